"""Counters, gauges and histograms of one process, as plain numbers: declared once, added to where things happen.

They become Prometheus' text when somebody asks. Plain numbers, because they are quick (1.4 µs of CPU where
prometheus_client's own counters, which look a child up and take its lock, need 6.9), and because the processes of one
proxy add theirs up (`Numbers`). Label values come from the configuration and from enums, never from a client, so the
number of series is bounded. What is known beforehand gets its series at once: an alert on a counter that appears with
its first error never fires.
"""

from __future__ import annotations

import itertools
import platform
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pdlink import __version__
from pdlink._http import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import Metric as Family

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets for what computing does."""
FINE_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, *SECONDS[:-3])
"""Buckets for what memory, disks and networks do: from 10 µs to 10 s."""

Numbers: TypeAlias = dict[str, list[tuple[tuple[str, ...], list[float]]]]
"""By metric, for each combination of labels: one number, or of a histogram those of its buckets and their sum."""


_MOST_SPANS = 64
"""A span that began before so many gaps counts the older ones as if nothing had been in flight in them."""

_Key = TypeVar("_Key", bound=str | tuple[str, ...])
_Series = TypeVar("_Series", list[float], Buckets)


class Metric(Generic[_Series]):
    """One metric of any number of series."""

    kind: ClassVar[str]

    def __init__(self, name: str, text: str, *, of_all: bool = False, **labels: Iterable[str]) -> None:
        """name: with its unit, and `_total` of a counter. labels: with the values known beforehand, () for none.

        of_all: every process of a proxy knows it; it does not add up.
        """
        self.name, self.text, self.of_all = name, text, of_all
        self.known = {label: tuple(values) for label, values in labels.items()}
        self._values: dict[tuple[str, ...], _Series] = {}
        for series in itertools.product(*self.known.values()):
            self.series(*series)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.known)

    @property
    def unit(self) -> str:
        """seconds or bytes, as the name says; empty for what is counted."""
        words = self.name.removesuffix("_total").rpartition("_")[2]
        return words if words in ("seconds", "bytes") else ""

    @property
    def values(self) -> dict[tuple[str, ...], list[float]]:
        """By labels, the numbers as they are now."""
        raise NotImplementedError

    def series(self, *labels: str) -> _Series:
        """The numbers under these labels; from now on there is such a series."""
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = self._zero()
        return found

    def family(self, values: Iterable[tuple[tuple[str, ...], list[float]]]) -> Family:
        """In prometheus_client's words."""
        raise NotImplementedError

    def _zero(self) -> _Series:
        raise NotImplementedError


class _Plain(Metric[list[float]]):
    """Of one number for each series."""

    @property
    def values(self) -> dict[tuple[str, ...], list[float]]:
        return self._values

    def _zero(self) -> list[float]:
        return [0.0]


class Counter(_Plain):
    kind = "counter"

    def add(self, number: float, *labels: str) -> None:
        (self._values.get(labels) or self.series(*labels))[0] += number

    def set(self, number: float, *labels: str) -> None:
        """What somebody else has counted."""
        self.series(*labels)[0] = float(number)

    def family(self, values: Iterable[tuple[tuple[str, ...], list[float]]]) -> Family:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels, unit=self.unit)
        for labels, numbers in values:
            family.add_metric(labels, numbers[0])
        return family


class Gauge(_Plain):
    kind = "gauge"

    def add(self, number: float, *labels: str) -> None:
        self.series(*labels)[0] += number

    def set(self, number: float, *labels: str) -> None:
        self.series(*labels)[0] = float(number)

    def replace(self, values: Mapping[_Key, float]) -> None:
        """All series at once; a series that is not named ends."""
        found: dict[tuple[str, ...], list[float]] = {}
        for key, value in values.items():
            found[(key,) if isinstance(key, str) else key] = [float(value)]
        self._values = found

    def family(self, values: Iterable[tuple[tuple[str, ...], list[float]]]) -> Family:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels, unit=self.unit)
        for labels, numbers in values:
            family.add_metric(labels, numbers[0])
        return family


