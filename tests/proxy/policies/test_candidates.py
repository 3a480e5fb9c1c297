"""Several routers before the same workers."""

from __future__ import annotations

from collections import Counter

import pytest

from pdlink._index import HeldKV
from pdlink_proxy.fleet import Fleet, PlacementRequest
from pdlink_proxy.placement import Pair, Placer
from pdlink_proxy.policies.candidates import Candidates
from pdlink_proxy.table import Workers, WorkerState
from tests.proxy.policies.fleets import pool

STATES = [WorkerState(f"http://w{number}:1#e") for number in range(50)]
WORKERS = Workers.of(STATES)


def request(number: int = 0) -> PlacementRequest:
    return PlacementRequest("m", 4096, chain=tuple(range(number * 1000, number * 1000 + 8)))


def test_one_router_takes_the_least_loaded_of_all() -> None:
    workers = pool(*range(100, 150))
    placed = Placer("least_loaded", "least_loaded").place(request(), Fleet(workers, workers))
    assert isinstance(placed, Pair)
    assert placed.prefill is workers[0]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix", "cost"])
def test_routers_that_see_the_same_loads_do_not_send_to_the_same_worker(policy: str) -> None:
    workers = pool(*[0 if number == 7 else 100 for number in range(50)])
    fleet, chosen = Fleet(workers, workers), Counter[str]()
    for salt in range(64):
        placed = Placer(policy, policy, routers=64, salt=salt * 1000).place(request(salt), fleet)
        assert isinstance(placed, Pair)
        assert placed.prefill is not None
        chosen[placed.prefill.key] += 1
    assert max(chosen.values()) <= 16, "a global minimum takes all 64"


def test_every_router_looks_at_the_workers_that_a_prompt_draws() -> None:
    drawn = []
    for salt in range(16):
        candidates = Candidates(salt, affine=True)
        drawn.append({worker.key for turn in range(3) for worker in candidates.of(request(5), WORKERS, turn)})
    common = set.intersection(*drawn)
    assert common
    longer = PlacementRequest("m", 9000, chain=(*request(5).keys, *range(90_000, 90_010)))
    again = {worker.key for worker in Candidates(99, affine=True).of(longer, WORKERS, 0)}
    assert common <= again, "the next turn of the chat is looked for where this one was"


def test_the_worker_that_says_it_has_most_of_a_prompt_is_looked_at() -> None:
    asked = request()
    asked.held = HeldKV([(STATES[31].number, 4096, 0.0), (STATES[30].number, 512, 0.0)])
    for turn in range(20):
        assert STATES[31] in Candidates(3, affine=True).of(asked, WORKERS, turn)


def test_candidates_are_of_the_workers_each_once_and_a_few() -> None:
    for num in (1, 2, 3, 50):
        for turn in range(50):
            found = Candidates(turn, affine=True).of(request(turn), Workers.of(STATES[:num]), turn)
            assert 1 <= len(found) <= min(num, 6)
            assert len({worker.key for worker in found}) == len(found)
            assert all(worker in STATES[:num] for worker in found)
