"""What one figure is, how time is taken on a GPU, and the table and JSON of a run."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

REPEATS = 21


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside what it is compared with, both of this run."""

    name: str
    seconds: float
    """Median."""
    gb_per_s: float
    """Decimal; bytes read plus bytes written where both are device memory."""
    against: str = ""
    ratio: float | None = None
    """Of the two speeds, or of the two times where the bar is one of time."""
    bar: float | None = None
    at_most: bool = False
    """The bar is an upper one."""
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.bar is None or self.ratio is None:
            return ""
        met = self.ratio <= self.bar if self.at_most else self.ratio >= self.bar
        return "met" if met else "MISSED"


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds on the device, by events around `work`, after three warm-ups."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(float(before.elapsed_time(after)) / 1e3)
    return statistics.median(times)


def table(figures: Sequence[Figure]) -> str:
    """Short, for the end of a log."""
    rows = [("what", "ms", "GB/s", "ratio", "bar", "", "against")]
    for one in figures:
        sign = "<=" if one.at_most else ">="
        rows.append(
            (
                one.name,
                f"{one.seconds * 1e3:.3f}",
                f"{one.gb_per_s:.1f}",
                "" if one.ratio is None else f"{one.ratio:.3f}",
                "" if one.bar is None else f"{sign} {one.bar:.3f}",
                one.verdict,
                one.against or one.note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def write_json(path: Path, facts: dict[str, str | int | float], figures: Sequence[Figure]) -> None:
    content = {"machine": facts, "figures": [{**asdict(one), "verdict": one.verdict} for one in figures]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
