"""The client's side of a proxied request, without aiohttp: a connection reads its head and body, and the request runs
in the callbacks of sockets. No task, no future, no request object: aiohttp's took a sixth of a request's CPU.

It serves the plain kind alone: POST of completions and chats, HTTP/1.1, a body of known length, nothing that
changes how either is read. The first request of a connection that is anything else, or that is to be refused, goes to
aiohttp with every byte, and the connection with it. So there is one place that reads what is unusual, and one that
refuses.

Strangers cost little: a head has `idle_timeout_s` to come, and so has a body; nothing of a body is held for a client
without a key; bytes that come one by one are joined once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from aiohttp import web
from aiohttp.tcp_helpers import tcp_keepalive, tcp_nodelay

from pdlink._http import plain_request
from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.few_lines import http_logger

from .client_answer import ClientAnswer

if TYPE_CHECKING:
    from .app import Router
    from .request import Request

MAX_HELD_NBYTES = 1 << 20
"""Of a body that comes in parts; aiohttp waits for longer ones."""
MAX_HEAD_NBYTES = 16 * 1024
"""Of a head that comes in parts."""
SWEEP_S = 1.0
"""Between two looks for connections that have been idle for too long."""

_HEAD_END = b"\r\n\r\n"
MAX_START_NBYTES = 64
"""Of the first line of a request, as far as it is looked for."""


class Front(asyncio.Protocol):
    """One connection of a client. `ClientAnswer` writes to it."""

    __slots__ = (
        "_awaited_nbytes",
        "_doors",
        "_drained",
        "_held",
        "_request",
        "_keeps",
        "_paused",
        "_waits",
        "idle_since_s",
        "transport",
        "writing_paused",
    )

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self.idle_since_s = doors.loop.time()
        """Since its last request, or since the first bytes of the next one; while one runs, whenever it began."""
        self._request: Request | None = None
        self._held: bytearray | None = None
        """What has come and is not a whole request, or waits for the one that runs."""
        self._awaited_nbytes = 0
        """Of the request that is held, with its head; 0 until that is whole."""
        self._waits = False
        """For the rest of a request, since `idle_since_s`."""
        self._keeps = True
        self._paused = False
        self._drained: list[asyncio.Future[None]] | None = None

    @property
    def busy(self) -> bool:
        """A request runs."""
        return self._request is not None

    async def drain(self) -> None:
        """Wait until the client has read what it was sent. Raises ConnectionError if it leaves."""
        if self.transport is None:
            raise ConnectionResetError("the client has left")
        if self.writing_paused:
            waiter = self._doors.loop.create_future()
            self._drained = [*(self._drained or ()), waiter]
            await waiter

    def close(self) -> None:
        """Now if it is idle, else after the request that runs."""
        self._keeps = False
        if self._request is None and self.transport is not None:
            self.transport.close()

    def break_off(self) -> None:
        """End the request that runs, and the connection."""
        if self._request is not None:
            self._request.leave()
        if self.transport is not None:
            self.transport.close()

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        tcp_keepalive(self.transport)
        tcp_nodelay(self.transport, True)
        self._doors.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._doors.closed(self)
        if self._request is not None:
            self._request.leave()
        for waiter in self._drained or ():
            if not waiter.done():
                waiter.set_exception(ConnectionResetError("the client has left"))
        self._drained = None

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        for waiter in self._drained or ():
            if not waiter.done():
                waiter.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        held = self._held
        if self._request is not None:  # the next request waits for the end of this one
            self._held = held + data if held is not None else bytearray(data)
            if not self._paused and self.transport is not None:
                self._paused = True
                self.transport.pause_reading()
            return
        if held is not None:
            before = len(held)
            held += data
            if len(held) < self._awaited_nbytes:
                return
            if not self._awaited_nbytes and held.find(_HEAD_END, max(0, before - 3)) < 0 and self._may_grow(held):
                return
            data, self._held, self._awaited_nbytes = bytes(held), None, 0
        self._read(data)

    # ---- requests

    def _read(self, data: bytes) -> None:
        """The next request begins with these bytes."""
        line = data.find(b"\r\n", 0, MAX_START_NBYTES) + 2
        path = self._doors.paths.get(data[:line])
        end = data.find(_HEAD_END, max(0, line - 2)) + 4
        if end < 4 and self._may_grow(data):
            self._hold(data, 0)
            return
        found = plain_request(data, line, end) if path is not None and end >= 4 else None
        if path is None or found is None:
            self._hand_over(data)
            return
        head, nbytes, keep = found
        router = self._doors.router
        if end + nbytes > len(data):
            if nbytes > MAX_HELD_NBYTES or not router.services.entry.admits(head):
                self._hand_over(data)
            else:
                self._hold(data, end + nbytes)
            return
        client = ClientAnswer(self, keep=keep and self._keeps)
        request = router.taken(path, head, data[end : end + nbytes], client, self._ended)
        if request is None:
            self._hand_over(data)
            return
        self._request, self._waits = request, False
        if end + nbytes < len(data):
            self._held = bytearray(data[end + nbytes :])
        request.begin()

    @staticmethod
    def _may_grow(head: bytes | bytearray) -> bool:
        """Whether the rest of a head is waited for: of one that begins as HTTP does, and is not too long."""
        line = head.find(b"\r\n")
        if len(head) > MAX_HEAD_NBYTES or not head[:1].isupper():
            return False
        return line < 0 or head[:line].endswith((b" HTTP/1.1", b" HTTP/1.0"))

    def _hold(self, data: bytes, awaited_nbytes: int) -> None:
        """The rest is waited for: of a head, or until there are so many bytes."""
        if not self._waits:
            self._waits, self.idle_since_s = True, self._doors.loop.time()
        self._held, self._awaited_nbytes = bytearray(data), awaited_nbytes

    def _ended(self) -> None:
        """The answer is written."""
        request, self._request = self._request, None
        if request is None or self.transport is None:
            return
        client = request.client
        if not (self._keeps and client.keep and client.ended):
            self.transport.close()
            return
        self.idle_since_s = self._doors.loop.time()
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if self._held:  # not from here: one request after the other would fill the stack
            self._doors.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if (held := self._held) is not None and self._request is None and self.transport is not None:
            self._held, self._awaited_nbytes = None, 0
            self._read(bytes(held))

    def _hand_over(self, data: bytes) -> None:
        """aiohttp goes on with the connection, from these bytes."""
        transport = self.transport
        if transport is None:
            return
        self.transport, self._held = None, None
        self._doors.closed(self)
        handler = self._doors.aiohttp()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(data)

    def look(self, now_s: float, keepalive_s: float, wait_s: float) -> None:
        """Close it if it has been idle for too long, or if a head does not come. A body that does not come is
        aiohttp's to refuse."""
        if self._request is not None or self.transport is None:
            return
        if self._held is None:
            if now_s - self.idle_since_s > keepalive_s:
                self.transport.close()
        elif now_s - self.idle_since_s > wait_s:
            if self._awaited_nbytes:
                self._hand_over(bytes(self._held))
            else:
                self.transport.close()


