"""Spans of a request, made from its record when it has ended: the request, its phases, and the legs of all attempts.

The legs' workers get their leg's span as the parent of what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdlink.observe.spans import Span, context_for, new_span_id, unix_offset_s

from .records import phases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.api.openai import Call
    from pdlink.observe.otlp import SpanSender
    from pdlink.observe.spans import TraceContext, Value

    from .records import LegRecord, RequestRecord

TRACE_HEADERS = ("traceparent", "tracestate")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""Names of OpenTelemetry's conventions for generative AI."""
_GOOD = ("ok", "client_left")
_GOOD_ENDS = ("served", "let go", "cancelled")


class Tracer:
    """Begins the traces of a proxy's requests."""

    def __init__(self, sender: SpanSender, share: float) -> None:
        self._sender, self._share = sender, share

    def begin(self, headers: dict[str, str]) -> RequestTrace | None:
        """None for a request that is not sampled. headers: for both legs; brought in line with that."""
        context = context_for(headers.get("traceparent"), headers.get("tracestate"), self._share)
        if not context.span_id:  # it begins here; what was said is no trace context
            headers.pop("tracestate", None)
            headers["traceparent"] = context.traceparent(new_span_id())
        return RequestTrace(context, self._sender) if context.sampled else None


class RequestTrace:
    """The trace of one request."""

    __slots__ = ("_context", "_sender", "_span_id")

    def __init__(self, context: TraceContext, sender: SpanSender) -> None:
        self._context, self._sender, self._span_id = context, sender, new_span_id()

    def below(self, span_id: str) -> str:
        """`traceparent` for a worker."""
        return self._context.traceparent(span_id)

    def ended(self, record: RequestRecord, call: Call) -> None:
        """Make its spans and send them."""
        operation = _OPERATIONS.get(call.path, call.path)
        whole, *others = request_spans(record, self._span_id)
        asked: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": call.model,
            "pdlink.stream": call.streaming,
        }
        whole = msgspec.structs.replace(
            whole,
            name=f"{operation} {call.model}",
            parent_id=self._context.span_id,
            attributes={**asked, **whole.attributes},
        )
        self._sender.send(self._context, [whole, *others])


def request_spans(record: RequestRecord, span_id: str) -> list[Span]:
    """The request, which has this id, its phases, and the legs of all its attempts."""
    came_s = record.at_s - unix_offset_s() - record.total_s
    attributes: dict[str, Value] = {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "pdlink.request_id": record.request_id,
        "pdlink.outcome": record.outcome,
        "pdlink.kv": record.kv,
        "pdlink.attempts": record.attempts,
    }
    if record.ttft_s is not None:
        attributes["pdlink.ttft_ms"] = record.ttft_s * 1e3
    whole = Span(
        name="request",
        label=record.request_id,
        track="requests",
        span_id=span_id,
        kind="server",
        begin_s=came_s,
        end_s=came_s + record.total_s,
        attributes=attributes,
        error="" if record.outcome in _GOOD else record.outcome,
    )
    return [
        whole,
        *_phases(record, came_s, span_id),
        *(_leg(leg, came_s, span_id, record.total_s) for leg in record.legs),
    ]


def _phases(record: RequestRecord, came_s: float, span_id: str) -> Sequence[Span]:
    """Of each attempt, one after the other."""
    return [
        Span(
            name=each.name,
            track="requests",
            span_id=new_span_id(),
            parent_id=span_id,
            begin_s=came_s + each.begin_s,
            end_s=came_s + each.end_s,
            attributes={"pdlink.attempt": each.attempt},
        )
        for each in phases(record.tries, record.total_s, well=record.outcome == "ok")
    ]


def _leg(leg: LegRecord, came_s: float, span_id: str, total_s: float) -> Span:
    attributes: dict[str, Value] = {
        "pdlink.worker": leg.worker,
        "pdlink.transfer_id": leg.transfer_id,
        "pdlink.end": leg.end,
    }
    if leg.answered_s is not None:
        attributes["pdlink.answered_ms"] = (leg.answered_s - leg.sent_s) * 1e3
    ended_s = total_s if leg.ended_s is None else leg.ended_s
    return Span(
        name=f"{leg.leg} leg",
        label=f"{leg.leg}, {leg.worker}: {leg.end}",
        track="legs",
        span_id=leg.span_id,
        parent_id=span_id,
        kind="client",
        begin_s=came_s + leg.sent_s,
        end_s=came_s + max(leg.sent_s, ended_s),
        attributes=attributes,
        error="" if leg.end in _GOOD_ENDS else leg.end,
    )
