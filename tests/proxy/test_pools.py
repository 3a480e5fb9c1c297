"""Which workers get requests: absent, slow, dead, reborn, draining and misplaced ones."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from pdlink.api.health import Health
from pdlink.config import ProxyConfig
from pdlink.errors import ConfigError
from pdlink_proxy.app import build_app
from pdlink_proxy.dialects.own import read_health
from pdlink_proxy.fleet import Fleet
from pdlink_proxy.members import ListedWorker, Members
from pdlink_proxy.placement import Pairs, Placer
from pdlink_proxy.pools import Pools
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State, Worker
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until


def health(**more: object) -> bytes:
    fields = {"status": "ok", "name": "n", "epoch": "e1", "role": "decode", "model": "m", "control": "tcp://h:1"}
    return json.dumps(fields | more).encode()


def state_of(worker: Worker) -> State:
    return worker.state


def states(proxy: Proxy) -> list[State]:
    return [worker.state for worker in proxy.router.services.pools.all]


async def status_of(proxy: Proxy, **body: Any) -> int:
    async with proxy.post(**body) as response:
        await response.read()
        return int(response.status)


# ---- one worker


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [
        (200, health(), State.OK),
        (200, health(role="both"), State.OK),
        (200, health(role="prefill"), State.WRONG_ROLE),
        (503, health(status="draining"), State.DRAINING),
        (200, health(status="draining"), State.DRAINING),
        (503, health(status="failed"), State.FAILED),
        (500, health(), State.FAILED),
        (200, b"<html>", State.INVALID),
        (200, b"{}", State.INVALID),
        (200, health(running="many"), State.INVALID),
        (404, b"", State.INVALID),
    ],
)
def test_an_answer_makes_the_state(status: int, body: bytes, state: State) -> None:
    worker = Worker("http://w", Leg.DECODE)
    worker.heard(read_health(status, body), faults_when_asked=0)
    assert worker.state is state
    assert (worker.reason == "") == (state is State.OK)


def test_only_an_answer_asked_for_after_the_fault_clears_it() -> None:
    """A question on its way while the worker died may still be answered 200 from a buffer."""
    worker = Worker("http://w", Leg.DECODE)
    worker.heard(read_health(200, health()), faults_when_asked=0)
    worker.fault("reset")
    worker.heard(read_health(200, health()), faults_when_asked=0)
    assert state_of(worker) is State.UNREACHABLE
    worker.heard(read_health(200, health()), faults_when_asked=1)
    assert state_of(worker) is State.OK


def test_a_worker_is_back_at_the_level_at_which_it_went(caplog: pytest.LogCaptureFixture) -> None:
    """At the proxy's default level an operator read of every loss, and never that it was over."""
    worker = Worker("http://a:1", Leg.PREFILL)
    health = Health("ok", "a", "e", "prefill", "m", "tcp://a:2")
    worker.heard(health, faults_when_asked=0)
    assert caplog.records == [], "the first time is no news"
    worker.fault("reset")
    worker.heard(health, faults_when_asked=1)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "prefill worker http://a:1: unreachable (reset)"),
        ("WARNING", "prefill worker http://a:1: ok again"),
    ]


def test_one_late_answer_takes_nobody_out_and_two_do() -> None:
    worker = Worker("http://w", Leg.DECODE)
    worker.heard(read_health(200, health()), faults_when_asked=0)
    worker.silent(time.monotonic())
    assert state_of(worker) is State.OK
    worker.silent(time.monotonic())
    assert state_of(worker) is State.UNREACHABLE
    worker.heard(read_health(200, health()), faults_when_asked=0)
    worker.silent(time.monotonic())
    assert state_of(worker) is State.OK


def test_another_epoch_is_another_incarnation_which_nobody_avoids() -> None:
    worker = Worker("http://w", Leg.DECODE)
    worker.heard(read_health(200, health()), faults_when_asked=0)
    before = worker.key
    worker.heard(read_health(200, health()), faults_when_asked=0)
    assert (worker.key, worker.incarnations) == (before, 1)
    worker.heard(read_health(200, health(epoch="e2")), faults_when_asked=0)
    assert worker.key != before
    assert worker.incarnations == 2


