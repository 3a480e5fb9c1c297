"""Heads of HTTP/1.1 messages of the plain kind, which is nearly all of them; answers with such heads; and marks in
events (`csrc/http`). What is not plain is None here, and a whole parser reads it."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
BAD: int
"""They are no HTTP; nothing more can be read."""
MORE: int
"""More came than the answer."""

class Headers(Mapping[str, str]):
    """Of an answer, as they came: names in any case, the first of a name. Decoded when they are asked for."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None: ...
    def __getitem__(self, name: str) -> str: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    @property
    def content_type(self) -> str:
        """In lower case, without parameters; empty if there is none."""

class SocketPoller:
    """Sockets that are read on the thread of an event loop, in one native turn for all that have something. Linux."""

    def __init__(self, loop: int = -1) -> None:
        """loop: the epoll of the loop, which has other sockets and stays open."""

    @property
    def fd(self) -> int:
        """Readable when there is something to read: then call `turn`. It does not tell of streams that wait for the
        rest of a burst, which only `turn` ends."""

    def turn(self, wait_s: float | None = 0.0) -> bool:
        """Waits so long until there is something, without end if None. Then reads once from each socket that
        has something, 64 of them at most, first from those whose events pass. What an owner raises is raised; the
        other sockets have their turn in the next call. Returns whether the loop's own sockets have something."""

class Socket:
    """One connected socket, read by a poller and written to natively."""

    def open(self, poller: SocketPoller, socket: int) -> None:
        """Read this socket, and write to it, until `close`. It must stay open until then."""

    def close(self) -> None: ...
    @property
    def is_open(self) -> bool:
        """If not, bytes come by `feed`, and go to `send_rest`."""

    def hold(self) -> None:
        """Read no more, until `go_on`."""

    def go_on(self) -> None: ...
    clogged: bool
    """The transport has bytes to send, so what follows must go there, too."""

class Exchange(Socket):
    """One connection to a worker: `ask` sends a request, and its listener (`AnswerListener`) hears the answer, but
    for events that pass to the client (`pass_to`).

    A plain answer has a head of at most 16 KB that comes in one piece and says how long the body is or that it comes
    in chunks, and the connection stays after it. A subclass does what is seldom needed: `abort`, `resume`,
    `broke(errno)`, `send_rest(data)`; `unusual(data)` for an answer that is not plain, as `Unusual.feed`, and
    `usual()` when that is over; `too_long(most_nbytes)` and `bad(most_nbytes)` of an answer that is lost;
    `fault(error)` if `freed` raised, of which the listener hears nothing.
    """

    keeps: bool
    """It can be used once more."""
    reused: bool
    paused: bool
    """The subclass reads no more, until `resume`, which the end of an answer calls."""

    def __init__(self) -> None: ...
    def ask(self, begin: bytes, lines: bytes, body: bytes, listener: Any, uses: Any) -> None:
        """Sends a request whose head is `begin`, `lines` and the length of its body. The listener's `most_nbytes` is
        read now, and when it has heard the head. uses: its `freed(exchange)` is called before the listener hears of
        the end."""

    def feed(self, data: bytes) -> None:
        """Bytes that came in another way."""

    def end(self, where: int) -> None:
        """The answer is over: frees the connection, and the listener hears no more."""

    def pass_to(self, to: Requests, marks: int) -> None:
        """Whole events of a stream without these marks go to this client as they are, each read as a chunk, until
        something else comes, the client does not take them, or `pass_no_more`. Behind the first events, and behind
        those that come within 2 ms of the ones before them, the next are read 1 ms later, together; not behind a
        finish_reason. The listener hears of some 35 of them at a time, and always before it hears of anything else:
        `on_passed(events, when_the_last_one_passed_s, finished)`, on the monotonic clock; finished: one has a
        finish_reason. What the client's socket does not take gets its `send_rest`."""

    def pass_no_more(self) -> None:
        """The listener has heard of all that passed when this returns."""

    def leave_off(self) -> tuple[int, Any, bytes]:
        """As `end`, of an answer that is over without its end; status, headers and body as far as they came."""

    @property
    def listener(self) -> Any:
        """None between two answers."""

    @property
    def heard(self) -> bool:
        """Something of the answer has come."""

    @property
    def passed_s(self) -> float:
        """When an event of this connection has passed last, on the monotonic clock; 0 before."""

class Requests(Socket):
    """One connection of a client: reads its plain requests. Their first line is one of `paths`; each field comes once
    and is a token (RFC 9110 5.6.2), a colon and printable ASCII; there are a host and a length, and no field that
    changes how a request is read.

    The subclass has `take(path, fields, body, keep)`, which gets a whole one (names in lower case, values without the
    spaces around them; keep: the connection stays after it) and says whether it serves it; `admits(fields)`, whether
    the rest of a body is waited for; `hand_over(data)`, which gets everything else as it came; `pause`, when more
    came than the request that runs; `broke(errno)`, `abort` and `send_rest(data)`.
    """

    idle_since_s: float
    """Since its last request, or since the first bytes of the next one, on the monotonic clock; while one runs,
    whenever it began."""

    def __init__(self, paths: dict[bytes, str]) -> None:
        """paths: by the first line of a plain request, what `take` gets."""

    @property
    def busy(self) -> bool:
        """A request runs: from `take` until `done`."""

    @property
    def has_held(self) -> bool:
        """Something has come that is no whole request, or waits for the end of the one that runs."""

    @property
    def has_head(self) -> bool:
        """A head is whole, and its body is waited for."""

    @property
    def native(self) -> Requests | None:
        """Where chunks may be written natively from now on: here, while it is open."""

    def feed(self, data: bytes) -> None:
        """Bytes that came in another way."""

    def open_to_write(self, socket: int) -> None:
        """Write to a duplicate of this socket, whose requests somebody else reads."""

    def write(self, head: bytes, body: bytes = b"") -> None: ...
    def done(self) -> None:
        """The request that ran has ended."""

    def read_on(self) -> None:
        """Reads the next request in what is held."""

    def take_held(self) -> bytes:
        """What is held, which is forgotten."""

