"""The proxy's metrics. Numbers of several processes of one proxy add up (`Numbers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink.api.kv_path import PATHS, USUAL, path_of
from pdlink.observe.series import FINE_SECONDS, Counter, Gauge, Histogram, ProcessMetrics, Registry
from pdlink.observe.spans import read_context

from .records import STAGES
from .steps import Leg, Loss, Outcome, Why

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .records import EndedRequest

FALLBACKS = ("retry", "decode_only", "recovered")
TOKENIZED = ("known", "asked", "late", "not_asked", "failed")

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUEST_BUCKETS_S = (*_TTFT_BUCKETS_S, 300, 600, 1200)
_TOKEN_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
"""Fine around the 10 to 50 ms of a token that people set objectives for."""

_LEGS = tuple(leg.value for leg in Leg)
_WITH_TOKENS = (Outcome.OK.value, Outcome.BROKEN.value)
MAX_EXEMPLAR_CHARS = 60
"""Of a request's id, or it is left out; an exemplar has 128 characters in all."""


class Metrics(Registry):
    def __init__(self) -> None:
        super().__init__()
        add, outcomes = self.add, tuple(outcome.value for outcome in Outcome)
        self.requests = add(Counter("pdlink_proxy_requests_total", "Client requests, by outcome.", outcome=outcomes))
        self.attempts = add(
            Counter(
                "pdlink_proxy_attempts_total",
                "Attempts, by what they were made for.",
                why=tuple(why.value for why in Why),
            )
        )
        self.fallbacks = add(
            Counter(
                "pdlink_proxy_fallbacks_total",
                "Requests that took their configured second way: another attempt, decode alone, a stream that goes "
                "on at another worker.",
                kind=FALLBACKS,
            )
        )
        self.leg_failures = add(
            Counter(
                "pdlink_proxy_leg_failures_total",
                "Legs that failed, by kind of loss or HTTP status.",
                leg=_LEGS,
                reason=tuple(loss.value for loss in Loss),
            )
        )
        self.kv = add(
            Counter(
                "pdlink_proxy_requests_kv_total",
                "Answers with tokens, by the way the KV of their prompt took: transferred; cached by decode; "
                "recomputed by decode; unknown, the worker does not say.",
                path=PATHS,
            )
        )
        self.ttft = add(
            Histogram(
                "pdlink_proxy_time_to_first_token_seconds",
                _TTFT_BUCKETS_S,
                "From the request's arrival to its first token: sent on, or made by prefill's leg if nothing "
                "streams; by whose token it was.",
                first_leg=_LEGS,
            )
        )
        self.per_token = add(
            Histogram(
                "pdlink_proxy_time_per_output_token_seconds",
                _TOKEN_BUCKETS_S,
                "Of each request answered well: from its first token to its end, by the number of further tokens: as "
                "its usage says, else events of the stream.",
            )
        )
        self.stages = add(
            Histogram(
                "pdlink_proxy_stage_seconds",
                FINE_SECONDS,
                "Parts of the time to the first token: queue, until there were workers; placement, to choose them; "
                "prefill, until its token; transfer, until decode's first one after it.",
                stage=STAGES,
            )
        )
        self.duration = add(
            Histogram(
                "pdlink_proxy_request_duration_seconds",
                _REQUEST_BUCKETS_S,
                "From the arrival of a request for tokens to the end of its answer, by outcome.",
                outcome=outcomes,
            )
        )
        self.active_streams = add(Gauge("pdlink_proxy_active_streams", "Streams open to clients."))
        self.queued = add(Gauge("pdlink_proxy_queued_requests", "Requests that wait for a worker."))
        self.tokenized = add(
            Counter(
                "pdlink_proxy_tokenized_total",
                "Texts to be looked up in KV events, by where their tokens came from.",
                how=TOKENIZED,
            )
        )
        self.log_dropped = add(
            Counter("pdlink_proxy_decision_log_dropped_total", "Lines that the decision log could not take.")
        )
        self.spans_dropped = add(
            Counter("pdlink_proxy_spans_dropped_total", "Spans that the collector of tracing.endpoint did not take.")
        )
        self.known_blocks = add(
            Gauge("pdlink_proxy_kv_index_blocks", "Blocks of KV that workers say they have.", of_all=True)
        )
        self.known_nbytes = add(Gauge("pdlink_proxy_kv_index_bytes", "Memory for them."))
        self.in_flight = add(Gauge("pdlink_proxy_in_flight_legs", "Open legs.", worker=(), leg=()))
        self.left_out = add(
            Gauge(
                "pdlink_proxy_worker_left_out",
                "1 if its legs fail or are slow far beyond those of its peers.",
                worker=(),
                leg=(),
            )
        )
        self.without_events = add(
            Gauge(
                "pdlink_proxy_worker_without_kv_events",
                "1 if it computed prompts and its KV events, which are listened to, did not come.",
                worker=(),
                leg=(),
            )
        )
        self.healthy = add(
            Gauge("pdlink_proxy_worker_healthy", "1 if it may get requests.", of_all=True, worker=(), leg=())
        )
        self.processes = add(
            Gauge(
                "pdlink_proxy_process_counted",
                "1 if the numbers here are also of this process of the proxy, 0 if it did not answer; nothing where "
                "it has one.",
                of_all=True,
                process=(),
            )
        )
        ProcessMetrics(self)
        # By label: found once, and not for each request.
        self.ttft_of = {leg: self.ttft.series(leg.value) for leg in Leg}
        self._duration = {outcome: self.duration.series(outcome) for outcome in outcomes}
        self._stages, self._per_token = (
            {stage: self.stages.series(stage) for stage in STAGES},
            self.per_token.series(),
        )
        self._requests = {outcome: self.requests.series(outcome) for outcome in outcomes}
        self._kv = {value: self.kv.series(value) for value in USUAL}
        self.num_streams = self.active_streams.series()
        """How many are open, as its one number."""
        self.attempts_for = {why: self.attempts.series(why.value) for why in Why}

    def ended(self, kept: EndedRequest, stages: Mapping[str, float], exemplar: dict[str, str]) -> None:
        """A request for tokens has ended. stages: of the time to its first token. exemplar: names it."""
        outcome = kept.outcome
        self._requests[outcome][0] += 1
        self._duration[outcome].observe(kept.ended_s - kept.started_s, exemplar)
        if outcome in _WITH_TOKENS:
            (self._kv.get(kept.kv) or self.kv.series(path_of(kept.kv)))[0] += 1
            for stage, took_s in stages.items():
                self._stages[stage].observe(took_s)
        if kept.per_token_s is not None:
            self._per_token.observe(kept.per_token_s)

    def count_processes(self, said: Mapping[str, Any]) -> None:
        """Numbers of these processes are added to its own before they are shown. said: see `Siblings.said`."""
        by_process = {(str(number),): True for number in said["answered"]}
        self.processes.replace(by_process | {(str(number),): False for number in said["silent"]})


def trace_of(traceparent: str) -> dict[str, str]:
    """What names it in an exemplar, if it is kept."""
    context = read_context(traceparent)
    return {"trace_id": context.trace_id} if context is not None and context.sampled else {}
