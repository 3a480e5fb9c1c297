"""HTTP/1.1 requests to workers over pooled connections.

aiohttp's client took most of the proxy's CPU (see `pdlink bench proxy`); it serves browsing: cookies, redirects,
compression, a stream object per body. None of that is wanted here.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from pdlink._http import Exchanges, header_lines

from .http_connection import Address, Connection, Host, NoConnection, NotSent, tell_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink._http import Requests, SocketPoller

    from .http_connection import AnswerListener, HttpError

KEEPALIVE_S = 3.5
"""Lifetime of an idle connection; up to a quarter more until somebody looks. Shorter than the servers' (5 s for
uvicorn, vLLM and SGLang), or requests would go into closed connections."""
_MAX_KNOWN = 10_000
_ENDS = "the proxy ends"


class HttpClient(Exchanges):
    """Connections to any number of workers. Use it as a context manager."""

    def __init__(
        self,
        *,
        poller: SocketPoller,
        connect_timeout_s: float,
        max_connections: int = 0,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """poller: reads its connections. max_connections: in use; 0 sets no limit. headers: of every request. tls:
        for https; None trusts the system's authorities."""
        super().__init__(max_connections)
        self._poller, self._connect_timeout_s, self._tls = poller, connect_timeout_s, tls
        self._headers = header_lines(
            {"Accept-Encoding": "identity", "Content-Type": "application/json", **(headers or {})}
        )
        self._hosts: WeakValueDictionary[Address, Host] = WeakValueDictionary()
        """All that somebody uses."""
        self._sweep: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends running requests, too; each is lost to its listener."""
        if self._sweep is not None:
            self._sweep.cancel()
        while self.waiting:
            self.waiting.popleft().lost(NoConnection(_ENDS))
        connecting = [task for each in tuple(self.running) if (task := each.stop()) is not None]
        for host in self.resting:
            for connection in host.idle:
                connection.abort()
            host.idle.clear()
        self.resting.clear()
        await asyncio.gather(*connecting, return_exceptions=True)
        await asyncio.sleep(0)  # asyncio closes the sockets in its next turn

    def start(
        self,
        method: str,
        url: str,
        listener: AnswerListener,
        body: bytes = b"",
        lines: bytes = b"",
    ) -> HttpRequest:
        """Send a request, now if a connection is idle; tell the listener what comes. Loss is NoConnection,
        Disconnected or BadAnswer. lines: more headers, of `header_lines`."""
        host, begin = self.known.get((method, url)) or self.split(method, url)
        request = HttpRequest(self, host)
        request.unsent = begin, lines, body, listener
        if self.is_full:
            self.waiting.append(request)
        else:
            self._begin(request)
        return request

    def split(self, method: str, url: str) -> tuple[Host, bytes]:
        """Where a request goes, and how it begins."""
        at = url.index("/", url.index("://") + 3)
        parts = urlsplit(url[:at])
        address = Address(parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        begin = f"{method} {url[at:]} HTTP/1.1\r\nHost: {address.authority}\r\n".encode() + self._headers
        if len(self.known) >= _MAX_KNOWN:  # stop calls have a transfer id in their path
            self.known.clear()
        host = self._hosts.get(address)
        if host is None:
            host = self._hosts[address] = Host(address)
        found = self.known[method, url] = host, begin
        return found

    def _begin(self, request: HttpRequest) -> None:
        self.running.add(request)
        try:
            if (connection := self.newest(request.host)) is not None:
                request.sent_on(connection)
                return
            request.connecting = asyncio.get_running_loop().create_task(self._connect(request))
        except BaseException:
            self.running.discard(request)
            raise

    async def _connect(self, request: HttpRequest) -> None:
        loop, address, tls = asyncio.get_running_loop(), request.host.address, None
        try:
            if address.scheme == "https":
                tls = self._tls = self._tls or ssl.create_default_context()
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._poller), address.host, address.port, ssl=tls
                )
        except TimeoutError:
            error = NoConnection(f"no connection within {self._connect_timeout_s:g} s")
        except Exception as problem:  # noqa: BLE001 -- not OSError alone: a name that DNS cannot have is a ValueError
            error = NoConnection(str(problem))
            error.__cause__ = problem
        else:
            if connection.keeps:
                connection.host = request.host
                request.connecting = None
                try:
                    request.sent_on(connection)
                except Exception as problem:  # noqa: BLE001 -- whatever it is, the listener hears of it
                    self._failed(request, problem)
                return
            # Its loss was told before it had a listener: a worker that dies resets what it has not accepted.
            error = NoConnection("the worker closed the connection at once")
        if request in self.running:
            self.finished(request)
            request.lost(error)

    def finished(self, request: HttpRequest) -> None:
        """The request needs its connection no more. For `HttpRequest`."""
        self.running.discard(request)
        if (connection := request.connection) is not None:
            request.connection = None
            try:
                self.keep(connection)
            except BaseException:
                self.next()
                raise
        if self.waiting:
            self.next()

    def forget(self, request: HttpRequest) -> None:
        """It is not to be sent any more. For `HttpRequest`."""
        if request in self.running:
            self.finished(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def next(self) -> None:
        """Sends what waits, as long as there may be more in use."""
        while self.waiting and not self.is_full:
            request = self.waiting.popleft()
            try:
                self._begin(request)
            except Exception as error:  # noqa: BLE001 -- of this request alone: the others go on
                self._failed(request, error)

    def _failed(self, request: HttpRequest, error: Exception) -> None:
        """By a fault of ours it cannot be sent."""
        self.running.discard(request)
        tell_of("a request could not be sent", error)
        request.lost(NotSent(f"the proxy could not send: {error}"))

    def rest(self, host: Host) -> None:
        """Drops its connections in time, if nobody uses them."""
        self.resting.add(host)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep, oldest_s = None, time.monotonic() - KEEPALIVE_S
        for host in tuple(self.resting):
            idle = host.idle
            while idle and idle[0].idle_since_s <= oldest_s:
                idle.pop(0).abort()
            if not idle:
                self.resting.discard(host)
        if self.resting:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S / 4, self._drop_old)


class HttpRequest:
    """One request under way."""

    __slots__ = ("_client", "connecting", "connection", "host", "unsent")

    def __init__(self, client: HttpClient, host: Host) -> None:
        self._client, self.host = client, host
        self.connection: Connection | None = None
        """While it has one."""
        self.unsent: tuple[bytes, bytes, bytes, AnswerListener] | None = None
        """How it begins, headers, body and listener until the connection has them: it has this request, and a cycle
        would wait for the collector."""
        self.connecting: asyncio.Task[None] | None = None

    def sent_on(self, connection: Connection) -> None:
        """It has a connection."""
        assert self.unsent is not None
        begin, lines, body, listener = self.unsent
        self.connection = connection
        try:
            connection.ask(begin, lines, body, listener, self)
        except BaseException:
            self.connection = None
            connection.leave()
            raise
        self.unsent = None

    def freed(self, _connection: Connection) -> None:
        """It needs its connection no more."""
        self._client.finished(self)

    def lost(self, error: HttpError) -> None:
        """It has no connection, and gets none."""
        if self.unsent is not None:
            self.unsent[3].on_lost(error)

    def leave(self) -> None:
        """The answer is not wanted: the listener hears no more, and the worker aborts. Nothing after its end."""
        if self.connection is not None:
            self.connection.leave()
        else:
            self._client.forget(self)
            if self.connecting is not None:
                self.connecting.cancel()

    def pause(self) -> None:
        """Read no more of the answer, until `resume`."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def pass_to(self, to: Requests, marks: int) -> None:
        """See `Exchange.pass_to`."""
        if self.connection is not None:
            self.connection.pass_to(to, marks)

    @property
    def passed_s(self) -> float:
        """See `Exchange.passed_s`."""
        return self.connection.passed_s if self.connection is not None else 0.0

    def pass_no_more(self) -> None:
        if self.connection is not None:
            self.connection.pass_no_more()

    def stop(self) -> asyncio.Task[None] | None:
        """Break it off: the listener hears of its loss soon. The task of its connecting, which then ends."""
        if self.connection is not None:
            self.connection.abort()
        elif self.connecting is not None:
            self.connecting.cancel()  # it may not have begun, so it tells nobody
            self._client.finished(self)
            self.lost(NoConnection(_ENDS))
        return self.connecting
