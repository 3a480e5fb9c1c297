"""What every store says of records: right bytes or none, whoever put them, and nobody waits for another one."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import CapacityExceeded, ConfigError
from pdlink.store.interface import MEMORY, Found
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape
from pdlink.store.slots import Share
from tests.store.process import everything_is_free
from tests.store.stubs import SHAPE, StubTier
from tests.store.test_store import KEYS, Clock, content, drained, fetch, payload, put_below, read, tier_is_empty
from tests.waiting import WAIT_S, until

from .conftest import disturb, heard, put

if TYPE_CHECKING:
    from pdlink.store.interface import AnyStore

    from .conftest import Reach

LARGE = RecordShape("uint8", 4, (Group("full", (0, 1), 2, 1, 2048),))


# --- Reading


def test_what_was_put_is_found_up_to_the_first_gap(reach: Reach) -> None:
    with reach() as (_, mine, other):
        assert put(mine, [KEYS[0], KEYS[1], KEYS[3]]) == 3
        assert read(other, KEYS) == 2
        assert put(other, KEYS[:4]) == 1
        assert read(mine, KEYS) == 4


def test_each_key_is_answered_for_also_behind_one_that_is_not_known(reach: Reach) -> None:
    with reach(64, [StubTier()]) as (_, mine, _):
        assert mine.places == (MEMORY, "stub")
        assert put(mine, KEYS[:4]) == 4
        assert mine.flush(WAIT_S)
        mine.clear(KEYS[:1])
        mine.clear(KEYS[2:3], [MEMORY])
        assert mine.known_at(KEYS[:5], WAIT_S) == (-1, 0, 1, 0, -1)
        assert mine.lookup(KEYS[:5], WAIT_S).keys == ()


def test_records_of_several_shapes_live_in_one_store(reach: Reach) -> None:
    with reach(8) as (store, mine, _):
        put(mine, KEYS[:2])
        mine.commit(mine.reserve(KEYS[2:4], LARGE), LARGE)
        heard(mine)
        assert read(mine, KEYS[:2]) == 2
        begun = mine.fetch(mine.lookup(KEYS[2:4], WAIT_S), LARGE, "request")
        assert [slot.nbytes for slot in begun.done.result(WAIT_S)] == [LARGE.nbytes] * 2
        assert begun.close()
        store.check()


def test_a_key_that_is_named_twice_is_leased_once(reach: Reach) -> None:
    with reach() as (store, mine, _):
        put(mine, KEYS[:2])
        begun = mine.fetch(Found((KEYS[0], KEYS[0]), (0, 0)), SHAPE, "request")
        begun.done.result(WAIT_S)
        begun.close()
        store.check()
        assert put(mine, KEYS[2:6]) == 4, "it can be evicted"


def test_a_lease_that_has_ended_does_not_stand(reach: Reach) -> None:
    """Who was stopped meanwhile has read what others wrote."""
    clock = Clock()
    with reach(2, clock=clock, lease_s=5.0) as (_, mine, other):
        put(mine, KEYS[:2])
        begun = fetch(mine, KEYS[:2])
        assert len(begun.done.result(WAIT_S)) == 2
        assert put(other, KEYS[2:4]) == 0, "what is leased stays"
        clock.now_s += 6
        until(lambda: put(other, KEYS[2:4]), "the lease is over")
        assert read(mine, KEYS[2:4]) == 2
        assert not begun.close()
        assert not begun.close(), "asked again, it says the same"


def test_a_reader_that_finds_a_record_wrong_has_it_forgotten(reach: Reach) -> None:
    tier = StubTier()
    with reach(8, [tier]) as (store, mine, other):
        put(mine, KEYS[:3])
        assert mine.flush(WAIT_S)
        mine.clear(places=[MEMORY])
        begun = mine.fetch(mine.lookup(KEYS[:3], WAIT_S), SHAPE, "request", checks=True)
        slots = begun.done.result(WAIT_S)
        assert set(begun.unchecked) == set(KEYS[:3])
        assert begun.close([slots[1]])
        drained(store)
        assert other.known_at(KEYS[:3], WAIT_S) == (0, -1, 0)


# --- Below memory


def test_a_record_that_memory_has_lost_comes_from_the_tier_and_stays(reach: Reach) -> None:
    tier = StubTier()
    with reach(2, [tier]) as (_, mine, other):
        put_below(mine, KEYS[:4], tier)
        assert read(mine, KEYS[:2]) == 2
        assert tier.calls.count("get") == 2
        assert read(other, KEYS[:2]) == 2
        assert tier.calls.count("get") == 2, "a hit below is kept in memory"
    assert tier.closed


def test_a_fetch_from_a_tier_comes_when_it_is_there(reach: Reach) -> None:
    tier = StubTier()
    with reach(4, [tier]) as (_, mine, _):
        put_below(mine, KEYS[:4], tier)
        mine.clear(None, [MEMORY])
        tier.going.clear()
        begun = fetch(mine, KEYS[:4])
        assert tier.stalled.wait(WAIT_S)
        assert not begun.done.done()
        assert put(mine, KEYS[4:5]) == 0
        tier.going.set()
        assert len(begun.done.result(WAIT_S)) == 4
        assert begun.close()


def test_two_requests_for_one_prefix_read_it_once(reach: Reach) -> None:
    tier = StubTier()
    with reach(4, [tier]) as (_, mine, other):
        put_below(mine, KEYS[:6], tier)
        tier.going.clear()
        first, second = fetch(mine, KEYS[:2]), fetch(other, KEYS[:2])
        tier.going.set()
        for begun in (first, second):
            assert [payload(mine, slot) for slot in begun.done.result(WAIT_S)] == [content(key) for key in KEYS[:2]]
            assert begun.close()
        assert tier.calls.count("get") == 2


def test_a_load_without_room_is_a_shorter_prefix_and_waits_for_nobody(reach: Reach) -> None:
    """lmcache#2942, lmcache#3855: loads that hold memory and wait for more block each other for ever."""
    tier = StubTier()
    with reach(4, [tier]) as (_, mine, other):
        put_below(mine, KEYS, tier)
        holding = fetch(mine, KEYS[4:7])
        assert len(holding.done.result(WAIT_S)) == 3
        begun = fetch(other, KEYS[:4])
        assert len(begun.done.result(WAIT_S)) == 1
        assert holding.close()
        assert begun.close()
        assert read(other, KEYS[:4]) == 4


