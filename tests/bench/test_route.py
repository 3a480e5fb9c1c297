"""The simulated fleet: nothing is lost, seeds are kept, and the policies that look at prompts are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from pdlink.plan.closed_form import prefill_times
from pdlink.plan.curves import Curves
from pdlink.plan.fleet import PolicyOutcome, Simulation, at_load
from pdlink.plan.traffic import Traffic  # noqa: TC001
from pdlink_bench.chats import conversations
from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.pair_times import PairTimes
from pdlink_proxy.policies.base import Pick, Policy, mixed
from pdlink_proxy.policies.registry import POLICIES
from pdlink_proxy.table import WorkerState

CURVES = Curves()


def played(policy: str, *, seed: int = 1, load: float = 0.8, slow: float = 0.0, num: int = 600) -> PolicyOutcome:
    requests = at_load(conversations(num, seed), load, 4, CURVES)
    return Simulation((policy, policy), 4, 4, slow=slow).run(requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_the_same_seed_gives_the_same_times(policy: str) -> None:
    assert played(policy).ttft_s == played(policy).ttft_s


@pytest.mark.parametrize("policy", ["prefix", "cost"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_policies_that_know_prompts_beat_those_that_do_not(policy: str, seed: int) -> None:
    mean_s = fmean(played(policy, seed=seed).ttft_s)
    for other in ("round_robin", "least_loaded"):
        assert mean_s < fmean(played(other, seed=seed).ttft_s), (policy, other, seed)


def test_cost_beats_the_others_where_workers_differ() -> None:
    mean_s = {policy: fmean(played(policy, load=0.5, slow=0.5).ttft_s) for policy in ("cost", "least_loaded")}
    assert mean_s["cost"] < mean_s["least_loaded"]


def test_a_full_decode_pool_makes_requests_wait_in_the_queue_and_loses_none() -> None:
    requests = at_load(conversations(300, 1), 0.8, 4, CURVES)
    small = Curves(pool_tokens=60_000)
    outcome = Simulation(("cost", "least_loaded"), 4, 1, curves=small).run(requests)
    assert len(outcome.ttft_s) == 300
    assert max(outcome.ttft_s) > max(Simulation(("cost", "least_loaded"), 4, 4).run(requests).ttft_s)


def test_one_request_alone_takes_what_the_curves_say() -> None:
    request = conversations(1, 1)
    expected = float(prefill_times(CURVES, request.prompt_tokens, None)[0])
    outcome = Simulation(("cost", "cost"), 2, 2).run(request)
    assert outcome.ttft_s == [pytest.approx(expected)]
    (tokens,), (answer,) = request.prompt_tokens.tolist(), request.answer_tokens.tolist()
    steps_s = sum(CURVES.decode_step_s(1, tokens + 1 + step) for step in range(answer - 1))
    assert outcome.played.per_token_s * (answer - 1) == pytest.approx(CURVES.tail_s(tokens, expected) + steps_s)


class BestOfTwo(Policy):
    """The less loaded of two workers drawn by chance."""

    notes = False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        number, num = mixed(turn + 1), len(workers)
        one, two = workers[number % num], workers[(number % num + 1 + (number >> 32) % (num - 1)) % num]
        return Pick(one if one.load <= two.load else two)


def test_many_routers_are_as_good_as_the_best_of_two_of_one_that_knows_all() -> None:
    """They know their own sends and reports that are 0.1 s old; a router that takes the minimum herds instead."""

    def requests(seed: int) -> Traffic:
        chats = conversations(3000, seed)
        apart = replace(chats, answer_tokens=np.full(3000, 16), keys=tuple((number,) for number in range(3000)))
        return at_load(apart, 0.85, 50, Curves())

    of_seeds = [requests(seed) for seed in (1, 2, 3)]

    def mean_s(policy: str, routers: int) -> float:
        played = (Simulation((policy, policy), 50, 50, routers=routers).run(each) for each in of_seeds)
        return fmean(fmean(outcome.ttft_s) for outcome in played)

    assert mean_s("least_loaded", 16) <= 1.05 * mean_s(f"{__name__}:BestOfTwo", 1)


def test_many_routers_find_the_kv_that_workers_publish() -> None:
    requests = at_load(conversations(1500, 1), 0.85, 16, Curves())
    found = {
        policy: Simulation((policy, "least_loaded"), 16, 16, routers=8, publish=True).run(requests)
        for policy in ("cost", "least_loaded")
    }
    assert found["cost"].cached > 2 * found["least_loaded"].cached
    assert fmean(found["cost"].ttft_s) < 0.6 * fmean(found["least_loaded"].ttft_s)


@pytest.mark.parametrize("policy", ["cost", "round_robin"])
@pytest.mark.parametrize("seed", [1, 2])
def test_workers_that_fail_and_drain_lose_no_request_and_breakers_keep_most_away(policy: str, seed: int) -> None:
    print(f"seed {seed}")
    requests = at_load(conversations(600, seed), 0.5, 8, CURVES)
    outcome = Simulation((policy, policy), 8, 8, away=0.2, seed=seed).run(requests)
    assert len(outcome.ttft_s) == 600
    assert outcome.outages > 0
    # Without breakers every tenth leg would fail: 0.2 of the workers are away, and half of those fail.
    assert 0 < outcome.failed_legs < 0.05 * 2 * 600
    assert outcome.ttft_s == Simulation((policy, policy), 8, 8, away=0.2, seed=seed).run(requests).ttft_s


def test_cost_learns_which_pairs_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before engines whose answers are decode's alone, and links that are slower than prefill."""
    curves = Curves(grace_s=1e9)
    requests = at_load(conversations(3000, 1), 0.6, 16, curves)

    def mean_s() -> float:
        return fmean(Simulation(("cost", "cost"), 16, 16, curves=curves, racks=4).run(requests).ttft_s)

    knows = mean_s()
    monkeypatch.setattr(PairTimes, "took", lambda *_: None)
    assert knows < 0.9 * mean_s()
