"""What happened, as small frozen structs, and the one `emit()` that tells those who listen.

Metrics, traces and the timeline are all made from these events (`pdlink/observe`), so a number on a dashboard and
a span in a trace cannot disagree. Emitting costs one call per listener and nothing when nobody listens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at_s: float = field(default_factory=time.monotonic)
    """Monotonic seconds of this host; on Linux comparable between processes of one host, never between hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWritten(Event):
    """The engine has written one layer's KV of tokens [start, end) of a request that is to be sent."""

    transfer_id: str
    layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLanded(Event):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnded(Event):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChanged(Event):
    """A peer was connected, lost or refused."""

    peer: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDropped(Event):
    """A control message was not acted upon: unknown, duplicate, late, malformed or of an old epoch."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackUsed(Event):
    """A request took its configured second way: "recompute", "retry" or "decode_only"."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded(Event):
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
