"""Prometheus metrics of a worker, made from its events and, at scrape time, from its gauges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdlink.events import (
    Event,
    FallbackUsed,
    HandlingFailed,
    LayerLanded,
    MessageDropped,
    PeerChanged,
    PrefixFound,
    RecordsChanged,
    RequestEnded,
    TierCalled,
    TransferEnded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Gauges = dict[str, tuple[str, "Mapping[str, float]"]]
"""Name (without prefix) to help text and values by the label `kind`."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class WorkerMetrics:
    """Counts events; `text()` is the body of /metrics. Pass the instance to `pdlink.events.listen`."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        """gauges: read at every scrape; must be quick."""
        self._registry = CollectorRegistry()
        self._bytes = Counter(
            "pdlink_transfer_bytes", "KV bytes visible at the receiver, by lane really used", ["transport"],
            registry=self._registry,
        )  # fmt: skip
        self._layers = Counter(
            "pdlink_layers_landed", "Layer pushes visible at the receiver", ["transport"], registry=self._registry
        )
        self._push_s = Histogram(
            "pdlink_push_seconds", "From handing a layer to the transport until it is visible", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._wait_s = Histogram(
            "pdlink_push_wait_seconds", "From a layer being written and offered for until its first bytes leave",
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._transfers = Counter(
            "pdlink_transfers", "Transfers ended, by side and terminal state", ["side", "state"],
            registry=self._registry,
        )  # fmt: skip
        self._transfer_s = Histogram(
            "pdlink_transfer_seconds", "Life of a transfer", ["side"], buckets=_SECONDS, registry=self._registry
        )
        self._peers = Counter("pdlink_peer_changes", "Peers connected and lost", ["state"], registry=self._registry)
        self._dropped = Counter(
            "pdlink_messages_dropped", "Control messages not acted upon", ["reason"], registry=self._registry
        )
        self._failures = Counter(
            "pdlink_handling_failures", "Unexpected errors in the endpoint, each charged to who caused it", ["what"],
            registry=self._registry,
        )  # fmt: skip
        self._fallbacks = Counter(
            "pdlink_fallbacks", "Requests that took their configured second way", ["kind"], registry=self._registry
        )
        self._requests = Counter(
            "pdlink_requests", "Requests ended, by outcome", ["role", "outcome"], registry=self._registry
        )
        self._tokens = Counter("pdlink_tokens", "Tokens of ended requests", ["kind"], registry=self._registry)
        self._ttft_s = Histogram(
            "pdlink_ttft_seconds", "From a request's arrival to its first token here", ["role"], buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._chunks = Counter(
            "pdlink_store_chunks", "Chunks of prompts looked up in the store, by where they were", ["place"],
            registry=self._registry,
        )  # fmt: skip
        self._records = Counter(
            "pdlink_store_records", "Records that came into the store's memory or went", ["kind"],
            registry=self._registry,
        )  # fmt: skip
        self._tier_bytes = Counter(
            "pdlink_tier_bytes", "Bytes of records read from and written to tiers", ["tier", "call"],
            registry=self._registry,
        )  # fmt: skip
        self._tier_s = Histogram(
            "pdlink_tier_seconds", "Calls of tiers, by outcome", ["tier", "call", "outcome"], buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_Gauges(gauges))

    def __call__(self, event: Event) -> None:
        match event:
            case LayerLanded():
                self._bytes.labels(event.transport).inc(event.nbytes)
                self._layers.labels(event.transport).inc()
                self._push_s.observe(event.at_s - event.submitted_s)
                self._wait_s.observe(event.submitted_s - event.asked_s)
            case TransferEnded():
                self._transfers.labels(event.side, event.state).inc()
                self._transfer_s.labels(event.side).observe(event.at_s - event.started_s)
            case PeerChanged():
                self._peers.labels(event.state).inc()
            case MessageDropped():
                self._dropped.labels(event.reason).inc()
            case HandlingFailed():
                self._failures.labels(event.what).inc()
            case FallbackUsed():
                self._fallbacks.labels(event.kind).inc()
            case PrefixFound():
                self._chunks.labels("memory").inc(event.in_memory)
                self._chunks.labels("below").inc(event.below)
                self._chunks.labels("missed").inc(event.asked - event.in_memory - event.below)
            case RecordsChanged():
                self._records.labels(event.kind).inc(event.records)
            case TierCalled():
                if event.outcome == "done":
                    self._tier_bytes.labels(event.tier, event.call).inc(event.nbytes)
                self._tier_s.labels(event.tier, event.call, event.outcome).observe(event.took_s)
            case RequestEnded():
                self._requests.labels(event.role, event.outcome).inc()
                self._tokens.labels("prompt").inc(event.prompt_tokens)
                self._tokens.labels("completion").inc(event.completion_tokens)
                if event.first_token_s is not None:
                    self._ttft_s.labels(event.role).observe(event.first_token_s - event.started_s)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (text, values) in self._read().items():
            family = GaugeMetricFamily(f"pdlink_{name}", text, labels=["kind"])
            for kind, value in values.items():
                family.add_metric([kind], value)
            yield family

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing at registration: the values are not there yet."""
        return []
