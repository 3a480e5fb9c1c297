"""Streams that pass natively: the client gets the same, and every rule of a stream still holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdlink_proxy.relaying import Relays
from pdlink_proxy.request import Request
from tests.proxy.fakes import END, FakeWorker, Proxy, abort, event, proxy_of, tokens_of, until
from tests.proxy.test_client_answer import connected, request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiohttp import web

pytest.importorskip("pdlink._relay", reason="the native relay is built where there is epoll")

WORDS = [f" word{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def words(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    """What all workers say."""
    for worker in (prefill, *decodes):
        worker.tokens = WORDS


def relays_of(proxy: Proxy) -> Relays:
    found = proxy.router.services.shared.relays
    assert found is not None
    return found


async def lent(proxy: Proxy, decode: FakeWorker) -> AsyncGenerator[bytes]:
    """A stream of which each event is read before the next is sent: what was read when it is lent, and at its end."""
    decode.gates = {number: asyncio.Event() for number in range(1, 10)}
    async with proxy.post(prompt="hello", stream=True) as response:
        assert response.status == 200
        got = b""
        for number in range(1, 10):
            while got.count(b"data:") < number:
                got += await response.content.readany()
            decode.gates[number].set()
            if number == 6:
                await until(lambda: len(relays_of(proxy)) == 1, "the stream is lent")
                yield got
        yield got + await response.read()


async def test_a_lent_stream_is_the_same_for_its_client(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        got = [read async for read in lent(proxy, decode)][-1]
        assert tokens_of(got) == b"".join(map(event, WORDS)) + END
        assert len(relays_of(proxy)) == 0
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


@pytest.mark.parametrize(("returns", "asked"), [({1: 2, 2: 3, 3: None}, [1, 2, 3]), ({1: 1}, [1])])
def test_a_stream_that_is_lent_again_by_what_returns_is_taken_back_again(
    returns: dict[int, int | None], asked: list[int]
) -> None:
    """returns: by key, whose key the request has then: one of closed relays stays."""
    made, told = object.__new__(Request), []

    class Returning:
        def take_back(self, key: int) -> None:
            told.append(key)
            made._lent = returns[key]

    made._relays, made._lent = Returning(), 1  # type: ignore[assignment]
    made._take_back()
    assert told == asked


async def test_streams_return_although_our_own_code_fails_at_what_passed() -> None:
    """The native part tells each report once: the stream of the next one would wait for ever."""
    told: list[str] = []

    class Failing:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_passed(self, data: bytes) -> None:
            raise RuntimeError("of our own")

        def on_returned(self, unsent: bytes, unread: bytes) -> None:
            told.append(self.name)

    fd, keys = os.eventfd(0), iter((1, 2))
    native: Any = SimpleNamespace(fd=fd, reports=lambda: [(key, b"data: 1\n\n", True, b"", b"") for key in (1, 2)])
    native.lend = lambda *_: (next(keys), b"")
    relays = Relays(native)
    for name in ("first", "second"):
        relays.lend(5, 6, b"", 0, Failing(name))
    relays._turn()
    relays.close()
    os.close(fd)
    assert told == ["first", "second"]


async def test_the_worker_of_a_lent_stream_hears_that_the_client_left(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        async with contextlib.aclosing(lent(proxy, decode)) as streams:
            await anext(streams)
        await until(lambda: decode.received[0].aborted, "the worker's abort")
        await until(lambda: proxy.counted("requests_total", outcome="client_left") == 1, "its end")
        assert len(relays_of(proxy)) == 0


async def test_a_worker_that_falls_silent_in_a_lent_stream_is_given_up(
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


async def test_a_reset_in_a_lent_stream_is_its_failure_and_told_as_a_reset(
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
        async with contextlib.aclosing(lent(proxy, decode)) as streams:
            await anext(streams)
            assert len(relays_of(proxy)) == 1
            decode.gates[7].set()
            got = await anext(streams)
    assert b"decode worker lost (reset)" in got
    assert "Connection reset by peer" in caplog.text


async def test_a_lent_stream_goes_on_elsewhere_when_its_worker_dies(
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
        await until(lambda: len(relays_of(proxy)) == 1, "the stream is lent")
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


async def test_a_client_that_reads_slowly_gets_all_of_a_lent_stream(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.tokens = [f"{number} {'x' * 20_000}" for number in range(1000)]
    async with proxy_of([prefill], [decode]) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(request("Connection: close", stream=True))
        got = await reader.readuntil(b"data:")
        await until(lambda: any(front.writing_paused for front in proxy.doors._fronts), "a full socket")
        assert not decode.received[0].answered
        got += await reader.read()
    assert got.count(b"data:") == len(decode.tokens) + 2
    assert b"data: [DONE]" in got[-60:]
