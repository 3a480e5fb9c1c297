"""Ratios and rates: the closed form beside every split, and what is promised."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pdlink.plan.closed_form import closed_form
from pdlink.plan.curves import Curves
from pdlink.plan.report import PlanReport, sentences
from pdlink.plan.sweep import ABOVE, Demand, Promise, best, best_rate, demand_of, fewest_workers, sweep
from pdlink.plan.traffic import Traffic, from_quantiles
from pdlink.plan.workers import Played

CHAT = from_quantiles({10: 200, 50: 1000, 99: 8000}, {10: 20, 50: 150, 99: 900}, 1500, 3)
PROMPTS = from_quantiles({10: 2000, 50: 7000, 99: 40_000}, {10: 20, 50: 100, 99: 500}, 1500, 3)


def demand(traffic: Traffic, per_token_s: float, ttft_s: float = 3.0) -> Demand:
    return demand_of(traffic, Curves(pool_tokens=1_000_000), Promise(ttft_s, per_token_s, 0.9))


@pytest.mark.parametrize("traffic", [CHAT, PROMPTS], ids=["chat", "prompts"])
@pytest.mark.parametrize("per_token_s", [0.012, 0.03])
def test_the_closed_form_is_within_one_worker_of_the_best_split(traffic: Traffic, per_token_s: float) -> None:
    asked = demand(traffic, per_token_s)
    found = best(sweep(asked, 12))
    assert found.per_s > 0
    assert abs(asked.closed_form().split(12)[0] - found.num_prefill) <= 1
    assert found.per_s <= asked.closed_form().rate(found.num_prefill, found.num_decode) * 1.1


def test_the_context_is_weighted_by_the_tokens_of_answers() -> None:
    prompt, answer = np.array([100, 10_000]), np.array([1, 101])
    assert closed_form(Curves(), prompt, answer, None, 0.02).context == pytest.approx(10_050.5)


def test_what_bounds_the_batch_is_named() -> None:
    prompt, answer = np.full(10, 1000), np.full(10, 101)
    step_s = Curves().decode_step_s
    form = closed_form(Curves(), prompt, answer, None, step_s(50, 50 * 1050.5))
    assert form.batch_limit == "time per token"
    assert form.batch == pytest.approx(50)
    assert closed_form(Curves(max_running=8), prompt, answer, None, 1.0).batch == 8
    tight = closed_form(Curves(pool_tokens=11_010), prompt, answer, None, 1.0)
    assert tight.batch_limit == "memory"
    # Its memory is taken while prefill computes, too.
    assert 5 < tight.batch < 10


def test_a_promise_below_one_step_gives_no_rate() -> None:
    asked = demand(CHAT, 0.004)
    assert best_rate(asked, 4, 4, asked.closed_form()).per_s == 0
    assert fewest_workers(asked, 1.0, 100) is None


def test_a_link_that_is_slower_than_prefill_is_noticed() -> None:
    fast, slow = (
        closed_form(Curves(link_nbytes_per_s=speed), CHAT.prompt_tokens, CHAT.answer_tokens, None, 0.02)
        for speed in (26e9, 1.25e9)
    )
    assert not fast.link_loses
    assert slow.link_loses
    assert slow.prefill_per_s == slow.link_per_s < fast.prefill_per_s


def test_cached_prompts_need_fewer_prefill_workers_and_as_much_of_the_link() -> None:
    half = CHAT.prompt_tokens // 2
    none, cached = (
        closed_form(Curves(), CHAT.prompt_tokens, CHAT.answer_tokens, held, 0.02) for held in (None, half)
    )
    assert cached.num_prefill(24) < none.num_prefill(24)
    assert cached.link_per_s == none.link_per_s


def test_the_fewest_workers_keep_the_promise_and_one_less_do_not() -> None:
    asked = demand(CHAT, 0.02)
    found = fewest_workers(asked, 50.0, 200)
    assert found is not None

    def kept(workers: int) -> float:
        middle = asked.closed_form().split(workers)[0]
        splits = [num for num in (middle - 1, middle, middle + 1) if 1 <= num < workers]
        return max(asked.promise.kept(asked.played(num, workers - num, 50.0))[0] for num in splits)

    assert kept(found) >= 0.9 > kept(found - 1)
    assert fewest_workers(asked, 50.0, found - 1) is None


def test_answers_of_one_token_need_no_decode() -> None:
    form = closed_form(Curves(), np.array([100]), np.array([1]), None, 0.02)
    assert math.isinf(form.decode_per_s)
    assert form.split(4) == (3, 1)


def test_a_promise_counts_requests_for_which_both_times_hold() -> None:
    times = Played(np.array([1.0, 1.0, 3.0]), np.array([0.01, 0.03, np.nan]), 0, 0, 0, 1)
    assert Promise(2.0, 0.02, 0.9).kept(times) == pytest.approx((1 / 3, 2 / 3, 2 / 3))


def test_a_trace_in_its_own_rhythm_is_as_fast_as_asked_and_keeps_its_bursts() -> None:
    bursts = Traffic("t", np.repeat(np.arange(10) * 3.0, 5), np.full(50, 100), np.full(50, 10))
    asked = demand_of(bursts, Curves(), Promise(1, 1, 1), num=100, as_traced=True)
    assert asked.unit_s[-1] == pytest.approx(100, rel=0.1)
    assert (np.diff(asked.unit_s) == 0).mean() > 0.75
    assert (np.diff(asked.unit_s) >= 0).all()


def test_splits_that_cannot_be_the_best_are_not_played() -> None:
    asked = demand(PROMPTS, 0.03)
    found = sweep(asked, 24)
    top = best(found).per_s
    played = {split.num_prefill for split in found}
    left_out = [num for num in range(1, 24) if num not in played]
    assert left_out
    assert all(asked.closed_form().rate(num, 24 - num) * ABOVE < top for num in left_out)


def test_a_rate_above_the_closed_form_is_said_without_a_share_above_100_percent() -> None:
    """It said "That is 107% of what they compute without ever waiting"."""
    asked = demand(CHAT, 0.03)
    form = asked.closed_form()
    split = best_rate(asked, 2, 2, form)
    splits = [replace(split, per_s=form.rate(2, 2) * share) for share in (1.07, 0.6)]
    above, below = (sentences(PlanReport("t", asked, form, [each], "decode", 0.0, None))[0] for each in splits)
    assert "That is more than the" in above
    assert "That is 60% of the" in below
