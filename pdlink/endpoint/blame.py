"""`Blame`: an exception costs the one who caused it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdlink.events import HandlingFailed, emit
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_LOG_EVERY_S = 1.0
"""Log a failure this often at most: a peer that causes many could fill the disk. All are counted."""


class Blame:
    """Frames cost their peer, commands their caller, callbacks a line in the log, occurrences their peer.

    What is not guarded is the loop's own: its sockets, its clock, its books. An exception there ends the loop and the
    worker: if giving up a peer fails, nobody knows any more which blocks it may still write to.
    """

    def __init__(self, name: str, now_s: Callable[[], float]) -> None:
        """name: of this worker, for the log."""
        self._name, self._now_s = name, now_s
        self._num_failed, self._logged_s = 0, float("-inf")

    def guard(self, what: str, act: Callable[[], object], cost: Callable[[Reason], None] | None = None) -> None:
        """Call `act`, which others can make fail. If it raises, call `cost(reason)`, which must not."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  any bug that a peer's input finds, see above
            self.charge(what, error, cost)

    def charge(self, what: str, error: Exception, cost: Callable[[Reason], None] | None = None) -> None:
        """`what` has raised this: as in `guard`, for the places that come by for every transfer."""
        reason = f"{what} could not be handled: {type(error).__name__}"
        self._num_failed += 1
        now = self._now_s()
        if now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            log.error("%s: a %s (%d failures so far)", self._name, reason, self._num_failed, exc_info=error)
        emit(HandlingFailed(what=what, error=f"{type(error).__name__}: {error}"))
        if cost is not None:
            cost(Reason(Code.HANDLING_FAILED, reason))
