"""An endpoint's clock: the time that passes, and how much of it the endpoint's loop was awake for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    """Seconds of two kinds, each monotonic and with an origin of its own. May be read from any thread."""

    def now_s(self) -> float:
        """Time that passes: for durations, local waits and what this worker does at intervals."""

    def awake_s(self) -> float:
        """As `now_s`, but it stands still while the loop does. For every deadline that news from a peer moves."""

    def turn(self) -> None:
        """The loop goes round: it is about to read what has arrived."""


class AwakeClock:
    """Real time. From one turn to the next `awake_s` goes on by `longest_gap_s` at most.

    What arrived while the loop stood still (SIGSTOP, another thread with the GIL, a suspended machine) waits to be
    read, so an absence says nothing about others, and neither silence nor a lease may run out in it.
    """

    def __init__(self, longest_gap_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        """longest_gap_s: more than the loop ever waits by itself."""
        self.now_s = now_s
        self._longest_gap_s = longest_gap_s
        self._turned_s, self._awake_s = now_s(), 0.0
        """When the last turn began, and how long the loop had been awake by then."""

    def awake_s(self) -> float:
        return self._awake_s + min(self.now_s() - self._turned_s, self._longest_gap_s)

    def turn(self) -> None:
        self._awake_s, self._turned_s = self.awake_s(), self.now_s()
