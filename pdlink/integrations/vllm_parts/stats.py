"""What happened in this process since somebody last asked: for vLLM's connector statistics.

The declarations are those of every pdlink process (`pdlink.observe.metrics`), under vLLM's prefix. vLLM carries the
numbers from its workers to its API server, whose histograms take single numbers only: so those are carried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.observe.metrics import Counting, PromptMetrics, StoreMetrics, TransferMetrics
from pdlink.observe.series import Counter, Histogram, Registry

if TYPE_CHECKING:
    from pdlink.events import Event

Stats = dict[str, float | list[float]]
"""What a counter has gained, or every number that a histogram was told; by `NAME|LABEL VALUE|LABEL VALUE`."""


def declared() -> tuple[Registry, Counting]:
    """The metrics of a rank, or of the scheduler, which knows of prompts, and the listener that counts them."""
    registry = Registry()
    parts = TransferMetrics(registry), StoreMetrics(registry), PromptMetrics(registry)
    return registry, Counting(registry, *parts)


def split(key: str) -> tuple[str, tuple[str, ...]]:
    """The name of a metric, and the values of its labels in their order."""
    name, *values = key.split("|")
    return name, tuple(values)


def add_up(one: Stats, other: Stats) -> Stats:
    total = dict(one)
    for key, value in other.items():
        known = total.get(key)
        if isinstance(value, list):
            total[key] = [*known, *value] if isinstance(known, list) else [*value]
        else:
            total[key] = known + value if isinstance(known, float | int) else value
    return total


def in_short(stats: Stats) -> dict[str, int | float]:
    """For a line of a log: counters, and of histograms in seconds the means in ms."""
    shown: dict[str, int | float] = {}
    for key, value in sorted(stats.items()):
        name, labels = split(key.removeprefix("pdlink_"))
        of = f"[{','.join(labels)}]" if labels else ""
        if not isinstance(value, list):
            shown[name.removesuffix("_total") + of] = round(value, 6)
        elif value:
            shown[f"{name.removesuffix('_seconds')}_mean_ms{of}"] = round(sum(value) / len(value) * 1000, 3)
    return shown


class Counts:
    """Pass the instance to `pdlink.events.listen`."""

    def __init__(self) -> None:
        self._registry, self._count = declared()
        for metric in self._registry.metrics:
            if isinstance(metric, Histogram):
                metric.samples = {}

    def __call__(self, event: Event) -> None:
        self._count(event)

    def take(self) -> Stats:
        """What has happened since the last call; empty if nothing did."""
        found: Stats = {}
        with self._registry.lock:
            for metric in self._registry.metrics:
                if isinstance(metric, Histogram) and metric.samples:
                    found.update({"|".join((metric.name, *key)): told for key, told in metric.samples.items()})
                    metric.samples = {}
                elif isinstance(metric, Counter):
                    for key, numbers in metric.values.items():
                        if numbers[0]:
                            found["|".join((metric.name, *key))] = numbers[0]
                            numbers[0] = 0.0
        return found
