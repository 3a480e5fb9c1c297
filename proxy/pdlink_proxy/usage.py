"""`cached_tokens` in the usage of an answer that two workers made.

Decode calls every token cached that it was sent. What a client is told (and billed) by is what nobody computed, which
prefill knows; if prefill's answer comes after decode's, nothing is said.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdlink._http import CACHED, marks_of
from pdlink.api.sse import payloads, rewritten

_MARKS = (b't_tokens_details":{', b't_tokens_details": {', b'"cache_read_input_tokens":')
"""Of `CACHED`."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    """Of /v1/responses."""
    cache_read_input_tokens: int | None = None
    """Of /v1/messages."""


class _Answer(msgspec.Struct):
    usage: _Usage | None = None

    @property
    def cached_tokens(self) -> int:
        """0 if missing: engines leave out empty details."""
        if self.usage is None:
            return 0
        details = self.usage.prompt_tokens_details or self.usage.input_tokens_details
        return (details and details.cached_tokens) or self.usage.cache_read_input_tokens or 0


def told_cached(events: bytes) -> bytes:
    """Of whole events the object that tells of cached tokens; empty if none does."""
    if not marks_of(events, CACHED):
        return b""
    return next((payload for payload in payloads(events) if marks_of(payload, CACHED)), b"")


def merged_events(prefill_answer: bytes, events: bytes) -> bytes:
    """`merged` of whole events."""
    for mark in _MARKS:
        events = rewritten(events, mark, lambda document: merged(prefill_answer, document))
    return events


def merged(prefill_answer: bytes, document: bytes) -> bytes:
    """Decode's answer, which has the mark `CACHED`, with the cached tokens of prefill's, which is empty until it is
    here."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        usage = msgspec.json.decode(fields.get("usage", b"null"), type=dict[str, Any] | None)
        said = msgspec.json.decode(prefill_answer or b"{}", type=_Answer)
    except (ValueError, RecursionError):
        return document
    if usage and isinstance(details := usage.get("prompt_tokens_details"), dict):
        details["cached_tokens"] = said.cached_tokens
        fields["usage"] = {**usage, "prompt_tokens_details": details if prefill_answer else None}
    elif usage:
        fields["usage"] = _with_cached(usage, said.cached_tokens)
    for name in ("response", "message"):  # of an event of /v1/responses, of /v1/messages
        if (inner := bytes(fields.get(name, b"")))[:1] == b"{":
            fields[name] = msgspec.Raw(merged(prefill_answer, inner))
    return msgspec.json.encode(fields)


def _with_cached(usage: dict[str, Any], cached_tokens: int) -> dict[str, Any]:
    """The usage of /v1/responses or /v1/messages. Of a message the tokens that are cached are not in
    `input_tokens`."""
    if isinstance(details := usage.get("input_tokens_details"), dict):
        return {**usage, "input_tokens_details": {**details, "cached_tokens": cached_tokens}}
    read = usage.get("cache_read_input_tokens")
    if not isinstance(read, int) or not isinstance(usage.get("input_tokens"), int):
        return usage
    total = usage["input_tokens"] + read
    return {**usage, "input_tokens": max(0, total - cached_tokens), "cache_read_input_tokens": cached_tokens}
