"""What is slower to load than to compute is not loaded, and what was never measured is tried."""

from __future__ import annotations

import random

import pytest

from pdlink.store.worth import COPY, HALF_LIFE_S, Choice, Speed, choose

CHUNK, NBYTES = 256, 1 << 20


def speed(latency_s: float, each_s: float, half_life_s: float = HALF_LIFE_S) -> Speed:
    """As measured by work of that speed, until time 0."""
    made = Speed(half_life_s)
    for amount in (1, 5, 20, 3, 8):
        made.measured(amount * NBYTES, latency_s + amount * NBYTES * each_s, 0.0)
    return made


def computing(tokens_per_s: float) -> Speed:
    made = Speed()
    made.measured(512, 512 / tokens_per_s, 0.0)
    return made


MEMORY, DISK = 0, 1


def chosen(
    places: str, *, cached: int = 0, disk: Speed | None = None, tokens_per_s: float = 10_000, now_s: float = 0.0
) -> Choice:
    """places: a letter for each chunk, m in memory and d on the disk."""
    loading = {COPY: speed(0, 1e-10), MEMORY: speed(0, 0)}
    if disk is not None:
        loading[DISK] = disk
    return choose(
        cached,
        len(places) * CHUNK,
        [{"m": MEMORY, "d": DISK}[letter] for letter in places],
        CHUNK,
        NBYTES,
        loading,
        computing(tokens_per_s),
        now_s,
    )


@pytest.mark.parametrize(("latency_s", "each_s"), [(0.0, 1e-9), (0.02, 1e-9), (0.5, 0.0), (0.001, 3e-8)])
def test_latency_and_rate_are_found_from_work_of_several_sizes(latency_s: float, each_s: float) -> None:
    made, rng = Speed(), random.Random(1)
    for _ in range(50):
        amount = rng.uniform(1e5, 1e8)
        made.measured(amount, latency_s + amount * each_s, 0.0)
    assert made.line() == pytest.approx((latency_s, each_s), rel=1e-3, abs=1e-12)
    assert made.takes_s(1e7, 0.0) == pytest.approx(latency_s + 1e7 * each_s, rel=1e-3)


def test_work_of_one_size_gives_a_rate_and_work_of_no_size_a_latency() -> None:
    made = Speed()
    assert (made.known, made.line()) == (False, (0.0, 0.0))
    for _ in range(3):
        made.measured(100, 2.0, 0.0)
    assert made.line() == pytest.approx((0.0, 0.02))
    stalled = Speed()
    stalled.measured(0, 10.0, 0.0)
    assert stalled.line() == (10.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_an_estimate_is_never_negative_whatever_was_measured(seed: int) -> None:
    made, rng = Speed(), random.Random(seed)
    for _ in range(100):
        made.measured(rng.choice([0, 1, 5, rng.uniform(0, 1e9)]), rng.uniform(0, 10), 0.0)
        latency_s, each_s = made.line()
        assert latency_s >= 0
        assert each_s >= 0


def test_what_was_measured_last_counts_most() -> None:
    made = Speed()
    for took_s in (*[1.0] * 50, *[3.0] * 20):
        made.measured(1, took_s, 0.0)
    assert 2.7 < made.takes_s(1, 0.0) < 3.0


def test_a_fast_place_gives_all_that_was_found() -> None:
    choice = chosen("mmmm")
    assert choice[:2] == (4 * CHUNK, "faster")
    assert choice[2:] == pytest.approx((4 * NBYTES * 1e-10, 4 * CHUNK / 10_000))


def test_a_place_slower_than_computing_gives_nothing() -> None:
    choice = chosen("dddd", disk=speed(0, 1e-7))
    assert (choice.end, choice.reason) == (0, "slower")
    assert choice.load_s > choice.other_s > 0


def test_a_prefix_is_loaded_up_to_the_place_that_does_not_pay() -> None:
    choice = chosen("mmddd", disk=speed(0, 1e-7))
    assert (choice.end, choice.reason) == (2 * CHUNK, "partly_faster")


def test_latency_is_worth_it_for_many_chunks_and_not_for_one() -> None:
    disk = speed(0.05, 1e-9)
    assert chosen("d", disk=disk).end == 0
    assert chosen("dddd", disk=disk).end == 4 * CHUNK
    assert chosen("dddd", disk=disk, cached=3 * CHUNK).end == 3 * CHUNK


def test_slow_chunks_are_loaded_for_the_sake_of_fast_ones_behind_them() -> None:
    assert chosen("dmmmmmm", disk=speed(0.05, 1e-9)).end == 7 * CHUNK


def test_what_was_never_measured_is_loaded() -> None:
    assert chosen("dddd")[:2] == (4 * CHUNK, "not_measured")
    choice = choose(0, 2 * CHUNK, [DISK] * 2, CHUNK, NBYTES, {DISK: speed(9, 9)}, Speed(), 0.0)
    assert (choice.end, choice.reason) == (2 * CHUNK, "not_measured")


def test_a_slow_place_is_tried_again_after_a_while() -> None:
    slow = speed(0, 1e-7)
    assert chosen("dddd", disk=slow, now_s=HALF_LIFE_S).end == 0
    assert chosen("dddd", disk=slow, now_s=3 * HALF_LIFE_S).end == 4 * CHUNK


@pytest.mark.parametrize(
    ("places", "cached", "reason"), [("", 0, "not_found"), ("", 64, "not_found"), ("mm", 512, "in_blocks")]
)
def test_nothing_is_loaded_that_is_not_found_or_is_in_the_blocks(places: str, cached: int, reason: str) -> None:
    assert chosen(places, cached=cached)[:2] == (cached, reason)
