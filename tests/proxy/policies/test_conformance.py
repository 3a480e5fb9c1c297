"""What holds for every policy."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import ConfigError
from pdlink_proxy.policies.registry import POLICIES, make_policy
from pdlink_proxy.table import WorkerState
from tests.proxy.policies.fleets import pool, request, some_request

if TYPE_CHECKING:
    from pdlink_proxy.policies.base import Policy


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


def played(policy: Policy, seed: int) -> list[str]:
    """The keys that a policy picks in a fleet whose workers come, go and change."""
    rng = random.Random(seed)
    workers = pool(*[0] * 6)
    picked, running = [], []
    for turn in range(300):
        wanted = some_request(rng)
        candidates = rng.sample(workers, rng.randint(1, len(workers)))
        pick = policy.pick(wanted, candidates, turn)
        assert pick.worker in candidates
        assert 0 <= pick.cached_tokens <= wanted.num_tokens
        policy.placed(wanted, pick.worker)
        pick.worker.sent(wanted.num_tokens, turn)
        running.append((pick.worker, wanted.num_tokens))
        picked.append(pick.worker.key)
        if rng.random() < 0.8:
            worker, tokens = running.pop(rng.randrange(len(running)))
            worker.finished(tokens, turn + 0.5, served=True)
        if rng.random() < 0.05:
            gone = workers.pop(rng.randrange(len(workers)))
            policy.forget(gone)
            workers.append(WorkerState(f"http://new{turn}#e1"))
    return picked


@pytest.mark.parametrize("seed", range(5))
def test_the_pick_is_a_candidate_and_the_same_calls_pick_the_same(policy: Policy, seed: int) -> None:
    assert played(policy, seed) == played(type(policy)(), seed)


def test_an_idle_pool_is_used_whole(policy: Policy) -> None:
    workers = pool(*[0] * 4)
    for turn in range(400):
        wanted = request(turn, session=f"s{turn}")
        pick = policy.pick(wanted, workers, turn)
        policy.placed(wanted, pick.worker)
        pick.worker.sent(100, 0.0)
    assert min(worker.requests for worker in workers) >= 40


def test_a_forgotten_worker_holds_nothing(policy: Policy) -> None:
    workers, wanted = pool(0, 0), request(1, 2, 3)
    for worker in workers:
        policy.placed(wanted, worker)
        policy.forget(worker)
    assert policy.pick(wanted, workers, 0).cached_tokens == 0


def test_a_prompt_without_keys_is_placed(policy: Policy) -> None:
    workers = pool(0, 5, 0)
    policy.placed(request(), policy.pick(request(), workers, 3).worker)
    assert policy.pick(request(), workers, 4).worker in workers


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fastest", "policy: got 'fastest'; expected round_robin, least_loaded"),
        ("no.such:Thing", "cannot be made"),
        ("pdlink_proxy.fleet:WorkerState", "cannot be made"),
        ("builtins:dict", "expected subclasses of"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_a_remedy(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_policy(name)


def test_a_policy_of_ones_own_is_found() -> None:
    assert isinstance(make_policy("pdlink_proxy.policies.cost:Cost"), POLICIES["cost"])  # type: ignore[arg-type]
