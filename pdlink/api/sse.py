"""Server-sent events: event boundaries, and the meaning of first, last and error events.

A stream's bytes pass through unchanged. They are cut at event boundaries only, so a broken stream never leaves the
client with half a line before the error event.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink._http import DONE as MARK_OF_DONE
from pdlink._http import FAILED, marks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DONE = b"data: [DONE]\n\n"

MAX_EVENT_NBYTES = 16 * 2**20
"""Longest single event to hold. One token with the log-probabilities of a 128k-token prompt is about 10 MiB."""

# Lines end in \n or \r\n; no inference server uses the bare \r that the standard also allows. The \r of a last line
# is left to it: a pattern that begins with a byte is searched in a quarter of the time.
_BOUNDARY = re.compile(rb"\n\r?\n")


class EventTooLong(ValueError):
    """A worker sent more than MAX_EVENT_NBYTES without ending its event."""


class EventBuffer:
    """Cuts arriving bytes into whole events. Every byte is searched once."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0
        """Bytes of `_held` without a complete boundary."""

    def feed(self, data: bytes) -> None:
        self._held += data

    def take_whole_events(self) -> bytes:
        """All bytes up to the last event boundary; the rest is held."""
        held, start = self._held, self._searched
        if held.endswith(b"\n\n"):
            return self._take(len(held))
        end = max(held.rfind(b"\n\n", start) + 2, held.rfind(b"\n\r\n", start) + 3)
        if end < 3:  # nothing found: -1 + 2 or 3
            self._hold()
            return b""
        return self._take(end)

    @property
    def is_empty(self) -> bool:
        """No event has begun without its end."""
        return not self._held

    def pass_whole_events(self, data: bytes) -> bytes:
        """`feed`, then `take_whole_events`; does not copy bytes that are whole events already."""
        if not self._held and data.endswith(b"\n\n"):
            return data
        self.feed(data)
        return self.take_whole_events()

    def take_rest(self) -> bytes:
        """All held bytes, at the end of the stream."""
        return self._take(len(self._held))

    def _take(self, nbytes: int) -> bytes:
        taken = bytes(memoryview(self._held)[:nbytes])
        del self._held[:nbytes]
        self._searched = 0
        return taken

    def _hold(self) -> None:
        self._searched = max(0, len(self._held) - 2)  # the longest boundary has three bytes
        if len(self._held) > MAX_EVENT_NBYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_NBYTES} bytes")


def is_done(data: bytes) -> bool:
    """Whether whole events end with the [DONE] marker."""
    # Generated text cannot match: a JSON line ends in "}".
    return marks_of(data, MARK_OF_DONE) != 0


def has_named(data: bytes, names: Iterable[bytes]) -> bool:
    """Whether whole events have one of these names."""
    # Generated text cannot match: a JSON line has no line ends in it.
    return any(data.startswith(mark) or b"\n" + mark in data for mark in (b"event: " + name for name in names))


def fails(document: bytes) -> bool:
    """Whether an answer, or the payload of an event, has a choice with the finish_reason "error", or has that
    somewhere and cannot be read. Elsewhere in it a client's or a model's words may be fields, too."""
    if not marks_of(document, FAILED):
        return False
    try:
        choices = msgspec.json.decode(document, type=_Chosen).choices or ()
    except (ValueError, RecursionError):
        return True
    return any(choice is not None and choice.finish_reason == "error" for choice in choices)


def before_finish_error(data: bytes) -> tuple[bytes, bytes]:
    """Of whole events those before the first one that `fails`, and that one; empty if there is none."""
    start = 0
    while (end := _BOUNDARY.search(data, start)) is not None:
        event = data[start : end.end()]
        if fails(_payload(event)):
            return data[:start], event
        start = end.end()
    return data, b""


def before_end(data: bytes) -> bytes:
    """Whole events that end with [DONE]: those before it."""
    end = data.rindex(b"[DONE]")
    start = max(data.rfind(b"\n\n", 0, end) + 2, data.rfind(b"\n\r\n", 0, end) + 3)
    return data[: start if start > 2 else 0]


ERROR_MARK = b'{"error"'
ABORT_MARK = b'"abort"'
FAILURES = (b"error", b"response.failed")
"""Names of events that tell of a failure."""


def payloads(data: bytes) -> Iterator[bytes]:
    """Of whole events."""
    for event in _BOUNDARY.split(data):
        yield _payload(event)


def until_error(data: bytes) -> tuple[bytes, bytes] | None:
    """Whole events before the first error, and its object; None if there is none."""
    start = 0
    while (end := _BOUNDARY.search(data, start)) is not None:
        event = data[start : end.end()]
        if (ERROR_MARK in event and is_error(_payload(event))) or has_named(event, FAILURES):
            return data[:start], _payload(event)
        start = end.end()
    return None


def rewritten(data: bytes, mark: bytes, rewrite: Callable[[bytes], bytes]) -> bytes:
    """Whole events, with the payloads that contain `mark` replaced by `rewrite(payload)`, or left out if that is
    empty."""
    out, start = b"", 0
    while (end := _BOUNDARY.search(data, start)) is not None:
        event, start = data[start : end.end()], end.end()
        if mark in event:
            payload = _payload(event)
            if (new := rewrite(payload)) != payload:
                named = b"".join(line + b"\n" for line in event.splitlines() if line.startswith(b"event:"))
                event = named + b"data: " + new + b"\n\n" if new else b""
        out += event
    return out + data[start:]


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:  # one line, as nearly always
        return event[5:].strip()
    return b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:")).strip()


def is_error(document: bytes) -> bool:
    """Whether the payload of an event is an error object."""
    try:
        return bytes(msgspec.json.decode(document, type=_Peek).error) != b"null"
    except (ValueError, RecursionError):
        return False


class _Peek(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")  # with `| None` msgspec 0.22 accepts null only


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Chosen(msgspec.Struct):
    choices: list[_Choice | None] | None = None


class _End(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _End | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None


def abort_of(document: bytes) -> bytes:
    """An error document for an event of SGLang's /generate that ends an answer because of a failure; else empty."""
    try:
        meta = msgspec.json.decode(document, type=_Generated).meta_info
    except (ValueError, RecursionError):
        return b""
    end = meta.finish_reason if meta is not None else None
    if end is None or end.type != "abort" or end.status_code is None or end.status_code < 400:
        return b""  # somebody asked for the abort
    message = end.message or "the server aborted the request"
    return msgspec.json.encode({"error": {"message": message, "type": "stream_error", "code": end.status_code}})


def problem_of(event: bytes) -> tuple[str, bytes] | None:
    """Why a first data event is not output token 0: (message, the worker's error document if it sent one)."""
    payload = _payload(event)
    if payload == b"[DONE]":
        return "the stream ended without a token", b""
    try:
        error = msgspec.json.decode(payload, type=_Peek).error
    except (ValueError, RecursionError):
        return "the first event is not a JSON object", b""
    if bytes(error) == b"null":
        payload = abort_of(payload) if ABORT_MARK in payload else b""
    return ("the stream began with an error", payload) if payload else None
