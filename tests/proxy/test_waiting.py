"""Requests that wait for a worker, through a running proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdlink_proxy.placement import Queued
from pdlink_proxy.pools import Pools
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

PATIENT: dict[str, Any] = {"no_worker_timeout_s": 10}


async def waits(proxy: Proxy, num: int) -> None:
    await until(lambda: len(proxy.queue) == num, f"{num} to wait")


async def status_of(proxy: Proxy, **body: Any) -> int:
    async with proxy.post(**body) as response:
        await response.read()
        return int(response.status)


async def test_a_rolling_update_of_the_whole_pool_fails_no_request(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Others answer 503 then (vllm-project/router#140)."""
    async with proxy_of([prefill], [decode], **PATIENT) as proxy:
        await decode.stop()
        await until(lambda: proxy.router.services.pools.all[1].state is State.UNREACHABLE)
        asked = [asyncio.create_task(status_of(proxy)) for _ in range(5)]
        await waits(proxy, 5)
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            assert "pdlink_proxy_queued_requests 5.0" in await response.text()
        decode.epoch = "e2"
        await decode.start()
        assert await asyncio.gather(*asked) == [200] * 5
        assert len(decode.received) == 5


async def test_a_proxy_that_has_not_heard_its_workers_yet_lets_requests_wait(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode], settled=False, **PATIENT) as proxy:
        assert await status_of(proxy) == 200


async def test_a_wait_that_ends_is_told_with_the_time_to_try_again(prefill: FakeWorker, decode: FakeWorker) -> None:
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False, no_worker_timeout_s=0.1) as proxy:
        async with proxy.post() as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            error = (await response.json())["error"]
        assert error["code"] == "no_worker"
        assert "waited 0.1 s" in error["message"]
        assert len(proxy.queue) == 0


async def test_more_than_may_wait_are_told_at_once(prefill: FakeWorker, decode: FakeWorker) -> None:
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False, queue_size=1, **PATIENT) as proxy:
        first = asyncio.create_task(status_of(proxy))
        await waits(proxy, 1)
        async with proxy.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "overloaded"
        await decode.start()
        assert await first == 200


async def test_a_client_that_leaves_waits_no_more(prefill: FakeWorker, decode: FakeWorker) -> None:
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False, **PATIENT) as proxy:
        asked = asyncio.create_task(status_of(proxy))
        await waits(proxy, 1)
        asked.cancel()
        await waits(proxy, 0)
        await decode.start()
        assert await status_of(proxy) == 200
        assert len(decode.received) == 1


async def test_a_request_that_is_over_waits_no_more_while_its_client_reads_the_end(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False, no_worker_timeout_s=2) as proxy:
        asked = asyncio.create_task(status_of(proxy))
        await waits(proxy, 1)
        (request,) = proxy.router.services.requests
        front: Any = request.client.connection  # type: ignore[attr-defined]
        front.pause_writing()  # as asyncio does when a client does not read
        assert await asked == 503
        assert (len(proxy.queue), proxy.router.services.num_running) == (0, 1)
        front.resume_writing()
        await until(lambda: not proxy.router.services.num_running, "the end of the request")


