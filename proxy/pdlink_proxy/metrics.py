"""The proxy's metrics. One registry per proxy, so two proxies in one process do not add up.

Labels come from the configuration and from enums, never from a client, so the number of series is bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdlink.protocol.kv_path import PATHS

from .steps import Leg, Outcome, Why

FALLBACKS = ("retry", "decode_only")

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUEST_BUCKETS_S = (*_TTFT_BUCKETS_S, 300, 600, 1200)


class Metrics:
    """Every series of one proxy."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        name = "pdlink_proxy_"
        self.requests = Counter(f"{name}requests", "Client requests by outcome.", ["outcome"], registry=registry)
        self.attempts = Counter(f"{name}attempts", "Attempts by what they were made for.", ["why"], registry=registry)
        self.fallbacks = Counter(
            f"{name}fallbacks", "Requests that took their configured second way.", ["kind"], registry=registry
        )
        self.leg_failures = Counter(
            f"{name}leg_failures",
            "Legs that failed, by kind of loss or status.",
            ["leg", "reason"],
            registry=registry,
        )
        self.first_tokens = Counter(
            f"{name}first_tokens", "Streams by the leg whose first token was sent.", ["leg"], registry=registry
        )
        self.kv = Counter(
            f"{name}kv",
            "Answers with tokens by the way the KV of their prompt took: transferred, or recomputed by decode.",
            ["path"],
            registry=registry,
        )
        self.ttft = Histogram(
            f"{name}ttft_seconds",
            "From the request's arrival to its first token: sent on, or made by prefill's leg if nothing streams.",
            ["streaming"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.request_seconds = Histogram(
            f"{name}request_seconds",
            "From the request's arrival to the end of its answer, of those answered well.",
            ["streaming"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.active_streams = Gauge(f"{name}active_streams", "Streams open to clients.", registry=registry)
        self.queued = Gauge(f"{name}queued", "Requests that wait for a worker.", registry=registry)
        self.in_flight = Gauge(f"{name}in_flight", "Open legs.", ["worker", "leg"], registry=registry)
        self.healthy = Gauge(
            f"{name}worker_healthy", "1 if it may get requests.", ["worker", "leg"], registry=registry
        )

        # Create the series at the start, so that they have a rate from the start.
        for outcome in Outcome:
            self.requests.labels(outcome.value)
        for why in Why:
            self.attempts.labels(why.value)
        for kind in FALLBACKS:
            self.fallbacks.labels(kind)
        for streaming in ("true", "false"):
            self.ttft.labels(streaming)
            self.request_seconds.labels(streaming)
        for path in PATHS:
            self.kv.labels(path)
        for leg in Leg:
            self.first_tokens.labels(leg.value)

    def exposition(self) -> bytes:
        """The text that GET /metrics answers."""
        return generate_latest(self._registry)