@pytest.mark.parametrize("damage", ["flip", "header", "short", "long", "empty", "other"])
def test_a_damaged_record_is_a_shorter_prefix_and_is_dropped(reach: Reach, damage: str) -> None:
    tier = StubTier()
    with reach(4, [tier]) as (store, mine, _):
        put_below(mine, KEYS[:3], tier)
        records = dict(tier.records)
        mine.clear()
        tier_is_empty(tier)
        tier.records = records
        if damage in ("flip", "header"):
            tier.flip(KEYS[1], HEADER_NBYTES + 5 if damage == "flip" else 20)
        else:
            whole = records[KEYS[1]]
            tier.records[KEYS[1]] = {
                "short": whole[:-1],
                "long": whole + b"x",
                "empty": b"",
                "other": records[KEYS[2]],
            }[damage]
        assert read(mine, KEYS[:3]) == 1
        drained(store)
        assert KEYS[1] not in tier.records or damage == "long"
        assert put(mine, KEYS[:3]) == 1, "computed again, it is stored again"
        assert read(mine, KEYS[:3]) == 3


# --- Writing


def test_a_record_is_readable_when_all_of_its_shares_are_there(reach: Reach) -> None:
    with reach() as (_, one, two):
        first, second = (
            store.reserve(KEYS[:1], SHAPE, f"rank {at}", Share(at, at + 1, 2)) for at, store in enumerate((one, two))
        )
        assert first[0].offset == second[0].offset
        one.commit(first, SHAPE)
        heard(one)
        assert one.lookup(KEYS[:1], WAIT_S).keys == ()
        two.commit(second, SHAPE)
        heard(two)
        assert one.lookup(KEYS[:1], WAIT_S).keys == (KEYS[0],)


def test_abandoned_slots_are_free_and_found_by_nobody(reach: Reach) -> None:
    with reach() as (_, mine, other):
        mine.abandon(mine.reserve(KEYS[:4], SHAPE))
        heard(mine)
        assert mine.lookup(KEYS, WAIT_S).keys == ()
        assert everything_is_free(other, 4)


