"""Two thousand streams at once through a real proxy process: each whole, in order, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from pdlink.serve.process import raise_descriptor_limit
from tests.waiting import until

from .deployment import request
from .stubs import fleet_of, running, url_of

pytestmark = pytest.mark.e2e

STREAMS, EVENTS = 2000, 8
AT_ONCE = 64
"""Connections that are being made; the kernel's backlog is finite."""


async def read_stream(number: int, port: int, dialling: asyncio.Semaphore, first: asyncio.Semaphore) -> bytes:
    """The events of one stream, as the proxy sent them; `first` is released when one of them is here."""
    body = json.dumps(
        {"model": "m", "prompt": f"crowd {number}, {EVENTS} events", "max_tokens": EVENTS, "stream": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    async with dialling:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + body).encode())
        try:
            data = await reader.readuntil(b"\n\n")
        finally:
            first.release()
    try:
        return data + await reader.read()
    finally:
        writer.close()


def test_two_thousand_paced_streams_at_once_all_end_whole_and_unmixed() -> None:
    if raise_descriptor_limit() < 3 * STREAMS:
        pytest.skip(f"this needs {3 * STREAMS} open files: raise `ulimit -Hn`")
    with fleet_of(1, 1) as fleet:
        proxy = fleet.add_proxy(first_byte_timeout_s=180.0)

        async def crowd() -> list[bytes]:
            dialling, first = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(0)
            port = int(proxy.facts["port"])
            streams = [asyncio.create_task(read_stream(n, port, dialling, first)) for n in range(STREAMS)]
            for _ in streams:
                await first.acquire()
            assert await asyncio.to_thread(running, proxy) == STREAMS, "all of them are open at once"
            await asyncio.to_thread(request, fleet.decode[0].url + "/open")
            return await asyncio.gather(*streams)

        answers = asyncio.run(crowd())
        for number, answer in enumerate(answers):
            told = re.findall(rb'"text":"([^"]*)"', answer)
            first, *events, last = told  # the first is prefill's, the last says why it ends
            assert events == [b" %d.%d" % (number, event) for event in range(1, EVENTS)], (first, told)
            assert last == b""
            assert b"data: [DONE]" in answer
        until(fleet.idle, "nothing is left")
        assert request(url_of(proxy) + "/health").status == 200
