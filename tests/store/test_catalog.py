"""The catalog under random schedules of holders that write, read and die; and the same with planted bugs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.store.catalog import Catalog
from pdlink.store.eviction import EvictionPolicy, Lru
from pdlink.store.extents import ALIGNMENT_NBYTES
from pdlink.store.slots import WHOLE, Retention, Share

from .catalog_mutants import MUTANTS
from .catalog_world import MOVES, POLICIES, World

PAGE = ALIGNMENT_NBYTES
SCHEDULES = st.lists(st.integers(0, 2**40 - 1), max_size=100)
KEYS = [b"%d" % index for index in range(10)]
MAX_SCHEDULES = 400


def random_schedule(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2**40) for _ in range(rng.randint(1, 400))]


def breaks(seed: int) -> bool:
    try:
        World().play(random_schedule(seed))
    except (AssertionError, KeyError):
        return True
    return False


@settings(max_examples=80, deadline=None)
@given(policy=st.sampled_from(POLICIES), schedule=SCHEDULES)
def test_no_schedule_breaks_the_catalog(policy: Callable[[], EvictionPolicy], schedule: list[int]) -> None:
    World(policy).play(schedule)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_long_schedule_breaks_the_catalog(policy: Callable[[], EvictionPolicy]) -> None:
    for seed in range(60):
        World(policy).play(random_schedule(seed))


def test_schedules_reach_what_they_are_to_reach() -> None:
    counts: Counter[str] = Counter()
    for seed in range(250):
        world = World()
        world.play(random_schedule(seed))
        counts += world.counts
    ends = {"stored", "evicted", "removed", "committed", "released", "expired", "garbage refused", "pinned", "buried"}
    ends |= {"shared", "completed by ranks", "outlived", "held", "session ended"}
    assert {name for name, count in counts.items() if count} >= {*ends, *MOVES}, counts


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str) -> None:
    owner, method, wrong = MUTANTS[name]
    with patch.object(owner, method, wrong):
        assert any(breaks(seed) for seed in range(MAX_SCHEDULES))


def catalog(pages: int, *, quota_pages: int = 0, tenant_pages: int = 0) -> Catalog:
    made = Catalog(Lru(), pin_quota_nbytes=quota_pages * PAGE, tenant_quota_nbytes=tenant_pages * PAGE)
    made.resize(pages * PAGE)
    return made


def store(made: Catalog, keys: list[bytes], now_s: float = 0.0, **retention: Any) -> None:
    made.commit(made.reserve(keys, PAGE, "w", WHOLE, Retention(**retention), now_s))


def test_the_head_of_a_prefix_is_the_last_to_be_evicted() -> None:
    made = catalog(4)
    store(made, KEYS[:4])
    made.release(made.lease(KEYS[:4], "r", "", 1.0))
    for taken in range(1, 4):
        store(made, [b"new-%d" % taken])
        assert made.lookup(KEYS) == 4 - taken


def test_the_head_of_a_prefix_that_is_committed_in_pieces_is_the_last_to_be_evicted() -> None:
    made = catalog(4)
    slots = made.reserve(KEYS[:4], PAGE, "w")
    made.place(slots[2:])
    made.place(slots[:2])
    assert made.commit(slots[:2]) + made.commit(slots[2:]) == KEYS[:4]
    assert [change.key for change in made.changes] == KEYS[:4], "who is told of a record knows the one before it"
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


def test_records_of_one_commit_are_told_in_the_order_of_the_prompt() -> None:
    made = catalog(4)
    made.commit(made.reserve(KEYS[:3], PAGE, "a"))
    assert [change.key for change in made.changes] == KEYS[:3], "a router drops one whose parent it does not know"


LEFT, RIGHT = Share(0, 1, 2), Share(1, 2, 2)


def test_a_record_is_readable_when_the_last_share_is_committed() -> None:
    made = catalog(4)
    left, right = (made.reserve(KEYS[:2], PAGE, name, share) for name, share in (("a", LEFT), ("b", RIGHT)))
    assert [slot.offset for slot in left] == [slot.offset for slot in right], "ranks fill one record"
    assert made.reserve(KEYS[:2], PAGE, "c", LEFT) == (), "another replica's rank has nothing to add"
    assert made.commit(left) == []
    assert made.lookup(KEYS) == 0
    assert made.commit(right[:1]) == KEYS[:1]
    assert made.lookup(KEYS) == 1


def test_a_share_whose_writer_died_is_written_by_another() -> None:
    made = catalog(4)
    made.commit(made.reserve(KEYS[:1], PAGE, "a", LEFT))
    made.reserve(KEYS[:1], PAGE, "dead", RIGHT)
    made.holder_gone("dead")
    assert made.lookup(KEYS) == 0
    assert made.commit(made.reserve(KEYS[:1], PAGE, "b", RIGHT)) == KEYS[:1]


def test_a_record_that_nobody_completes_goes_in_its_turn_but_not_under_a_writer() -> None:
    made = catalog(4)
    made.commit(made.reserve(KEYS[:3], PAGE, "a", LEFT))
    (writing,) = made.reserve(KEYS[2:3], PAGE, "b", RIGHT)
    store(made, [b"x", b"y", b"z"])
    assert made.lookup([b"x", b"y", b"z"]) == 3
    assert made.commit([writing]) == KEYS[2:3]


def test_who_brings_all_of_a_record_replaces_what_nobody_completes() -> None:
    made = catalog(4)
    made.commit(made.reserve(KEYS[:1], PAGE, "a", LEFT))
    writing = made.reserve(KEYS[1:2], PAGE, "a", LEFT)
    assert [slot.key for slot in made.reserve(KEYS[:2], PAGE, "tier", WHOLE)] == KEYS[:1], "a rank writes the other"
    made.abandon(writing)


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{index}".encode() for index in range(count)]


def present(made: Catalog, keys: list[bytes]) -> int:
    return sum(made.lookup([key]) for key in keys)


def test_a_tenant_at_its_quota_loses_its_own_records_and_nobody_elses() -> None:
    made = catalog(8, tenant_pages=3)
    store(made, names("a", 3), tenant="a")
    store(made, names("b", 3), tenant="b")
    store(made, names("more", 2), tenant="a")
    assert (present(made, names("a", 3)), present(made, names("b", 3)), present(made, names("more", 2))) == (1, 3, 2)
    store(made, names("free", 8))
    assert len(made) == 8, "records of no tenant have no quota"


def test_where_memory_is_full_the_tenant_that_uses_most_gives_way() -> None:
    made = catalog(6, tenant_pages=5)
    store(made, names("a", 5), tenant="a")
    store(made, names("b", 3), tenant="b")
    assert (present(made, names("a", 5)), present(made, names("b", 3))) == (3, 3)


def test_a_tenant_whose_records_are_all_in_use_waits_for_nothing() -> None:
    made = catalog(8, tenant_pages=2)
    store(made, names("a", 2), tenant="a")
    lease = made.lease(names("a", 2), "r", "", 9.0)
    assert made.reserve([b"more"], PAGE, "w", WHOLE, Retention("a")) == ()
    assert made.release(lease)
    assert made.reserve([b"more"], PAGE, "w", WHOLE, Retention("a"))


def test_a_record_is_found_until_its_time_is_over_however_often_it_is_used() -> None:
    made = catalog(4)
    store(made, KEYS[:2], now_s=100.0, ttl_s=10.0)
    assert made.release(made.lease(KEYS[:2], "r", "", 200.0))
    made.expire(109.9)
    assert made.lookup(KEYS) == 2
    lease = made.lease(KEYS[:2], "r", "", 200.0)
    made.expire(110.0)
    assert made.lookup(KEYS) == 0
    assert made.release(lease), "who reads it finishes"
    made.expire(110.0)
    assert made.used_nbytes == 0


def test_low_priorities_go_first_and_a_high_one_lapses() -> None:
    made = catalog(4)
    store(made, [b"high"], priority=90, priority_s=60.0)
    store(made, [b"low"], priority=5)
    store(made, [b"usual", b"other"])
    store(made, [b"1"])
    assert present(made, [b"low"]) == 0
    store(made, [b"2", b"3", b"4"])
    assert present(made, [b"high"]) == 1, "it is the oldest"
    made.expire(60.0)
    store(made, [b"5", b"6", b"7", b"8"])
    assert present(made, [b"high"]) == 0


def test_a_known_record_rises_in_priority_when_it_is_stored_again() -> None:
    made = catalog(2)
    store(made, [b"system prompt", b"other"])
    store(made, [b"system prompt"], priority=80)
    for key in (b"1", b"2", b"3"):
        store(made, [key])
    assert present(made, [b"system prompt"]) == 1
    store(made, [b"system prompt"], priority=5)
    for key in (b"4", b"5"):
        store(made, [key])
    assert present(made, [b"system prompt"]) == 1, "nobody lowers what another wants kept"


def test_pins_end_with_who_made_them_or_by_their_name() -> None:
    made = catalog(4, quota_pages=4)
    store(made, KEYS[:3])
    assert made.pin(KEYS[:3], "prompt", "worker") == 3
    assert made.pin(KEYS[:2], "prompt", "other") == 2
    made.holder_gone("worker")
    assert [(held.holder, held.request, held.records) for held in made.pins()] == [("other", "prompt", 2)]
    assert made.pinned_nbytes == 2 * PAGE
    assert made.pin(KEYS[:2], "prompt", "third") == 2
    assert made.unpin("prompt") == 2, "by its name, whosever it is"
    assert made.pins() == []
    made.check()


def test_deadlines_of_records_that_are_gone_are_sorted_out() -> None:
    made = catalog(4)
    for index in range(1000):
        store(made, [b"%d" % index], now_s=float(index), ttl_s=1e6)
    assert len(made._deadlines.entries) < 100
