"""The catalog under random schedules of holders that write, read and die; and the same with planted bugs."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.store.catalog import Catalog
from pdlink.store.extents import ALIGNMENT_NBYTES
from pdlink.store.policies.registry import POLICIES, make_policy

from .catalog_mutants import MUTANTS
from .catalog_world import MOVES, World

PAGE = ALIGNMENT_NBYTES
SCHEDULES = st.lists(st.integers(0, 2**40 - 1), max_size=100)
KEYS = [b"%d" % index for index in range(10)]
MAX_SCHEDULES = 400


def random_schedule(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2**40) for _ in range(rng.randint(1, 400))]


def breaks(seed: int) -> bool:
    try:
        World("lru").play(random_schedule(seed))
    except (AssertionError, KeyError):
        return True
    return False


@settings(max_examples=200, deadline=None)
@given(policy=st.sampled_from(sorted(POLICIES)), schedule=SCHEDULES)
def test_no_schedule_breaks_the_catalog(policy: str, schedule: list[int]) -> None:
    World(policy).play(schedule)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_long_schedule_breaks_the_catalog(policy: str) -> None:
    for seed in range(100):
        World(policy).play(random_schedule(seed))


def test_schedules_reach_what_they_are_to_reach() -> None:
    counts: Counter[str] = Counter()
    for seed in range(300):
        world = World("lru")
        world.play(random_schedule(seed))
        counts += world.counts
    ends = {"stored", "evicted", "removed", "committed", "released", "expired", "garbage refused", "pinned", "buried"}
    assert {name for name, count in counts.items() if count} >= {*ends, *MOVES}, counts


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str) -> None:
    owner, method, wrong = MUTANTS[name]
    with patch.object(owner, method, wrong):
        assert any(breaks(seed) for seed in range(MAX_SCHEDULES))


def catalog(pages: int, *, quota_pages: int = 0) -> Catalog:
    made = Catalog(make_policy("lru"), pin_quota_nbytes=quota_pages * PAGE)
    made.grow(pages * PAGE)
    return made


def store(made: Catalog, keys: list[bytes]) -> None:
    made.commit(made.reserve(keys, PAGE, "w"))


def test_the_head_of_a_prefix_is_the_last_to_be_evicted() -> None:
    made = catalog(4)
    store(made, KEYS[:4])
    made.release(made.lease(KEYS[:4], "r", "", 1.0))
    for taken in range(1, 4):
        store(made, [b"new-%d" % taken])
        assert made.lookup(KEYS) == 4 - taken


def test_what_does_not_fit_is_a_shorter_prefix_and_nobody_waits() -> None:
    """Two loads that each hold half of the arena and want the rest both go on with what they have."""
    made = catalog(6)
    store(made, KEYS[:6])
    first, second = made.lease(KEYS[:3], "a", "", 9.0), made.lease(KEYS[:6], "b", "", 9.0)
    assert made.reserve([b"x", b"y"], PAGE, "a") == ()
    made.release(second)
    assert [slot.key for slot in made.reserve([b"x", b"y", b"z", b"v"], PAGE, "a")] == [b"x", b"y", b"z"]
    assert made.lookup(KEYS) == 3
    assert made.release(first)


def test_a_record_larger_than_the_arena_evicts_nothing() -> None:
    made = catalog(4)
    store(made, KEYS[:4])
    assert made.reserve([b"huge"], 4 * PAGE + 1, "w") == ()
    assert made.lookup(KEYS) == 4


def test_a_leased_record_in_the_middle_does_not_cost_all_others() -> None:
    """A record of half the arena finds no range; eviction for it stops after four times its bytes."""
    made = catalog(40)
    keys = [b"k%d" % index for index in range(40)]
    store(made, keys)
    leases = [made.lease([key], "r", "", 9.0) for key in keys[1::2]]
    assert made.reserve([b"two pages"], 2 * PAGE, "w") == ()
    assert len(made) == 40 - 8
    assert all(made.release(lease) for lease in leases)


def test_a_pin_keeps_up_to_its_quota_until_it_is_taken_back() -> None:
    made = catalog(4, quota_pages=2)
    store(made, KEYS[:4])
    assert made.pin(KEYS[:4], "operator") == 2
    assert made.pin(KEYS[:2], "other") == 2, "bytes that are pinned already cost no quota"
    store(made, [b"a", b"b", b"c", b"d"])
    assert made.lookup(KEYS) == 2
    assert (made.unpin("operator"), made.unpin("operator")) == (2, 0)
    store(made, [b"e", b"f", b"g", b"h"])
    assert made.lookup(KEYS) == 2
    assert made.unpin("other") == 2
    store(made, [b"i", b"j", b"k", b"l"])
    assert made.lookup(KEYS) == 0
