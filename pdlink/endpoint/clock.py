"""An endpoint's clock: real time, and the time in which the endpoint's loop was awake."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    """Seconds of two kinds, each monotonic and with an origin of its own. May be read from any thread."""

    def now_s(self) -> float:
        """Real time: for durations, local waits and intervals."""

    def awake_s(self) -> float:
        """As `now_s`, but it stops while the loop does. For every deadline that a peer's messages extend."""

    def turn(self) -> None:
        """A turn of the loop begins: it is about to read what has arrived."""


class AwakeClock:
    """`awake_s` advances by `longest_gap_s` at most from one turn to the next.

    Messages that arrive while the loop stands still (SIGSTOP, another thread with the GIL, a suspended machine) wait
    unread. So its own absence proves nothing about peers, and no silence or lease may run out in it.
    """

    def __init__(self, longest_gap_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        """longest_gap_s: longer than any wait of the loop."""
        self.now_s = now_s
        self._longest_gap_s = longest_gap_s
        self._turned_s, self._awake_s = now_s(), 0.0
        """Start of the last turn, and `awake_s` at that time."""

    def awake_s(self) -> float:
        gap_s, longest_s = self.now_s() - self._turned_s, self._longest_gap_s
        return self._awake_s + (gap_s if gap_s < longest_s else longest_s)  # without a call: some five per transfer

    def turn(self) -> None:
        self._awake_s, self._turned_s = self.awake_s(), self.now_s()


class RecentMaximum:
    """The largest value of the last one to two periods. Reading changes nothing: two who watch see the same."""

    def __init__(self, period_s: float = 60.0) -> None:
        """period_s: at least the longest pause of a watcher between two looks, so that each sees every peak."""
        self._period_s = period_s
        self._began_s = 0.0
        self._before, self._now = 0.0, 0.0
        """Largest of the last period, and of this one."""

    def add(self, now_s: float, value: float) -> None:
        """now_s: of a monotonic clock. value: 0 or more."""
        if now_s - self._began_s >= self._period_s:
            self._turn(now_s)
        if value > self._now:
            self._now = value

    def read(self, now_s: float) -> float:
        """0 where no value came lately. May be called from any thread."""
        age_s = now_s - self._began_s
        if age_s < self._period_s:
            return max(self._before, self._now)
        return self._now if age_s < 2 * self._period_s else 0.0

    def _turn(self, now_s: float) -> None:
        self._before = self._now if now_s - self._began_s < 2 * self._period_s else 0.0
        self._now, self._began_s = 0.0, now_s
