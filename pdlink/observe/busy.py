"""The time in which at least one of many overlapping spans goes on, while they are told one by one."""

from __future__ import annotations


class Busy:
    """Adds up the union of spans. They come in the order of their ends, or almost."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._spans: list[tuple[float, float]] = []
        """Disjoint, in order: what later spans may still overlap."""

    def add(self, begin_s: float, end_s: float) -> float:
        """What this span adds to the total."""
        spans = self._spans
        covered_s = 0.0
        after = []
        while spans and spans[-1][1] >= begin_s:
            span = spans.pop()
            if span[0] > end_s:
                after.append(span)
                continue
            covered_s += span[1] - span[0]
            begin_s, end_s = min(begin_s, span[0]), max(end_s, span[1])
        spans.append((begin_s, end_s))
        spans.extend(reversed(after))
        del spans[:-_MOST]
        gained_s = end_s - begin_s - covered_s
        self.total_s += gained_s
        return gained_s


_MOST = 64
"""A span that began before so many gaps counts the older ones as if nothing had been in flight in them."""
