"""What happened, as small frozen structs, and the one `emit()` that tells those who listen.

Metrics, traces and the timeline are all made from these events (`pdlink/observe`), so a number on a dashboard and
a span in a trace cannot disagree. Emitting costs one call per listener and nothing when nobody listens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    at_s: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic seconds of this host; on Linux comparable between processes of one host, never between hosts."""


class LayerWritten(Event, frozen=True, kw_only=True, gc=False):
    """The engine has written one layer's KV of tokens [start, end) of a request that is to be sent."""

    transfer_id: str
    layer: int
    start: int
    end: int


class LayerLanded(Event, frozen=True, kw_only=True, gc=False):
    """One layer's KV of tokens [start, end) is visible in the decode worker's pages (sender's view)."""

    transfer_id: str
    layer: int
    start: int
    end: int
    nbytes: int
    transport: str
    submitted_s: float
    """When the first of these bytes were handed to the transport, on the clock of `at_s`."""
    asked_s: float
    """When they could have been: before that the layer was not written, or not offered for."""


class TransferEnded(Event, frozen=True, kw_only=True, gc=False):
    """The one terminal event of a transfer on one side."""

    transfer_id: str
    side: str
    """"sender" or "receiver"."""
    peer: str
    state: str
    """Terminal state: DONE, READY or FAILED."""
    reason: str
    """Empty for DONE and READY, otherwise a code of `pdlink.errors` or of the protocol."""
    nbytes: int
    transport: str
    started_s: float
    first_landed_s: float | None = None


class PeerChanged(Event, frozen=True, kw_only=True, gc=False):
    """A peer was connected, lost or refused."""

    peer: str
    state: str
    reason: str = ""


class MessageDropped(Event, frozen=True, kw_only=True, gc=False):
    """A control message was not acted upon: unknown, duplicate, late, malformed or of an old epoch."""

    reason: str


class HandlingFailed(Event, frozen=True, kw_only=True, gc=False):
    """What a peer, a transport or this worker's code gave the endpoint to do raised an unexpected error."""

    what: str
    """"frame", "message", "push", "occurrence", "transport", "command" or "callback"."""
    error: str


class FallbackUsed(Event, frozen=True, kw_only=True, gc=False):
    """A request took its configured second way: "recompute", "retry" or "decode_only"."""

    kind: str
    reason: str


class PrefixFound(Event, frozen=True, kw_only=True, gc=False):
    """A store was asked for a prefix. Counts chunks."""

    asked: int
    in_memory: int
    below: int
    """Leading ones after those in memory that are in a tier, or on their way from one."""


class RecordsChanged(Event, frozen=True, kw_only=True, gc=False):
    """Records came into a store's memory or went."""

    kind: str
    """"stored", "evicted" or "removed"."""
    records: int
    nbytes: int


class TierCalled(Event, frozen=True, kw_only=True, gc=False):
    """A call of a tier below memory ended."""

    tier: str
    call: str
    """"contains", "get", "put", "remove" or "clear"."""
    outcome: str
    """"done", "missed" or "failed"."""
    nbytes: int
    took_s: float


class RequestEnded(Event, frozen=True, kw_only=True, gc=False):
    """A request of the engine or the proxy reached its end."""

    request_id: str
    role: str
    outcome: str
    """A finish reason ("stop", "length") or an error code."""
    prompt_tokens: int
    completion_tokens: int
    started_s: float
    first_token_s: float | None


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def emit(event: Event) -> None:
    """Tell every listener, in the calling thread. A listener must be quick and must not raise."""
    for listener in _listeners:
        listener(event)


def listen(listener: Listener) -> Callable[[], None]:
    """Add a listener for all events of this process; returns the function that removes it."""
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop
