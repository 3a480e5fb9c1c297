"""The client for workers, against servers that write what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import socket
import ssl
from types import MappingProxyType
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from aiohttp import web

from pdlink._http import Headers, header_lines
from pdlink_proxy import http_client
from pdlink_proxy.http_client import HttpClient, HttpRequest
from pdlink_proxy.http_connection import (
    MAX_HEAD_NBYTES,
    AnswerListener,
    BadAnswer,
    Connection,
    HttpError,
    NoConnection,
    NotSent,
    WorkerGone,
)
from pdlink_proxy.polling import polling
from pdlink_proxy.steps import Loss
from pdlink_proxy.upstream import answer_of, loss_of
from tests.certificates import make_certificate
from tests.proxy.fakes import until
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Runs `talk` for each connection; its base URL."""

    running: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await talk(reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    listening = await asyncio.start_server(run, "127.0.0.1", 0, ssl=tls)
    async with listening:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    await asyncio.gather(*running)


def saying(*pieces: bytes, close: bool = True) -> Talk:
    """Answers every request with these writes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return talk


@contextlib.asynccontextmanager
async def client(**more: object) -> AsyncIterator[HttpClient]:
    async with polling() as poller, HttpClient(poller=poller, connect_timeout_s=5, **more) as http:  # type: ignore[arg-type]
        yield http


async def body_of(talk: Talk, max_nbytes: int = 1 << 20) -> bytes:
    async with server(talk) as url, client() as http:
        return (await answer_of(http, "GET", url + "/x", max_nbytes=max_nbytes, timeout_s=WAIT_S)).body


class Heard(AnswerListener):
    """Keeps what a listener is told."""

    def __init__(self) -> None:
        self.status, self.headers = 0, Headers([])
        self.parts: list[bytes] = []
        self.end: str | HttpError = ""
        self.more = asyncio.Event()
        self.request: HttpRequest | None = None
        self.connection: Connection | None = None

    async def until(self, true: Callable[[Heard], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true(self):
                self.more.clear()
                await self.more.wait()

    async def ended(self) -> bytes:
        """The body, once the end was told. Raises what was told instead."""
        await self.until(lambda heard: heard.end)
        if isinstance(self.end, HttpError):
            raise self.end
        return b"".join(self.parts)

    def on_head(self, status: int, headers: Headers) -> None:
        assert not self.status
        self.status, self.headers = status, headers
        assert self.request is not None
        self.connection = self.request.connection  # none if the answer came in one piece
        self.more.set()

    def on_data(self, data: bytes) -> None:
        assert data
        assert self.status
        assert not self.end
        self.parts.append(data)
        self.more.set()

    def on_end(self, data: bytes) -> None:
        assert not self.end
        self.parts.append(data)
        self.end = "ended"
        self.more.set()

    def on_lost(self, error: HttpError) -> None:
        assert not self.end
        self.end = error
        self.more.set()


def ask(http: HttpClient, url: str, method: str = "GET", body: bytes = b"", **headers: str) -> Heard:
    heard = Heard()
    lines = header_lines({name.replace("_", "-"): headers[name] for name in headers})
    heard.request = http.start(method, url, heard, body, lines)
    return heard


async def test_a_request_is_lost_at_once_if_its_worker_dies_before_it_accepts_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reset is read in the turn that makes the connection, before anybody asks: a request waited for ever."""
    listening = socket.create_server(("127.0.0.1", 0))  # which accepts nothing
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    made = Connection.connection_made
    heard = Heard()
    async with polling() as poller, HttpClient(poller=poller, connect_timeout_s=5) as http:

        def made_and_reset(connection: Connection, transport: asyncio.BaseTransport) -> None:
            made(connection, transport)
            listening.close()
            assert select.select([poller.fd], [], [], 10)[0]
            poller.turn()

        monkeypatch.setattr(Connection, "connection_made", made_and_reset)
        heard.request = http.start("GET", url + "/x", heard)
        with pytest.raises(NoConnection, match="closed the connection at once"):
            await heard.ended()


async def test_a_request_is_lost_at_once_if_its_workers_name_is_none_that_dns_can_have() -> None:
    """asyncio raises a UnicodeError, which is no OSError: the listener was told nothing."""
    async with client() as http:
        with pytest.raises(NoConnection, match="label"):
            await ask(http, f"http://{'a' * 70}/x").ended()


async def test_an_answer_that_is_late_is_given_up_with_its_connection() -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")  # so the next one needs no connection
        with contextlib.suppress(ConnectionError):
            await reader.read()
        closed.set()

    async with server(talk) as url, client() as http, asyncio.timeout(WAIT_S):
        await answer_of(http, "GET", url + "/x", max_nbytes=1, timeout_s=WAIT_S)
        with pytest.raises(TimeoutError):
            await answer_of(http, "GET", url + "/y", max_nbytes=1, timeout_s=0.001)
        await closed.wait()


async def test_requests_that_connect_or_wait_for_a_connection_are_lost_when_the_client_ends() -> None:
    """The task of a connection may not have begun, and tells nobody then."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(silent) as url:
        async with client(max_connections=1) as http:
            heard = [ask(http, url + path) for path in ("/connects", "/waits")]
        for each in heard:
            with pytest.raises(HttpError):
                await each.ended()


async def test_a_request_has_the_headers_of_the_client_and_its_own() -> None:
    seen = b""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4)
        writer.write(
            b"HTTP/1.1 201 Created\r\nX-One: 1\r\ncontent-type: text/Plain; a=b\r\nContent-Length: 2\r\n\r\nok"
        )

    async with server(talk) as url, client(headers={"X-Key": "k"}) as http:
        heard = ask(http, url + "/path?a=1", "POST", b"body", X_Two="2")
        assert await heard.ended() == b"ok"
        assert (heard.status, heard.headers.content_type, heard.headers["x-one"]) == (201, "text/plain", "1")
    head = seen.decode().split("\r\n")
    assert head[0] == "POST /path?a=1 HTTP/1.1"
    assert head[1] == f"Host: {url.removeprefix('http://')}"
    assert {"X-Key: k", "X-Two: 2", "Accept-Encoding: identity", "Content-Length: 4"} <= set(head)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("seed", range(20))
async def test_a_body_is_the_same_wherever_the_network_cuts_it(seed: int) -> None:
    rng = random.Random(seed)
    body = rng.randbytes(rng.randrange(1, 4000))
    sent, at = CHUNKED, 0
    while at < len(body):
        size = rng.randrange(1, 700)
        piece = body[at : at + size]
        sent += f"{len(piece):x}{rng.choice(['', ';x=y'])}\r\n".encode() + piece + b"\r\n"
        at += size
    sent += b"0\r\n\r\n"
    cuts = sorted(rng.sample(range(len(sent)), min(40, len(sent) - 1)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert await body_of(saying(*pieces)) == body, f"seed {seed}"


async def test_what_has_come_is_given_out_before_the_rest_comes() -> None:
    goes_on = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"3\r\none\r\n")
        await goes_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with server(talk) as url, client() as http:
        heard = ask(http, url + "/")
        await heard.until(lambda heard: heard.parts)
        assert heard.parts == [b"one"]
        goes_on.set()
        assert await heard.ended() == b"onetwo"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nall of it",
        b"HTTP/1.0 200 OK\r\n\r\nall of it",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
    ],
)
async def test_bodies_that_end_with_the_connection_and_interim_answers(answer: bytes) -> None:
    assert await body_of(saying(answer)) == b"all of it"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", WorkerGone),
        (b"HTTP/1.1 200 OK\r\nContent-Le", WorkerGone),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfour", WorkerGone),
        (CHUNKED + b"5\r\nfive!\r\n", WorkerGone),
        (CHUNKED + b"xyz\r\n", BadAnswer),
        (b"SSH-2.0-OpenSSH\r\n\r\n", BadAnswer),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nfive!", BadAnswer),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD_NBYTES + 1), BadAnswer),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world", BadAnswer),  # longer than is read
    ],
)
async def test_an_answer_that_breaks_is_an_error(answer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        await body_of(saying(answer), max_nbytes=10)


async def test_a_connection_is_used_again_and_a_closed_one_is_told_as_stale() -> None:
    connections = 0
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        await reader.readuntil(b"\r\n\r\n")  # closed in answer to the fourth request

    async with server(talk) as url, client() as http:
        for _ in range(3):
            assert await ask(http, url + "/").ended() == b"ok"
        with pytest.raises(WorkerGone) as caught:
            await ask(http, url + "/").ended()
        assert caught.value.stale
        assert await ask(http, url + "/").ended() == b"ok"
    assert connections == 2


@pytest.mark.parametrize("num_bytes", [1, 20, None])
async def test_a_connection_that_says_more_than_it_was_asked_is_not_used_again(num_bytes: int | None) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with server(saying(answer + answer[:num_bytes], close=False)) as url, client() as http:
        for _ in range(2):
            heard = ask(http, url + "/")
            assert await heard.ended() == b"ok"
            assert heard.connection is not None
            assert not heard.connection.keeps


async def test_trailers_are_no_headers_of_the_next_answer() -> None:
    answer = CHUNKED + b"2\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n"
    async with server(saying(answer, close=False)) as url, client() as http:
        for _ in range(2):
            heard = ask(http, url + "/")
            assert await heard.ended() == b"ok"
            assert dict(heard.headers) == {"Transfer-Encoding": "chunked"}
        assert heard.connection is not None
        assert heard.connection.reused


async def test_a_connection_that_was_paused_at_the_end_of_an_answer_is_read_again() -> None:
    talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"one", close=False)
    async with server(talk) as url, client() as http:
        heard = ask(http, url + "/")
        await heard.until(lambda heard: heard.status)
        assert heard.request is not None
        heard.request.pause()
        heard.request.resume()
        assert await heard.ended() == b"one"
        heard.request.pause()  # too late: the connection is not its own any more
        assert await ask(http, url + "/").ended() == b"one"


async def test_idle_connections_are_closed_before_the_server_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at_last_s = 1.25 * http_client.KEEPALIVE_S
    assert looked_at_last_s < 5, "uvicorn's timeout_keep_alive"
    monkeypatch.setattr(http_client, "KEEPALIVE_S", 0.05)
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        try:
            await reader.read()
        finally:
            closed.set()

    async with server(talk) as url, client() as http:
        await ask(http, url + "/").ended()
        await asyncio.wait_for(closed.wait(), WAIT_S)
        assert not http.resting, "nothing is kept of workers that come and go"


async def test_a_look_at_idle_connections_leaves_young_ones() -> None:
    async with server(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", close=False)) as url, client() as http:
        await ask(http, url + "/").ended()
        await until(lambda: bool(http.resting), "the idle connection")
        http._drop_old()
        (host,) = http.resting
        assert len(host.idle) == 1


async def test_leaving_early_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"3\r\none\r\n")
        try:
            await reader.read()
        finally:
            closed.set()

    async with server(talk) as url, client() as http:
        heard = ask(http, url + "/")
        await heard.until(lambda heard: heard.parts)
        assert heard.request is not None
        heard.request.leave()
        await asyncio.wait_for(closed.wait(), WAIT_S)
        assert (heard.parts, heard.end) == ([b"one"], "")


async def test_a_reader_that_is_slow_holds_the_worker_back() -> None:
    total, sent = 64 << 20, 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1 << 20

    async with server(talk) as url, client() as http:
        heard = ask(http, url + "/")
        await heard.until(lambda heard: heard.status)
        assert heard.request is not None
        heard.request.pause()
        for _ in range(200):
            await asyncio.sleep(0)
        assert sent < total // 2  # the rest is in no memory of ours
        heard.request.resume()
        assert len(await heard.ended()) == total


async def test_a_port_where_nobody_listens_is_no_connection() -> None:
    async with server(saying(b"")) as url:
        pass
    async with client() as http:
        with pytest.raises(NoConnection) as caught:
            await ask(http, url + "/").ended()
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_a_bound_on_connections_holds_others_back() -> None:
    open_now = most = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        await reader.readuntil(b"\r\n\r\n")
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    async with server(talk) as url, client(max_connections=2) as http:
        await asyncio.gather(*(ask(http, url + "/").ended() for _ in range(20)))
    assert most <= 2


@contextlib.contextmanager
def one_failure(monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[list[str]]:
    """The next request that waits cannot be sent, or the next connection that its user gives back is not taken; what
    was logged of it."""
    logged: list[str] = []
    owner, name = (Connection, "ask") if kind == "ask" else (HttpClient, "newest" if kind == "begin" else "keep")

    def fail(*_: object) -> None:
        again.undo()
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as again:
        again.setattr(owner, name, fail, raising=False)
        asyncio.get_running_loop().set_exception_handler(lambda _, about: logged.append(str(about["exception"])))
        yield logged
    assert logged == ["a fault of ours"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["begin", "ask", "keep"])
async def test_an_answer_is_heard_whatever_fails_behind_it_and_no_place_is_lost(
    kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await may_answer.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    class Whole(Heard):
        most_nbytes = 100

        def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
            self.status = status
            self.on_end(body)

    may_answer = asyncio.Event()
    async with server(talk) as url, client(max_connections=1) as http:
        heard = [Whole() if whole else Heard() for _ in range(3)]
        for each in heard:
            each.request = http.start("GET", url + "/", each)
        await asyncio.wait_for(asked.wait(), WAIT_S)
        with one_failure(monkeypatch, kind):
            may_answer.set()
            assert await heard[0].ended() == b"ok"
            if kind == "keep":
                assert await heard[1].ended() == b"ok"
            else:
                with pytest.raises(NotSent, match="a fault of ours") as caught:
                    await heard[1].ended()
                assert loss_of(caught.value) is Loss.LOCAL, "no worker is to blame"
            assert await heard[2].ended() == b"ok"
        assert not http.running


async def test_a_request_that_cannot_be_sent_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        server(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", close=False)) as url,
        client(max_connections=1) as http,
    ):
        assert await ask(http, url + "/").ended() == b"ok"
        for send in (http.start, http.send):
            with monkeypatch.context() as once:
                once.setattr(Connection, "ask", Mock(side_effect=RuntimeError("a fault of ours")))
                with pytest.raises(RuntimeError, match="a fault of ours"):
                    send("GET", url + "/", Heard())
            assert not http.running
            assert await ask(http, url + "/").ended() == b"ok"


async def test_a_large_body_arrives_whole(unused_tcp_port: int) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    url, body = f"http://127.0.0.1:{unused_tcp_port}/", random.Random(5).randbytes(5 << 20)
    try:
        async with client() as http:
            assert await ask(http, url, "POST", body).ended() == body
    finally:
        await runner.cleanup()


async def test_a_connection_with_tls_tells_the_same_and_is_used_again(tmp_path: Path) -> None:
    """asyncio reads it, and sends what is asked."""
    cert, key = make_certificate(tmp_path)
    serves, trusts = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context(cafile=cert)
    serves.load_cert_chain(cert, key)
    body = random.Random(7).randbytes(1 << 20)
    goes_on = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(body)) == body
            writer.write(CHUNKED + b"3\r\none\r\n")
            await goes_on.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with server(talk, serves) as url, client(tls=trusts) as http:
        for number in range(2):
            heard = ask(http, url + "/", "POST", body)
            await heard.until(lambda heard: heard.parts)
            assert heard.request is not None
            heard.request.pause()
            goes_on.set()
            heard.request.resume()
            assert await heard.ended() == b"onetwo"
            assert heard.connection is not None
            assert heard.connection.reused == (number > 0)
            assert not heard.connection.is_open


def test_headers_are_sent_as_they_were_read() -> None:
    given = {"X-Request-Id": "r", "X-Café": "é", "X-Bytes": "a\udcff", "X-Empty": ""}
    assert header_lines(given) == "X-Request-Id: r\r\nX-Café: é\r\nX-Bytes: a".encode() + b"\xff\r\nX-Empty: \r\n"
    assert header_lines(MappingProxyType(given)) == header_lines(given)
    assert header_lines({}) == b""
    with pytest.raises(UnicodeEncodeError):
        header_lines({"x": "\ud800"})