class Doors(web.Server):
    """Makes a `Front` for each connection; in front of aiohttp's server, and closed with it."""

    def __init__(self, aiohttp: web.Server, router: Router, keepalive_s: float) -> None:
        self.aiohttp, self.router = aiohttp, router
        self.paths = {f"POST {path} HTTP/1.1\r\n".encode(): path for path in (COMPLETIONS, CHAT)}
        """By the first line of a request that is served here."""
        self.loop = asyncio.get_running_loop()
        self._keepalive_s, self._body_s = keepalive_s, router.services.config.idle_timeout_s
        self._fronts: set[Front] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closing = False
        self._quiet: asyncio.Event | None = None
        """Set when the last request has ended, once they are waited for."""

    def __call__(self) -> Front:  # type: ignore[override]
        return Front(self)

    def opened(self, front: Front) -> None:
        self._fronts.add(front)
        if self._sweep is None:
            self._sweep = self.loop.call_later(SWEEP_S, self._look)
        if self._closing:
            front.close()

    def closed(self, front: Front) -> None:
        self._fronts.discard(front)
        if self._quiet is not None and not any(front.busy for front in self._fronts):
            self._quiet.set()

    def pre_shutdown(self) -> None:
        """aiohttp's name: no connection takes another request."""
        self._closing = True
        self.aiohttp.pre_shutdown()
        for front in list(self._fronts):
            front.close()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 -- aiohttp's
        """Requests that run have so long to end."""
        if any(front.busy for front in self._fronts):
            self._quiet = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._quiet.wait()
        for front in list(self._fronts):
            front.break_off()
        if self._sweep is not None:
            self._sweep.cancel()
        await self.aiohttp.shutdown(timeout)

    def _look(self) -> None:
        self._sweep, now_s = None, self.loop.time()
        for front in list(self._fronts):
            front.look(now_s, self._keepalive_s, self._body_s)
        if self._fronts:
            self._sweep = self.loop.call_later(SWEEP_S, self._look)


class FrontRunner(web.AppRunner):
    """aiohttp's, with `Doors` in front of it."""

    async def _make_server(self) -> web.Server:
        from .app import ROUTER

        self._kwargs.setdefault("logger", http_logger("pdlink.proxy.http"))
        inner = await super()._make_server()
        return Doors(inner, self.app[ROUTER], self._kwargs.get("keepalive_timeout", 75.0))
