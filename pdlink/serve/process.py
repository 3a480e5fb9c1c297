"""The life of one process of a deployment: settings, bind, ready, serve, drain, end.

A process may have a parent (`pdlink up`) at the other end of a socket: it reads its settings there, reports in JSON
lines, and stops when the socket ends. A line has its progress (`doing`), why it cannot start (`failed`), or its
address once it is ready (`url` and more). It also carries the warnings so far, so that the parent can log the same
warning of several children once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import select
import signal
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdlink.config.listen import HostPort
from pdlink.errors import ConfigError
from pdlink.few_lines import http_logger

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

_MAX_SETTINGS_NBYTES = 1 << 20
_MAX_DESCRIPTORS = 2**20


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to `ulimit -Hn`; returns it. Most systems begin with 1,024.

    A session takes six descriptors of the decode worker, and one of the prefill worker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class Parent:
    """The socket to the parent, in the child."""

    def __init__(self, fd: int) -> None:
        """Collects warnings until the process is ready or has failed."""
        self._socket = socket.socket(fileno=fd)
        self._starting = True
        self._warnings: list[str] = []
        self.status = 0
        for handler in logging.getLogger().handlers:
            handler.addFilter(self._pass)

    def settings(self) -> dict[str, Any]:
        """The parent's settings, one line of JSON."""
        text = b""
        while not text.endswith(b"\n") and len(text) < _MAX_SETTINGS_NBYTES:
            more = self._socket.recv(65536)
            if not more:
                raise ConfigError("the parent process ended before it sent the settings")
            text += more
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ConfigError("the parent process sent no settings")
        return data

    def doing(self, what: str) -> None:
        """Report the present step of the start."""
        self._tell({"doing": what})

    def ready(self, facts: dict[str, Any]) -> None:
        self._starting = False
        self._tell({**facts, "warnings": self._warnings})

    def failed(self, reason: str, status: int) -> bool:
        """Report why the start failed; returns whether the parent will log it."""
        if not self._starting:
            return False
        self._starting, self.status = False, status
        try:
            self._tell({"failed": reason, "warnings": self._warnings})
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop collecting warnings, and close the socket."""
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._pass)
        self._socket.close()

    def _tell(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _pass(self, record: logging.LogRecord) -> bool:
        if not self._starting or record.levelno != logging.WARNING:
            return True
        self._warnings.append(record.getMessage())
        return False

    def ended(self) -> bool:
        """Whether the parent has closed its end or died, for a process without an event loop."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0)) and not self._socket.recv(4096)

    async def gone(self) -> None:
        """Returns when the parent has closed its end or died."""
        self._socket.setblocking(False)
        while await asyncio.get_running_loop().sock_recv(self._socket, 4096):
            pass


def bind(host: str, port: int, setting: str = "listen", *, shared: bool = False) -> socket.socket:
    """A bound TCP socket that does not listen yet: it owns the port before anybody learns of it.

    Raises ConfigError that begins with the name of the setting. Until one listens, another process with SO_REUSEADDR
    can bind the same port: so `pdlink up` keeps the ports of absent children. shared: other processes of this user
    listen on it, too, and the kernel spreads connections over them.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else "ports end at 65535"
        remedy = "port 0 takes a free port"
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            remedy = "this host has no such address; take one of its own, or 0.0.0.0 for all"
        raise ConfigError(f"{setting}: cannot bind {HostPort(host, port)}: {reason}; {remedy}") from None
    return bound


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _until(stop: asyncio.Event, parent: Parent | None) -> None:
    """Wait for the event, or the end of the parent."""
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
    if parent is not None:
        waits.append(asyncio.ensure_future(parent.gone()))
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


async def _nameless(_: web.Request, response: web.StreamResponse) -> None:
    """aiohttp names itself and Python, with their versions, in every answer."""
    response.headers.popall("Server", None)


async def serve(
    app: web.Application,
    bound: socket.socket,
    parent: Parent | None,
    *,
    ready: Callable[[str], dict[str, Any]],
    drain: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    tls: ssl.SSLContext | None = None,
    reload: Callable[[], None] | None = None,
    runner_of: type[web.AppRunner] = web.AppRunner,
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent; then drain, and close every connection.

    ready: makes the facts for the parent from the base URL, with a `line` for people. reload: on SIGHUP.
    """
    if reload is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    app.on_response_prepare.append(_nameless)
    runner = runner_of(
        app,
        handler_cancellation=True,  # a client that leaves ends its request; aiohttp's default lets it run on
        access_log=None,
        keepalive_timeout=75.0,  # longer than our clients': they close first
        shutdown_timeout=1.0,  # the drain is over; aiohttp would wait 60 s
        logger=http_logger("pdlink.http"),
    )
    await runner.setup()
    await web.SockSite(runner, bound, backlog=1024, ssl_context=tls).start()
    stop = _stop_signals()  # before it reports ready: a stop may follow at once
    place = HostPort(*bound.getsockname()[:2])
    facts = ready(f"{'https' if tls else 'http'}://{place}")
    say(facts["line"])
    if parent is not None:
        parent.ready({**facts, "port": place.port})
    await _until(stop, parent)
    await drain()
    await runner.cleanup()
