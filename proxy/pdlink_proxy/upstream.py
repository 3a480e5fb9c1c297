"""Questions to workers about themselves, the stop call, and what failed requests mean."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import ssl
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdlink._http import Headers, header_lines

from .access import worker_tls
from .http_client import HttpClient
from .http_connection import AnswerListener, BadAnswer, HttpError, NoConnection, NotSent, WorkerGone
from .steps import Loss

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from pdlink._http import SocketPoller
    from pdlink.config import ProxyConfig

    from .http_client import HttpRequest

_MAX_WORDS_CHARS = 300

MAX_REPLY_NBYTES = 64 * 1024
"""Of an answer about a worker itself (health, models)."""

_OUT_OF_SOCKETS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


def open_client(
    config: ProxyConfig, poller: SocketPoller, *, max_connections: int, headers: Mapping[str, str] | None = None
) -> HttpClient:
    """For many requests; a context manager. headers: the proxy's own, for every request."""
    return HttpClient(
        poller=poller,
        connect_timeout_s=config.connect_timeout_s,
        max_connections=max_connections,
        headers=headers,
        tls=worker_tls(config),
    )


@dataclass(frozen=True, slots=True)
class Asking:
    """A worker to ask about itself, with a deadline."""

    client: HttpClient
    url: str
    """Base URL."""
    timeout_s: float


class Reply(NamedTuple):
    status: int
    body: bytes


async def ask(asking: Asking, path: str, max_nbytes: int = MAX_REPLY_NBYTES) -> Reply:
    """GET. Raises TimeoutError or HttpError."""
    url, timeout_s = asking.url + path, asking.timeout_s
    return await answer_of(asking.client, "GET", url, max_nbytes=max_nbytes, timeout_s=timeout_s)


async def post(client: HttpClient, url: str, body: object, *, timeout_s: float) -> Reply:
    """POST a value as JSON. Raises TimeoutError, HttpError or OSError."""
    data = msgspec.json.encode(body)
    return await answer_of(client, "POST", url, data, max_nbytes=MAX_REPLY_NBYTES, timeout_s=timeout_s)


async def answer_of(
    client: HttpClient,
    method: str,
    url: str,
    body: bytes = b"",
    *,
    max_nbytes: int,
    timeout_s: float,
) -> Reply:
    """A whole answer. Raises TimeoutError, HttpError, and BadAnswer for a longer one."""
    loop = asyncio.get_running_loop()
    whole = _Whole(max_nbytes, loop.create_future())
    request = client.start(method, url, whole, body)
    late = loop.call_later(timeout_s, whole.late)  # asyncio.timeout costs four times as much: each worker is polled
    try:
        return await whole.reply
    finally:
        late.cancel()
        request.leave()


class _Whole(AnswerListener):
    """Listens until the end."""

    def __init__(self, max_nbytes: int, reply: asyncio.Future[Reply]) -> None:
        self.most_nbytes, self.reply = max_nbytes, reply

    def late(self) -> None:
        """It did not come in time."""
        if not self.reply.done():
            self.reply.set_exception(TimeoutError())

    def on_whole(self, status: int, _headers: Headers, body: bytes) -> None:
        if not self.reply.done():
            self.reply.set_result(Reply(status, body))

    def on_lost(self, error: HttpError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


@contextlib.asynccontextmanager
async def streamed(
    client: HttpClient, method: str, url: str, body: bytes, headers: Mapping[str, str]
) -> AsyncIterator[Streamed]:
    """An answer whose head is there and whose body comes as it is read. Leaving early ends the request.

    Raises HttpError.
    """
    answer = Streamed()
    request = client.start(method, url, answer, body, header_lines(headers))
    answer.request = request
    try:
        await answer.head
        yield answer
    finally:
        request.leave()


class Streamed(AnswerListener):
    """Listens for somebody who reads at their own pace; the worker is held back meanwhile."""

    def __init__(self) -> None:
        self.request: HttpRequest | None = None
        self.status = 0
        self.headers = Headers([])
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._error: HttpError | None = None
        self._ended = False

    async def parts(self) -> AsyncIterator[bytes]:
        """What has come, until the end. Raises HttpError."""
        while True:
            while self._parts:
                yield self._parts.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._news.clear()
            if self.request is not None:
                self.request.resume()
            await self._news.wait()

    async def read(self, max_nbytes: int) -> bytes:
        """The whole body. Raises HttpError, also for a longer one."""
        found = bytearray()
        async for data in self.parts():
            found += data
            if len(found) > max_nbytes:
                raise BadAnswer.too_long(max_nbytes)
        return bytes(found)

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        if not self.head.done():
            self.head.set_result(None)

    def on_data(self, data: bytes) -> None:
        self._parts.append(data)
        if len(self._parts) > 1 and self.request is not None:
            self.request.pause()
        self._news.set()

    def on_end(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
        self._ended = True
        self._news.set()

    def on_lost(self, error: HttpError) -> None:
        self._error = error
        if not self.head.done():
            self.head.set_exception(error)
        self._news.set()


def describe(error: Exception) -> str:
    """The text of an exception, or its name if the text is empty. For a failed connection the system's text alone."""
    cause = error.__cause__
    if isinstance(error, NoConnection) and isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError):
        known = cause.errno is not None and cause.errno > 0  # name look-ups have negative ones
        return os.strerror(cause.errno) if known and cause.errno else cause.strerror or str(cause)
    return printable(str(error)) or type(error).__name__


def printable(text: str) -> str:
    """A text that may contain a worker's words, for the log: one line, cut."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_WORDS_CHARS])


def loss_of(error: Exception) -> Loss:
    """The kind of loss that an exception of a request means."""
    match error:
        case NotSent():
            return Loss.LOCAL
        case NoConnection():
            cause = error.__cause__
            return Loss.LOCAL if isinstance(cause, OSError) and cause.errno in _OUT_OF_SOCKETS else Loss.CONNECT
        case WorkerGone():
            return Loss.STALE if error.stale else Loss.RESET
        case ConnectionError():
            return Loss.RESET
        case TimeoutError():
            return Loss.TIMEOUT
        case _:
            return Loss.MALFORMED


async def tell_to_stop(
    client: HttpClient, worker_url: str, transfer_id: str, reason: str, *, timeout_s: float
) -> bool:
    """Stop a transfer on a worker, because the other leg failed; returns whether the worker accepted.

    A failure here is no error: the worker's own deadline ends the transfer.
    """
    url = f"{worker_url}/pdlink/transfers/{transfer_id}/stop"
    try:
        return (await post(client, url, {"reason": reason}, timeout_s=timeout_s)).status == 202
    except (HttpError, OSError):
        return False
