"""What a trace is made of: W3C's trace context, and spans made afterwards from records. Pure.

Spans have two outputs: `otlp.py` sends them to a collector, `perfetto.py` writes them as a picture.

https://www.w3.org/TR/trace-context (Level 2). No ambient context is taken: a span's parent is what its own request
said, so traces of others never mix in (vllm #38672).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = str | int | float | bool
_SAMPLED = 1
_KNOWN_FLAGS = 3
"""Sampled, and a random trace id."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """Where spans of one request belong."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them: the parent of what comes. Empty where a trace begins."""
    flags: int = _SAMPLED
    state: str = ""
    """`tracestate`, handed on as it came."""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)

    def traceparent(self, span_id: str) -> str:
        """The header for who works below this span."""
        return f"00-{self.trace_id}-{span_id}-{self.flags & _KNOWN_FLAGS:02x}"


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of work that has ended. Times are of its host's monotonic clock."""

    name: str
    span_id: str = ""
    """Empty where nothing refers to it and no collector gets it."""
    parent_id: str = ""
    """Empty for the first one of a trace."""
    begin_s: float
    end_s: float
    kind: Literal["internal", "server", "client", "producer", "consumer"] = "internal"
    attributes: Mapping[str, Value] = {}
    error: str = ""
    """Why it failed; empty if it did not."""
    links: tuple[str, ...] = ()
    """Ids of spans of the same trace that it follows."""
    track: str = ""
    """Where a picture shows it."""
    label: str = ""
    """What a picture calls it; empty for its name."""


def read_context(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """None where there is no header, and for one that is not as the specification has it."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16), tracestate or "")


def context_for(traceparent: str | None, tracestate: str | None, share: float) -> TraceContext:
    """That of the headers, or a new trace, of which this share is sampled."""
    if (found := read_context(traceparent, tracestate)) is not None:
        return found
    sampled = random.random() < share
    return TraceContext(os.urandom(16).hex(), "", _SAMPLED if sampled else 0)


def new_span_id() -> str:
    return os.urandom(8).hex()


def transfer_span_id(side: str, transfer_id: str) -> str:
    """The same in both workers, so that the receiver's span can link to the sender's."""
    return hashlib.blake2b(f"{side} {transfer_id}".encode(), digest_size=8).hexdigest()


def unix_offset_s() -> float:
    """Added to a time of this host's monotonic clock, a moment ago, it gives Unix time."""
    return time.time() - time.monotonic()
