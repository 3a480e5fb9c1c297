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

from pdlink._http import Requests
from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.few_lines import http_logger

from .client_answer import ClientAnswer
from .polling import keep_from_reading
from .request import Request

if TYPE_CHECKING:
    from .services import Services

SWEEP_S = 1.0
"""Between two looks for connections that have been idle for too long."""


class Front(Requests, asyncio.Protocol):
    """One connection of a client, to which `ClientAnswer` writes. Its requests are read natively
    (`csrc/http/requests_py`). asyncio keeps it, and sends what its socket does not take at once; where that has TLS,
    asyncio reads it, too."""

    def __init__(self, doors: Doors) -> None:
        super().__init__(doors.paths)
        self._doors = doors
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self._request: Request | None = None
        self._keeps = True
        self._paused = False
        self._drained: list[asyncio.Future[None]] | None = None

    async def drain(self) -> None:
        """Wait until the client has read what it was sent. Raises ConnectionError if it leaves."""
        if self.transport is None:
            raise ConnectionResetError("the client has left")
        if self.writing_paused:
            waiter = self._doors.loop.create_future()
            self._drained = [*(self._drained or ()), waiter]
            await waiter

    def stop(self) -> None:
        """Now if it is idle, else after the request that runs."""
        self._keeps = False
        if not self.busy:
            self._finish()

    def break_off(self) -> None:
        """End the request that runs, and the connection."""
        if self._request is not None:
            self._request.leave()
        self._finish()

    def abort(self) -> None:
        """Close the connection now."""
        self.close()
        if self.transport is not None:
            self.transport.abort()

    def _finish(self) -> None:
        """Close the connection, once all is sent."""
        self.hold()
        if self.transport is not None:
            self.transport.close()

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = made = cast("asyncio.Transport", transport)
        tcp_keepalive(made)
        tcp_nodelay(made, True)
        self._doors.opened(self)
        socket = made.get_extra_info("socket")
        if socket is not None and made.get_extra_info("ssl_object") is None and not made.is_closing():
            keep_from_reading(made)
            self.open(self._doors.poller, socket.fileno())

    def data_received(self, data: bytes) -> None:
        self.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.close()
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

    # ---- what the native part does not do itself

    def take(self, path: str, said: dict[str, str], body: bytes, keep: bool) -> bool:
        """A request is whole; whether it is served here."""
        services = self._doors.services
        call = services.entry.taken(path, said, body)
        if call is None:  # it is to be refused, which `Router.generate` does
            return False
        headers = services.entry.leg_headers(said)
        if services.entry.tenants:
            services.entry.own(headers["X-Request-Id"], said)
        client = ClientAnswer(self, keep=keep and self._keeps)
        request = Request(self._doors.shared, client, call=call, headers=headers, said=said, over=self._ended)
        self._request = request
        if not services.requests:
            services.idle.clear()
        services.requests.add(request)
        request.begin()
        return True

    def admits(self, said: dict[str, str]) -> bool:
        """Whether the body of a request with this head is waited for."""
        return self._doors.services.entry.admits(said)

    def hand_over(self, data: bytes) -> None:
        """aiohttp goes on with the connection, from these bytes."""
        transport = self.transport
        if transport is None:
            return
        self.transport = None
        native = self.is_open
        self.close()
        self._doors.closed(self)
        handler = self._doors.aiohttp()
        transport.set_protocol(handler)
        if native:
            transport.resume_reading()
        handler.connection_made(transport)
        handler.data_received(data)

    def pause(self) -> None:
        """The next request waits."""
        self._paused = True
        if self.is_open:
            self.hold()
        elif self.transport is not None:
            self.transport.pause_reading()

    def send_rest(self, data: bytes) -> None:
        """What the socket did not take at once."""
        if self.transport is not None:
            self.transport.write(data)
            self.clogged = self.transport.get_write_buffer_size() > 0

    def broke(self, error: int) -> None:
        """The client has ended its side, or the connection broke."""
        if error:
            self.abort()
        else:
            self._finish()

    def _ended(self) -> None:
        """The answer is written."""
        request, self._request = self._request, None
        if request is None:
            return
        services = self._doors.services
        services.requests.discard(request)
        if not services.requests:
            services.idle.set()
        if self.transport is None:
            return
        client = request.client
        if not (self._keeps and client.keep and client.ended):
            self._finish()
            return
        self.done()
        if self._paused:
            self._paused = False
            if self.is_open:
                self.go_on()
            else:
                self.transport.resume_reading()
        if self.has_held:  # not from here: one request after the other would fill the stack
            self._doors.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self.transport is not None:
            try:
                self.read_on()
            except Exception:  # as where a read raises: the request would seem to run for ever
                self.abort()
                raise

    def look(self, now_s: float, keepalive_s: float, wait_s: float) -> None:
        """Close it if it has been idle for too long, or if a head does not come. A body that does not come is
        aiohttp's to refuse."""
        if self.busy or self.transport is None:
            return
        if not self.has_held:
            if now_s - self.idle_since_s > keepalive_s:
                self._finish()
        elif now_s - self.idle_since_s > wait_s:
            if self.has_head:
                self.hand_over(self.take_held())
            else:
                self._finish()


class Doors(web.Server):
    """Makes a `Front` for each connection; in front of aiohttp's server, and closed with it."""

    def __init__(self, aiohttp: web.Server, services: Services, keepalive_s: float) -> None:
        self.aiohttp, self.services, self.shared = aiohttp, services, services.shared
        self.paths = {f"POST {path} HTTP/1.1\r\n".encode(): path for path in (COMPLETIONS, CHAT)}
        """By the first line of a request that is served here."""
        self.loop = asyncio.get_running_loop()
        self.poller = services.shared.poller
        """Reads the connections."""
        self._keepalive_s, self._body_s = keepalive_s, services.config.idle_timeout_s
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
            front.stop()

    def closed(self, front: Front) -> None:
        self._fronts.discard(front)
        if self._quiet is not None and not any(front.busy for front in self._fronts):
            self._quiet.set()

    def pre_shutdown(self) -> None:
        """aiohttp's name: no connection takes another request."""
        self._closing = True
        self.aiohttp.pre_shutdown()
        for front in list(self._fronts):
            front.stop()

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
        return Doors(inner, self.app[ROUTER].services, self._kwargs.get("keepalive_timeout", 75.0))
