"""Heads of HTTP/1.1 messages of the plain kind, which is nearly all of them, and marks in events (`csrc/http`). What
is not plain is None here, and a whole parser reads it."""

ERROR: int
"""An error object."""
FINISH: int
"""A finish_reason that is not null."""
CACHED: int
"""Cached tokens, in a usage."""
DONE: int
"""The marker at the end of a stream."""

def marks_of(events: bytes) -> int:
    """Which of these marks whole events have, or a whole answer. Quotes in generated text are escaped, so a mark is a
    field."""

def plain_request(data: bytes, start: int, end: int) -> tuple[dict[str, str], int, bool] | None:
    """The fields of a request in these bytes, which end with an empty line: each name once, in lower case; values
    without the spaces around them. Then the bytes of its body, and whether the connection stays. None if a name comes
    twice, a line is not a token (RFC 9110 5.6.2), a colon and printable ASCII, there is no host or length, or a field
    changes how it is read. Raises IndexError for an `end` beyond the bytes."""

def server_timing(
    queue_s: float,
    placement_s: float,
    prefill_s: float | None,
    transfer_s: float | None,
    decode_s: float | None,
    last: str,
    until_now_s: float,
) -> str:
    """The value of Server-Timing, in ms. last: the name of `until_now_s`."""

def whole_answer(data: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes, bool] | None:
    """Status, fields as they came, body, and whether that is of type application/json, if these bytes are one whole
    answer with a body of known length, after which the connection stays. None for any other: a part of one, a stream,
    an interim answer, more than one."""
