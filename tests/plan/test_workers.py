"""The simulated fleet: equal to one that plays every pass and step, and nothing is lost in large ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pdlink.plan.curves import Curves
from pdlink.plan.fleet import Simulation
from pdlink.plan.traffic import Traffic
from pdlink.plan.workers import Played, SimulatedWorkers
from tests.plan.reference import Job, Pair

SMALL = Curves(pool_tokens=6000, max_batched_tokens=512, max_running=4, handoff_s=1e-3)


def drawn(seed: int, num: int, per_s: float, longest: int = 2000) -> list[Job]:
    draw = np.random.default_rng(seed)
    at_s = np.cumsum(draw.exponential(1 / per_s, num))
    jobs = []
    for at in at_s:
        prompt = int(draw.integers(1, longest))
        jobs.append(Job(float(at), prompt, int(draw.integers(1, 60)), int(draw.integers(0, prompt))))
    return jobs


def columns(jobs: list[Job]) -> list[Any]:
    return [np.array([getattr(job, name) for job in jobs]) for name in ("at_s", "prompt", "answer", "cached")]


def played(curves: Curves, jobs: list[Job]) -> Played:
    """By one pair, behind a line in which a request waits until decode has room for all of it, as in `reference`."""
    at_s, prompt, answer, cached = columns(jobs)
    workers, line, room = SimulatedWorkers(curves, 1, 1, prompt, answer), list[int](), curves.pool_tokens
    arrivals = [*enumerate(at_s.tolist()), (-1, math.inf)]
    for number, arrives_s in arrivals:
        while ended := workers.advance(arrives_s, first=True):
            for now_s, job, leg in ended:
                room += (job.prompt + job.answer) * leg
                while line and room >= jobs[line[0]].need:
                    first = line.pop(0)
                    room -= jobs[first].need
                    workers.enter(first, 0, 0, max(1, int(prompt[first] - cached[first])), int(prompt[first]), now_s)
        if number < 0:
            break
        if line or room < jobs[number].need:
            line.append(number)
        else:
            room -= jobs[number].need
            workers.enter(number, 0, 0, max(1, int(prompt[number] - cached[number])), int(prompt[number]), arrives_s)
    assert not line
    return workers.outcome(at_s)


@pytest.mark.parametrize("per_s", [2.0, 20.0, 100.0])
@pytest.mark.parametrize("link", [1e9, 26e9])
def test_it_gives_the_times_of_a_fleet_that_plays_every_step(per_s: float, link: float) -> None:
    for seed in range(5):
        print(f"seed {seed}")
        curves = SMALL.model_copy(update={"link_nbytes_per_s": link})
        jobs = drawn(seed, 80, per_s)
        found = played(curves, jobs)
        Pair(curves).play(jobs)
        assert found.ttft_s == pytest.approx([job.prefilled_s - job.at_s for job in jobs], abs=1e-9)
        expected = [(job.last_s - job.prefilled_s) / (job.answer - 1) if job.answer > 1 else np.nan for job in jobs]
        assert found.per_token_s == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_a_request_alone_takes_what_the_curves_say() -> None:
    found = played(Curves(overhead_s=0.01), [Job(3.0, 1000, 3, 400)])
    assert found.ttft_s[0] == pytest.approx(Curves().prefill_s(600, 400) + 0.01)
    tail_s = Curves().tail_s(1000, Curves().prefill_s(600, 400))
    steps_s = Curves().decode_step_s(1, 1001) + Curves().decode_step_s(1, 1002)
    assert found.per_token_s[0] == pytest.approx((tail_s + steps_s) / 2)


@pytest.mark.parametrize("workers", [(3, 2), (74, 69)])
@pytest.mark.parametrize("load", [0.5, 3.0])
def test_every_request_ends_and_the_same_seed_gives_the_same_times(workers: tuple[int, int], load: float) -> None:
    jobs = drawn(7, 3000, load * 15 * workers[0])
    *sizes, cached = columns(jobs)
    one, other = (
        Simulation(("cost", "least_loaded"), *workers, curves=SMALL).run(Traffic("drawn", *sizes), cached).played
        for _ in range(2)
    )
    assert np.isfinite(one.ttft_s).all()
    many = np.array([job.answer > 1 for job in jobs])
    assert np.isfinite(one.per_token_s[many]).all()
    assert (one.per_token_s[many] > 0).all()
    assert (one.ttft_s == other.ttft_s).all()
    # Each worker is busy for as long as its work takes.
    alone_s = sum(SMALL.prefill_s(job.prompt - job.cached, job.cached) - SMALL.prompt_s for job in jobs)
    assert one.prefill_busy * one.span_s * workers[0] >= alone_s


def test_waiting_for_memory_of_decode_counts_before_the_first_token() -> None:
    jobs = [Job(0.0, 900, 50, 0) for _ in range(4)]
    roomy = played(SMALL, jobs)
    tight = played(SMALL.model_copy(update={"pool_tokens": 1000}), jobs)
    assert roomy.ttft_s[3] < 0.5 < tight.ttft_s[3]


def test_a_slow_link_delays_the_tokens_after_the_first() -> None:
    jobs = [Job(0.5 * number, 1000, 10, 0) for number in range(20)]
    fast, slow = (played(SMALL.model_copy(update={"link_nbytes_per_s": speed}), jobs) for speed in (26e9, 1e9))
    assert (fast.ttft_s == slow.ttft_s).all()
    assert (slow.per_token_s > fast.per_token_s).all()


def test_a_slot_that_is_free_before_the_prompt_is_computed_is_used() -> None:
    one = SMALL.model_copy(update={"max_running": 1})
    jobs = [Job(0.0, 10, 2, 0), Job(0.0, 1900, 5, 0)]
    found = played(one, jobs)
    Pair(one).play(jobs)
    assert found.per_token_s == pytest.approx([(job.last_s - job.prefilled_s) / (job.answer - 1) for job in jobs])
