"""Spans of what a worker did for requests, made from its events. Pass the instance to `pdlink.events.listen`.

A request's span has its phases below it: queue, prefill (or the wait for KV) and decode; and its transfer, in which
the sender's span has the time while bytes were in flight.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from pdlink.events import Event, LayerLanded, PromptSourced, RequestEnded, TransferEnded
from pdlink.observe.spans import Span, context_for, new_span_id, transfer_span_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.observe.spans import TraceContext, Value

_MAX_TRACED = 4096
"""Requests that are remembered: a transfer may end after its request."""


class _Traced:
    """One request or leg that is sampled."""

    def __init__(self, request_id: str, transfer_id: str, leg: str, context: TraceContext, caller_id: str) -> None:
        self.request_id, self.leg, self.context, self.span_id = request_id, leg, context, new_span_id()
        self.ids: dict[str, Value] = {"pdlink.request_id": caller_id, "pdlink.transfer_id": transfer_id}
        self.sourced: PromptSourced | None = None
        self.submitted_s: float | None = None
        """When the first byte was in flight."""
        self.landed_s = 0.0


class WorkerSpans:
    """Remembers requests that are sampled, and makes their spans when they end."""

    def __init__(self, send: Callable[[TraceContext, Sequence[Span]], None], share: float) -> None:
        """share: of the requests without a `traceparent`."""
        self._send, self._share = send, share
        self._lock = threading.Lock()
        self._traced: OrderedDict[str, _Traced] = OrderedDict()
        """By transfer id."""
        self._by_request: dict[str, _Traced] = {}
        """By the engine's id."""

    def began(
        self, request_id: str, transfer_id: str, leg: str, caller_id: str, traceparent: str | None, state: str | None
    ) -> None:
        """A request came. leg: prefill, decode, or empty for one that this worker serves alone."""
        context = context_for(traceparent, state, self._share)
        if not context.sampled:
            return
        traced = _Traced(request_id, transfer_id, leg, context, caller_id)
        with self._lock:
            self._traced[transfer_id] = self._by_request[request_id] = traced
            if len(self._traced) > _MAX_TRACED:
                _, oldest = self._traced.popitem(last=False)
                self._by_request.pop(oldest.request_id, None)

    def __call__(self, event: Event) -> None:
        match event:
            case LayerLanded():
                if (traced := self._traced.get(event.transfer_id)) is not None:
                    traced.landed_s = max(traced.landed_s, event.at_s)
                    traced.submitted_s = min(traced.submitted_s or event.submitted_s, event.submitted_s)
            case PromptSourced():
                if (traced := self._by_request.get(event.request_id)) is not None:
                    traced.sourced = event
            case TransferEnded():
                traced = self._traced.get(event.transfer_id)
                if traced is not None and (event.side == "sender") == (traced.leg == "prefill"):
                    self._send(traced.context, _of_transfer(traced, event))
            case RequestEnded():
                with self._lock:
                    ended = self._by_request.pop(event.request_id, None)
                if ended is not None:
                    self._send(ended.context, _of_request(ended, event))


def _of_request(traced: _Traced, ended: RequestEnded) -> list[Span]:
    came_s, failed = ended.started_s, ended.outcome not in ("stop", "length")
    attributes: dict[str, Value] = {
        **traced.ids,
        "pdlink.outcome": ended.outcome,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.completion_tokens,
    }
    if (sourced := traced.sourced) is not None:
        for name in ("cached", "loaded", "received", "computed"):
            attributes[f"pdlink.prompt_tokens.{name}"] = getattr(sourced, name)
    whole = Span(
        name=traced.leg or "generate",
        span_id=traced.span_id,
        parent_id=traced.context.span_id,
        kind="server",
        begin_s=came_s,
        end_s=ended.at_s,
        attributes=attributes,
        error=ended.outcome if failed else "",
    )
    admitted_s = came_s if sourced is None else min(max(came_s, sourced.began_s), ended.at_s)
    first_s = ended.first_token_s
    found = [whole, _phase(traced, "queue", came_s, admitted_s)]
    if first_s is not None:
        found.append(_phase(traced, "wait for KV" if traced.leg == "decode" else "prefill", admitted_s, first_s))
        if traced.leg != "prefill":
            found.append(_phase(traced, "decode", first_s, ended.at_s))
    return found


def transfer_span(ended: TransferEnded) -> Span:
    """One side's part of a transfer. The receiver's follows the sender's."""
    sends = ended.side == "sender"
    attributes: dict[str, Value] = {
        "pdlink.transfer_id": ended.transfer_id,
        "pdlink.peer": ended.peer,
        "pdlink.lane": ended.transport,
        "pdlink.bytes": ended.nbytes,
        "pdlink.state": ended.state,
    }
    if ended.exposed_s is not None:
        attributes["pdlink.exposed_ms"] = ended.exposed_s * 1e3
    return Span(
        name="send KV" if sends else "receive KV",
        span_id=transfer_span_id(ended.side, ended.transfer_id),
        kind="producer" if sends else "consumer",
        begin_s=ended.started_s,
        end_s=ended.at_s,
        attributes=attributes,
        error=ended.reason,
        links=() if sends else (transfer_span_id("sender", ended.transfer_id),),
    )


def _of_transfer(traced: _Traced, ended: TransferEnded) -> list[Span]:
    whole = transfer_span(ended)
    whole = msgspec.structs.replace(whole, parent_id=traced.span_id, attributes={**traced.ids, **whole.attributes})
    if ended.side != "sender" or traced.submitted_s is None:
        return [whole]
    return [whole, _phase(traced, "KV in flight", traced.submitted_s, traced.landed_s, below=whole.span_id)]


def _phase(traced: _Traced, name: str, begin_s: float, end_s: float, below: str = "") -> Span:
    return Span(name=name, span_id=new_span_id(), parent_id=below or traced.span_id, begin_s=begin_s, end_s=end_s)