class Exchanges:
    """Sends requests on connections to workers that nobody uses, each an `Exchange` with its `host`, which has the
    others that are `idle`, the newest last. A subclass does what is seldom needed: `split(method, url)` says a host
    and how such a request begins; `start(method, url, listener, body, lines)` takes a request for which no connection
    is free; `rest(host)` hears that a host has one; `next()`, that one is given back while some wait."""

    def __init__(self, limit: int) -> None:
        """limit: of those in use; 0 sets none."""

    known: dict[tuple[str, str], tuple[Any, bytes]]
    """By method and URL, what `split` said, where that is kept."""
    running: set[Any]
    """Connections that listeners have, and what `start` gave and `finished` has not ended."""
    resting: set[Any]
    """Hosts with connections that nobody uses."""
    waiting: deque[Any]
    """What `start` put off until one less is in use."""

    def send(self, method: str, url: str, listener: Any, body: bytes = b"", lines: bytes = b"") -> Any:
        """Sends a request, now if a connection is free, and tells the listener what comes. The connection, which
        serves the listener until that has heard the end, and others then; else what `start` gives. lines: more
        headers, of `header_lines`."""

    def newest(self, host: Any) -> Any:
        """The newest connection of the host that nobody uses, for a request; None if there is none."""

    def freed(self, connection: Exchange) -> None:
        """Its listener needs it no more. Of `send`."""

    def keep(self, connection: Exchange) -> None:
        """For another request, if it can be used once more."""

    @property
    def is_full(self) -> bool:
        """As many are in use as may be."""

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

class Buckets:
    """The numbers of one series of a histogram."""

    keeps: bool
    """Every single number, too, until `take_samples`; the first 100,000."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: upper ones, ascending."""

    def observe(self, number: float, exemplar: dict[str, str] | None = None) -> None:
        """exemplar: what names the one thing that was measured; of at most 128 characters in all."""

    @property
    def numbers(self) -> list[float]:
        """How many are in each bucket, the last of which has no bound; then their sum."""

    @property
    def exemplars(self) -> dict[int, tuple[dict[str, str], float, float]]:
        """The newest of each bucket: what it names, its number and its Unix time."""

    def take_samples(self) -> list[float]: ...

def header_lines(headers: Mapping[str, str]) -> bytes:
    """As they are sent."""

def num_events(data: bytes) -> int:
    """How many events end in these bytes: `data.count(b"\n\n")`, at a tenth of its cost."""

def marks_of(events: bytes, wanted: int) -> int:
    """Which of the marks in `wanted` whole events have, or a whole answer. Quotes in generated text are escaped, so a
    mark is a field."""

def first_data_event(events: bytes) -> tuple[int, int, bool] | None:
    """Of whole events where the first one with data begins and ends, None if there is none; and whether it is a token
    for certain: `sse.problem_of` judges others."""

def place_of_done(events: bytes) -> int | None:
    """Where the line with [DONE] begins, if whole events end with it: a comment may stand before it."""

def usage_of(data: bytes) -> tuple[int, int]:
    """`prompt_tokens` and `completion_tokens`, or `input_tokens` and `output_tokens`, as a whole answer says, or the
    last of whole events that has a usage of its own or of its `response`; 0 where it does not. Tokens that
    /v1/messages counts beside its input, as read from its cache or written there, are the prompt's, too. A batch of
    SGLang's /generate has none, only each of its answers."""

def shortened(json: bytes, long_nbytes: int) -> tuple[bytes, int, dict[str, bytes]] | None:
    """A JSON object with null in place of each value of at least so many bytes; how many fields it has; and these
    values, by name. None if it is not such an object, and for some that a whole parser has to judge."""

def is_answer(json: bytes) -> bool:
    """Whether a whole answer is one: an object with a list of `choices`, of `output` (/v1/responses) or of `content`
    (/v1/messages), or with `meta_info` (SGLang's /generate), or a list of objects with that."""

def names_media(json: bytes) -> bool:
    """Whether messages have parts, images say, that become tokens which do not tell what is in them."""

def take_arenas_from_large_pages() -> None:
    """From now on Python takes the memory for small objects from pages of 2 MiB, where the system has such
    (`transparent_hugepage/enabled` is madvise or always)."""

def move_heap_to_large_pages() -> None:
    """What is in this process's memory now goes to such pages, some 1 ms each; nothing before Linux 6.1."""

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