def test_a_record_that_can_never_fit_finds_no_room(reach: Reach) -> None:
    huge = RecordShape("uint8", 4, (Group("full", (0,), 2, 1, 1 << 20),))
    with reach(2) as (_, mine, _):
        with suppress(CapacityExceeded):
            assert mine.reserve(KEYS[:1], huge) == ()
        assert put(mine, KEYS[:2]) == read(mine, KEYS) == 2


def test_a_frozen_store_answers_and_keeps_nothing_new(reach: Reach) -> None:
    tier = StubTier()
    with reach(2, [tier]) as (store, mine, other):
        put_below(mine, KEYS[:4], tier)
        store.frozen = True
        assert put(other, KEYS[4:5]) == 0
        assert read(other, KEYS[2:4]) == 2
        assert read(other, KEYS[:2]) == 0
        assert "get" not in tier.calls
        store.frozen = False
        assert put(other, KEYS[4:5]) == 1


# --- Operators


def test_pins_keep_within_the_quota(reach: Reach) -> None:
    with reach() as (store, mine, _):
        put(mine, KEYS[:4])
        assert store.pin(KEYS, "operator") == 2
        put(mine, KEYS[4:8])
        assert read(mine, KEYS[:2]) == 2
        assert store.unpin("operator") == 2


def test_what_is_cleared_is_found_nowhere(reach: Reach) -> None:
    with reach(8, [StubTier()]) as (_, mine, other):
        put(mine, KEYS[:4])
        assert mine.flush(WAIT_S)
        assert mine.clear(ending=KEYS[0][-8:]).records == 1
        assert other.known_at(KEYS[:4], WAIT_S) == (-1, 0, 0, 0)
        assert mine.clear(KEYS[1:2]).records == 1
        assert mine.clear([]).records == 0
        assert mine.clear().records == 2
        assert other.known_at(KEYS[:4], WAIT_S) == (-1,) * 4


def test_records_are_moved_between_places_and_packed_there(reach: Reach) -> None:
    tier = StubTier()
    with reach(8, [tier]) as (store, mine, other):
        put(mine, KEYS[:5])
        assert store.move(KEYS[:6], SHAPE, MEMORY, "stub", copy=True) == 5
        assert store.repack(KEYS[:6], SHAPE, "stub", "raw") == 5
        with pytest.raises(ConfigError, match="none of ours"):
            store.repack(KEYS[:6], SHAPE, "stub", "none of ours")
        assert mine.clear(KEYS[:5], [MEMORY]).records == 5
        assert other.lookup(KEYS, WAIT_S).places == (1,) * 5
        assert read(other, KEYS) == 5
        assert store.move(KEYS[:1], SHAPE, MEMORY, "stub", copy=False) == 1
        assert other.lookup(KEYS[:2], WAIT_S).places == (1, 0)


def test_a_flush_says_whether_the_tiers_have_all(reach: Reach) -> None:
    tier = StubTier()
    with reach(8, [tier]) as (_, mine, _):
        tier.going.clear()
        put(mine, KEYS[:3])
        assert not mine.flush(0.05)
        tier.going.set()
        assert mine.flush(WAIT_S)
        assert set(tier.records) == set(KEYS[:3])


@pytest.mark.parametrize("seed", range(3))
def test_nobody_ever_reads_another_record(reach: Reach, seed: int) -> None:
    failures: list[BaseException] = []
    keys = [b"%032d" % index for index in range(30)]

    def work(mine: AnyStore, number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for step in range(100):
                first = rng.randrange(28)
                some = keys[first : first + rng.randint(1, 4)]
                if rng.random() < 0.5:
                    put(mine, some)
                elif rng.random() < 0.05:
                    mine.clear(some)
                elif step % 20 == 19:
                    disturb(mine)
                else:
                    begun = fetch(mine, some)
                    slots = begun.done.result(WAIT_S)
                    right = [payload(mine, slot) == content(slot.key) for slot in slots]
                    assert not begun.close() or all(right)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    with reach(8, [StubTier()]) as (store, mine, other):
        threads = [threading.Thread(target=work, args=(one, number)) for number, one in enumerate([mine, other] * 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures, failures
        until(lambda: store._catalog.num_leases + store._catalog.num_reservations == 0, "all is given back")