class Histogram(Metric[Buckets]):
    kind = "histogram"

    def __init__(self, name: str, buckets: tuple[float, ...], text: str, **labels: Iterable[str]) -> None:
        """buckets: their upper bounds, ascending."""
        self.buckets = buckets
        self._bounds = (*(str(float(bound)) for bound in buckets), "+Inf")
        self._keeps = False
        super().__init__(name, text, of_all=False, **labels)

    @property
    def values(self) -> dict[tuple[str, ...], list[float]]:
        return {labels: series.numbers for labels, series in self._values.items()}

    def observe(self, number: float, *labels: str, exemplar: dict[str, str] | None = None) -> None:
        """As `Buckets.observe`."""
        (self._values.get(labels) or self.series(*labels)).observe(number, exemplar)

    def keep_samples(self) -> None:
        """From now on every single number is kept, too, until `take_samples`."""
        self._keeps = True
        for series in self._values.values():
            series.keeps = True

    def take_samples(self) -> dict[tuple[str, ...], list[float]]:
        """By labels, of series with some."""
        return {labels: taken for labels, series in self._values.items() if (taken := series.take_samples())}

    def _zero(self) -> Buckets:
        series = Buckets(self.buckets)
        series.keeps = self._keeps
        return series

    def family(self, values: Iterable[tuple[tuple[str, ...], list[float]]]) -> Family:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels, unit=self.unit)
        for labels, numbers in values:
            total, buckets = 0.0, []
            exemplars = self._values[labels].exemplars if labels in self._values else {}
            for at, (bound, number) in enumerate(zip(self._bounds, numbers, strict=False)):
                total += number
                exemplar = exemplars.get(at)
                buckets.append((bound, total) if exemplar is None else (bound, total, Exemplar(*exemplar)))
            family.add_metric(labels, buckets, numbers[-1])
        return family


_M = TypeVar("_M", bound=Metric[Any])


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """For series that several threads add to: while they add, and while the numbers are read."""
        self.metrics: list[Metric[Any]] = []
        self._before: list[Callable[[], None]] = []

    def add(self, metric: _M) -> _M:
        assert all(metric.name != other.name for other in self.metrics), metric.name
        self.metrics.append(metric)
        return metric

    def before_reading(self, update: Callable[[], None]) -> None:
        """update: sets gauges; it is called at every scrape, with the lock not held, and must be quick."""
        self._before.append(update)

    def numbers(self) -> Numbers:
        """Of this process, now."""
        for update in self._before:
            update()
        with self.lock:
            return {metric.name: [(key, [*own]) for key, own in metric.values.items()] for metric in self.metrics}

    def exposition(self, accept: str = "", others: Iterable[Numbers] = ()) -> tuple[bytes, str]:
        """The body of /metrics and its content type.

        accept: the client's header. OpenMetrics, with exemplars (this process's only), if it asks for that; else
        Prometheus' text format 0.0.4. others: of the other processes of the same proxy.
        """
        totals = {name: dict(series) for name, series in self.numbers().items()}
        for numbers in others:
            for metric in self.metrics:
                total = totals[metric.name]
                for labels, more in numbers.get(metric.name, ()):
                    own = total.get(tuple(labels))
                    if own is None:
                        total[tuple(labels)] = [*more]
                    elif not metric.of_all:
                        own[:] = map(float.__add__, own, more)
        registry = CollectorRegistry()
        registry.register(_Shown([metric.family(totals[metric.name].items()) for metric in self.metrics]))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def totals(self) -> dict[str, dict[str, float]]:
        """Counters for people: name without `pdlink_` and `_total`, to values by label values with `/` between."""
        with self.lock:
            return {
                metric.name.removeprefix("pdlink_").removesuffix("_total"): {
                    "/".join(labels): numbers[0] for labels, numbers in metric.values.items()
                }
                for metric in self.metrics
                if isinstance(metric, Counter)
            }


class _Shown(Collector):
    def __init__(self, found: list[Family]) -> None:
        self._found = found

    def collect(self) -> Iterator[Family]:
        return iter(self._found)


class ProcessMetrics:
    """What every process tells of itself. Those of one proxy add up, but for the limits and the time of its start."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        build = add(Gauge("pdlink_build_info", "1; which version runs.", of_all=True, version=(), python_version=()))
        build.set(1, __version__, platform.python_version())
        declared = (
            Counter("process_cpu_seconds_total", "CPU time of the process, user and system."),
            Gauge("process_resident_memory_bytes", "Memory of the process that is in RAM; shared memory counts."),
            Gauge("process_virtual_memory_bytes", "Address space of the process."),
            Gauge("process_open_fds", "Open file descriptors."),
            Gauge("process_max_fds", "Most file descriptors that it may open.", of_all=True),
            Gauge("process_start_time_seconds", "Unix time at which the process began.", of_all=True),
        )
        self._of_kernel = {metric.name: add(metric) for metric in declared}
        self._collector = ProcessCollector(registry=None)
        registry.before_reading(self._update)

    def _update(self) -> None:
        for family in self._collector.collect():
            for sample in family.samples:
                if (metric := self._of_kernel.get(sample.name)) is not None:
                    metric.series()[0] = float(sample.value)


class Busy:
    """The time in which at least one of many overlapping spans goes on, while they are told one by one.

    Adds up their union. They come in the order of their ends, or almost.
    """

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
        del spans[:-_MOST_SPANS]
        gained_s = end_s - begin_s - covered_s
        self.total_s += gained_s
        return gained_s
