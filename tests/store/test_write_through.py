"""What a tier is to have is written while it is in memory, however late; `flush` says whether all is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from pdlink.events import WriteDropped, listen
from pdlink.store.eviction import Lru
from pdlink.store.line import Width
from pdlink.store.slots import Retention
from pdlink.store.store import Store
from tests.waiting import WAIT_S, until

from .stubs import SHAPE, StubRunTier, StubTier
from .test_store import KEYS, Clock, fetch, opened, put, read

NUM_SLOTS = 8
"""Of the arena. A quarter of them may wait for a tier."""


class Refusing(StubTier):
    """Takes nothing while it is full, and says no more than that."""

    full = True

    def put(self, key: bytes, record: memoryview) -> bool:
        self._called("put")
        if self.full:
            return False
        return super().put(key, record)


def debts_of(store: Store) -> Mapping[bytes, None]:
    """Of its first tier."""
    return store._books.debts[store._below.tiers[0]]


def test_a_burst_larger_than_what_may_wait_is_written_whole() -> None:
    tier = StubTier()
    with opened(NUM_SLOTS, [tier]) as store:
        tier.going.clear()
        assert put(store, KEYS[:NUM_SLOTS]) == NUM_SLOTS
        with store._lock:
            assert len(debts_of(store)) == NUM_SLOTS - 2
            assert store._catalog.num_leases == 2, "a debt holds nothing"
        tier.going.set()
        assert store.flush(WAIT_S)
        assert set(tier.records) == set(KEYS[:NUM_SLOTS])


def test_a_burst_is_written_without_a_flush_too() -> None:
    tier = StubTier()
    with opened(NUM_SLOTS, [tier]) as store:
        tier.going.clear()
        put(store, KEYS[:NUM_SLOTS])
        tier.going.set()
        until(lambda: len(tier.records) == NUM_SLOTS, "the writer goes on with what is owed")


@pytest.mark.parametrize("fails", [False, True])
def test_records_go_to_a_tier_and_come_back_in_runs_and_one_by_one_where_a_run_fails(fails: bool) -> None:
    tier = StubRunTier()
    tier.fails = fails
    with opened(4 * NUM_SLOTS, [tier]) as store:
        assert put(store, KEYS) == len(KEYS)
        assert store.flush(WAIT_S)
        assert set(tier.records) == set(KEYS)
        store.clear(KEYS, ["memory"])
        assert read(store, KEYS) == len(KEYS)
        assert tier.runs == [len(KEYS)] * 2
        store.check()


def test_a_tier_that_has_all_of_a_run_is_not_called_for_it() -> None:
    """Such a call would be told as a write, and a tier that fails would seem to be back."""
    tier = StubRunTier()
    with opened(4 * NUM_SLOTS, [tier]) as store:
        put(store, KEYS)
        assert store.flush(WAIT_S)
        store.clear(KEYS, ["memory"])
        put(store, KEYS)
        assert store.flush(WAIT_S)
        assert tier.runs == [len(KEYS)]


def test_a_record_of_a_run_that_is_damaged_or_gone_ends_the_prefix_there() -> None:
    tier = StubRunTier()
    with opened(4 * NUM_SLOTS, [tier]) as store:
        put(store, KEYS)
        assert store.flush(WAIT_S)
        store.clear(KEYS, ["memory"])
        tier.flip(KEYS[5])
        assert read(store, KEYS) == 5
        store.clear(KEYS, ["memory"])
        begun = store.lookup(KEYS, WAIT_S)
        del tier.records[KEYS[2]]
        arrived = store.fetch(begun, SHAPE, "request")
        assert len(arrived.done.result(WAIT_S)) == 2
        assert arrived.close()
        store.check()


def test_what_was_used_is_written_first() -> None:
    tier = StubTier()
    with opened(NUM_SLOTS, [tier]) as store:
        tier.going.clear()
        put(store, KEYS[:NUM_SLOTS])
        fetch(store, [KEYS[7]]).close()
        with store._lock:
            assert next(iter(debts_of(store))) == KEYS[7], "behind the keys that are in line"
        tier.going.set()
        assert store.flush(WAIT_S)
        assert set(tier.records) == set(KEYS[:NUM_SLOTS])


def test_a_debt_does_not_keep_a_record_from_eviction_and_is_told_when_it_is_lost() -> None:
    dropped: list[WriteDropped] = []
    stop = listen(lambda event: dropped.append(event) if isinstance(event, WriteDropped) else None)
    tier = StubTier()
    try:
        with opened(NUM_SLOTS, [tier]) as store:
            tier.going.clear()
            put(store, KEYS[:NUM_SLOTS])
            assert put(store, [b"%032d" % (100 + number) for number in range(3)]) == 3
            assert len(dropped) == 3
            tier.going.set()
            assert not store.flush(WAIT_S), "not all that was committed is there"
            assert len(tier.records) == NUM_SLOTS
            assert store.flush(WAIT_S), "it was said once"
    finally:
        stop()


def test_a_record_whose_write_failed_once_is_written_again() -> None:
    tier, clock = StubTier(), Clock()
    with opened(NUM_SLOTS, [tier], clock) as store:
        tier.error = OSError(5, "Input/output error")
        put(store, KEYS[:1])
        assert not store.flush(WAIT_S)
        tier.error = None
        clock.now_s += 2
        until(lambda: tier.records, "the keeper offers it again")
        assert store.flush(WAIT_S)


def test_a_tier_that_takes_nothing_is_offered_one_record_after_each_pause() -> None:
    tier, clock = Refusing(), Clock()
    with opened(NUM_SLOTS, [tier], clock) as store:
        put(store, KEYS[:1])
        until(lambda: store._below.tiers[0].refuses, "it refuses")
        put(store, KEYS[1:NUM_SLOTS])
        for number in range(2, 6):
            clock.now_s += 40
            until(lambda number=number: tier.calls.count("put") == number, "it is offered one")  # type: ignore[misc]
        assert not store.flush(WAIT_S)
        tier.full = False
        clock.now_s += 40
        until(lambda: len(tier.records) == NUM_SLOTS, "all that is owed follows the first that is taken")


def test_what_was_cleared_is_not_owed_any_more() -> None:
    tier = StubTier()
    with opened(NUM_SLOTS, [tier]) as store:
        tier.going.clear()
        put(store, KEYS[:NUM_SLOTS])
        store.clear(KEYS[4:NUM_SLOTS], ["stub"])
        tier.going.set()
        assert store.flush(WAIT_S)
        assert not set(tier.records) & set(KEYS[4:NUM_SLOTS])
        assert read(store, KEYS[:NUM_SLOTS]) == NUM_SLOTS


def test_a_clear_waits_for_the_writes_that_are_under_way_in_several_threads() -> None:
    tier = StubTier()
    with opened(NUM_SLOTS, [tier]) as store:
        writers = store._below.tiers[0].writers
        with writers._changed:
            writers._width = Width(4)
            writers._have(4)
        tier.going.clear()
        put(store, KEYS[:NUM_SLOTS])
        until(lambda: tier.calls.count("put") >= 2, "two are under way")
        store.clear()
        tier.going.set()
        assert store.flush(WAIT_S)
        assert not tier.records


def test_the_keeper_outlives_a_record_that_expires_while_a_tier_is_to_have_it() -> None:
    tier, clock = Refusing(), Clock()
    with opened(NUM_SLOTS, [tier], clock) as store:

        def expires() -> None:
            store.commit(store.reserve(KEYS[:1], SHAPE, retention=Retention(ttl_s=100)), SHAPE)
            until(lambda: KEYS[0] in debts_of(store), "the tier refuses it")
            clock.now_s += 101
            until(lambda: store.holds(KEYS[:1]) == [False] and not debts_of(store), "it is gone")

        expires()
        expires()
        tier.full = False
        assert store.flush(WAIT_S), "what has expired is not missing below"


def test_a_store_that_closes_does_not_wait_for_a_tier_that_stalls_and_writes_to_the_others() -> None:
    frozen, other, clock = StubTier(), StubTier(), Clock()
    store = Store(16 * SHAPE.nbytes, Lru(), [frozen, other], tier_deadline_s=6 * WAIT_S, clock=clock)
    store.open()
    frozen.going.clear()
    put(store, KEYS[:4])
    assert frozen.stalled.wait(WAIT_S)
    until(lambda: len(other.records) == 4, "the other tier has what came before")
    until(lambda: not store._below.tiers[1].queued, "and no call is under way")
    clock.now_s += 7 * WAIT_S
    put(store, KEYS[4:])
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(WAIT_S)
    is_over = not closing.is_alive()
    frozen.going.set()
    closing.join()
    assert is_over
    assert other.records.keys() == set(KEYS)


def test_what_is_owed_is_written_when_the_store_closes() -> None:
    tier = StubTier()
    with opened(NUM_SLOTS, [tier]) as store:
        tier.going.clear()
        put(store, KEYS[:NUM_SLOTS])
        tier.going.set()
    assert len(tier.records) == NUM_SLOTS


def test_a_tier_that_takes_no_records_is_told_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    tier, clock = Refusing(), Clock()
    with opened(NUM_SLOTS, [tier], clock) as store:
        put(store, KEYS[:NUM_SLOTS])
        for number in range(1, 5):
            until(lambda number=number: tier.calls.count("put") >= number, "it is offered one")  # type: ignore[misc]
            clock.now_s += 40
        until(lambda: store.state().places[1].problem, "operators see it")
        assert len([one for one in caplog.records if "takes no records" in one.message]) == 1
        tier.full = False
        clock.now_s += 40
        until(lambda: len(tier.records) == NUM_SLOTS, "it has all")
        assert store.state().places[1].problem == ""
        until(lambda: "takes records again" in caplog.text, "its return is told")


def test_a_clear_does_not_wait_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not noted then, and says so."""
    thaw = threading.Event()
    store = Store(NUM_SLOTS * SHAPE.nbytes, Lru(), [StubTier()], tier_deadline_s=0.2)
    store.open()
    try:
        put(store, KEYS[:2])
        monkeypatch.setattr(store._cleared, "add", lambda *_: (thaw.wait(WAIT_S), (b"late", True))[1])
        assert store.clear().durable is False
        assert read(store, KEYS[:2]) == 0
    finally:
        thaw.set()
        store.close()


class Hanging(StubTier):
    """Does not come back from a listing."""

    def __init__(self) -> None:
        super().__init__()
        self.thaw = threading.Event()

    def keys_ending(self, ending: bytes) -> list[bytes]:
        self.thaw.wait(WAIT_S)
        return []


def test_a_clear_by_ending_does_not_wait_for_a_tier_that_hangs() -> None:
    tier = Hanging()
    store = Store(NUM_SLOTS * SHAPE.nbytes, Lru(), [tier], tier_deadline_s=0.2)
    store.open()
    try:
        put(store, KEYS[:2])
        cleared = store.clear(ending=KEYS[0][-4:])
        assert cleared.records == 1
        assert not cleared.durable
    finally:
        tier.thaw.set()
        store.close()
