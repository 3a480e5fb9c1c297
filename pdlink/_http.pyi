"""Heads of HTTP/1.1 messages of the plain kind, which is nearly all of them; answers with such heads; and marks in
events (`csrc/http`). What is not plain is None here, and a whole parser reads it."""

ERROR: int
"""An error object."""
FINISH: int
"""A finish_reason that is not null."""
CACHED: int
"""Cached tokens, in a usage."""
DONE: int
"""The marker at the end of a stream."""
PARAMS: int
"""`kv_transfer_params` that are not null."""
NAMED: int
"""An event with a name that ends a stream or tells of a failure: response.completed, response.incomplete,
response.failed, message_stop, error."""
ABORT: int
"""A finish_reason of SGLang's /generate that may tell of a failure."""
ANYTHING: int
"""All events have it."""
FAILED: int
"""A finish_reason "error"."""

END: int
"""The answer is over."""
BETWEEN: int
"""The bytes end between two chunks."""
BAD: int
"""They are no HTTP; nothing more can be read."""
MORE: int
"""More came than the answer."""

Head = tuple[int, list[tuple[bytes, bytes]], bool]
"""Status; fields as they came; whether the body is of type application/json, without parameters."""

class Answers:
    """Reads the answers on one connection, one after the other, in whatever pieces they come."""

    def feed(self, data: bytes) -> tuple[Head | None, bytes, int] | None:
        """The head, if it came with these bytes; what they have of the body, without the frames of its chunks; and
        which of END, BETWEEN, BAD and MORE is so.

        None if an answer begins with them that is not plain, of which nothing was read: its head must come in one
        piece, be of at most 16 KB and say how long the body is or that it comes in chunks, and the connection must
        stay after it.
        """

class Packed:
    """Remembers the events of a stream, packed: an event that differs from the one before in a token takes some 15
    bytes and 0.1 us."""

    def add(self, data: bytes) -> None:
        """Any bytes; whole events take least."""

    def take(self) -> bytes:
        """All that was added; forgets it."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""

def num_events(data: bytes) -> int:
    """How many events end in these bytes: `data.count(b"\n\n")`, at a tenth of its cost."""

def marks_of(events: bytes, wanted: int) -> int:
    """Which of the marks in `wanted` whole events have, or a whole answer. Quotes in generated text are escaped, so a
    mark is a field."""

def usage_of(events: bytes) -> tuple[int, int]:
    """`prompt_tokens` and `completion_tokens` as the last usage in whole events or in a whole answer says, 0 where it
    does not."""

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
