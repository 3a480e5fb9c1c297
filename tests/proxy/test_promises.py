"""What a client and an operator may rely on, whatever happens: played with the proxy's own code in virtual time.

Each test plays seeded schedules. A seed that a failure names gives the same schedule again.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pdlink_proxy.queue import MAX_RETRY_AFTER_S, PATIENCE_S
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import FAILURES, State

from .virtual import Client, World, in_virtual_time


async def _settled(world: World) -> None:
    world.list()
    await asyncio.sleep(0.1)


# ---- whatever happens


def _happens(world: World) -> None:
    """Something to one of the workers."""
    rng = world.rng
    worker = rng.choice(list(world.workers.values()))
    match rng.randrange(9):
        case 0 | 1:
            worker.die()
        case 2 | 3:
            worker.come_back()
        case 4:
            worker.sick = not worker.sick
        case 5:
            worker.drains = not worker.drains
        case 6:
            world.listed[worker.url] = True
            world.list()
        case 7:
            world.listed.pop(worker.url, None)
            world.list()
            # What was heard of it is forgotten with it.
            world.heard_draining.discard(worker.url)
        case 8:
            world.listed[worker.url] = False
            world.list()


async def _whatever(seed: int) -> World:
    pools = {"pool_tokens": (seed % 3 + 1) * 3000}
    world = World(
        seed, seed % 4 + 1, seed // 4 % 4 + 1, queue_size=20, queue_timeout_s=8, no_worker_timeout_s=4, **pools
    )
    rng = world.rng
    if rng.random() < 0.5:
        await _settled(world)
    else:
        world.list()
    while world.now_s < 25:
        await asyncio.sleep(rng.expovariate(8))
        if rng.random() < 0.1:
            _happens(world)
        for _ in range(rng.choice((0, 1, 1, 12) if rng.random() < 0.05 else (1,))):
            tokens, answer = rng.choice((10, 200, 2000)), rng.choice((1, 100, 900))
            client = world.ask(rng.choice("abc"), tokens=tokens, answer=answer, priority=rng.randint(-9, 9))
            if rng.random() < 0.1:
                asyncio.get_running_loop().call_later(rng.expovariate(2), world.leave, client)
    await world.end()
    for each in world.clients:
        if not each.left and each.status == 503:
            assert each.retry_after_s is not None
            assert 1 <= each.retry_after_s <= MAX_RETRY_AFTER_S
    return world


@pytest.mark.parametrize("seed", range(12))
def test_no_request_is_lost_and_none_goes_to_a_worker_that_drains_or_is_removed(seed: int) -> None:
    """Workers die, come back, fail all that they get, drain, are removed and added; clients leave. `World` fails on a
    leg to a worker that must not have it; every client ends with an answer or leaves; no book keeps anything."""
    print(f"seed {seed}")

    async def play() -> None:
        await _whatever(seed)

    in_virtual_time(play)


def test_the_schedules_reach_what_they_are_to_reach() -> None:
    """A world in which nothing happens finds nothing."""
    ends: Counter[object] = Counter()
    seeds = iter(range(6))

    async def play() -> None:
        world = await _whatever(next(seeds))
        ends.update("left" if each.left else each.status for each in world.clients)
        ends["waited"] += sum(
            bool(each.placed_s) and each.placed_s[0] > each.came_s + 0.001 for each in world.clients
        )
        ends["tried again"] += sum(len(each.placed_s) > 1 for each in world.clients)

    for _ in range(6):
        in_virtual_time(play)
    assert {"left", 200, 503, "waited", "tried again"} <= {end for end, num in ends.items() if num}, ends


# ---- an empty pool


@pytest.mark.parametrize("side", Leg)
def test_an_empty_pool_for_20_s_lets_requests_wait_and_then_serves_them_all(side: Leg) -> None:
    async def play() -> None:
        world = World(1, 2, 2, no_worker_timeout_s=30, on_no_prefill="fail")
        await _settled(world)
        gone = [worker for worker in world.workers.values() if worker.side is side]
        for worker in gone:
            worker.die()
        await asyncio.sleep(1)
        assert all(worker.state is State.UNREACHABLE for worker in world.pools.workers[side])
        began_s = world.now_s
        for _ in range(40):
            world.ask()
            await asyncio.sleep(0.5)
        assert len(world.shared.queue) == 40
        assert world.now_s >= began_s + 20
        for worker in gone:
            worker.come_back()
        await world.end()
        assert [each.status for each in world.clients] == [200] * 40
        back_s = began_s + 20
        assert all(back_s <= each.placed_s[0] <= back_s + 20 for each in world.clients)

    in_virtual_time(play)


# ---- shares


async def _backlogged(world: World, tenants: dict[str, int], until_s: float) -> None:
    """Each tenant always has some waiting: who is answered asks again. tenants: tokens of their requests."""

    async def keeps_asking(tenant: str, most: int) -> None:
        while world.now_s < until_s:
            client = world.ask(tenant, tokens=world.rng.randint(10, most), answer=10)
            assert client.task is not None
            await client.task

    await asyncio.gather(*(keeps_asking(tenant, most) for tenant, most in tenants.items() for _ in range(25)))


@pytest.mark.parametrize("seed", range(2))
def test_tenants_that_wait_get_tokens_by_their_weights_within_five_percent(seed: int) -> None:
    """Whatever the sizes of their requests: a tenant with large ones gets no more than its share."""
    print(f"seed {seed}")
    shares = {"one": 1.0, "two": 2.0, "four": 4.0, "large": 1.0}

    async def play() -> None:
        world = World(seed, 2, 2, shares=shares, pool_tokens=600, queue_timeout_s=600)
        world.token_s = 0.01
        await _settled(world)
        all_ask = asyncio.create_task(_backlogged(world, {"one": 100, "two": 100, "four": 100, "large": 300}, 60))
        await asyncio.sleep(5)
        before = world.served_tokens.copy()  # to the first ones, who found room and did not wait
        await asyncio.sleep(50)
        served = world.served_tokens - before
        await all_ask
        await world.end()
        for tenant, weight in shares.items():
            due = weight / sum(shares.values())
            assert served[tenant] / served.total() == pytest.approx(due, rel=0.05), (seed, served)

    in_virtual_time(play)


# ---- nobody starves


@pytest.mark.parametrize("seed", range(2))
def test_the_oldest_request_of_every_tenant_is_served_within_a_bound(seed: int) -> None:
    """Also one that needs a whole worker while small ones keep all of them busy, and one under ever new keys.

    Bound: its turn comes after at most one request of each other share, and each turn takes at most the patience with
    which the large request is passed over and the time in which all that runs ends.
    """
    print(f"seed {seed}")
    longest = 900

    async def play() -> None:
        world = World(seed, 3, 3, pool_tokens=1000, queue_timeout_s=900, queue_size=4000)
        world.token_s = 0.005
        await _settled(world)
        rng = world.rng

        async def comes(tenant: str, least: int, most: int, rate: float) -> None:
            while world.now_s < 20:
                name = f"{tenant}{rng.randrange(10**6)}" if tenant == "new" else tenant
                world.ask(name, tokens=rng.randint(least, most), answer=10, priority=rng.choice((-1, 0, 0, 1)))
                await asyncio.sleep(rng.expovariate(rate))

        large = asyncio.create_task(comes("large", longest, longest, 0.1))
        await asyncio.gather(
            large, comes("small", 10, 300, 40), comes("steady", 10, 300, 5), comes("new", 10, 100, 3)
        )
        waiting = len(world.shared.queue)
        await world.end()
        worst_s = {
            tenant: _longest_turn_s([each for each in world.clients if each.tenant == tenant])
            for tenant in ("large", "small", "steady")
        }
        assert waiting > 20, "nobody had to wait"
        shares = 3 + 3  # new keys that come in such a time
        bound_s = shares * (PATIENCE_S + (longest + 10) * world.token_s)
        assert max(worst_s.values()) <= bound_s, (seed, worst_s, bound_s)

    in_virtual_time(play)


def _longest_turn_s(clients: list[Client]) -> float:
    """Longest time in which some of them waited and none was placed."""
    placed = sorted((each.placed_s[0], each.came_s) for each in clients if each.placed_s)
    assert len(placed) == len(clients), "one was never placed"
    longest, before_s = 0.0, 0.0
    for index, (at_s, _) in enumerate(placed):
        oldest_s = min(came_s for _, came_s in placed[index:])
        longest = max(longest, at_s - max(before_s, oldest_s))
        before_s = at_s
    return longest


# ---- priorities


@pytest.mark.parametrize("seed", range(2))
def test_a_tenants_urgent_requests_go_first_and_no_other_waits_for_ever(seed: int) -> None:
    print(f"seed {seed}")

    async def play() -> None:
        world = World(seed, 1, 1, pool_tokens=320, queue_timeout_s=900)
        await _settled(world)
        rng = world.rng
        patient = [world.ask(priority=1, answer=60) for _ in range(3)]
        while world.now_s < 60:  # more than can be served, all more urgent
            world.ask(priority=rng.choice((-1, 0)), answer=60)
            await asyncio.sleep(rng.expovariate(8))
        await world.end()
        served = world.placed
        # As vLLM: ten seconds of age make up for one step.
        stands = [each.came_s + 10 * each.priority for each in served]
        for index, each in enumerate(served):
            if each in patient[:2]:  # nobody else was there
                continue
            waited = (other for other in served[index + 1 :] if other.came_s < each.placed_s[0] - 0.01)
            assert all(stands[index] <= other.came_s + 10 * other.priority + 1e-6 for other in waited)
        assert max(each.placed_s[0] for each in patient) < 60

    in_virtual_time(play)


# ---- breakers


def test_a_worker_that_fails_what_it_gets_is_left_alone_and_gets_requests_again_when_it_serves() -> None:
    """Although it goes on with a long request all the while."""

    async def play() -> None:
        world = World(1, 1, 3, policy="round_robin")
        await _settled(world)
        long = world.ask(tokens=20, answer=15_000)
        await asyncio.sleep(0.01)
        (bad,) = (worker for worker in world.workers.values() if worker.side is Leg.DECODE and worker.took)
        (known,) = (worker for worker in world.pools.all if worker.url == bad.url)

        async def asked(num: int) -> int:
            """How many of them it serves."""
            before = bad.num_taken
            for _ in range(num):
                world.ask()
                await asyncio.sleep(0.05)
            return bad.num_taken - before

        bad.sick = True
        await asked(60)
        assert known.breaker.keeps_away(world.now_s)
        failed = sum(bool(each.said) and each.status == 500 for each in world.clients)
        assert FAILURES <= failed <= FAILURES + 2, "and the requests that found out that it still fails"
        bad.sick = False
        assert await asked(100) > 10
        assert long.ended_s is None
        assert not known.breaker.keeps_away(world.now_s)
        await world.end()
        assert long.status == 200

    in_virtual_time(play)
