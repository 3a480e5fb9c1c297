"""HTTP to workers: connection pools, one leg from request to last byte, the stop call.

aiohttp's client has defaults for browsing; the settings here differ for a router of long streams, each with its
reason.
"""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from .access import worker_tls
from .steps import Answered, Chunk, Ended, Event, Leg, Loss, Lost

if TYPE_CHECKING:
    from pdlink.config import ProxyConfig

KEEPALIVE_S = 2.5
"""Lifetime of an idle connection: shorter than the servers' (5 s for uvicorn and vLLM), or requests would go into
closed connections. aiohttp's default is 15 s."""

# A vanished host sends no reset, and a stream that only reads never notices: TCP keep-alive probes after 10 s of
# silence, and gives up after three unanswered probes 3 s apart.
_KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # Tokens are small; do not delay them.
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)

_MAX_WORDS_CHARS = 300

MAX_REPLY_NBYTES = 64 * 1024
"""Of an answer about a worker itself (health, models)."""

_OUT_OF_SOCKETS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class AnswerTooLarge(ValueError):
    """A worker's answer exceeds the limit."""


def open_session(
    config: ProxyConfig, *, max_connections: int, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """A session for many requests; the caller closes it. headers: the proxy's own, for every request."""
    connector = aiohttp.TCPConnector(
        limit=max_connections,  # 0: no limit; with the default the 101st stream would wait for another to end
        keepalive_timeout=KEEPALIVE_S,
        socket_factory=_socket,
        ssl=worker_tls(config),
    )
    timeout = aiohttp.ClientTimeout(
        total=None,  # the default ends every stream after 300 s; the flow has its own deadlines
        sock_connect=config.connect_timeout_s,
    )
    reuse = aiohttp.TraceConfig()
    reuse.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,  # bytes pass through unchanged, with the headers that describe them
        cookie_jar=aiohttp.DummyCookieJar(),  # a worker's cookie must not go to another client's request
        # Ask for uncompressed answers; aiohttp would offer gzip.
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json", **(headers or {})},
        trace_configs=[reuse],
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for level, option, value in _KEEPALIVE_OPTIONS:
        made.setsockopt(level, option, value)
    return made


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    if isinstance(context.trace_request_ctx, SimpleNamespace):
        context.trace_request_ctx.reused = True


@dataclass(frozen=True, slots=True)
class LegCall:
    """One leg's request."""

    attempt: int
    leg: Leg
    url: str
    body: bytes
    headers: Mapping[str, str]
    streaming: bool
    max_answer_nbytes: int
    on_head: Callable[[Mapping[str, str]], None]
    """Called with the headers of a 2xx answer before its first event."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A worker to ask about itself, with a deadline."""

    session: aiohttp.ClientSession
    url: str
    """Base URL."""
    timeout_s: float


class Reply(NamedTuple):
    status: int
    body: bytes


async def ask(asking: Asking, path: str) -> Reply:
    """GET. Raises TimeoutError, aiohttp.ClientError, OSError or ValueError."""
    timeout = aiohttp.ClientTimeout(total=asking.timeout_s)
    async with asking.session.get(asking.url + path, timeout=timeout, allow_redirects=False) as response:
        return Reply(response.status, await read_bounded(response, MAX_REPLY_NBYTES))


Say = Callable[[Event], Awaitable[None]]
"""Reports one event of a leg. Waits while the client is slow: back-pressure for the worker."""


async def run_leg(session: aiohttp.ClientSession, call: LegCall, say: Say) -> None:
    """Send a leg's request and report its result: chunks and their end, or one answer, or one loss.

    Returns when the leg is over. Cancelling it closes the connection, and the worker aborts.
    """
    trace = SimpleNamespace(reused=False)
    head_seen = False
    attempt, leg = call.attempt, call.leg
    try:
        async with session.post(
            call.url,
            data=io.BytesIO(call.body),  # plain bytes above 1 MiB would be written in one go, with a warning
            headers=call.headers,
            allow_redirects=False,
            trace_request_ctx=trace,
        ) as response:
            head_seen = True
            well = 200 <= response.status < 300
            if well:
                call.on_head(response.headers)
            if call.streaming and well:
                async for data in response.content.iter_any():
                    await say(Chunk(attempt, leg, data))
                await say(Ended(attempt, leg))
                return
            body = await read_bounded(response, call.max_answer_nbytes)
            await say(Answered(attempt, leg, response.status, body, response.content_type))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        loss = loss_of(error, reused=trace.reused and not head_seen)
        await say(Lost(attempt, leg, loss, f"{call.url}: {describe(error)}"))


def describe(error: Exception) -> str:
    """The text of an exception, or its name if the text is empty, as some of aiohttp's are.

    For a failed connection the system's text alone: aiohttp's repeats the address, and names `ssl:default` without
    encryption.
    """
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        cause = error.os_error
        known = cause.errno is not None and cause.errno > 0  # name look-ups have negative ones
        return os.strerror(cause.errno) if known and cause.errno else cause.strerror or str(cause)
    return printable(str(error)) or type(error).__name__


def printable(text: str) -> str:
    """A text that may contain a worker's words, for the log: one line, cut."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_WORDS_CHARS])


async def read_bounded(response: aiohttp.ClientResponse, max_nbytes: int) -> bytes:
    """The whole body. Raises AnswerTooLarge."""
    parts: list[bytes] = []
    nbytes = 0
    async for part in response.content.iter_any():
        nbytes += len(part)
        if nbytes > max_nbytes:
            raise AnswerTooLarge(f"an answer of more than {max_nbytes} bytes")
        parts.append(part)
    return b"".join(parts)


def loss_of(error: Exception, *, reused: bool) -> Loss:
    """The kind of loss that an exception of aiohttp's client means. reused: on a pooled connection, before any byte
    of the answer."""
    match error:
        case aiohttp.ClientSSLError():  # first: certificate errors have no os_error (aiohttp 3.14)
            return Loss.CONNECT
        case aiohttp.ClientConnectorError() if error.os_error.errno in _OUT_OF_SOCKETS:
            return Loss.LOCAL
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return Loss.CONNECT
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return Loss.STALE if reused else Loss.RESET
        case aiohttp.ClientPayloadError() | ConnectionError():
            return Loss.RESET
        case TimeoutError():
            return Loss.TIMEOUT
        case _:
            return Loss.MALFORMED


async def tell_to_stop(
    session: aiohttp.ClientSession, worker_url: str, transfer_id: str, reason: str, *, timeout_s: float
) -> bool:
    """Stop a transfer on a worker, because the other leg failed; returns whether the worker accepted.

    A failure here is no error: the worker's own deadline ends the transfer.
    """
    try:
        async with session.post(
            f"{worker_url}/pdlink/transfers/{transfer_id}/stop",
            json={"reason": reason},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            return response.status == 202
    except (aiohttp.ClientError, OSError):
        return False
