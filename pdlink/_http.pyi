"""Heads of HTTP/1.1 messages of the plain kind, which is nearly all of them (`csrc/http`). What is not plain is None
here, and a whole parser reads it."""

def fields(data: bytes, start: int, end: int) -> dict[str, str] | None:
    """The fields in these bytes, which end with an empty line: each name once, in lower case; values without the
    spaces around them. None if a name comes twice, or a line is not a token (RFC 9110 5.6.2), a colon and printable
    ASCII. Raises IndexError for an `end` beyond the bytes."""

def whole_answer(data: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
    """Status, fields as they came, and body, if these bytes are one whole answer with a body of known length, after
    which the connection stays. None for any other: a part of one, a stream, an interim answer, more than one."""
