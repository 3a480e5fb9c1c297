"""How long requests wait for KV between two workers, as their streams have shown: what pairs differ by.

Decode's first token comes after prefill's by what is left of the transfer, and decode's own step and queue. The
second part is the same for every prefill worker of one decode worker. So what its pairs take beyond the fastest of
them is the way: another host, another lane, another rack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Behind: TypeAlias = Mapping[str, dict[str, float]]
"""By the keys of decode and prefill, how much longer a request waits for each token's KV than from the best prefill
worker: in tokens that a mean prefill worker computes meanwhile. Pairs that do not differ are not there."""

MIN_TOKENS = 512
"""Of a prompt to be measured by: shorter ones measure the handover."""
FEW = 4
"""Prompts prove nothing."""
DIFFERS = 0.1
"""Tokens for each token: less is chance."""
FORGOTTEN_S = 120.0
"""After the last prompt: a pair that is avoided is tried again."""
_DECAY = 0.9


class _Taken:
    """Tokens and seconds of one pair, each prompt counting less than the next."""

    __slots__ = ("heard_s", "num", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.num = 0
        self.heard_s = 0.0


class PairTimes:
    def __init__(self) -> None:
        self.behind: Behind = {}
        self._taken: dict[str, dict[str, _Taken]] = {}

    def took(self, prefill: str, decode: str, tokens: int, seconds: float, now: float) -> None:
        """A stream's token of decode came so long after that of prefill, for a prompt of so many tokens."""
        if tokens < MIN_TOKENS:
            return
        pairs = self._taken.setdefault(decode, {})
        taken = pairs.get(prefill)
        if taken is None:
            taken = pairs[prefill] = _Taken()
        taken.tokens = taken.tokens * _DECAY + tokens
        taken.seconds = taken.seconds * _DECAY + max(0.0, seconds)
        taken.num += 1
        taken.heard_s = now

    def compare(self, tokens_per_s: float, now: float) -> None:
        """Sets `behind`. tokens_per_s: of a mean prefill worker; 0 if nobody knows."""
        found: dict[str, dict[str, float]] = {}
        for decode, pairs in list(self._taken.items()):
            for prefill in [key for key, taken in pairs.items() if now - taken.heard_s > FORGOTTEN_S]:
                del pairs[prefill]
            if not pairs:
                del self._taken[decode]
                continue
            each = {key: taken.seconds / taken.tokens for key, taken in pairs.items() if taken.num >= FEW}
            least = min(each.values(), default=0.0)
            late = {key: extra for key, s in each.items() if (extra := (s - least) * tokens_per_s) >= DIFFERS}
            if late:
                found[decode] = late
        self.behind = found

    def forget(self, key: str) -> None:
        """The process of this worker is gone."""
        self._taken.pop(key, None)
        for pairs in self._taken.values():
            pairs.pop(key, None)
