"""`Pace`: how long forward passes take here, as curves, fitted to each pass as it ends. No I/O and no clock.

A pass over prompts takes `a + b n + c n (s + n / 2)` for n tokens behind s others: the last term is attention. A pass
over answers takes `d0 + d1 B + d2 T` for B of them with T tokens in all. A pass that does both adds to the seconds,
and to no curve. Each is a least squares fit in which old passes fade, so a curve follows what happens to the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.engine.scheduler import PassWork

COLD_PASSES = 8
"""Of each kind, not counted: the first ones compile, allocate and load (dynamo#12430 learned from those)."""
MIN_PASSES = 24
"""Before there is a curve."""
_FADE = 0.998
"""Weight of a pass, relative to the next one: some 500 count."""
_RENEW_PASSES = 64
"""A curve stays as it is for so many passes: what it is sent in changes with it."""
_SLOWEST = 5.0
"""Times what the curve says: a pass beyond that was held up, and says nothing about the engine."""


class Curve:
    """`seconds = x[0] + x[1] u + x[2] v`, none of them negative."""

    def __init__(self) -> None:
        self.num_passes = 0
        self._moments = [[0.0] * 4 for _ in range(3)]
        """Weighted sums of products of (1, u, v) with (1, u, v, seconds)."""
        self._fitted: tuple[float, float, float] | None = None
        self._fitted_at = 0

    def add(self, u: float, v: float, seconds: float) -> None:
        """A pass has taken so long."""
        self.num_passes += 1
        if self.num_passes <= COLD_PASSES:
            return
        known = self.get()
        if known is not None and seconds > _SLOWEST * (known[0] + known[1] * u + known[2] * v) > 0:
            return
        values = (1.0, u, v, seconds)
        weight = 1.0 / max(seconds, 1e-6) ** 2  # it is the relative error that counts: long passes are not all
        for one, moments in zip(values, self._moments, strict=False):
            moments[:] = [_FADE * old + weight * one * value for old, value in zip(moments, values, strict=True)]

    def get(self) -> tuple[float, float, float] | None:
        """Coefficients in seconds; None before `MIN_PASSES`."""
        if self.num_passes < COLD_PASSES + MIN_PASSES:
            return None
        if self._fitted is None or self.num_passes - self._fitted_at >= _RENEW_PASSES:
            self._fitted, self._fitted_at = _fit(self._moments), self.num_passes
        return self._fitted


class Pace:
    """Of one engine. `passed` is of its thread; what is read may be read from any."""

    def __init__(self) -> None:
        self.prefill_s = self.decode_s = 0.0
        """Seconds of passes with tokens of prompts, and of all others."""
        self._prefill, self._decode = Curve(), Curve()

    def passed(self, batch: Sequence[PassWork], seconds: float) -> None:
        """A forward pass over this batch has taken so long."""
        prompts = [work for work in batch if work.start < work.sequence.num_prompt]
        if not prompts:
            self.decode_s += seconds
            self._decode.add(len(batch), sum(work.end for work in batch), seconds)
            return
        self.prefill_s += seconds
        if len(prompts) == len(batch):
            sizes = [(work.end - work.start, work.start) for work in batch]
            self._prefill.add(sum(n for n, _ in sizes), sum(n * (start + n / 2) for n, start in sizes), seconds)

    def prefill_of(self, tokens: int) -> float:
        """Seconds for so many tokens of prompts, without what attention adds; 0 until there is a curve."""
        known = self._prefill.get()
        return known[0] + known[1] * tokens if known is not None and tokens else 0.0

    def curves(self) -> dict[str, tuple[float, float, float] | None] | None:
        """For /health: three coefficients of `prefill` and of `decode`, in seconds; None for those not known yet."""
        prefill, decode = self._prefill.get(), self._decode.get()
        if prefill is None and decode is None:
            return None
        return {
            "prefill": prefill and _rounded(*prefill),
            "decode": decode and _rounded(*decode),
        }


def _rounded(one: float, two: float, three: float) -> tuple[float, float, float]:
    """To four digits."""
    return float(f"{one:.4g}"), float(f"{two:.4g}"), float(f"{three:.4g}")


def _fit(moments: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Non-negative least squares: a coefficient that would be negative is left out, and the others fitted again."""
    kept = [0, 1, 2]
    while kept:
        found = _solve([[moments[row][column] for column in (*kept, 3)] for row in kept])
        if found is None:  # passes of one size alone: they cannot tell the last two terms apart
            kept.pop()
            continue
        lowest = min(found)
        if lowest >= 0:
            by_term = dict(zip(kept, found, strict=True))
            return by_term.get(0, 0.0), by_term.get(1, 0.0), by_term.get(2, 0.0)
        del kept[found.index(lowest)]
    return 0.0, 0.0, 0.0


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Of a symmetric system, by elimination; None where it has no one solution."""
    size = len(rows)
    scales = [rows[index][index] ** 0.5 or 1.0 for index in range(size)]  # terms differ by ten orders of magnitude
    rows = [
        [value / mine / scale for value, scale in zip(values, (*scales, 1.0), strict=True)]
        for values, mine in zip(rows, scales, strict=True)
    ]
    for pivot in range(size):
        if rows[pivot][pivot] < 1e-9:
            return None
        for row in range(size):
            if row != pivot:
                share = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [mine - share * other for mine, other in zip(rows[row], rows[pivot], strict=True)]
    return [rows[index][size] / rows[index][index] / scales[index] for index in range(size)]
