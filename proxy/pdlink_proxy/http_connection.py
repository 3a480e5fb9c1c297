"""One HTTP/1.1 connection to a worker: a request in one write, an answer told to its listener as it comes.

No task and no queue lies between the socket and the listener: what one read of the socket brings is one call.
`csrc/http` reads plain answers, which nearly all are, and `Unusual` the others.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast, overload

import httptools

from pdlink._http import BAD, BETWEEN, END, MORE, Answers
from pdlink.config.listen import in_url

if TYPE_CHECKING:
    from pdlink._http import Head

_T = TypeVar("_T")

MAX_HEAD_NBYTES = 64 * 1024
_AT_ONCE_NBYTES = 64 * 1024
"""A body of this size is written by itself: a copy beside its head takes longer."""

# A vanished host sends no reset, and a stream that only reads never notices: TCP keep-alive probes after 10 s of
# silence, and gives up after three unanswered probes 3 s apart.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class Address(NamedTuple):
    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        host = in_url(self.host)
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"


class Host:
    """A worker's address, and the connections to it that nobody uses, the newest last."""

    __slots__ = ("__weakref__", "address", "idle")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle: deque[Connection] = deque()


class HttpError(Exception):
    """A request has no answer."""


class NoConnection(HttpError):
    """The connection was not made; its cause says why."""


class WorkerGone(HttpError):
    """The worker closed the connection before the end of its answer."""

    def __init__(self, cause: Exception | None, *, reused: bool, answered: bool) -> None:
        super().__init__(str(cause) if cause else "the connection was closed")
        self.stale = reused and not answered
        """Nothing came on a pooled connection: most likely the worker closed it while it was idle."""


class BadAnswer(HttpError):
    """What the worker sent is no HTTP, or too much of it."""

    @classmethod
    def too_long(cls, max_nbytes: int) -> BadAnswer:
        return cls(f"an answer of more than {max_nbytes} bytes")


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


@functools.lru_cache(256)
def _lower(name: str) -> bytes:
    """Of a header, as this code names it."""
    return name.lower().encode("latin-1", "replace")


class AnswerListener:
    """Hears one answer, and its end or its loss."""

    __slots__ = ()

    most_nbytes: int = 0
    """Of the body of an answer that it hears whole, by `on_whole` alone; a longer one is lost to it. 0: it hears the
    head, the body in parts, and the end. It may change when it hears the head."""

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        """At least a byte."""

    def on_end(self) -> None:
        pass

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        pass

    def on_lost(self, error: HttpError) -> None:
        raise NotImplementedError


class Uses(Protocol):
    """What a connection is used for."""

    def freed(self, connection: Connection) -> None:
        """The connection is not needed any more, for this."""


