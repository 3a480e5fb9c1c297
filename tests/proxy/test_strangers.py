"""What somebody without a key costs: lines of the log, probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from aiohttp.http_exceptions import BadHttpMessage

from pdlink.api.openai import parse
from pdlink.few_lines import LINES, WINDOW_S, FewLines, http_logger
from pdlink_proxy.watching import LEAST_S
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of
from tests.waiting import WAIT_S

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
        return await asyncio.wait_for(reader.read(), WAIT_S)


async def test_what_is_no_http_costs_a_few_short_lines_of_the_log(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.few_lines.WINDOW_S", 10 * WAIT_S)
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


async def test_pokes_make_no_worker_be_asked_more_often(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], health_interval_s=10) as proxy:
        clock = asyncio.get_running_loop().time
        worker, began_s, before = proxy.router.services.pools.all[0], clock(), prefill.probed
        while (took_s := clock() - began_s) < 5 * LEAST_S:
            worker.poke.set()
            await asyncio.sleep(0.001)
        assert 1 <= prefill.probed - before <= took_s / LEAST_S + 1
