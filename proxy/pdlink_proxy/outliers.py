"""Workers whose legs fail or are slow far beyond those of their peers are left out for a while. No I/O, no clock.

A leg counts at its own worker only. The breaker (`pdlink/breaker.py`) sees failures in a row; this sees a worker that
fails every third leg, or takes eight times as long for the same work. After a pause one leg at a time finds out
whether it is well again. Pauses grow while it is not.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from pdlink._index import Fares

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED_SHARE = 0.3
"""Of its recent legs, for a worker to be left out."""
FAILED_BEYOND = 3.0
"""Times the share of its peers."""
SLOW_BEYOND = 8.0
"""Times the pace of its peers: batches and lengths of prompts explain three."""
MIN_LEGS = 10
"""Before a worker is judged."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0
FORGET_S = 300.0
"""After so long without being left out its pauses begin anew."""
_MANY = 16


class Outlier(Fares):
    """How the legs of one worker's incarnation fare."""

    __slots__ = ("_back_s", "_pause_s", "_probes", "_until_s", "limit", "why")

    def __init__(self) -> None:
        super().__init__()
        self.why = ""
        """It is left out."""
        self.limit = math.inf
        """Of the pace. What its unit of work is, is the caller's, and the same for its peers."""
        self._probes = 0
        self._pause_s, self._until_s, self._back_s = FIRST_PAUSE_S, 0.0, -math.inf

    def allows(self, now_s: float) -> bool:
        """Whether it may get a leg."""
        return not self.out or (now_s >= self._until_s and not self._probes)

    def begin(self) -> bool:
        """A leg leaves for it: call this while it is `out`. Whether the leg is one that finds out; say so when it has
        ended."""
        self._probes += self.out
        return self.out

    def end(self, now_s: float, *, probe: bool, failed: bool, pace: float | None = None) -> None:
        """A leg has ended. pace: seconds for a unit of work, if it can be said."""
        if probe:
            self._probes -= 1
        if self.out:
            if probe:
                self._found_out(now_s, well=not failed and (pace is None or pace <= self.limit))
            return  # older legs prove nothing anew
        self.count(failed, pace)

    def drop(self, now_s: float, *, probe: bool, at_least: float | None = None) -> None:
        """A leg was given up. at_least: its pace would have been at least that."""
        if at_least is not None and at_least > self.limit:
            self.end(now_s, probe=probe, failed=False, pace=at_least)
        elif probe:
            self._probes -= 1

    def leave_out(self, now_s: float, why: str) -> None:
        if now_s - self._back_s > FORGET_S:
            self._pause_s = FIRST_PAUSE_S
        self.out, self.why = True, why
        self._probes = 0
        self._pause(now_s)

    def reason(self, usual: Usual) -> str:
        """Why it is an outlier; empty if it is none. Sets its limit."""
        self.limit = SLOW_BEYOND * usual.pace
        if self.num >= MIN_LEGS and self.failed >= max(FAILED_SHARE, FAILED_BEYOND * usual.failed):
            return f"{self.failed:.0%} of its legs fail, {usual.failed:.0%} of its peers'"
        if self.timed and self.pace > self.limit:
            return f"it takes {SLOW_BEYOND * self.pace / self.limit:.0f} times as long as its peers"
        return ""

    @property
    def timed(self) -> bool:
        """Whether its pace is known."""
        return self.num_timed >= MIN_LEGS

    @property
    def badness(self) -> float:
        """To compare those with a reason."""
        return max(self.failed / FAILED_SHARE, self.pace / self.limit)

    def _found_out(self, now_s: float, *, well: bool) -> None:
        if not well:
            self._pause(now_s)
            return
        self.out, self.why, self._back_s = False, "", now_s
        self.forget()

    def _pause(self, now_s: float) -> None:
        self._until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class Usual(NamedTuple):
    """The medians of a pool."""

    failed: float
    pace: float
    """Infinite if not known."""

    @classmethod
    def of(cls, peers: Sequence[Outlier]) -> Usual:
        paces = [peer.pace for peer in peers if peer.timed]
        return cls(median(peer.failed for peer in peers) if peers else 1.0, median(paces) if paces else math.inf)


def leave_out(pool: Sequence[Outlier], now_s: float, most: float) -> None:
    """Leave the outliers of a pool out, the worst first, as long as no more than this share of it is out; of two or
    three workers one may be."""
    if len(pool) < 2 or not most:
        return
    left = max(1, int(most * len(pool))) - sum(each.out for each in pool)
    well = [each for each in pool if not each.out]
    of_all = Usual.of(well)
    found = []
    for each in pool:
        # Among many, one does not move the median.
        usual = of_all if len(well) > _MANY else Usual.of([peer for peer in well if peer is not each])
        reason = each.reason(usual)
        if reason and not each.out:
            found.append((each, reason))
    found.sort(key=lambda one: one[0].badness, reverse=True)
    for each, reason in found[: max(0, left)]:
        each.leave_out(now_s, reason)
