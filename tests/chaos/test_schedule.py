"""The schedule of faults: all from the seed, and all kinds of them."""

from __future__ import annotations

import pytest

from pdlink_bench.chaos.schedule import LOAD, PROXY, Kind, schedule

WORKERS = ("prefill-0", "decode-0", "decode-1")
SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_faults(seed: int) -> None:
    assert schedule(seed, 120, 5, WORKERS) == schedule(seed, 120, 5, WORKERS)


def test_another_seed_gives_other_faults() -> None:
    assert len({schedule(seed, 120, 5, WORKERS) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_fault_falls_into_every_interval(seed: int) -> None:
    faults = schedule(seed, 60, 5, WORKERS)
    assert [int(fault.at_s // 5) for fault in faults] == list(range(12))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_longer_run_begins_like_a_shorter_one(seed: int) -> None:
    """What was found in ten minutes can be looked at in one."""
    assert schedule(seed, 600, 5, WORKERS)[:12] == schedule(seed, 60, 5, WORKERS)


def test_every_kind_hits_every_process_sooner_or_later() -> None:
    hit = {(fault.kind, fault.target) for fault in schedule(0, 10_000, 5, WORKERS)}
    of_processes = (Kind.KILL, Kind.STOP, Kind.TERM)
    assert hit == {(kind, label) for kind in of_processes for label in (*WORKERS, PROXY)} | {
        (Kind.BURST, LOAD),
        (Kind.FULL, LOAD),
    }


def test_faults_that_go_on_all_the_time_are_not_in_the_schedule() -> None:
    assert schedule(1, 600, 5, WORKERS, [Kind.LOST, Kind.LATE, Kind.DUPLICATED, Kind.SLOW]) == ()
    assert schedule(1, 600, 5, WORKERS, tuple(Kind)) == schedule(1, 600, 5, WORKERS)


def test_only_the_kinds_asked_for_are_drawn() -> None:
    assert {fault.kind for fault in schedule(1, 600, 5, WORKERS, [Kind.KILL])} == {Kind.KILL}


def test_stops_last_from_half_a_second_to_twenty_and_the_proxys_at_most_three() -> None:
    stops = [fault for fault in schedule(2, 20_000, 5, WORKERS) if fault.kind is Kind.STOP]
    workers = [fault.for_s for fault in stops if fault.target != PROXY]
    assert 0.5 <= min(workers) < 1
    assert 15 < max(workers) <= 20
    assert max(fault.for_s for fault in stops if fault.target == PROXY) <= 3
