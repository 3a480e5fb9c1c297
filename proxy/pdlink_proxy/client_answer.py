"""The client's answer, written to its connection as the workers' bytes come.

Where aiohttp has read the request, and keeps the connection, the answer does not pass through its response objects
either: they took 20 us of a request, and a task switch of each event.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11

from pdlink._http import Requests

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


_CHUNKS = "Transfer-Encoding: chunked\r\n"
_CLOSES, _STAYS = "Connection: close\r\n", "Connection: keep-alive\r\n"
_EVENTS = "Content-Type: text/event-stream; charset=utf-8\r\n"


class _Sent(web.StreamResponse):
    """Tells aiohttp that the answer has been written, and whether the connection stays."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self.keep = keep

    @property
    def keep_alive(self) -> bool:
        return self.keep

    async def prepare(self, _request: web.BaseRequest) -> None:
        pass

    async def write_eof(self, _data: object = b"") -> None:
        pass


_SENT, _SENT_LAST = _Sent(keep=True), _Sent(keep=False)


class ClientConnection(Protocol):
    """To a client."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once it is closed."""

    @property
    def writing_paused(self) -> bool:
        """The client reads more slowly than bytes come for it."""

    @property
    def native(self) -> Requests | None:
        """Where chunks may be written natively from now on."""

    def write(self, head: bytes, body: bytes = b"") -> None:
        """Send these. Nothing if it is closed."""

    def abort(self) -> None:
        """Close it now."""

    async def drain(self) -> None:
        """Wait until it has read them. Raises ConnectionError if it leaves."""


class _OfAiohttp(Requests):
    def __init__(self, request: web.Request) -> None:
        super().__init__({})
        self._request = request

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._request.transport

    @property
    def writing_paused(self) -> bool:
        return self._request.protocol.writing_paused

    @property
    def native(self) -> Requests | None:
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
            return None
        if not self.is_open and (made := transport.get_extra_info("socket")) is not None:
            self.open_to_write(made.fileno())
        self.clogged = transport.get_write_buffer_size() > 0
        return self

    def write(self, head: bytes, body: bytes = b"") -> None:
        self.close()  # or its client would see the end of its connection only when the duplicate is collected
        self.send_rest(head + body)

    def send_rest(self, data: bytes) -> None:
        if (transport := self._request.transport) is not None:
            transport.write(data)
            self.clogged = transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        self.close()
        if (transport := self._request.transport) is not None:
            transport.abort()

    async def drain(self) -> None:
        await self._request.writer.drain()


class ClientAnswer(msgspec.Struct, eq=False):
    """To one request: `respond`, or `begin`, any number of `write` and `end`. Nothing waits: while its connection is
    `writing_paused`, the client is behind."""

    connection: ClientConnection
    chunked: bool = True
    """It knows HTTP/1.1."""
    keep: bool = True
    """The connection stays after the answer."""
    begun: bool = False
    ended: bool = False
    _head: bytes = b""
    """Of its stream, until it is sent."""

    @classmethod
    def of(cls, request: web.Request) -> ClientAnswer:
        """To a request that aiohttp has read; see `result`."""
        # HTTP/1.0 knows no chunks: the stream ends with the connection.
        return cls(_OfAiohttp(request), chunked=request.version >= HttpVersion11, keep=request.keep_alive)

    @property
    def gone(self) -> bool:
        """The client has closed its connection."""
        transport = self.connection.transport
        return transport is None or transport.is_closing()

    @property
    def keeps(self) -> bool:
        """The connection stays for another request."""
        return self.keep and self.ended

    def respond(self, status: int, content_type: str, lines: str, body: bytes) -> None:
        """The whole answer. lines: more headers, as they are sent."""
        self.begun = self.ended = True
        line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
        kept = _CLOSES if not self.keep else "" if self.chunked else _STAYS
        length = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        head = f"{line}{length}{lines}{kept}Date: {rfc822_formatted_time()}\r\n\r\n"
        self.connection.write(head.encode(), body)

    def begin(self, lines: str, data: bytes) -> None:
        """The head of a stream of events, and the first of them; without these it is sent with what comes next."""
        self.begun = True
        self.keep = self.keep and self.chunked
        framing, kept = _CHUNKS if self.chunked else "", "" if self.keep else _CLOSES
        head = f"{_STATUS_LINES[200]}{_EVENTS}{framing}{lines}{kept}Date: {rfc822_formatted_time()}\r\n\r\n"
        self._head = head.encode()
        if data:
            self.write(data)

    def write(self, data: bytes) -> None:
        """At least a byte."""
        head, self._head = self._head, b""
        self.connection.write(head, b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    @property
    def native(self) -> Requests | None:
        """As of `ClientConnection`."""
        return self.connection.native if self.chunked and not self._head else None

    def end(self, data: bytes, comment: bytes = b"", at: int | None = None) -> None:
        """Last bytes, perhaps none, with the comment at that place of them."""
        self.ended = True
        head, self._head = self._head, b""
        before = after = b""
        if self.chunked:
            nbytes = len(data) + (len(comment) if at is not None else 0)
            before, after = (b"%x\r\n" % nbytes, b"\r\n0\r\n\r\n") if data else (b"", b"0\r\n\r\n")
        if at is not None:
            view = memoryview(data)  # a stream that came at once is long
            data = b"".join((before, view[:at], comment, view[at:], after))
        else:
            data = before + data + after
        if head or data:
            self.connection.write(head, data)

    async def drain(self) -> None:
        """Wait until the client is no more behind. Raises ConnectionError if it leaves."""
        await self.connection.drain()

    async def caught_up(self, timeout_s: float) -> None:
        """Wait until the client is no more behind, or has left; close the connection of one that does not read."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.connection.drain()
        except TimeoutError:
            self.abort()
        except ConnectionError:
            pass

    def abort(self) -> None:
        """Close the connection now."""
        self.connection.abort()

    def result(self) -> web.StreamResponse:
        """What the handler of the request returns to aiohttp."""
        return _SENT if self.keeps else _SENT_LAST
