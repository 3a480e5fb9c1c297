"""The simulated fleet: nothing is lost, seeds are kept, and the policies that look at prompts are worth it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from pdlink.errors import ConfigError
from pdlink_bench.fleet import Curves, Outcome, Simulation, at_load, conversations, read_trace
from pdlink_proxy.policies.registry import POLICIES

CURVES = Curves()


def played(policy: str, *, seed: int = 1, load: float = 0.8, slow: float = 0.0, num: int = 600) -> Outcome:
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
    (request,) = conversations(1, 1)
    request.at_s = 0.0
    prefill_s = CURVES.prefill_s(request.prompt_tokens, 0)
    expected = prefill_s + CURVES.tail_s(request.prompt_tokens, prefill_s)
    expected += CURVES.decode_step_s(1, request.prompt_tokens)
    assert Simulation(("cost", "cost"), 2, 2).run([request]).ttft_s == [pytest.approx(expected)]


def test_a_trace_is_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        json.dumps({"timestamp": 500, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}) + "\n"
    )
    (request,) = read_trace(path, 10)
    assert (request.at_s, request.prompt_tokens, request.answer_tokens, request.keys) == (0.5, 700, 9, (1, 2))
    for bad in ("{", '{"timestamp": 1}', "[1]"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="trace: cannot read"):
            read_trace(path, 10)
