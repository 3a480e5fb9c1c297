"""What a leg counts for at its worker, however it ends and however often that is said."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.breaker import Breaker
from pdlink_proxy.leg import MIN_PACE_TOKENS, LegAccount
from pdlink_proxy.outliers import Outlier
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import FAILURES, Worker


def worker_on_trial() -> Worker:
    worker = Worker("http://w", Leg.DECODE)
    worker.breaker, worker.outlier = Breaker(math.inf, failures=FAILURES), Outlier()
    worker.outlier.leave_out(0.0, "slow")
    worker.judged()
    assert worker.on_trial
    return worker


def sent(worker: Worker, tokens: int = 100) -> tuple[LegAccount, list[bool]]:
    freed: list[bool] = []
    worker.work.sent(tokens, 0.0)
    return LegAccount(worker, worker.work, tokens, 0.0, lambda: freed.append(True)), freed


@given(ends=st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=5))
def test_load_is_given_back_once_whatever_ends_are_said(ends: list[bool | None]) -> None:
    worker = Worker("http://w", Leg.DECODE)
    account, freed = sent(worker)
    assert (worker.work.requests, worker.work.tokens) == (1, 100)
    for well in ends:
        account.end(1.0, well=well)
    assert (worker.work.requests, worker.work.tokens, freed) == (0, 0, [True])
    assert worker.breaker.failures == (False in ends), "a failure counts once, also one that shows late"


def test_the_first_end_counts_unless_a_failure_shows_later() -> None:
    worker = Worker("http://w", Leg.DECODE)
    account, _ = sent(worker)
    account.end(1.0, well=True)
    account.end(1.0, well=None)
    assert worker.breaker.failures == 0
    account.end(1.0, well=False)
    assert (worker.breaker.failures, account.failed) == (1, True)
    account.end(1.0, well=True)
    assert worker.breaker.failures == 1


@pytest.mark.parametrize("well", [True, False, None])
def test_a_leg_that_finds_out_about_a_worker_makes_room_for_the_next_one(well: bool | None) -> None:
    worker = worker_on_trial()
    late_s = 1e9
    assert worker.outlier.allows(late_s)
    account, _ = sent(worker)
    assert not worker.outlier.allows(late_s), "one at a time"
    account.end(1.0, well=well)
    assert worker.outlier.out is (well is not True)
    account.end(1.0, well=False)
    assert worker.outlier.allows(2 * late_s)


def test_the_pace_of_a_short_prompt_is_not_known() -> None:
    worker = Worker("http://w", Leg.PREFILL)
    short, _ = sent(worker, MIN_PACE_TOKENS - 1)
    assert short.pace(2.0) is None
    long, _ = sent(worker, 1)
    assert long.pace(2.0) == 2.0 / MIN_PACE_TOKENS
