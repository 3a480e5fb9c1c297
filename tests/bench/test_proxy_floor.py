"""The router that decides nothing answers as the others do, or its figure would be of something else."""

from __future__ import annotations

import asyncio

import aiohttp

from pdlink_bench.proxy_floor import serving
from pdlink_bench.proxy_stub import CHUNKS, EVENT, WHOLE, Stub


async def test_the_bare_router_passes_decodes_answers_whole() -> None:
    class Prefill(Stub):
        role = "prefill"

    loop = asyncio.get_running_loop()
    workers = [await loop.create_server(kind, "127.0.0.1", 0) for kind in (Prefill, Stub)]
    urls = [f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in workers]
    router, pools = await serving(0, urls)
    url = f"http://127.0.0.1:{router.sockets[0].getsockname()[1]}/v1/completions"
    before = Stub.requests
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            async with client.post(url, json={"model": "m", "prompt": "hello"}) as answer:
                assert await answer.read() == WHOLE
            async with client.post(url, json={"model": "m", "prompt": "hello", "stream": True}) as answer:
                assert await answer.read() == EVENT * CHUNKS + b"data: [DONE]\n\n"
    assert Stub.requests == before + 8
    for each in (router, *workers):
        each.close()
    for _, _, pool in pools:
        assert len(pool) == 1, "a connection is used again"
        pool[0].transport.close()
    for _ in range(10):  # turns, in which the other ends hear of it
        await asyncio.sleep(0)
