"""One HTTP/1.1 connection to a worker: a request in one write, an answer told to its listener as it comes.

No task and no queue lies between the socket and the listener: what one read of the socket brings is one call. The
parser is llhttp, by httptools; a whole plain answer in one read is read by `csrc/http`.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, overload

import httptools

from pdlink._http import whole_answer

if TYPE_CHECKING:
    from .http_client import Host

_T = TypeVar("_T")

MAX_HEAD_NBYTES = 64 * 1024
_CHUNK_END = b""
"""Among the parts of a body, after those of each chunk: a call of Python for each would be a third of its cost."""

# A vanished host sends no reset, and a stream that only reads never notices: TCP keep-alive probes after 10 s of
# silence, and gives up after three unanswered probes 3 s apart.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class HttpError(Exception):
    """A request has no answer."""


class NoConnection(HttpError):
    """The connection was not made; its cause says why."""


class Disconnected(HttpError):
    """The worker closed the connection before the end of its answer."""

    def __init__(self, cause: Exception | None, *, reused: bool, answered: bool) -> None:
        super().__init__(str(cause) if cause else "the connection was closed")
        self.stale = reused and not answered
        """Nothing came on a pooled connection: most likely the worker closed it while it was idle."""


class BadAnswer(HttpError):
    """What the worker sent is no HTTP, or too much of it."""


class Headers(Mapping[str, str]):
    """Of an answer, as they came: names in any case, the first of a name. Decoded when they are asked for."""

    __slots__ = ("_pairs", "is_json")

    def __init__(self, pairs: list[tuple[bytes, bytes]], is_json: bool = False) -> None:
        """is_json: they are known to say so."""
        self._pairs, self.is_json = pairs, is_json

    def __getitem__(self, name: str) -> str:
        if (found := self.get(name)) is None:
            raise KeyError(name)
        return found

    @overload
    def get(self, name: str, /) -> str | None: ...

    @overload
    def get(self, name: str, default: str, /) -> str: ...

    @overload
    def get(self, name: str, default: _T, /) -> str | _T: ...

    def get(self, name: str, default: object = None, /) -> object:
        wanted = _lower(name)
        num = len(wanted)
        for found, value in self._pairs:
            if len(found) == num and found.lower() == wanted:
                return value.decode("utf-8", "surrogateescape")
        return default

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self._pairs))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def content_type(self) -> str:
        """Without parameters; empty if there is none."""
        if self.is_json:
            return "application/json"
        for name, value in self._pairs:
            if len(name) == 12 and name.lower() == b"content-type":
                return value.partition(b";")[0].strip().lower().decode("latin-1")
        return ""

    @property
    def framed(self) -> bool:
        """Whether they say where the body ends; otherwise it ends with the connection."""
        return "content-length" in self or self.get("transfer-encoding", "").lower().endswith("chunked")


@functools.lru_cache(256)
def _lower(name: str) -> bytes:
    """Of a header, as this code names it."""
    return name.lower().encode("latin-1", "replace")


class Listener(Protocol):
    """Hears one answer: its head, its body in parts, and then its end or its loss."""

    __slots__ = ()

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None:
        """At least a byte."""

    def on_end(self) -> None: ...

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Head, body and end of an answer that came in one piece. Its connection serves others already."""
        self.on_head(status, headers)
        if body:
            self.on_data(body)
        self.on_end()

    def on_lost(self, error: HttpError) -> None: ...


class Uses(Protocol):
    """What a connection is used for."""

    def freed(self, connection: Connection) -> None:
        """The connection is not needed any more, for this."""


