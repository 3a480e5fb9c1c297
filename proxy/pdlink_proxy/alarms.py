"""The deadlines of all requests of one process, on one timer of the event loop.

Nearly every request ends long before its deadlines. A timer of the loop for each of them cost a request 3 us.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Alarm: TypeAlias = Callable[[], object]

log = logging.getLogger("pdlink.proxy")


class Alarms:
    """What is to be called when. Setting and taking back costs a dictionary's entry; ringing, a look at all."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        """Asking for it takes a system call in CPython 3.11."""
        self.due_s: dict[Alarm, float] = {}
        """On the loop's clock, when each is to be called. One that is taken out is not called; one may be put in that
        is not due before `rings_s`."""
        self.rings_s = math.inf
        """The next look at all."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, alarm: Alarm, due_s: float) -> None:
        """Call this once, at that time of the loop's clock, in place of an earlier or later time for the same."""
        self.due_s[alarm] = due_s
        if due_s < self.rings_s:
            self._wait(due_s)

    def after(self, alarm: Alarm, delay_s: float) -> None:
        """As `set`, from now on."""
        self.set(alarm, self._loop.time() + delay_s)

    def _wait(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.rings_s = until_s
        self._timer = self._loop.call_at(until_s, self._ring)

    def _ring(self) -> None:
        self._timer, self.rings_s = None, math.inf
        now_s = self._loop.time()
        for alarm in [alarm for alarm, due_s in self.due_s.items() if due_s <= now_s]:
            if self.due_s.get(alarm, math.inf) <= now_s:  # an earlier one may have cleared it, or set it again
                del self.due_s[alarm]
                try:
                    alarm()
                except Exception:  # the others ring all the same
                    log.exception("an alarm failed unexpectedly")
        if self.due_s:
            self._wait(min(self.rings_s, min(self.due_s.values())))
