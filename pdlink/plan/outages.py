"""Workers that fail and drain for a while, by a seeded schedule: what a simulated fleet (`fleet.py`) goes through."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MEAN_S = 20.0
"""Of an outage; exponential."""
FAIL_S = 0.01
"""A failing worker answers GET /health, and breaks each new leg after this time. Legs that run already end well."""


class Outages:
    """When each worker fails or drains."""

    def __init__(self, keys: Sequence[str], share: float, seed: int, until_s: float) -> None:
        """share: mean share of the workers that are away at any time; half of them fail, half drain."""
        rng = random.Random(seed)
        self._spans: dict[str, list[tuple[float, float, bool]]] = {}
        self.num = 0
        for key in keys if share else ():
            spans = self._spans[key] = []
            at_s = rng.expovariate(share / MEAN_S)
            while at_s < until_s:
                end_s = at_s + rng.expovariate(1 / MEAN_S)
                spans.append((at_s, end_s, rng.random() < 0.5))
                at_s = end_s + rng.expovariate(share / MEAN_S)
            self.num += len(spans)

    def drained(self, key: str) -> list[tuple[float, bool]]:
        """When the worker begins (True) and ceases to drain, in order."""
        spans = [(at_s, end_s) for at_s, end_s, failing in self._spans.get(key, ()) if not failing]
        return [each for at_s, end_s in spans for each in ((at_s, True), (end_s, False))]

    def fails(self, key: str, now_s: float) -> bool:
        return any(at_s <= now_s < end_s and failing for at_s, end_s, failing in self._spans.get(key, ()))
