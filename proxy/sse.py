"""Server-sent events, as far as a router must know them: where one event ends and what the first one says.

The bytes of a stream are passed on as they came; they are only cut at event boundaries, so that a stream that breaks
never leaves the client with half a line before the error event.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

DONE = b"data: [DONE]\n\n"

MAX_EVENT_NBYTES = 16 * 2**20
"""Longest single event held back. One token with the log-probabilities of a 128k-token prompt is about 10 MiB."""

# Lines may end in \n or \r\n; a bare \r, which the standard also allows, is used by no inference server.
_BOUNDARY = re.compile(rb"\r?\n\r?\n")


class EventTooLong(ValueError):
    """A worker sent more than MAX_EVENT_NBYTES without ending its event."""


class EventBuffer:
    """Bytes that arrived, given out again in whole events."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data

    def take_first_data_event(self) -> bytes | None:
        """The first event that carries data, or None while it is incomplete. Comments before it are dropped."""
        while (end := _BOUNDARY.search(self._held)) is not None:
            event, self._held = self._held[: end.end()], self._held[end.end() :]
            if event.startswith(b"data:") or b"\ndata:" in event:
                return event
        self._check_length()
        return None

    def take_whole_events(self) -> bytes:
        """Everything up to the last event boundary; what follows it is held."""
        held = self._held
        if held.endswith(b"\n\n"):
            self._held = b""
            return held
        end = max(held.rfind(b"\n\n") + 2, held.rfind(b"\r\n\r\n") + 4, held.rfind(b"\n\r\n") + 3)
        if end < 5:  # nothing found: -1 + 2, 3 or 4. No event is shorter than "a\n\n", and one that is says nothing.
            self._check_length()
            return b""
        self._held = held[end:]
        return held[:end]

    def take_rest(self) -> bytes:
        """What is held, when no more will come."""
        rest, self._held = self._held, b""
        return rest

    def _check_length(self) -> None:
        if len(self._held) > MAX_EVENT_NBYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_NBYTES} bytes")


def is_done(data: bytes) -> bool:
    """Whether whole events end with the marker after which nothing follows."""
    # A JSON line ends in "}", so this cannot be met by generated text.
    return data[-16:].rstrip().endswith(b"[DONE]")


def has_error(data: bytes) -> bool:
    """Whether whole events hold an error object of the worker. Quotes inside generated text are escaped."""
    return b'{"error"' in data


def rewritten(data: bytes, mark: bytes, rewrite: Callable[[bytes], bytes]) -> bytes:
    """Whole events, those of them that hold `mark` with another payload."""
    out, start = b"", 0
    while (end := _BOUNDARY.search(data, start)) is not None:
        event, start = data[start : end.end()], end.end()
        out += b"data: " + rewrite(_payload(event)) + b"\n\n" if mark in event else event
    return out + data[start:]


def _payload(event: bytes) -> bytes:
    return b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:")).strip()


class _Peek(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")  # with `| None` msgspec 0.22 takes nothing but null


def problem_of(event: bytes) -> tuple[str, bytes] | None:
    """Why a first data event is not output token 0: (message, the worker's error document if it sent one)."""
    payload = _payload(event)
    if payload == b"[DONE]":
        return "the stream ended without a token", b""
    try:
        error = msgspec.json.decode(payload, type=_Peek).error
    except (msgspec.DecodeError, RecursionError):
        return "the first event is not a JSON object", b""
    if bytes(error) != b"null":
        return "the stream began with an error", payload
    return None
