"""`Line`: jobs done in order by threads of their own; `Width`: how many threads.

One record at a time leaves a disk idle while Python decides, and a bucket while a request travels. So the width of a
tier's line doubles as long as records come faster by that, and a larger one is tried again now and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
_T = TypeVar("_T")

FIRST, MOST = 4, 16
"""A disk wants 2 to 4, a bucket that answers after 30 ms 16."""
_GAIN = 1.15
"""By how much a doubled width must be faster."""
_JOBS_EACH = 8
"""Measured for each thread. With 4 a disk whose speed changes by a third got any width."""
_SETTLED_JOBS = 1024
"""Done at one width before a larger one is tried again."""


class Line:
    def __init__(self, name: str, num_threads: int = 1, width: Width | None = None) -> None:
        """Daemon threads: one that is stuck in a medium must not keep the process.

        width: how many of them do jobs, and whether there are more.
        """
        self._name, self._width = name, width
        self._jobs: deque[tuple[Callable[[], None], bool]] = deque()
        """And whether it is done alone."""
        self._changed = threading.Condition()
        """Guards the jobs and `_ended`."""
        self._ended = False
        self._running, self._is_alone = 0, False
        self._threads: list[threading.Thread] = []
        with self._changed:
            self._have(num_threads)

    def _have(self, num_threads: int) -> None:
        """Start what is missing of so many. Under the lock."""
        while len(self._threads) < num_threads:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def put(self, job: Callable[[], None], *, alone: bool = False) -> bool:
        """Do it after what is in line. What it raises is logged. False after `end`: it is not done then.

        alone: begin when all before it have ended, and end before any behind it begins.
        """
        with self._changed:
            if not self._ended:
                self._jobs.append((job, alone))
                if self._is_free:  # else who ends a job takes it
                    self._changed.notify()
            return not self._ended

    def submit(self, job: Callable[[], _T], *, alone: bool = False) -> Future[_T]:
        """The same, and what becomes of it; after `end` a future that was cancelled."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except Exception as error:  # noqa: BLE001 - raised where the future is read
                done.set_exception(error)

        if not self.put(run, alone=alone):
            done.cancel()
        return done

    def wait(self) -> None:
        """Until what is in line now is done; of one thread."""
        try:
            self.submit(lambda: None).result()
        except CancelledError:
            for thread in self._threads:
                thread.join()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    def end(self) -> None:
        """End when what is in line is done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_end(self, timeout_s: float) -> None:
        """The same, and wait so long at most."""
        self.end()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Do what is in line, and end; return after `timeout_s` if that takes longer: the rest is not done then."""
        self.wait_end(timeout_s)
        with self._changed:  # a thread that is stuck would begin it while the process ends
            self._jobs.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of %s failed", threading.current_thread().name)
            del job  # what it refers to may be memory that somebody waits for
            self._done()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_free if self._jobs else self._ended)
            if not self._jobs:
                return None
            self._running += 1
            job, self._is_alone = self._jobs.popleft()
            if self._ended and not self._jobs:
                self._changed.notify_all()
            return job

    @property
    def _is_free(self) -> bool:
        if self._running and (self._is_alone or self._jobs[0][1]):
            return False
        return self._running < self._most

    @property
    def _most(self) -> int:
        """Jobs at a time."""
        return len(self._threads) if self._width is None else self._width.now

    def _done(self) -> None:
        with self._changed:
            self._running -= 1
            if self._width is not None:
                self._width.ended(time.monotonic(), waiting=len(self._jobs))
                self._have(0 if self._ended else self._width.now)
            if self._jobs:  # this thread takes the next one; a thread that wakes up for nothing costs two switches
                self._changed.notify(max(0, min(len(self._jobs), self._most - self._running) - 1))


class Width:
    """No clock, lock or thread in it."""

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
