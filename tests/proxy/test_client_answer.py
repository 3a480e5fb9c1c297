"""What a client's connection carries, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pdlink_proxy.request import Request
from tests.proxy.fakes import FakeWorker, event, proxy_of, until
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_BODY = b'{"model": "m", "prompt": "hello", "stream": %s}'


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WAIT_S):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(*headers: str, stream: bool, version: str = "1.1") -> bytes:
    body = _BODY % (b"true" if stream else b"false")
    lines = (f"POST /v1/completions HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


async def test_requests_on_one_connection_are_answered_in_turn(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(request(stream=True) + request(stream=False) + request("Connection: close", stream=False))
        said = await reader.read()
    first, second, third = said.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert b"\r\nTransfer-Encoding: chunked\r\n" in first
    assert first.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    for answer in (second, third):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Content-Length: %d\r\n" % len(body) in head
        assert b"\r\nDate: " in head
    assert b"\r\nConnection: close\r\n" in third
    assert b"Connection" not in second


async def test_a_client_of_http_1_0_gets_no_chunks(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(request("Connection: keep-alive", stream=False, version="1.0"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nConnection: keep-alive\r\n" in head
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(request("Connection: keep-alive", stream=True, version="1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"\r\nConnection: close" in head
    assert body.startswith(event("zero"))
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_reads_slowly_holds_its_worker_back_and_gets_every_byte(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    decode.tokens = ["x" * 100_000] * 300
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(request("Connection: close", stream=True))
        await reader.readuntil(b"\r\n\r\n")
        (running,) = proxy.router.services.requests
        assert isinstance(running, Request)
        await until(lambda: running._behind_since_s is not None)
        assert not decode.received[0].answered
        said = await reader.read()
        await until(lambda: decode.received[0].answered)
    assert said.count(b"data: {") == 301
    assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
