"""What happened in this process since somebody last asked, for the /metrics of vLLM's and SGLang's servers.

The declarations are those of every pdlink process (`pdlink.observe.metrics`), under the engine's prefix. vLLM carries
the numbers from its workers to its API server, whose histograms take single numbers only: so those are carried. Of
gauges the changes are carried, which add up over ranks and steps as counters do.
"""

from __future__ import annotations

from collections import Counter as Sum
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.observe.gauges import LinkGauges, LinkState, StoreGauges
from pdlink.observe.metrics import Counting, PromptMetrics, StoreMetrics, TransferMetrics
from pdlink.observe.series import Counter, Gauge, Histogram, Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdlink.events import Event
    from pdlink.node.report import NodeReport
    from pdlink.observe.series import Metric

Stats = dict[str, float | list[float]]
"""What a counter or gauge has gained, or every number that a histogram was told; by `NAME|VALUE|VALUE` of labels."""

_OF_ONE = "pdlink_endpoint_longest_absence_seconds"
"""A maximum, which does not add up over ranks."""

ENGINES = ("vllm", "sglang")
"""Engines whose servers show these metrics, each as PREFIX:NAME."""


class Declared(NamedTuple):
    """The metrics of a rank, or of the scheduler, which knows of prompts."""

    registry: Registry
    counting: Counting
    """The listener that counts them."""
    link: LinkGauges
    store: StoreGauges

    @property
    def metrics(self) -> list[Metric[Any]]:
        """The metrics that servers of other engines show."""
        return [metric for metric in self.registry.metrics if metric.name != _OF_ONE]


def declared(*, prompts: bool = True) -> Declared:
    """prompts: the engine tells where the KV of each one came from."""
    registry = Registry()
    parts = TransferMetrics(registry), StoreMetrics(registry), *((PromptMetrics(registry),) if prompts else ())
    return Declared(registry, Counting(registry, *parts), LinkGauges(registry), StoreGauges(registry))


def link_state(reports: Iterable[NodeReport]) -> LinkState:
    """Of all shards of a rank together."""
    found = list(reports)
    return LinkState(
        sending=_sum(each.sending for each in found),
        receiving=_sum(each.receiving for each in found),
        quarantined_blocks=sum(each.quarantined_blocks for each in found),
        push_nbytes=_sum(each.push_nbytes for each in found),
        control_nbytes=_sum(each.control_nbytes for each in found),
        live=sum(each.num_peers for each in found),
        closing=sum(each.num_closing for each in found),
        peers=[peer for each in found for peer in each.peers],
        refused=[refused for each in found for refused in each.refused],
        longest_absence_s=0.0,
    )


def _sum(parts: Iterable[Mapping[str, int]]) -> Sum[str]:
    total: Sum[str] = Sum()
    for part in parts:
        total.update(part)
    return total


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
        if not isinstance(value, list) and not name.endswith("_total"):
            continue  # the change of a gauge
        of = f"[{','.join(labels)}]" if labels else ""
        if not isinstance(value, list):
            shown[name.removesuffix("_total") + of] = round(value, 6)
        elif value:
            shown[f"{name.removesuffix('_seconds')}_mean_ms{of}"] = round(sum(value) / len(value) * 1000, 3)
    return shown


class Counts:
    """Pass the instance to `pdlink.events.listen`."""

    def __init__(self) -> None:
        self._declared = declared()
        self._registry = self._declared.registry
        self._told: dict[str, float] = {}
        """Gauges as the sum of their changes has them."""
        self.look: Callable[[LinkGauges, StoreGauges], None] | None = None
        """Sets the gauges, before each `take`."""
        for metric in self._declared.metrics:
            if isinstance(metric, Histogram):
                metric.keep_samples()

    def __call__(self, event: Event) -> None:
        self._declared.counting(event)

    def take(self) -> Stats:
        """What has happened since the last call; empty if nothing did."""
        if self.look is not None:
            self.look(self._declared.link, self._declared.store)
        found: Stats = {}
        with self._registry.lock:
            for metric in self._declared.metrics:
                if isinstance(metric, Histogram):
                    found.update({"|".join((metric.name, *key)): told for key, told in metric.take_samples().items()})
                elif isinstance(metric, Counter):
                    for key, numbers in metric.values.items():
                        if numbers[0]:
                            found["|".join((metric.name, *key))] = numbers[0]
                            numbers[0] = 0.0
        return {**found, **self._changes()}

    def _changes(self) -> dict[str, float]:
        """Of gauges, since the last call."""
        gauges = [metric for metric in self._declared.metrics if isinstance(metric, Gauge)]
        now = {"|".join((gauge.name, *key)): value[0] for gauge in gauges for key, value in gauge.values.items()}
        before, self._told = self._told, now
        changed = {key: now.get(key, 0.0) - before.get(key, 0.0) for key in now.keys() | before.keys()}
        return {key: change for key, change in changed.items() if change}

    def forget_gauges(self) -> None:
        """What `look` set is not there any more."""
        for metric in self._declared.metrics:
            if isinstance(metric, Gauge):
                metric.replace({})


class ShownStats:
    """The declared metrics as series of prometheus_client, which an engine's server shows."""

    def __init__(
        self,
        prefix: str,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        histogram: Callable[..., Any],
        labelnames: Sequence[str],
        engines: Iterable[Sequence[object]],
        *,
        prompts: bool = True,
    ) -> None:
        """prefix: of `ENGINES`. counter, gauge, histogram: make one, as prometheus_client's classes do. labelnames:
        of the engine, before our own. engines: values of them whose series are there from the start. prompts: as of
        `declared`."""
        self._series: dict[str, Any] = {}
        self._levels: dict[tuple[tuple[object, ...], str], float] = {}
        """Gauges by engine and key; they come as changes."""
        of_all = [tuple(labels) for labels in engines]
        for metric in declared(prompts=prompts).metrics:
            words = {
                "name": f"{prefix}:{metric.name}",
                "documentation": metric.text,
                "labelnames": [*labelnames, *metric.labels],
            }
            if isinstance(metric, Histogram):
                made = histogram(**words, buckets=list(metric.buckets))
            else:
                made = (gauge if isinstance(metric, Gauge) else counter)(**words)
            self._series[metric.name] = made
            for engine in of_all:
                for labels in metric.values:
                    made.labels(*engine, *labels)

    def add(self, gained: Stats, engine: Sequence[object]) -> None:
        """engine: values of its labels."""
        for key, value in gained.items():
            name, labels = split(key)
            series = self._series[name].labels(*engine, *labels)
            if isinstance(value, list):
                for number in value:
                    series.observe(number)
            elif name.endswith("_total"):
                series.inc(value)
            else:
                place = tuple(engine), key
                level = self._levels[place] = self._levels.get(place, 0.0) + value
                series.set(level)
