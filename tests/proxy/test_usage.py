"""`cached_tokens` of an answer is what no worker computed, whichever engine answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.proxy.fakes import Proxy

EACH = pytest.mark.parametrize("dialect", ["pdlink", "sglang"])


@asynccontextmanager
async def pair(dialect: str) -> AsyncIterator[tuple[Any, Any]]:
    """Decode calls nearly all of the prompt cached: it was sent to it."""
    made: Any = FakeSglang if dialect == "sglang" else FakeWorker
    prefill, decode = await made("prefill").start(), await made("decode").start()
    prefill.cached_tokens, decode.cached_tokens = 2, 7
    yield prefill, decode
    await prefill.stop()
    await decode.stop()


async def told(proxy: Proxy, *, stream: bool) -> dict[str, Any]:
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with proxy.post(**more) as response:
        assert response.status == 200
        data = await response.read()
    documents = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith((b"data: {", b"{"))]
    usages = [said["usage"] for each in documents if (said := json.loads(each)).get("usage")]
    (usage,) = usages
    assert isinstance(usage, dict)
    return usage


@EACH
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_that_prefill_did_not_compute(dialect: str, stream: bool) -> None:
    async with pair(dialect) as (prefill, decode), proxy_of([prefill], [decode], dialect=dialect) as proxy:
        for _ in range(3):
            decode.gate = asyncio.Event()
            asked = asyncio.create_task(told(proxy, stream=stream))
            await until(lambda: proxy.router.services.pools.all[1].in_flight == 1, "decode's leg")
            await until(lambda: not proxy.router.services.pools.all[0].in_flight, "prefill's answer")
            decode.gate.set()
            usage = await asked
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
            assert usage["total_tokens"] == 11


async def test_of_decode_alone_they_are_its_own(decode: FakeWorker) -> None:
    decode.cached_tokens = 7
    async with proxy_of([], [decode]) as proxy:
        for stream in (False, True):
            assert (await told(proxy, stream=stream))["prompt_tokens_details"] == {"cached_tokens": 7}
