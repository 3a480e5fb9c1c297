"""What pairs of workers differ by: the way of the KV, as streams have shown it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdlink_proxy.fleet import Fleet
from pdlink_proxy.members import ListedWorker, Members
from pdlink_proxy.pair_times import FEW, FORGOTTEN_S, MIN_TOKENS, PairTimes
from pdlink_proxy.placement import Pair, Placer
from pdlink_proxy.records import EndedRequest
from pdlink_proxy.steps import Leg
from tests.proxy.fakes import FakeWorker, proxy_of, until
from tests.proxy.policies.fleets import pool, request
from tests.proxy.test_records import kept

SPEED = 1000.0
"""Tokens per second of a mean prefill worker."""


def took(times: PairTimes, seconds_per_token: dict[tuple[str, str], float]) -> None:
    for (prefill, decode), each in seconds_per_token.items():
        for _ in range(2 * FEW):
            times.took(prefill, decode, 2000, 2000 * each, 0.0)
    times.compare(SPEED, 0.0)


def test_a_longer_way_is_told_in_tokens_of_prefill() -> None:
    times = PairTimes()
    took(times, {("near", "d"): 1e-3, ("far", "d"): 3e-3, ("far", "e"): 3e-3})
    assert times.behind == {"d": {"far": pytest.approx(2.0)}}, "e has one pair, which nothing is better than"


def test_what_a_decode_worker_takes_itself_makes_no_way_longer() -> None:
    times = PairTimes()
    took(times, {(prefill, decode): own for decode, own in (("d", 1e-3), ("e", 9e-3)) for prefill in ("a", "b")})
    assert times.behind == {}


def test_small_differences_few_prompts_and_short_ones_prove_nothing() -> None:
    rng = random.Random(1)
    times = PairTimes()
    for _ in range(200):
        for prefill in ("a", "b", "c"):
            times.took(prefill, "d", 2000, 2000 * 1e-4 * rng.uniform(0.7, 1.3), 0.0)
    for _ in range(FEW - 1):
        times.took("seldom", "d", 2000, 90.0, 0.0)
    for _ in range(FEW):
        times.took("short", "d", MIN_TOKENS - 1, 90.0, 0.0)
    times.compare(SPEED, 0.0)
    assert times.behind == {}
    times.took("seldom", "d", 2000, 90.0, 0.0)
    times.compare(0.0, 0.0)
    assert times.behind == {}, "nobody knows how fast prefill is"
    times.compare(SPEED, 0.0)
    assert times.behind["d"].keys() == {"seldom"}


def test_a_pair_that_is_avoided_is_tried_again_and_one_that_is_gone_is_forgotten() -> None:
    times = PairTimes()
    pairs = {("near", "d"): 1e-3, ("far", "d"): 3e-3}
    took(times, pairs)
    times.compare(SPEED, FORGOTTEN_S)
    assert times.behind
    times.compare(SPEED, FORGOTTEN_S + 1)
    assert times.behind == {}
    for gone in ("far", "d"):
        took(times, pairs)
        times.forget(gone)
        times.compare(SPEED, 0.0)
        assert times.behind == {}


def test_cost_sends_a_prompt_the_long_way_only_where_that_is_sooner() -> None:
    prefills, decodes = pool(0, 0), pool(0)
    near, far = prefills
    behind = {decodes[0].key: {far.key: 2.0}}
    placer = Placer("cost", "least_loaded")

    def chosen() -> Any:
        found = placer.place(request(1, 2, 3), Fleet(prefills, decodes, behind=behind))
        assert isinstance(found, Pair)
        return found.prefill

    assert [chosen() for _ in range(4)] == [near] * 4
    near.sent(2 * request(1, 2, 3).num_tokens + 1, 0.0)
    assert chosen() is far


def stream_of(handover_s: float, **more: Any) -> EndedRequest:
    said: dict[str, Any] = {"tries": [(100.0, 100.1, 101.0, 101.0 + handover_s)], "first_s": 101.01}
    return kept(**(said | {"prompt_tokens": 4000} | more))


@pytest.mark.parametrize(
    "more",
    [
        {"first_s": 101.0},  # of an answer in one piece decode's time is its end
        {"kv": "recomputed"},
        {"outcome": "broken"},
        {"tries": [(100.0, 100.1, 101.0, 101.25)] * 2},
        {"prefill": None},
        {"tries": [(100.0, 100.1, 101.0, None)]},
        {"tries": [(100.0, 100.1, None, 101.25)]},
    ],
)
def test_only_streams_whose_kv_came_at_once_tell_of_the_way(more: dict[str, Any]) -> None:
    assert stream_of(0.25).handover_s == 0.25
    assert stream_of(0.25, **more).handover_s is None


async def test_a_proxy_learns_the_ways_of_its_workers_from_their_streams(
    prefills: list[FakeWorker], decode: FakeWorker
) -> None:
    async with proxy_of(prefills, [decode], policy="cost") as proxy:
        pools = proxy.router.services.shared.pools
        for each in pools.workers[Leg.PREFILL]:  # as they would be after some work
            each.work.sent(4000, 0.0)
            each.work.finished(4000, 1.0, served=True)
        for worker, handover_s in zip(pools.workers[Leg.PREFILL], (2.0, 0.1), strict=True):
            for _ in range(FEW):
                pools.streamed(stream_of(handover_s), {Leg.DECODE: pools.workers[Leg.DECODE][0], Leg.PREFILL: worker})
        await until(lambda: bool(pools._pair_times.behind), "the next comparison")
        for _ in range(6):
            async with proxy.post() as response:
                assert response.status == 200
        assert [len(each.received) for each in prefills] == [0, 6]


async def test_the_last_streams_of_a_removed_worker_tell_nothing(
    prefills: list[FakeWorker], decode: FakeWorker
) -> None:
    async with proxy_of(prefills, [decode]) as proxy:
        pools = proxy.router.services.shared.pools
        (one, gone), (to,) = pools.workers[Leg.PREFILL], pools.workers[Leg.DECODE]
        pools.replace(Members((ListedWorker(one.url),), (ListedWorker(to.url),)))
        for prefill in (gone, one):
            pools.streamed(stream_of(0.1), {Leg.DECODE: to, Leg.PREFILL: prefill})
        assert pools._pair_times._taken[to.work.key].keys() == {one.work.key}


async def test_long_streams_tell_of_their_pair_and_others_do_not(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        pools = proxy.router.services.shared.pools
        await proxy.stream(prompt="short")
        async with proxy.post(prompt="word" * 4096) as response:
            assert response.status == 200
        assert not pools._pair_times._taken
        await proxy.stream(prompt="word" * 4096)
        one, to = (pools.workers[leg][0].work.key for leg in Leg)
        taken = pools._pair_times._taken[to][one]
        assert taken.num == 1
        assert taken.tokens >= MIN_TOKENS