class Connection(asyncio.Protocol):
    """One request at a time uses it."""

    __slots__ = (
        "_between",
        "_end",
        "_fresh",
        "_head_nbytes",
        "_lent",
        "_listener",
        "_lost",
        "_pairs",
        "_parser",
        "_parts",
        "_paused",
        "_status",
        "_told",
        "_transport",
        "_uses",
        "host",
        "idle_since_s",
        "keeps",
        "on_body",
        "on_chunk_complete",
        "reused",
    )
    host: Host
    """Where it leads; the client sets it."""

    def __init__(self) -> None:
        self.reused = False
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._listener: Listener | None = None
        self._uses: Uses | None = None
        self._parts: list[bytes] = []
        """Of the body, from the present read. llhttp appends them."""
        self.on_body = self._parts.append
        self.on_chunk_complete = partial(self._parts.append, _CHUNK_END)
        self._status = 0
        """Of the answer; 0 before its head."""
        self._told = False
        """The listener has the head."""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._head_nbytes = 0
        self._end: int | None = None
        """How many of the parts were there when the answer ended."""
        self.keeps = True
        """The worker keeps the connection: it can be used once more."""
        self._paused = False
        self._between = False
        """What was read ends between two chunks."""
        self._lent = False
        """Somebody else reads the socket."""
        self._lost = False
        self._fresh = True
        """Nothing of the answer has come."""

    def ask(self, head: bytes, body: bytes, listener: Listener, uses: Uses) -> None:
        """uses: hears that the connection is free before the listener hears of the end."""
        transport = self._transport
        if transport is None:
            raise RuntimeError("asks before it is connected")
        self._listener, self._uses = listener, uses
        if not self._fresh:
            self._fresh = True
            self._status, self._told, self._head_nbytes, self._end = 0, False, 0, None
            self._pairs = []
            self._between = self._lent = False
        if len(body) < MAX_HEAD_NBYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def pass_to(self, listener: Listener) -> None:
        """From now on this hears the answer, in place of the listener that waits for it."""
        if self._listener is not None:
            self._listener = listener

    def leave(self) -> None:
        """The listener hears no more, and the worker aborts."""
        self.keeps = False
        self._finish()
        self.abort()

    def pause(self) -> None:
        """Read no more of the answer, until `resume`."""
        if not self._paused and self._transport is not None and not self._lost:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self._lost:
            self._paused = False
            self._transport.resume_reading()

    def lend(self) -> int | None:
        """The number of its socket, which the caller alone reads until `give_back`; None unless this is between two
        chunks of an answer, of which the listener hears now, and the bytes on the socket are HTTP."""
        transport = self._transport
        if not self._between or self._end is not None or transport is None or transport.is_closing():
            return None
        made = transport.get_extra_info("socket")
        if made is None or transport.get_extra_info("ssl_object") is not None:
            self._between = False
            return None
        transport.pause_reading()
        self._lent = True
        return int(made.fileno())

    def give_back(self, unread: bytes) -> None:
        """Whole chunks have been read from its socket, and these bytes."""
        if not self._lent or self._lost or self._transport is None or self._transport.is_closing():
            return
        self._lent = False
        if not self._paused:
            self._transport.resume_reading()
        if unread:
            self.data_received(unread)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def stop(self) -> None:
        """As `Request.stop`."""
        self.abort()

    def _finish(self) -> Listener | None:
        """The request is over: who is to hear it."""
        listener, uses = self._listener, self._uses
        self._listener = self._uses = None
        if uses is not None:
            uses.freed(self)
        return listener

    def _fail(self, error: HttpError) -> None:
        self.keeps = False
        listener = self._finish()
        self.abort()
        if listener is not None:
            listener.on_lost(error)

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of which uvloop's are no subclass
        made = transport.get_extra_info("socket")
        if made is not None and made.family != socket.AF_UNIX:
            for level, option, value in _SOCKET_OPTIONS:
                made.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:  # nobody has asked
            self.keeps = False
            self.abort()
            return
        if self._fresh and (whole := whole_answer(data)) is not None:
            # The usual answer to what does not stream. llhttp would call back for each of its lines.
            status, pairs, body, is_json = whole
            if self._paused:
                self.resume()
            uses, self._listener, self._uses = self._uses, None, None
            if uses is not None:
                uses.freed(self)
            listener.on_whole(status, Headers(pairs, is_json), body)
            return
        self._fresh = False
        error: BadAnswer | None = None
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            error = BadAnswer(f"its answer is not HTTP: {problem}")
            self.keeps = False
        if not self._told:
            self._head_nbytes += len(data)
            if self._status:
                self._told = True
                listener.on_head(self._status, Headers(self._pairs))
                listener = self._listener or listener  # it may have passed the answer to another one
            elif self._head_nbytes > MAX_HEAD_NBYTES:
                error = BadAnswer(f"the head of an answer of more than {MAX_HEAD_NBYTES} bytes")
        parts, end = self._parts, self._end
        self._between = False
        if parts:
            # Within a chunk its bytes are the last part. A line with the size of the next one is no part, and has a
            # digit before its end.
            self._between = parts[-1] is _CHUNK_END and data.endswith(b"\n\r\n")
            one = end != 0 and (len(parts) == 1 or (len(parts) == 2 and parts[1] is _CHUNK_END))
            told = parts[0] if one else b"".join(parts[:end])
            parts.clear()
            if told and self._listener is listener:
                listener.on_data(told)
        if self._listener is not listener:  # it has left
            return
        if end is not None:
            self.resume()
            self._finish()
            listener.on_end()
        elif error is not None:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost, self.keeps = True, False
        if self._told and error is None and self._listener is not None and not Headers(self._pairs).framed:
            listener = self._finish()
            if listener is not None:
                listener.on_end()
        else:
            self._fail(Disconnected(error, reused=self.reused, answered=self._head_nbytes > 0))

    # ---- the parser's, and `on_body`

    def on_message_begin(self) -> None:
        if self._end is not None:  # more than was asked for, perhaps not a whole head yet
            self.keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # else a trailer
            self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if self._status:  # an answer that nobody asked for
            self.keeps = False
        elif status < 200:  # "100 Continue" and its kin; the answer follows
            self._pairs = []
        else:
            self._status = status

    def on_message_complete(self) -> None:
        if not self._status or self._end is not None:
            return
        assert self._parser is not None
        self.keeps = self.keeps and self._parser.should_keep_alive()
        self._end = len(self._parts)
