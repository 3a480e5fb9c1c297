"""One HTTP/1.1 connection to a worker: a request in one write, an answer told to its listener as it comes.

No task and no queue lies between the socket and the listener, who is called when a state is reached: once, of a whole
answer. `csrc/http` reads plain answers, which nearly all are, and `Unusual` the others.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, NamedTuple, cast

import httptools

from pdlink._http import BAD, END, MORE, Exchange, Headers
from pdlink.config.listen import in_url

from .polling import keep_from_reading

if TYPE_CHECKING:
    from pdlink._http import SocketPoller

MAX_HEAD_NBYTES = 64 * 1024

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
        self.idle: list[Connection] = []


class HttpError(Exception):
    """A request has no answer."""


class NoConnection(HttpError):
    """The connection was not made; its cause says why."""


class NotSent(NoConnection):
    """By a fault of ours."""


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

    def on_passed(self, data: bytes, at_s: float, finished: bool) -> None:
        """Of the body, what has passed to a client natively; the last of it at that time of `time.monotonic`.
        finished: with a finish_reason."""

    def on_end(self, data: bytes) -> None:
        """data: the last of the body, which came with the end; perhaps nothing."""

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        pass

    def on_lost(self, error: HttpError) -> None:
        raise NotImplementedError


class Connection(Exchange, asyncio.Protocol):
    """One request at a time uses it: `ask`, `leave` and what the listener hears are native (`csrc/http/exchange_py`).
    Here is what is seldom needed.

    asyncio connects it, and sends what the socket does not take at once. Its socket is read natively; where that has
    TLS, asyncio reads it, too.
    """

    host: Host
    """Where it leads; the client sets it."""

    def __init__(self, poller: SocketPoller) -> None:
        super().__init__()
        self.idle_since_s = 0.0
        self._poller = poller
        self._transport: asyncio.Transport | None = None
        self._unusual: Unusual | None = None
        """Reads the present answer, if it is not plain."""
        self._lost = False

    def leave(self) -> None:
        """The listener hears no more, and the worker aborts."""
        self.close()
        self.end(MORE)
        self.abort()

    def pause(self) -> None:
        """Read no more of the answer, until `resume`."""
        if not self.paused and self._transport is not None and not self._lost:
            self.paused = True
            if self.is_open:
                self.hold()
            else:
                self._transport.pause_reading()

    def resume(self) -> None:
        if self.paused and self._transport is not None and not self._lost:
            self.paused = False
            if self.is_open:
                self.go_on()
            else:
                self._transport.resume_reading()

    def abort(self) -> None:
        self.close()
        if self._transport is not None:
            self._transport.abort()

    def stop(self) -> None:
        """As `HttpRequest.stop`."""
        self.abort()

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast("asyncio.Transport", transport)
        socket_of = transport.get_extra_info("socket")
        if socket_of is not None and socket_of.family != socket.AF_UNIX:
            for level, option, value in _SOCKET_OPTIONS:
                socket_of.setsockopt(level, option, value)
        if socket_of is not None and transport.get_extra_info("ssl_object") is None:
            keep_from_reading(made)
            self.open(self._poller, socket_of.fileno())

    def data_received(self, data: bytes) -> None:
        self.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.close()
        if self._lost:
            return
        self._lost, self.keeps = True, False
        listener, unusual = self.listener, self._unusual
        if listener is None or error is not None or unusual is None or not unusual.ends_with_connection:
            self._fail(WorkerGone(error, reused=self.reused, answered=self.heard))
            return
        status, headers, body = self.leave_off()
        if listener.most_nbytes:
            listener.on_whole(status, headers, body)
        else:
            listener.on_end(b"")

    # ---- what the native part does not do itself

    def broke(self, error: int) -> None:
        """Its socket has ended, or broken."""
        self.connection_lost(OSError(error, os.strerror(error)) if error else None)
        self.abort()

    def send_rest(self, data: bytes) -> None:
        """What the socket did not take at once."""
        transport = self._transport
        if transport is None:
            raise RuntimeError("asks before it is connected")
        transport.write(data)
        self.clogged = transport.get_write_buffer_size() > 0

    def unusual(self, data: bytes) -> tuple[tuple[int, Headers] | None, bytes, int]:
        """Bytes of an answer that is not plain: see `Unusual.feed`."""
        self._unusual = unusual = self._unusual or Unusual()
        return unusual.feed(data)

    def usual(self) -> None:
        """Such an answer is over."""
        self._unusual = None

    def fault(self, error: Exception) -> None:
        """Who used it failed when it was given back; perhaps somebody uses it already."""
        self.keeps = False
        if self.listener is None:
            self.abort()
        tell_of("a connection could not be given back", error)

    def too_long(self, most_nbytes: int) -> None:
        self._fail(BadAnswer.too_long(most_nbytes))

    def bad(self, _most_nbytes: int) -> None:
        unusual = self._unusual
        self._fail(BadAnswer(unusual.problem if unusual is not None else "its answer is not HTTP: its chunks"))

    def _fail(self, error: HttpError) -> None:
        self.keeps = False
        listener = self.listener
        self.close()
        self.end(MORE)
        self.abort()
        if listener is not None:
            listener.on_lost(error)


def tell_of(what: str, error: Exception) -> None:
    """Logs a fault of ours."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


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

    def feed(self, data: bytes) -> tuple[tuple[int, Headers] | None, bytes, int]:
        """Status and headers, if they are whole with these bytes; what they have of the body; and which of END, BAD
        and MORE is so. MORE: something came behind it, or the connection does not stay."""
        where, head = 0, None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.problem = f"its answer is not HTTP: {error}"
            where = BAD
        if not self._told:
            self._head_nbytes += len(data)
            if self._status:
                self._told, head = True, (self._status, Headers(self._pairs))
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
