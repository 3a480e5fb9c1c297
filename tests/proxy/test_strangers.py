"""What somebody without a key costs: lines of the log, names, probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec
from aiohttp.http_exceptions import BadHttpMessage

from pdlink.api.openai import parse
from pdlink.api.presence import WorkerLoad
from pdlink.few_lines import LINES, WINDOW_S, FewLines, http_logger
from pdlink.protocol.auth import AllowList
from pdlink_proxy.beats import Beats
from pdlink_proxy.discovery.register import JoinRules, RegisterSource
from pdlink_proxy.discovery.roll import MAX_UNPROVEN
from pdlink_proxy.page.routes import state_of
from pdlink_proxy.steps import Leg
from pdlink_proxy.watching import LEAST_S
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until
from tests.proxy.joiner import joiners, knows
from tests.proxy.test_register import DECODE, OTHER, PREFILL, PROXY, followed, health_of, joined

if TYPE_CHECKING:
    import pytest


def test_lines_beyond_a_few_are_left_out_and_counted() -> None:
    few = FewLines()
    assert [few.admits(1.0) for _ in range(LINES + 5)] == [""] * LINES + [None] * 5
    assert few.admits(1.0 + WINDOW_S) == " (5 such lines were left out)"
    assert few.admits(1.0 + 2 * WINDOW_S) == ""


def test_where_our_own_code_has_failed_reaches_the_log_without_what_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("pdlink.proxy.http").filters.clear()
    logger, sent = http_logger("pdlink.proxy.http"), "/" + "s" * 9
    try:
        parse(sent, b'{"model": "m"}')  # a KeyError of ours
    except KeyError:
        logger.exception("Error handling request")
    try:
        raise BadHttpMessage(sent)
    except BadHttpMessage:
        logger.exception("Error handling request")
    ours, theirs = (record.getMessage() for record in caplog.records)
    assert "Error handling request: KeyError\n" in ours
    assert "pdlink/api/openai.py" in ours
    assert theirs == "Error handling request: BadHttpMessage"
    assert sent not in ours


async def garbage(proxy: Proxy, data: bytes) -> bytes:
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.closing(writer):
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 10)


async def test_what_is_no_http_costs_a_few_short_lines_of_the_log(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("pdlink.proxy.http").filters.clear()
    heads = (
        b"X: " + b"\x01" * 8000,
        b"X" * 9000,
        b"A: b\r\nTransfer-Encoding: chunked\r\nContent-Length: 3",
        b"\xff" * 99,
    )
    async with proxy_of([prefill], [decode], api_keys=["k"]) as proxy:
        for _ in range(3 * LINES):
            for head in heads:
                answer = await garbage(proxy, b"GET / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
                assert answer[8:12] in (b" 400", b" 431")
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 0 < len(lines) <= LINES
    assert all(record.exc_info is None and len(record.getMessage()) < 300 for record in lines)
    assert not any(b"\x01\x01".decode() in record.getMessage() for record in lines)


async def test_a_connection_speaks_for_one_worker() -> None:
    with joiners() as hall:
        async with followed() as (register, _):
            hall.address = register.address
            joiner = hall.new()
            for number in range(50):
                joiner.say(f"http://127.0.0.1:{number + 1}", health_of(number))
            await until(lambda: register.describe()["refused"] != [], "the refusal")
            hall.new().say("http://127.0.0.1:99", health_of(99))
            await until(lambda: len(register.roll) == 2, "another one's worker")
            assert {life.name for life in register.roll} == {"prefill-a/0", "prefill-a/99"}


async def test_announced_workers_that_nobody_finds_are_bounded_and_the_page_does_not_wait_for_them(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with joined() as (proxy, hall):
        first, second = hall.new(), hall.new()
        first.beat(prefill)
        second.beat(decode)
        await until(lambda: all(proxy.router.services.pools.usable(side) for side in Leg), "the honest pair")
        (source,) = proxy.router.services.discovery.sources.values()
        for number in range(MAX_UNPROVEN + 40):
            hall.new().say(f"http://127.0.{number // 250}.{number % 250 + 1}:9", health_of(number))
        await until(lambda: source.source.describe()["refused"] != [], "the refusal")  # type: ignore[attr-defined]
        await until(lambda: len(proxy.router.services.pools.all) >= MAX_UNPROVEN, "as many are taken in")
        assert len(proxy.router.services.pools.all) <= MAX_UNPROVEN + 2
        await proxy.stream()
        async with asyncio.timeout(5):
            await state_of(proxy.router.services)


async def test_pokes_make_no_worker_be_asked_more_often(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], health_interval_s=10) as proxy:
        worker, began_s, before = (
            proxy.router.services.pools.all[0],
            asyncio.get_running_loop().time(),
            prefill.probed,
        )
        while asyncio.get_running_loop().time() - began_s < 5 * LEAST_S:
            worker.poke.set()
            await asyncio.sleep(0.001)
        assert 1 <= prefill.probed - before <= 6


async def test_a_key_that_is_taken_off_the_allow_list_beats_no_more() -> None:
    with joiners() as hall:
        async with followed(knows(PROXY, PREFILL, OTHER)) as (register, hearing):
            hall.address = register.address
            joiner, other = hall.new(PREFILL), hall.new(OTHER)
            joiner.say("http://127.0.0.1:1", health_of(1))
            await until(lambda: hearing.num_heard == 1, "its beat")
            register.allow(AllowList({OTHER.public: OTHER.name}))
            for _ in range(5):
                joiner.say("http://127.0.0.1:1", health_of(1))
            other.say("http://127.0.0.1:2", health_of(2) | {"name": "other"})
            await until(lambda: len(register.roll) == 2, "the other one's beat")
            await until(lambda: hearing.num_heard > 1, "its health")
            assert hearing.num_heard == 2


async def test_a_key_that_is_put_on_the_allow_list_joins() -> None:
    known = knows(PROXY, PREFILL)
    with joiners() as hall:
        async with followed(known) as (register, hearing):
            hall.address = register.address
            register.allow(AllowList({PREFILL.public: PREFILL.name, OTHER.public: OTHER.name}))
            hall.new(OTHER).say("http://127.0.0.1:2", health_of(2) | {"name": OTHER.name})
            await until(lambda: hearing.num_heard == 1, "its beat")
            assert len(register.roll) == 1
    RegisterSource("tcp://127.0.0.1:0", JoinRules(hearing, known)).allow(AllowList({}))  # before it listens


async def test_a_new_life_is_not_believed_before_a_probe(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Nor a beat in the name of another worker."""
    async with proxy_of([prefill], [decode], health_interval_s=10) as proxy:
        beats, worker = Beats(proxy.router.services.pools, lambda: None), proxy.router.services.pools.all[0]
        known = worker.health
        assert known is not None
        for other in ({"epoch": "new"}, {"name": "another"}):
            worker.poke.clear()
            beats.heard(worker.url, msgspec.structs.replace(known, **other))
            assert (worker.health, worker.poke.is_set()) == (known, True)
        worker.poke.clear()
        beats.loaded(worker.url, "new", WorkerLoad(7, 7, 7, 7, 7, 7))
        assert (worker.health, worker.poke.is_set()) == (known, True)
        beats.heard(worker.url, msgspec.structs.replace(known, running=5))
        assert worker.health is not None
        assert worker.health.running == 5


async def test_an_allowed_worker_takes_no_other_one_out(prefill: FakeWorker, decode: FakeWorker) -> None:
    """It announces their URLs under its own name, with the other role."""
    async with joined(knows(PROXY, PREFILL, DECODE, OTHER)) as (proxy, hall):
        first, second, liar = hall.new(PREFILL), hall.new(DECODE), hall.new(OTHER)
        first.say(prefill.url, prefill.health() | {"name": PREFILL.name})
        second.say(decode.url, decode.health() | {"name": DECODE.name})
        await until(lambda: len(proxy.router.services.pools.all) == 2, "both")
        told = prefill.health() | {"name": OTHER.name, "role": "decode", "epoch": "e9"}
        liar.say(prefill.url, told, age_s=0.0)
        (source,) = proxy.router.services.discovery.sources.values()
        await until(lambda: source.source.describe()["left_out"] != [], "the liar")  # type: ignore[attr-defined]
        await until(lambda: all(proxy.router.services.pools.usable(side) for side in Leg), "the honest pair")
        assert [worker.side for worker in proxy.router.services.pools.at(prefill.url)] == [Leg.PREFILL]
        await proxy.stream()
