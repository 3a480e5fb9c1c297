"""`Arena`: the memory that records lie in. It is taken from the system ahead of need, from its begin on.

The whole range is reserved at once, so that other processes can map and register it. `Catalog` says what may be used.
Memory follows: a thread that is about to write to a slot calls `commit` for the memory up to the slot's end. It takes
the missing pieces from the system together with the arena's own threads. Memory is granted in whole steps, while the
system has a step to give. After a refusal `problem` is set and the room is lowered; the arena tries again later.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from pdlink.memory.available import available_nbytes
from pdlink.memory.buffers import Buffer
from pdlink.store.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Bytes

log = logging.getLogger(__name__)

_GIB = 1 << 30
STEP_NBYTES = 64 << 20
"""Granted at a time. A step that a slot lies in has memory in whole."""
_PIECE_NBYTES = 8 << 20
"""Filled by one thread at a time: some milliseconds."""
_MOST_THREADS = 8
"""That fill one request: 4.7 GB/s instead of 2.0 with one (eight cores of a virtual machine)."""
_TRY_AGAIN_S = 10.0
"""After a refusal."""
_LEFT_STEPS = 16
"""Of the system's memory, which run-ahead leaves to others: 1 GiB."""


class Arena:
    """Thread-safe. Its calls wait for memory only."""

    def __init__(
        self,
        nbytes: int,
        *,
        numa_node: int | None = None,
        reserve_nbytes: int = 0,
        step_nbytes: int,
        early_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reserve the range, give it its first step, and start the threads.

        reserve_nbytes: of the system's memory, never taken. numa_node: see `Buffer`. step_nbytes: granted at a time.
        early_nbytes: what is to have memory before the first request, by `run_early`; 0 for none.
        Raises OSError if there is no memory for the first step.
        """
        self.buffer = Buffer(
            nbytes,
            name="pdlink-store",
            committed_nbytes=step_nbytes,
            huge=early_nbytes > 0,  # else nobody reads into it soon, and the start need not wait
            numa_node=numa_node,
        )
        """Other processes of this host map it."""
        self.array: Bytes = self.buffer.array
        self._reserve_nbytes, self._step_nbytes, self._clock = reserve_nbytes, step_nbytes, clock
        self._early_nbytes = early_nbytes
        self._num_helpers = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1)
        self._helpers = Line("pdlink-store-memory", self._num_helpers)
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self.committed_nbytes = self._granted_nbytes = self._next = min(self.buffer.nbytes, step_nbytes)
        """From the begin: what has memory; what was granted; where the next piece begins that nobody fills yet."""
        self._filling: set[int] = set()
        """Begins of pieces."""
        self._refused_s = self._left_s = float("-inf")
        """When memory was refused, and when it was left to others."""
        self.problem = ""
        """Why it gets no more memory; empty while it does."""

    def close(self) -> None:
        """Give the memory back. Nobody may use slots any more."""
        self._helpers.close(1.0)
        self.buffer.close()

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def shortage(self) -> str:
        """Why it has less memory than it may take, or cannot have it now; empty if neither."""
        missing = self.nbytes - self._granted_nbytes
        if self.problem or not missing:
            return self.problem
        free = max(0, available_nbytes() - self._reserve_nbytes)
        if missing <= free:
            return ""
        return f"may grow to {self.nbytes / _GIB:,.1f} GiB, and the system has {free / _GIB:,.1f} GiB more"

    @property
    def room_nbytes(self) -> int:
        """What slots may lie in: all of it, or what was granted before memory was refused."""
        return self._granted_nbytes if self.problem else self.nbytes

    def commit(self, end: int) -> int:
        """Have the first `end` bytes filled with memory; how many have it: fewer where the system refused.

        Waits for it, and fills pieces meanwhile. Costs a comparison where they have it already.
        """
        if end <= self.committed_nbytes:
            return self.committed_nbytes
        self.begin(end)
        self.fill(end)
        with self._changed:
            self._changed.wait_for(lambda: self.committed_nbytes >= min(end, self._granted_nbytes))
            return self.committed_nbytes

    def begin(self, end: int) -> int:
        """Grant memory for the first `end` bytes, and have the arena's threads fill it; how many bytes are granted.

        For slots that another process fills; it may write at once to what is granted.
        """
        with self._changed:
            granted = self._grant(end)
        self._have_filled(granted, huge=False)
        return granted

    def _have_filled(self, granted: int, *, huge: bool) -> None:
        """By the arena's threads."""
        pieces = -(-(granted - self._next) // _PIECE_NBYTES)
        for _ in range(min(pieces, self._num_helpers)):
            self._helpers.put(partial(self.fill, granted, huge=huge))

    def fill(self, end: int, *, huge: bool = False) -> None:
        """Fill granted pieces below `end` in this thread, until others fill the rest.

        huge: as of `Buffer.populate`.
        """
        while (piece := self._claimed(end)) is not None:
            begin, after = piece
            try:
                self.buffer.populate(begin, after, huge=huge)
            except OSError as error:
                self._refuse(begin, error)
            finally:
                with self._changed:
                    self._filling.discard(begin)
                    self.committed_nbytes = max(self.committed_nbytes, min([*self._filling, self._next]))
                    self._changed.notify_all()

    def wants_more(self, used_nbytes: int) -> bool:
        """Whether less than half a step below what is needed ahead has memory, and more may be had now."""
        is_full = min(self.nbytes, self._ahead(used_nbytes) - self._step_nbytes // 2) <= self._granted_nbytes
        return not is_full and self._clock() - max(self._refused_s, self._left_s) > _TRY_AGAIN_S

    def run_ahead(self, used_nbytes: int) -> None:
        """Fill what will be needed next, in this thread; a step at most.

        In huge pages until the first record comes. Later the core has requests to serve, and the keeper gathers huge
        pages when it is idle.
        Nothing where the system is short: nobody needs it yet, and memory is not given back.
        """
        with self._changed:
            if available_nbytes() - self._reserve_nbytes < _LEFT_STEPS * self._step_nbytes:
                self._left_s = self._clock()
                return
            granted = self._grant(min(self._ahead(used_nbytes), self._granted_nbytes + self._step_nbytes))
        first = not used_nbytes  # a first request may come soon
        if first:
            self._have_filled(granted, huge=True)
        self.fill(granted, huge=first)

    def run_early(self, most_s: float) -> None:
        """Fill what is to have memory early, before a first request comes; `run_ahead` has what takes longer."""
        until_s = self._clock() + most_s
        while self.wants_more(0) and self._clock() < until_s:
            self.run_ahead(0)

    def _ahead(self, used_nbytes: int) -> int:
        """What is to have memory: twice what is used. A next prompt as long as all before it waits for none then."""
        return max(self._early_nbytes, used_nbytes + max(used_nbytes, self._step_nbytes))

    def _grant(self, end: int) -> int:
        """Whole steps up to the one that `end` lies in, as far as the system has memory for them. Under the lock."""
        end = min(self.nbytes, -(-end // self._step_nbytes) * self._step_nbytes)
        while self._granted_nbytes < end and self._clock() - self._refused_s > _TRY_AGAIN_S:
            step = min(self._step_nbytes, self.nbytes - self._granted_nbytes)
            under_way = self._granted_nbytes - self.committed_nbytes
            if available_nbytes() - self._reserve_nbytes - under_way < step:
                self._refused(f"the system has no {step >> 20} MiB more to give")
            else:
                self._granted_nbytes += step
                if self.problem:
                    log.info("the store's memory grows again, beyond %d MiB", self._granted_nbytes - step >> 20)
                    self.problem = ""
        return min(end, self._granted_nbytes)

    def _refuse(self, begin: int, error: OSError) -> None:
        """No memory came for a piece, although there seemed to be enough: what lies behind it is not granted."""
        if error.errno != errno.ENOMEM:
            log.error("the store's memory cannot be filled: %s", error)
        with self._changed:
            self._granted_nbytes, self._next = min(begin, self._granted_nbytes), min(begin, self._next)
            self._refused(str(error))

    def _refused(self, why: str) -> None:
        """Under the lock."""
        self._refused_s = self._clock()
        if not self.problem:
            self.problem = f"stays at {self._granted_nbytes >> 20} of {self.nbytes >> 20} MiB: {why}"
            log.warning("the store's memory %s", self.problem)

    def _claimed(self, end: int) -> tuple[int, int] | None:
        """The next piece below `end`, for one thread."""
        with self._changed:
            begin = self._next
            if begin >= min(end, self._granted_nbytes):
                return None
            self._next = min(begin + _PIECE_NBYTES, self._granted_nbytes)
            self._filling.add(begin)
            return begin, self._next