@pytest.mark.parametrize("urls", [["10.0.0.1:8000"], ["http://a", "http://a/"], ["ftp://a"]])
def test_urls_that_cannot_be_meant_are_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="prefill"):
        Pools(Placer("round_robin", "round_robin")).replace(Members(tuple(map(ListedWorker, urls))))


# ---- through the proxy


async def test_workers_may_come_up_after_the_proxy(prefill: FakeWorker, decode: FakeWorker) -> None:
    await prefill.stop()
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False) as proxy:
        await until(lambda: states(proxy) == [State.UNREACHABLE] * 2, "nobody there")
        assert await status_of(proxy) == 503
        await prefill.start()
        await decode.start()
        await until(lambda: states(proxy) == [State.OK] * 2, "both there")
        assert await status_of(proxy) == 200


async def test_the_whole_decode_pool_may_go_and_come_back(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    """Other routers have to be restarted then (dynamo#8965)."""
    async with proxy_of([prefill], decodes) as proxy:
        for epoch in ("e2", "e3"):
            assert await status_of(proxy) == 200
            for worker in decodes:
                await worker.stop()
            await until(lambda: states(proxy)[1:] == [State.UNREACHABLE] * 2)
            assert await status_of(proxy) == 503
            for worker in decodes:
                worker.epoch = epoch
                await worker.start()
            await until(lambda: states(proxy) == [State.OK] * 3)
        assert [worker.incarnations for worker in proxy.router.services.pools.workers[Leg.DECODE]] == [3, 3]


async def test_a_failed_connection_takes_a_worker_out_until_its_next_good_answer(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    """No permanent blacklist after one failed send (sglang#35823)."""
    bad = decodes[0]
    async with proxy_of([prefill], decodes) as proxy:
        prefill.gate = asyncio.Event()
        bad.resets = 1
        assert [await status_of(proxy) for _ in range(2)] == [200, 200]
        known = proxy.router.services.pools.workers[Leg.DECODE][0]
        assert known.faults == 1
        await until(lambda: known.state is State.OK, "its return")
        before = len(bad.received)
        assert [await status_of(proxy) for _ in range(4)] == [200] * 4
        assert len(bad.received) > before


@pytest.mark.parametrize("status", ["draining", "failed"])
async def test_a_worker_that_says_no_gets_no_new_requests(
    prefill: FakeWorker, decodes: list[FakeWorker], status: str
) -> None:
    decodes[0].gates = {1: asyncio.Event()}
    async with proxy_of([prefill], decodes) as proxy:
        running = asyncio.create_task(proxy.stream())
        await until(lambda: len(decodes[0].received) == 1)
        decodes[0].status = status
        await until(lambda: states(proxy)[1].value == status)
        assert [await status_of(proxy) for _ in range(3)] == [200] * 3
        assert [len(worker.received) for worker in decodes] == [1, 3]
        decodes[0].gates[1].set()
        assert b"two" in await running, "the running one finishes"


async def test_a_worker_in_the_wrong_list_is_named_and_not_used(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Two swapped URLs look like a broken link otherwise (vllm-router#46)."""
    async with proxy_of([decode], [decode, prefill], on_no_prefill="fail") as proxy:
        assert states(proxy) == [State.WRONG_ROLE, State.OK, State.WRONG_ROLE]
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 503
            (listed,) = (await response.json())["prefill"]
        assert listed["state"] == "wrong role"
        assert "'decode'" in listed["reason"]
        assert await status_of(proxy) == 503


async def test_without_prefill_decode_works_alone_unless_that_is_forbidden(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    await prefill.stop()
    async with proxy_of([prefill], [decode], settled=False, on_no_prefill="fail") as proxy:
        await until(lambda: states(proxy) == [State.UNREACHABLE, State.OK])
        async with proxy.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "no_worker"
        assert decode.received == []
        assert proxy.counted("requests_total", outcome="unavailable") == 1
    async with proxy_of([prefill], [decode], settled=False) as proxy:
        await until(lambda: states(proxy) == [State.UNREACHABLE, State.OK])
        async with proxy.post() as response:
            assert response.status == 200
            assert "X-Pdlink-Prefill" not in response.headers
        assert "kv_transfer_params" not in decode.received[0].body
        assert proxy.counted("fallbacks_total", kind="decode_only") == 1
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 200
            body = await response.json()
        assert body["status"] == "degraded", "it never answered"
        assert prefill.url in body["reason"]


async def test_requests_go_to_workers_of_their_model(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    prefills[1].model = decodes[1].model = "other"
    async with proxy_of(prefills, decodes) as proxy:
        for _ in range(3):
            assert await status_of(proxy, model="other") == 200
        assert [len(worker.received) for worker in (*prefills, *decodes)] == [0, 3, 0, 3]
        async with proxy.post(model="nobody's") as response:
            assert response.status == 404
            error = (await response.json())["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        async with proxy.client.get(f"{proxy.url}/v1/models") as response:
            cards = (await response.json())["data"]
            assert [card["id"] for card in cards] == ["m", "other"]
        async with proxy.client.get(f"{proxy.url}/v1/models/other") as response:
            assert (response.status, await response.json()) == (200, cards[1])
        async with proxy.client.get(f"{proxy.url}/v1/models/nobody's") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        await decodes[1].stop()
        await until(lambda: states(proxy)[3] is State.UNREACHABLE)
        assert await status_of(proxy, model="other") == 503, "away is not unknown"
    async with proxy_of(prefills, decodes, settled=False) as proxy:
        await until(lambda: states(proxy)[2:] == [State.OK, State.UNREACHABLE])
        assert await status_of(proxy, model="other") == 503, "the worker that never answered may hold it"


async def test_each_leg_may_have_a_policy_of_its_own(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    policy = {"prefill": "prefix", "decode": "round_robin"}
    async with proxy_of(prefills, decodes, policy=policy) as proxy:
        for turn in range(4):
            async with proxy.post(prompt="once upon a time " * 200 + str(turn)) as response:
                assert response.status == 200
        assert sorted(len(worker.received) for worker in prefills) == [0, 4]
        assert [len(worker.received) for worker in decodes] == [2, 2]


async def test_what_a_worker_has_to_do_is_known_while_it_does_it(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.gates = {1: asyncio.Event()}
    async with proxy_of([prefill], [decode]) as proxy:
        one, other = (worker.work for worker in proxy.router.services.pools.all)
        running = asyncio.create_task(proxy.stream(prompt=list(range(100)), max_tokens=10))
        await until(lambda: prefill.received != [] and one.requests == 0, "prefill's token")
        assert (other.requests, other.tokens) == (1, 110)
        decode.gates[1].set()
        await running
        await until(lambda: other.requests == 0)
        assert one.tokens == other.tokens == 0
        assert one.tokens_per_s


async def test_what_a_life_that_is_over_was_sent_is_forgotten(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    async with proxy_of(prefills, [decode], policy="prefix") as proxy:
        pools = proxy.router.services.pools
        sent_to = pools._placer.prefill.sent_to  # type: ignore[attr-defined]
        await proxy.stream(prompt="x" * 5000)
        assert sent_to.num_keys == 2
        old = {each.work.key for each in pools.workers[Leg.PREFILL]}
        for each in prefills:
            each.epoch = "another"
        await until(lambda: all(each.work.key not in old for each in pools.workers[Leg.PREFILL]), "the next life")
        assert sent_to.num_keys == 0


def test_a_policy_that_nobody_has_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="policy: got 'fastest'"):
        build_app(ProxyConfig(policy={"prefill": "fastest"}))


async def test_pairs_are_made_once_for_a_settled_fleet_and_not_for_another(
    prefills: list[FakeWorker], decodes: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make them takes longer than to place a request without."""
    async with proxy_of(prefills, decodes, policy="cost") as proxy:
        pools, made = proxy.router.services.pools, list[Fleet]()
        pairs = pools._placer.pairs

        def watched(fleet: Fleet) -> Pairs | None:
            made.append(fleet)
            return pairs(fleet)

        monkeypatch.setattr(pools._placer, "pairs", watched)
        monkeypatch.setattr(pools, "_compare_now_and_then", lambda: None)
        monkeypatch.setattr(Worker, "judged", lambda _: None)
        worker = pools.workers[Leg.PREFILL][0]
        for on_trial in (False, True):
            worker.on_trial = on_trial
            worker._tell()
            for _ in range(3):
                assert await status_of(proxy) == 200
            assert len(made) == 1
