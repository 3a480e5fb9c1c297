"""Streams that pass natively: the client gets the same, and every rule of a stream still holds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import socket
import struct
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdlink.errors import LocalError
from pdlink_proxy.http_connection import Connection
from pdlink_proxy.polling import _Waits
from pdlink_proxy.request import Request
from tests.proxy.fakes import END, FakeWorker, Proxy, abort, event, proxy_of, tokens_of, until
from tests.proxy.test_client_answer import connected, request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiohttp import web

WORDS = [f" word{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def words(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    """What all workers say."""
    for worker in (prefill, *decodes):
        worker.tokens = WORDS


def passes(proxy: Proxy) -> bool:
    return any(isinstance(each, Request) and each._passing is not None for each in proxy.router.services.requests)


async def passing(proxy: Proxy, decode: FakeWorker) -> AsyncGenerator[bytes]:
    """A stream of which each event is read before the next is sent: what was read when it passes natively, and at its
    end."""
    decode.gates = {number: asyncio.Event() for number in range(1, 10)}
    async with proxy.post(prompt="hello", stream=True) as response:
        assert response.status == 200
        got = b""
        for number in range(1, 10):
            while got.count(b"data:") < number:
                got += await response.content.readany()
            decode.gates[number].set()
            if number == 6:
                await until(lambda: passes(proxy), "the stream passes natively")
                yield got
        yield got + await response.read()


async def test_a_passing_stream_is_the_same_for_its_client(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        got = [read async for read in passing(proxy, decode)][-1]
        assert tokens_of(got) == b"".join(map(event, WORDS)) + END
        assert not passes(proxy)
        assert proxy.counted("requests_total", outcome="ok") == 1


@pytest.mark.parametrize("split", [1, 7, 45, 64])
async def test_events_that_come_in_pieces_reach_the_client_whole(
    prefill: FakeWorker, decode: FakeWorker, split: int
) -> None:
    decode.split = split
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(prompt="hello", stream=True) as response:
        got = await response.read()
    assert tokens_of(got) == b"".join(map(event, WORDS)) + END


async def test_a_stream_in_random_chunks_is_the_same_for_its_client(prefill: FakeWorker, decode: FakeWorker) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    async with proxy_of([prefill], [decode]) as proxy:
        for _ in range(10):
            prefill.tokens = decode.tokens = ["x" * chance.choice([1, 20, 300]) for _ in range(30)]
            decode.split = chance.choice([None, *range(20, 400)])
            async with proxy.post(prompt="hello", stream=True) as response:
                got = await response.read()
            assert tokens_of(got) == b"".join(map(event, decode.tokens)) + END


async def test_the_worker_of_a_passing_stream_hears_that_the_client_left(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        async with contextlib.aclosing(passing(proxy, decode)) as streams:
            await anext(streams)
        await until(lambda: decode.received[0].aborted, "the worker's abort")
        await until(lambda: proxy.counted("requests_total", outcome="client_left") == 1, "its end")
        assert not passes(proxy)


async def test_a_worker_that_falls_silent_in_a_passing_stream_is_given_up(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode], idle_timeout_s=2.0, retries=0, recover_streams=0) as proxy:
        decode.gates = {number: asyncio.Event() for number in range(1, 10)}
        async with proxy.post(prompt="hello", stream=True) as response:
            got = b""
            for number in range(1, 7):
                while got.count(b"data:") < number:
                    got += await response.content.readany()
                decode.gates[number].set()
            got += await response.read()
        assert b"decode worker lost (timeout)" in got
        assert got.endswith(b"data: [DONE]\n\n")


async def test_a_reset_in_a_passing_stream_is_its_failure_and_told_as_a_reset(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reset(request: web.Request) -> None:
        assert request.transport is not None
        made = request.transport.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        abort(request)

    monkeypatch.setattr("tests.proxy.fakes.abort", reset)
    async with proxy_of([prefill], [decode], retries=0, recover_streams=0) as proxy:
        decode.break_after = 7
        async with contextlib.aclosing(passing(proxy, decode)) as streams:
            await anext(streams)
            assert passes(proxy)
            decode.gates[7].set()
            got = await anext(streams)
    assert b"decode worker lost (reset)" in got
    assert "Connection reset by peer" in caplog.text


async def test_a_passing_stream_goes_on_elsewhere_when_its_worker_dies(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    prefill.resumes = True
    for decode in decodes:
        decode.resumes = True
        decode.gates = {number: asyncio.Event() for number in range(1, 10)}
    async with (
        proxy_of([prefill], decodes) as proxy,
        proxy.post(prompt="hello", stream=True, temperature=0) as response,
    ):
        got = b""
        for number in range(1, 7):
            while got.count(b"data:") < number:
                got += await response.content.readany()
            for decode in decodes:
                decode.gates[number].set()
        await until(lambda: passes(proxy), "the stream passes natively")
        (dying,) = (decode for decode in decodes if decode.received)
        dying.break_after = 7
        for decode in decodes:
            for gate in decode.gates.values():
                gate.set()
        got += await response.read()
    assert [len(decode.received) for decode in decodes] == [1, 1]
    for number, word in enumerate(WORDS):
        assert got.count(b'"text":"%b"' % word.encode()) == 1, number
    assert b"error" not in got


async def test_a_client_that_reads_slowly_gets_all_of_a_passing_stream(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    decode.tokens = [f"{number} {'x' * 20_000}" for number in range(1000)]
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(request("Connection: close", stream=True))
        got = await reader.readuntil(b"data:")
        await until(lambda: any(front.writing_paused for front in proxy.doors._fronts), "a full socket")
        assert not decode.received[0].answered
        got += await reader.read()
    assert got.count(b"data:") == len(decode.tokens) + 2
    assert b"data: [DONE]" in got[-60:]


@pytest.mark.parametrize("is_old", [False, True])
async def test_asyncio_reads_no_socket_that_is_read_natively(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """Or nothing would hold a worker back whose client reads slowly."""

    def add_reader(self: Any, fd: int, callback: Any, *args: Any) -> None:
        if not self._closing:
            self._loop._add_reader(fd, callback, *args)

    if is_old:  # as CPython before 3.11.4
        monkeypatch.setattr("asyncio.selector_events._SelectorTransport._add_reader", add_reader)
        monkeypatch.setattr("pdlink_proxy.polling._READS_ALL_THE_SAME", True)
    async with proxy_of([prefill], [decode]) as proxy, contextlib.aclosing(passing(proxy, decode)) as streams:
        await anext(streams)
        (leg,) = (each._passing for each in proxy.router.services.requests if isinstance(each, Request))
        to_worker: Any = leg and leg.connection
        if not isinstance(to_worker, Connection):
            to_worker = to_worker.connection
        transports: list[Any] = [to_worker._transport, *(front.transport for front in proxy.doors._fronts)]
        assert len(transports) > 1
        read = cast("Any", asyncio.get_running_loop())._selector.get_map().keys()
        for transport in transports:
            assert transport.get_extra_info("socket").fileno() not in read


def test_a_loop_that_does_not_wait_with_epoll_is_refused() -> None:
    with pytest.raises(LocalError, match="event loop: got object; expected asyncio's own with epoll"):
        _Waits(object())
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())
    with contextlib.closing(loop), pytest.raises(LocalError, match="got _UnixSelectorEventLoop with PollSelector"):
        _Waits(loop)