async def test_a_full_pool_gets_the_next_request_when_one_ends(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.free_blocks, decode.gate = 20, asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy:
        asked = [asyncio.create_task(status_of(proxy, max_tokens=200))]
        await until(lambda: len(decode.received) == 1)
        decode.free_blocks, decode.running = 7, 1
        (worker,) = proxy.router.services.pools.workers[Leg.DECODE]
        await until(lambda: worker.work.room_tokens == 7 * 16, "the proxy to hear it")
        asked += [asyncio.create_task(status_of(proxy, max_tokens=200)) for _ in range(2)]
        await waits(proxy, 2)
        assert len(decode.received) == 1
        decode.free_blocks, decode.running = 20, 0
        decode.gate.set()
        assert await asyncio.gather(*asked) == [200] * 3


async def test_a_large_request_that_waits_for_room_does_not_hold_up_small_ones(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    decode.free_blocks, decode.running = 78, 20
    async with proxy_of([prefill], [decode]) as proxy:
        (worker,) = proxy.router.services.pools.workers[Leg.DECODE]
        await until(lambda: worker.work.room_tokens == 78 * 16, "the proxy to hear it")
        large = asyncio.create_task(status_of(proxy, max_tokens=90 * 16))
        await waits(proxy, 1)
        assert await asyncio.gather(*[status_of(proxy, max_tokens=16) for _ in range(8)]) == [200] * 8
        assert len(proxy.queue) == 1
        decode.free_blocks, decode.running = 100, 0
        assert await large == 200


async def test_shares_count_where_prefill_is_full(prefill: FakeWorker, decode: FakeWorker) -> None:
    """One tenant asks for much, then another for a little: without a limit its prompts wait behind all the others."""
    for limit, behind in ((0, 12), (1, 2)):
        prefill.gate, prefill.received, decode.needs = asyncio.Event(), [], prefill
        async with proxy_of([prefill], [decode], prefill_queue_tokens=limit) as proxy:

            async def ask(tenant: str, proxy: Proxy = proxy) -> None:
                body = {"model": "m", "prompt": "hello"}
                headers = {"Authorization": f"Bearer {tenant}"}
                async with proxy.client.post(proxy.url + "/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()

            asked = [asyncio.create_task(ask("much")) for _ in range(12)]
            in_line = 12 if limit == 0 else 1
            await until(lambda num=in_line: len(prefill.received) == num)  # type: ignore[misc]
            await waits(proxy, 12 - in_line)
            asked.append(asyncio.create_task(ask("little")))
            await (until(lambda: len(prefill.received) == 13) if limit == 0 else waits(proxy, 12))
            prefill.gate.set()
            await asyncio.gather(*asked)
        served = [each.headers["Authorization"] for each in prefill.received]
        assert served.index("Bearer little") <= behind
        assert (served.index("Bearer little") == 12) == (limit == 0)


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_retry_waits_for_a_worker_too(prefill: FakeWorker, decode: FakeWorker, retries: int) -> None:
    async with proxy_of([prefill], [decode], retries=retries, **PATIENT) as proxy:
        prefill.gate, decode.gate = asyncio.Event(), asyncio.Event()
        asked = asyncio.create_task(status_of(proxy))
        await until(lambda: len(decode.received) == 1)
        await decode.stop()
        if retries:
            await waits(proxy, 1)
            decode.gate = prefill.gate = None
            await decode.start()
        assert await asked == (200 if retries else 502)


async def test_why_a_request_went_where_it_went_can_be_asked(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    await decode.stop()
    async with proxy_of(prefills, [decode], settled=False, policy="cost", **PATIENT) as proxy:
        asked = asyncio.create_task(proxy.stream(prompt=list(range(2000))))
        await waits(proxy, 1)
        await decode.start()
        await asked
        await proxy.stream(prompt=list(range(2100)))
        async with proxy.client.get(f"{proxy.url}/decisions") as response:
            decisions = (await response.json())["decisions"]
        waited, placed, again = (each for each in decisions if each["verdict"] != "ended")
        assert (waited["verdict"], placed["verdict"], again["verdict"]) == ("waits", "placed", "placed")
        assert "no healthy decode worker" in waited["reason"]
        assert waited["request_id"] == placed["request_id"] != again["request_id"]
        assert (again["prefill"], again["tokens"], again["cached_tokens"]) == (placed["prefill"], 2100, 1536)
        async with proxy.client.get(f"{proxy.url}/decisions", params={"request": again["request_id"]}) as response:
            assert (await response.json())["decisions"][0] == again


async def test_a_queue_full_of_others_refuses_nobody_whose_workers_are_free(
    prefills: list[FakeWorker], decodes: list[FakeWorker]
) -> None:
    prefills[1].model = decodes[1].model = "busy"
    async with proxy_of(prefills, decodes, queue_size=1, **PATIENT) as proxy:
        await decodes[1].stop()
        await until(lambda: proxy.router.services.pools.all[3].state is State.UNREACHABLE)
        first = asyncio.create_task(status_of(proxy, model="busy"))
        await waits(proxy, 1)
        assert await status_of(proxy) == 200
        assert await status_of(proxy, model="busy") == 503
        await decodes[1].start()
        assert await first == 200


async def test_a_request_whose_placement_fails_stops_nobody_behind_it(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False, **PATIENT) as proxy:
        asked = []
        for num in (1, 2):
            asked.append(asyncio.create_task(status_of(proxy)))
            await waits(proxy, num)
        choose, answers = Pools.choose, iter(("fail",))

        def failing(pools: Pools, *args: Any, **kwargs: Any) -> Any:
            found = choose(pools, *args, **kwargs)
            if not isinstance(found, Queued) and next(answers, None):
                raise ValueError("a policy of somebody's own")
            return found

        monkeypatch.setattr(Pools, "choose", failing)
        await decode.start()
        assert await asyncio.gather(*asked) == [500, 200]
        await waits(proxy, 0)
