"""Whether to load a prefix or to compute it: from how long each of them took lately. No clock, no lock, no thread.

What was never measured counts as free, and an estimate that no load refreshes halves with time: so a place that was
slow is tried again.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KEPT = 0.9
"""Weight of a measurement when the next one comes."""
_SPREAD = 0.01
"""Relative variance of the amounts from which on a latency can be told from a rate."""
COPY = -1
"""Among places: the way from the arena into an engine's blocks."""
_SHORTEST_LOOK_S = 0.05
"""A look-up may always take that long, however fast the prompt is computed or received."""
HALF_LIFE_S = 30.0
"""Of the estimate for a place from which nothing is loaded."""


Reason = Literal[
    "not_found",
    "in_blocks",
    "not_measured",
    "faster",
    "partly_faster",
    "slower",
    "always",  # by the settings
    "not_awaited",  # the engine has all that was found, or computes anew after a transfer has failed
    "look_up_failed",
    "no_tiers",
]
"""Why so much of a prompt is loaded."""


class _Sums(NamedTuple):
    """Weighted sums over measurements of an amount x that took t."""

    weight: float = 0.0
    x: float = 0.0
    t: float = 0.0
    xx: float = 0.0
    xt: float = 0.0


class Speed:
    """How long work takes by its amount (bytes, tokens): a latency and a time for each, newer measurements first.

    One thread may measure while others read.
    """

    def __init__(self, half_life_s: float = math.inf) -> None:
        """half_life_s: of an estimate that no measurement refreshes."""
        self._half_life_s = half_life_s
        self._sums, self._at_s = _Sums(), 0.0

    def measured(self, amount: float, took_s: float, now_s: float) -> None:
        new = (1.0, amount, took_s, amount * amount, amount * took_s)
        self._sums, self._at_s = _Sums(*(_KEPT * old + one for old, one in zip(self._sums, new, strict=True))), now_s

    @property
    def known(self) -> bool:
        return self._sums.weight > 0

    def line(self) -> tuple[float, float]:
        """Seconds whatever the amount, and seconds for each unit of it; 0 for what is not known."""
        weight, x, t, xx, xt = self._sums
        variance = weight * xx - x * x
        if variance > _SPREAD * x * x:
            each_s = max(0.0, (weight * xt - x * t) / variance)
            latency_s = (t - each_s * x) / weight
            return (latency_s, each_s) if latency_s >= 0 else (0.0, xt / xx)
        if x > 0:
            return 0.0, t / x
        return (t / weight if weight else 0.0), 0.0

    def takes_s(self, amount: float, now_s: float) -> float:
        latency_s, each_s = self.line()
        return (latency_s + amount * each_s) * math.exp2((self._at_s - now_s) / self._half_life_s)


def longest_look_s(limit_s: float, other: Speed, amount: float, now_s: float) -> float:
    """How long a look-up may take, where `amount` tokens would take as long as `other` says: no longer than they."""
    return min(limit_s, max(_SHORTEST_LOOK_S, other.takes_s(amount, now_s))) if other.known else limit_s


class Choice(NamedTuple):
    """How much of a found prefix to load."""

    end: int
    """Load tokens before this one, beside the tokens that are in the engine's blocks."""
    reason: Reason
    load_s: float = 0.0
    other_s: float = 0.0
    """Estimates for all that was found and is not in the blocks: to load it, and to compute or receive it."""


def choose_all(
    cached: int,
    end: int,
    records: Sequence[tuple[int, int]],
    loading: Mapping[int, Speed],
    other: Speed,
    now_s: float,
) -> Choice:
    """Of tokens [cached, end) all or nothing, where a part of them is of no use. records: (place, bytes) of each.

    The rest as of `choose`.
    """
    if end <= cached:
        return Choice(cached, "not_found")
    amounts: Counter[int] = Counter()
    for place, nbytes in records:
        amounts.update({place: nbytes, COPY: nbytes})
    speeds = {place: loading.get(place) for place in amounts}
    load_s = sum(speed.takes_s(amounts[place], now_s) for place, speed in speeds.items() if speed is not None)
    other_s = (end - cached) * other.line()[1]
    if not (other.known and all(speed is not None and speed.known for speed in speeds.values())):
        return Choice(end, "not_measured", load_s, other_s)
    return Choice(end, "faster", load_s, other_s) if load_s <= other_s else Choice(cached, "slower", load_s, other_s)


def choose(
    cached: int,
    end: int,
    places: Sequence[int],
    chunk_tokens: int,
    chunk_nbytes: int,
    loading: Mapping[int, Speed],
    other: Speed,
    now_s: float,
) -> Choice:
    """cached: leading tokens that are in the engine's blocks. end: where what was found ends.

    places: of the chunks that hold them (`Found`).
    loading: seconds for bytes of each place, and under COPY for the bytes of all of them on the way into blocks.
    other: seconds for tokens that are not loaded.
    """
    if end <= cached:
        return Choice(cached, "in_blocks" if places else "not_found")
    best, most_s, load_s, other_s = cached, 0.0, 0.0, 0.0
    by_place: Counter[int] = Counter()
    known = other.known
    each_s = other.line()[1]
    for chunk in range(cached // chunk_tokens, len(places)):
        by_place.update(dict.fromkeys((places[chunk], COPY), chunk_nbytes))
        speeds = [(loading.get(place), nbytes) for place, nbytes in by_place.items()]
        load_s = sum(speed.takes_s(nbytes, now_s) for speed, nbytes in speeds if speed is not None)
        upto = min(end, (chunk + 1) * chunk_tokens)
        other_s = (upto - cached) * each_s
        known = known and all(speed is not None and speed.known for speed, _ in speeds)
        if not other.known or other_s - load_s >= most_s:
            best, most_s = upto, other_s - load_s
    if not known and best == end:
        return Choice(best, "not_measured", load_s, other_s)
    return Choice(best, "faster" if best == end else "partly_faster" if best > cached else "slower", load_s, other_s)
