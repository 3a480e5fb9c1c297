"""`Width`: how many threads a tier's calls get, by how much faster more of them are. No clock, lock or thread in it.

One record at a time leaves a disk idle while Python decides, and a bucket while a request travels. So the width
doubles as long as records come faster by that, and a larger one is tried again now and then.
"""

from __future__ import annotations

MOST = 16
"""A bucket that answers after 30 ms wants 16, a disk 2 to 4."""
_GAIN = 1.15
"""By how much a doubled width must be faster."""
_JOBS_EACH = 4
"""Measured for each thread."""
_SETTLED_JOBS = 512
"""Done at one width before a larger one is tried again."""


class Width:
    def __init__(self, first: int) -> None:
        self.now = first
        self._begun_s: float | None = None
        """When the measurement began; None while there is none."""
        self._jobs = 0
        self._smaller: tuple[int, float] | None = None
        """The width that this one must beat, and its jobs a second."""
        self._settled_jobs = 0
        """Left until a larger one is tried."""

    def ended(self, now_s: float, *, waiting: int) -> None:
        """A job has ended, and so many wait; without any the threads had too little to do, which says nothing."""
        self._settled_jobs -= 1
        if not waiting:
            self._begun_s = None
        elif self._begun_s is None:
            self._begun_s, self._jobs = now_s, 0
        else:
            self._jobs += 1
            if self._jobs >= _JOBS_EACH * self.now:
                self._judge(self._jobs / max(now_s - self._begun_s, 1e-9))
                self._begun_s = None

    def _judge(self, per_s: float) -> None:
        if self._smaller is not None and per_s < _GAIN * self._smaller[1]:
            self.now, self._settled_jobs = self._smaller[0], _SETTLED_JOBS
            self._smaller = None
        elif self.now < MOST and self._settled_jobs <= 0:
            self._smaller, self.now = (self.now, per_s), 2 * self.now
        else:
            self._smaller = None
