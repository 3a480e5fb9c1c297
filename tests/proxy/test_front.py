"""Requests that aiohttp does not read: they are answered as it would, and what is unusual goes to it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from pdlink_proxy import front
from pdlink_proxy.entry import Entry
from tests.proxy.fakes import FakeWorker, proxy_of, until
from tests.proxy.test_client_answer import connected, request

if TYPE_CHECKING:
    from pdlink.api.openai import Call
    from tests.proxy.fakes import Proxy

ASKED = request(stream=False)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), await reader.readexactly(length)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Bodies of the requests that aiohttp did not read."""
    found, take = [], Entry.taken

    def taken(self: Entry, path: str, said: dict[str, str], body: bytes) -> Call | None:
        found.append(body)
        return take(self, path, said, body)

    monkeypatch.setattr(Entry, "taken", taken)
    return found


async def whole(proxy: Proxy, *parts: bytes) -> list[int]:
    """The statuses of the answers to what is sent in these parts, each of which is read before the next comes."""
    async with connected(proxy.url) as (reader, writer):
        fronts = proxy.doors._fronts
        await until(lambda: len(fronts) == 1, "the connection")
        for part in parts[:-1]:
            writer.write(part)
            await until(lambda: all(one.has_held for one in fronts), "what is read, or handed over")
        writer.write(parts[-1])
        return [(await answer_of(reader))[0] for _ in range(b"".join(parts).count(b" HTTP/1.1\r\n"))]


