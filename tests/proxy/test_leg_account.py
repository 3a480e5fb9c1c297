"""What a leg counts for at its worker, however it ends and however often that is said."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink._http import Headers
from pdlink.breaker import Breaker
from pdlink_proxy.leg import MIN_PACE_NBYTES, MIN_PACE_TOKENS, LegAccount, WorkerLeg
from pdlink_proxy.outliers import MIN_LEGS, Outlier, leave_out
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
    frees = SimpleNamespace(queue=SimpleNamespace(num=1), serve_queue=lambda: freed.append(True))
    return LegAccount(worker, tokens, 0.0, cast("Any", frees)), freed


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


def leg_of(worker: Worker, tokens: int) -> WorkerLeg:
    leg = WorkerLeg(worker, tokens, 0.0, cast("Any", SimpleNamespace(queue=SimpleNamespace(num=0))))
    leg.leg, leg.hears = worker.side, cast("Any", SimpleNamespace(began=lambda *_: None, sent=lambda *_: None))
    return leg


def test_the_pace_of_a_short_prompt_is_not_known() -> None:
    worker = Worker("http://w", Leg.PREFILL)
    assert leg_of(worker, MIN_PACE_TOKENS - 1).pace(2.0, well=True) is None
    assert leg_of(worker, 1).pace(2.0, well=True) == 2.0 / MIN_PACE_TOKENS


def stream(worker: Worker, took_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of the worker's takes so long from its head to its end."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("pdlink_proxy.leg.time", clock)
    leg = leg_of(worker, 100)
    leg.on_head(200, Headers([]))
    leg.on_data(bytes(MIN_PACE_NBYTES))
    clock.monotonic = lambda: took_s
    leg.close(well=True)


@pytest.mark.parametrize(("usual_s", "out"), [(0.001, False), (0.5, True)])
def test_a_worker_of_slow_streams_is_compared_with_those_whose_streams_took_their_time(
    usual_s: float, out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that come at once tell of the connection: beside them every worker that computes would be left out."""
    workers = [Worker(f"http://w{number}", Leg.DECODE) for number in range(2)]
    for _ in range(2 * MIN_LEGS):
        stream(workers[0], 5.0, monkeypatch)
        stream(workers[1], usual_s, monkeypatch)
    leave_out([worker.outlier for worker in workers], 10.0, 0.5)
    assert [worker.outlier.out for worker in workers] == [out, False]
