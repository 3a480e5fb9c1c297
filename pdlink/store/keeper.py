"""`Keeper`: the thread that keeps house in an arena.

It gives the arena memory before that is needed, puts that into huge pages afterwards, ends leases that are over and
fetches that take too long, and has tiers that were away forget what was cleared meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pdlink.store.gathering import STEP_NBYTES, Gathering

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Buffer
    from pdlink.store.below import Below
    from pdlink.store.books import Books
    from pdlink.store.fetching import Fetching

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_GROW_AGAIN_S = 10.0
"""After memory was refused."""


class Keeper:
    def __init__(
        self,
        books: Books,
        below: Below,
        fetching: Fetching,
        buffer: Buffer,
        *,
        step_nbytes: int,
        reserve_nbytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Starts the thread. buffer: the arena. step_nbytes: of memory that it is given at a time.

        reserve_nbytes: of the host's memory, which are never taken.
        """
        self._books, self._below, self._fetching, self._buffer = books, below, fetching, buffer
        self._step_nbytes, self._reserve_nbytes, self._clock = step_nbytes, reserve_nbytes, clock
        self.gathering = Gathering()
        self._work = threading.Condition(books.lock)
        self._closing = False
        self._refused_s = float("-inf")
        """When memory was refused last."""
        self._thread = threading.Thread(target=self._run, name="pdlink-store", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Room was taken. The caller holds the lock of the books."""
        self._work.notify_all()

    def close(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify_all()
        self._thread.join()

    def _run(self) -> None:
        catalog = self._books.catalog
        while True:
            self._below.try_again()
            self._books.tell()  # of what has expired, and of what went with the end of a lease
            with self._work:
                if self._closing:
                    return
                now_s = self._clock()
                catalog.expire(now_s)
                late = self._fetching.late(now_s)
                grows = self._wants_memory(now_s)
                begin = self.gathering.next(self._buffer.committed_nbytes)
                if not late and not grows and begin is None:
                    self._work.wait(_PAUSE_S)
                    continue
            for fetch in late:
                fetch.finish()
            if grows:
                self._grow(now_s)
            elif begin is not None:
                self._gather(begin)

    def _wants_memory(self, now_s: float) -> bool:
        """Whether half of what is there is used. Under the lock."""
        catalog = self._books.catalog
        full = 2 * catalog.used_nbytes > catalog.capacity_nbytes and catalog.capacity_nbytes < self._buffer.nbytes
        return full and now_s - self._refused_s > _GROW_AGAIN_S

    def _grow(self, now_s: float) -> None:
        capacity_nbytes = self._books.catalog.capacity_nbytes
        try:
            self._buffer.commit(capacity_nbytes + self._step_nbytes, reserve_nbytes=self._reserve_nbytes)
        except OSError as error:
            log.warning("the store stays at %d MiB of memory for now: %s", capacity_nbytes >> 20, error)
            self._refused_s = now_s
        with self._books.lock:
            self._books.catalog.grow(self._buffer.committed_nbytes)

    def _gather(self, begin: int) -> None:
        """A step of the arena into huge pages; half of a core at most."""
        began_s = time.monotonic()
        gathered = self._buffer.gather(begin, begin + STEP_NBYTES)
        with self._work:
            self.gathering.tried(begin, gathered)
            self._work.wait(time.monotonic() - began_s if gathered else _PAUSE_S)