async def test_a_request_may_come_in_any_two_parts(
    prefill: FakeWorker, decode: FakeWorker, taken: list[bytes]
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        for at in range(1, len(ASKED), 7):
            assert await whole(proxy, ASKED[:at], ASKED[at:]) == [200], at
    assert len(taken) > 3, "a body in parts is waited for"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (ASKED.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost"), 400),
        (ASKED.replace(b"Content-Length", b"Content-Length : 1\r\nContent-Length"), 400),
        (ASKED.replace(b"Content-Length", b"content-length: 3\r\nContent-Length"), 400),
        (ASKED.replace(b"Host: x", b"Host: x\r\n folded"), 400),
        (ASKED.replace(b"Content-Length: ", b"Content-Length: +"), 400),
        (ASKED.replace(b"completions HTTP", b"completions?x=1 HTTP"), 200),
        (ASKED.replace(b"Host: x", b"Host: x\r\nX-Name: \xc3\xa9"), 200),
        (ASKED.replace(b"Host: x", b"Host: x\r\nX-Name: a\r\nX-Name: b"), 200),
        (ASKED.replace(b'"model"', b'"mobel"'), 400),
        (ASKED.replace(b'"m"', b'"n"'), 404),
    ],
)
async def test_what_is_unusual_or_refused_goes_to_aiohttp(
    prefill: FakeWorker, decode: FakeWorker, asked: bytes, status: int
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        assert await whole(proxy, asked) == [status]
        assert not proxy.router.services.requests


async def test_aiohttp_goes_on_with_a_connection_whose_requests_differ(
    prefill: FakeWorker, decode: FakeWorker, taken: list[bytes]
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        assert await whole(proxy, ASKED + ASKED + HEALTH + ASKED) == [200] * 4
        assert len(taken) == 2
        assert await whole(proxy, HEALTH, ASKED) == [200, 200]
    assert len(taken) == 2


@pytest.mark.parametrize("before", [0, 1])
async def test_a_fault_of_ours_closes_the_connection_and_ends_no_other(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """before: requests that came in the same read, and were served."""
    take = Entry.taken
    faults = iter([*[False] * before, True])

    def taken(self: Entry, path: str, said: dict[str, str], body: bytes) -> Call | None:
        if next(faults, False):
            raise ZeroDivisionError
        return take(self, path, said, body)

    monkeypatch.setattr(Entry, "taken", taken)
    async with proxy_of([prefill], [decode]) as proxy:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with connected(proxy.url) as (reader, writer):
            writer.write(ASKED * (before + 1))
            for _ in range(before):
                assert (await answer_of(reader))[0] == 200
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await answer_of(reader)
        assert await whole(proxy, ASKED) == [200]


async def test_a_body_in_chunks_and_one_that_is_asked_for_are_served(prefill: FakeWorker, decode: FakeWorker) -> None:
    head, _, body = ASKED.partition(b"\r\n\r\n")
    start = head.split(b"\r\n")[0] + b"\r\nHost: x\r\n"
    chunked = start + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with proxy_of([prefill], [decode]) as proxy:
        assert await whole(proxy, chunked) == [200]
        async with connected(proxy.url) as (reader, writer):
            writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            assert (await answer_of(reader))[0] == 200


async def test_a_client_that_leaves_takes_its_request_along(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.silent = True
    async with proxy_of([prefill], [decode]) as proxy:
        async with connected(proxy.url) as (_, writer):
            writer.write(request(stream=True))
            await until(lambda: proxy.router.services.num_running == 1, "the request")
        await until(lambda: proxy.router.services.num_running == 0, "its end")
        assert proxy.counted("requests_total", outcome="client_left") == 1


async def test_a_body_that_does_not_come_is_refused(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "SWEEP_S", 0.02)
    async with proxy_of([prefill], [decode], idle_timeout_s=0.1) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(ASKED[:-1])
        status, body = await answer_of(reader)
    assert (status, b"the body did not arrive" in body) == (408, True)


async def test_a_body_that_comes_byte_by_byte_is_refused_when_its_time_is_over(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is no new beginning: a client could keep a connection open for ever."""
    monkeypatch.setattr(front, "SWEEP_S", 0.02)
    async with proxy_of([prefill], [decode], idle_timeout_s=0.2) as proxy, connected(proxy.url) as (reader, writer):
        head, _, body = request(stream=False).partition(b"\r\n\r\n")
        writer.write(head.replace(b"Content-Length: ", b"Content-Length: 9") + b"\r\n\r\n" + body)
        answered = asyncio.create_task(answer_of(reader))
        while not answered.done():
            writer.write(b" ")
            await asyncio.wait([answered], timeout=0.02)
        assert (await answered)[0] == 408


async def test_a_head_that_comes_byte_by_byte_is_served_or_its_connection_is_closed(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "SWEEP_S", 0.02)
    async with proxy_of([prefill], [decode], idle_timeout_s=60.0) as proxy, connected(proxy.url) as (reader, writer):
        for at in range(len(ASKED)):
            writer.write(ASKED[at : at + 1])
            await asyncio.sleep(0)
        assert (await answer_of(reader))[0] == 200
    for begun in (ASKED[:10], ASKED[:30], HEALTH[:-2]):
        async with (
            proxy_of([prefill], [decode], idle_timeout_s=0.1) as proxy,
            connected(proxy.url) as (reader, writer),
        ):
            writer.write(begun)
            assert await reader.read() == b""


async def test_a_body_is_not_waited_for_without_a_key(prefill: FakeWorker, decode: FakeWorker) -> None:
    head = ASKED.partition(b"\r\n\r\n")[0].replace(b"Content-Length: ", b"Content-Length: 9999")
    async with proxy_of([prefill], [decode], api_keys=("secret",)) as proxy:
        async with connected(proxy.url) as (reader, writer):
            writer.write(head + b"\r\n\r\n" + b" " * 1000)
            assert (await answer_of(reader))[0] == 401
        async with connected(proxy.url) as (reader, writer):
            writer.write(head + b"\r\nAuthorization: Bearer secret\r\n\r\n")
            await until(lambda: any(one.has_held for one in proxy.doors._fronts), "a body that is waited for")


async def test_bytes_of_a_body_are_joined_once(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Joined for every read, a body of half a MB in pieces of a byte takes half a minute."""
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (_, writer):
        head = ASKED.partition(b"\r\n\r\n")[0].replace(b"Content-Length: ", b"Content-Length: 9999")
        writer.write(head + b"\r\n\r\n")
        await until(lambda: any(one.has_held for one in proxy.doors._fronts), "a body that is waited for")
        (one,) = proxy.doors._fronts
        began_s = time.process_time()
        for _ in range(500_000):
            one.data_received(b" ")
        assert time.process_time() - began_s < 5
        assert one.has_head


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH\r\n", b"\x16\x03\x01\x02", b"get / HTTP/1.1\r\n"])
async def test_what_does_not_begin_as_http_is_not_waited_for(
    prefill: FakeWorker, decode: FakeWorker, said: bytes
) -> None:
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (_, writer):
        await until(lambda: len(proxy.doors._fronts) == 1, "the connection")
        writer.write(said)
        await until(lambda: not proxy.doors._fronts, "aiohttp has it")


async def test_an_idle_connection_is_closed_and_a_used_one_is_not(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "SWEEP_S", 0.02)
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(ASKED)
        assert (await answer_of(reader))[0] == 200
        (one,) = proxy.doors._fronts
        one.idle_since_s -= 10_000
        assert await reader.read() == b""