class Connection(asyncio.Protocol):
    """One request at a time uses it."""

    __slots__ = (
        "_answers",
        "_between",
        "_headers",
        "_heard",
        "_lent",
        "_listener",
        "_lost",
        "_nbytes",
        "_parts",
        "_paused",
        "_status",
        "_transport",
        "_unusual",
        "_uses",
        "host",
        "idle_since_s",
        "keeps",
        "reused",
    )
    host: Host
    """Where it leads; the client sets it."""
    _headers: Headers

    def __init__(self) -> None:
        self.reused = False
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._answers = Answers()
        self._unusual: Unusual | None = None
        """Reads the present answer, if it is not plain."""
        self._listener: AnswerListener | None = None
        self._uses: Uses | None = None
        self._status = 0
        self._parts: list[bytes] = []
        """Of the body, for a listener that hears it whole."""
        self._nbytes = 0
        """Of them."""
        self.keeps = True
        """The worker keeps the connection: it can be used once more."""
        self._paused = False
        self._between = 0
        """Not 0 if what was read ends between two chunks."""
        self._lent = False
        """Somebody else reads the socket."""
        self._lost = False
        self._heard = False
        """Something of the answer has come."""

    def ask(self, head: bytes, body: bytes, listener: AnswerListener, uses: Uses) -> None:
        """uses: hears that the connection is free before the listener hears of the end."""
        transport = self._transport
        if transport is None:
            raise RuntimeError("asks before it is connected")
        self._listener, self._uses = listener, uses
        self._heard, self._nbytes = False, 0
        if len(body) < _AT_ONCE_NBYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def leave(self) -> None:
        """The listener hears no more, and the worker aborts."""
        self._end(MORE)
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
        if not self._between or transport is None or transport.is_closing():
            return None
        made = transport.get_extra_info("socket")
        if made is None or transport.get_extra_info("ssl_object") is not None:
            self._between = 0
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

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
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
        self._heard = True
        fed = self._answers.feed(data) if self._unusual is None else None
        if fed is None:
            self._unusual = unusual = self._unusual or Unusual()
            fed = unusual.feed(data)
        head, body, where = fed
        if head is not None:
            self._status, pairs, is_json = head
            self._headers = Headers(pairs, is_json)
            if not listener.most_nbytes:
                listener.on_head(self._status, self._headers)
                if self._listener is not listener:  # it has left
                    return
        if most := listener.most_nbytes:
            self._nbytes = nbytes = self._nbytes + len(body)
            if nbytes > most:
                self._fail(BadAnswer.too_long(most))
            elif where & END:
                if self._parts:
                    self._parts.append(body)
                    body = self._joined()
                if where == END and self._unusual is None and not self._paused:  # nearly all
                    uses, self._listener, self._uses = self._uses, None, None
                    if uses is not None:
                        uses.freed(self)
                else:
                    self._end(where)
                listener.on_whole(self._status, self._headers, body)
            elif where & BAD:
                self._fail(self._bad())
            elif body:
                self._parts.append(body)
            return
        if body:
            self._between = where & BETWEEN
            listener.on_data(body)
            if self._listener is not listener:
                return
        if where & END:
            self._end(where)
            listener.on_end()
        elif where & BAD:
            self._fail(self._bad())

    def connection_lost(self, error: Exception | None) -> None:
        self._lost, self.keeps = True, False
        listener, unusual = self._listener, self._unusual
        if listener is None or error is not None or unusual is None or not unusual.ends_with_connection:
            self._fail(WorkerGone(error, reused=self.reused, answered=self._heard))
            return
        body = self._joined()
        self._end(MORE)
        if listener.most_nbytes:
            listener.on_whole(self._status, self._headers, body)
        else:
            listener.on_end()

    # ---- ends

    def _end(self, where: int) -> None:
        """The answer is over: the connection is free."""
        if where & MORE:
            self.keeps = False
        if self._paused:
            self.resume()
        self._unusual, self._between = None, 0
        uses, self._listener, self._uses = self._uses, None, None
        if uses is not None:
            uses.freed(self)

    def _fail(self, error: HttpError) -> None:
        self.keeps = False
        listener = self._listener
        self._end(MORE)
        self.abort()
        if listener is not None:
            listener.on_lost(error)

    def _bad(self) -> BadAnswer:
        return BadAnswer(self._unusual.problem if self._unusual is not None else "its answer is not HTTP: its chunks")

    def _joined(self) -> bytes:
        """The body, whose parts are not kept."""
        body = b"".join(self._parts)
        self._parts.clear()
        return body


class Unusual:
    """One answer that `csrc/http` does not read: an interim one, a head in pieces, a body that ends with the
    connection. Its parser is llhttp, by httptools."""

    __slots__ = ("_end", "_head_nbytes", "_pairs", "_parser", "_parts", "_status", "_told", "on_body", "problem")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Of the body, from the present read. llhttp appends them."""
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self._pairs: list[tuple[bytes, bytes]] = []
        self._status = self._head_nbytes = 0
        """Of the answer; 0 before its head."""
        self._told = False
        self._end: int | None = None
        """How many of the parts were there when the answer ended."""
        self.problem = ""
        """Why it cannot be read."""

    def feed(self, data: bytes) -> tuple[Head | None, bytes, int]:
        """As of `Answers`; MORE also says that the connection does not stay."""
        where, head = 0, None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.problem = f"its answer is not HTTP: {error}"
            where = BAD
        if not self._told:
            self._head_nbytes += len(data)
            if self._status:
                self._told, head = True, (self._status, self._pairs, False)
            elif self._head_nbytes > MAX_HEAD_NBYTES:
                self.problem, where = f"the head of an answer of more than {MAX_HEAD_NBYTES} bytes", BAD
        body = b"".join(self._parts[: self._end])
        self._parts.clear()
        if self._end is not None:
            where = END if not where and self._parser.should_keep_alive() else END | MORE
        return head, body, where

    @property
    def ends_with_connection(self) -> bool:
        """Its head does not say where the body ends."""
        names = {name.lower(): value.lower() for name, value in self._pairs}
        chunked = names.get(b"transfer-encoding", b"").endswith(b"chunked")
        return self._told and not chunked and b"content-length" not in names

    # ---- the parser's, and `on_body`

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # else a trailer
            self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._end is None and status < 200:  # "100 Continue" and its kin; the answer follows
            self._pairs = []
        elif not self._status:
            self._status = status

    def on_message_complete(self) -> None:
        if self._status and self._end is None:
            self._end = len(self._parts)
