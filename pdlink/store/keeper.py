"""`Keeper`: the thread that keeps house in an arena.

It gives the arena memory ahead of need, puts that into huge pages afterwards, tells who pins it, ends leases and
fetches that take too long, offers tiers again what they did not take, asks servers that do not answer, and has tiers
that were away forget what was cleared meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pdlink.memory.pages import gather
from pdlink.store.books import let_others
from pdlink.store.gathering import STEP_NBYTES, Gathering

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.store.arena import Arena
    from pdlink.store.below import Below
    from pdlink.store.books import Books
    from pdlink.store.fetching import Fetching
    from pdlink.store.write_through import WriteThrough

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_FAILED_PAUSE_S = 1.0
"""Unless it is woken."""


class Keeper:
    def __init__(
        self,
        books: Books,
        below: Below,
        fetching: Fetching,
        writing: WriteThrough,
        arena: Arena,
        *,
        settled: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """Starts the thread. settled: told how many bytes from the arena's begin stay in the pages they are in."""
        self._books, self._below, self._fetching, self._writing = books, below, fetching, writing
        self._arena, self._clock = arena, clock
        self.gathering = Gathering()
        self._settled, self._told_nbytes = settled, 0
        self.works = True
        """Whether its last round has not failed."""
        self._work = books.room_taken
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pdlink-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._keep()
                self.works = True
            except Exception:  # a store without its keeper ends no lease: the next round tries again
                self.works = False
                log.exception("a round of the store's keeper has failed")
                with self._work:
                    self._work.wait(_FAILED_PAUSE_S)
            with self._work:
                if self._closing:
                    return
            let_others()

    def _keep(self) -> None:
        """One round."""
        catalog = self._books.catalog
        self._below.try_again()
        self._books.tell()  # of what has expired, and of what went with the end of a lease
        with self._work:
            if self._closing:
                return
            now_s = self._clock()
            catalog.expire(now_s)
            self._writing.pay()
            late = self._fetching.late(now_s)
            catalog.resize(self._arena.room_nbytes)
            used_nbytes = catalog.used_nbytes
            reads = self._fetching.brings  # which needs the cores, and the pages where they are
            grows = self._arena.wants_more(used_nbytes) and not reads
            begin = self.gathering.next(self._arena.committed_nbytes, now_s)
            begin = None if reads else begin
            settled_nbytes = self.gathering.settled_nbytes(self._arena.committed_nbytes)
            settles = settled_nbytes > self._told_nbytes and not reads
            if not late and not grows and begin is None and not settles and not catalog.is_due(now_s):
                self._work.wait(_PAUSE_S)
                return
        for fetch in late:
            fetch.finish()
        if grows:
            self._arena.run_ahead(used_nbytes)
        elif settles:
            self._told_nbytes = settled_nbytes
            self._settled(settled_nbytes)
        elif begin is not None:
            self._gather(begin)

    def _gather(self, begin: int) -> None:
        """A step of the arena into huge pages; half of a core at most."""
        began_s = time.monotonic()
        gathered = gather(self._arena.array[begin : begin + STEP_NBYTES])
        with self._work:
            self.gathering.tried(begin, gathered)
            self._work.wait(time.monotonic() - began_s if gathered else _PAUSE_S)
