"""A second attempt beside one whose prefill is overdue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdlink.observe.explain import fetch_explanation
from tests.proxy.fakes import DONE, FakeWorker, Proxy, event, proxy_of, until

WHOLE = event("zero") + event("one") + event("two") + DONE
HEDGED: dict[str, Any] = {"hedge_factor": 2.0, "hedge_after_s": 0.05}


def pace(proxy: Proxy, tokens_per_s: float = 1e6) -> None:
    """What was measured of the prefill workers."""
    for worker in proxy.router.pools.all:
        worker.work.tokens_per_s = tokens_per_s


@pytest.mark.parametrize("stream", [True, False])
async def test_a_second_prefill_answers_for_one_that_hangs(
    prefills: list[FakeWorker], decodes: list[FakeWorker], stream: bool
) -> None:
    prefills[0].silent = True
    for worker, source in zip(decodes, prefills, strict=True):
        worker.needs = source
    async with proxy_of(prefills, decodes, **HEDGED) as proxy:
        pace(proxy)
        async with proxy.post(stream=stream) as response:
            data = await response.read()
            headers = response.headers
        assert response.status == 200
        assert data.count(b"zero") == 1
        await until(lambda: prefills[0].received[0].aborted and decodes[0].received[0].aborted, "the loser's end")
        ids = {worker.name: worker.received[0].transfer_id for worker in (*prefills, *decodes)}
        assert ids[prefills[0].name] == ids[decodes[0].name] != ids[prefills[1].name] == ids[decodes[1].name]
        assert headers["X-Pdlink-Transfer"] == ids[prefills[1].name]
        assert (headers["X-Pdlink-Prefill"], headers["X-Pdlink-Decode"]) == ("prefill-1", "decode-1")
        assert proxy.counted("hedges_total", result="won") == 1
        assert proxy.counted("attempts_total", why="hedge") == 1
        found = await asyncio.to_thread(fetch_explanation, proxy.url, headers["X-Request-Id"])
        assert [each["verdict"] for each in found.decisions] == ["placed", "placed", "hedged", "ended"]


async def test_the_first_attempt_may_still_win(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    for worker in prefills:
        worker.gate = asyncio.Event()
    async with proxy_of(prefills, decodes, **HEDGED) as proxy:
        pace(proxy)
        for worker in decodes:
            worker.gate = asyncio.Event()
        answer = asyncio.create_task(proxy.stream())
        await until(lambda: bool(prefills[1].received), "the hedge")
        first = prefills[0].gate
        assert first is not None
        first.set()
        await until(lambda: prefills[1].received[0].aborted, "the end of the hedge")
        for worker in decodes:
            assert worker.gate is not None
            worker.gate.set()
        assert await answer == WHOLE
        assert proxy.counted("hedges_total", result="lost") == 1


@pytest.mark.parametrize("why", ["off", "no pace", "no other", "no budget", "no room"])
async def test_no_second_attempt_where_there_is_no_reason_or_no_room(
    prefills: list[FakeWorker], decode: FakeWorker, why: str
) -> None:
    prefills[0].gate, decode.needs = asyncio.Event(), prefills[0]
    decode.free_blocks = 0 if why == "no room" else None  # an idle worker gets a request all the same
    settings = {"off": {**HEDGED, "hedge_factor": 0}}.get(why, HEDGED)
    async with proxy_of(prefills[:1] if why == "no other" else prefills, [decode], **settings) as proxy:
        if why != "no pace":
            pace(proxy)
        if why == "no budget":
            proxy.router.shared.retries.spend = lambda now: False  # type: ignore[method-assign]
        answer = asyncio.create_task(proxy.stream())
        await until(lambda: bool(prefills[0].received), "the first attempt")
        if why in ("off", "no pace"):
            assert proxy.router.shared.config.hedge_factor == settings["hedge_factor"]
            await asyncio.sleep(3 * HEDGED["hedge_after_s"])
        else:
            await until(
                lambda: any(
                    "second" in each.reason or "tried again" in each.reason for each in proxy.router.decisions
                ),
                "the refusal",
            )
        prefills[0].gate.set()
        assert await answer == WHOLE
        assert not prefills[1].received
        assert proxy.counted("attempts_total", why="hedge") == 0
