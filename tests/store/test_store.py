"""The store over its arena and tiers: right bytes or none, whatever a tier does, and nobody waits for one."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink.errors import CapacityExceeded, ConfigError
from pdlink.memory.available import available_nbytes
from pdlink.store.eviction import Lru
from pdlink.store.extents import ALIGNMENT_NBYTES as PAGE
from pdlink.store.fetching import Fetch, Wanted
from pdlink.store.gathering import Gathering
from pdlink.store.interface import MEMORY, Found
from pdlink.store.line import FIRST, Width
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape, seal, unseal
from pdlink.store.slots import USUAL, Retention, Share, Slot, SlotLease
from pdlink.store.store import Store
from pdlink.store.tiers.base import DAMAGED
from pdlink.store.tiers.striped import Striped
from pdlink.store.verifying import Verified
from tests.waiting import WAIT_S, until

from .stubs import SHAPE, StubTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdlink.store.interface import AnyFetch, AnyStore, RecordChange
    from pdlink.store.tiers.base import Tier

KEYS = [b"%032d" % index for index in range(8)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def opened(
    records: int = 4,
    tiers: Sequence[Tier] = (),
    clock: Clock | None = None,
    lease_s: float = 1000.0,
    ingestion: str = "all",
    verify: bool = False,
    tier_deadline_s: float | None = None,
) -> Iterator[Store]:
    store = Store(
        records * SHAPE.nbytes,
        Lru(),
        tiers,
        ingestion=ingestion,
        verify=verify,
        tier_deadline_s=tier_deadline_s or (WAIT_S if clock is None else 100.0),
        lease_s=lease_s,
        clock=clock or Clock(),
    )
    store.open()
    try:
        yield store
        store.check()
    finally:
        store.close()


def payload(store: AnyStore, slot: Slot) -> bytes:
    return store.array[slot.offset + HEADER_NBYTES : slot.offset + SHAPE.nbytes].tobytes()


def content(key: bytes) -> bytes:
    return random.Random(key).randbytes(SHAPE.payload_nbytes)


def put(store: AnyStore, keys: Sequence[bytes]) -> int:
    slots = store.reserve(keys, SHAPE)
    for slot in slots:
        store.array[slot.offset + HEADER_NBYTES : slot.offset + SHAPE.nbytes] = memoryview(content(slot.key))
    store.commit(slots, SHAPE)
    return len(slots)


def fetch(store: AnyStore, keys: Sequence[bytes]) -> AnyFetch:
    return store.fetch(store.lookup(keys, WAIT_S), SHAPE, "request")


def read(store: AnyStore, keys: Sequence[bytes]) -> int:
    """How many leading records come; all of them are right."""
    begun = fetch(store, keys)
    slots = begun.done.result(WAIT_S)
    assert [slot.key for slot in slots] == list(keys[: len(slots)])
    for slot in slots:
        assert payload(store, slot) == content(slot.key)
    assert begun.close()
    return len(slots)


def put_below(store: AnyStore, keys: Sequence[bytes], *tiers: StubTier) -> None:
    """Put records and wait until the tiers have them."""
    for key in keys:
        assert put(store, [key]) == 1
        for tier in tiers:
            assert tier.kept.acquire(timeout=WAIT_S)


def test_a_prefix_may_lie_in_memory_and_in_two_tiers() -> None:
    first, second = StubTier(), StubTier()
    with opened(4, [first, second]) as store:
        put_below(store, KEYS[:8], first, second)
        first.records = {KEYS[1]: first.records[KEYS[1]]}
        second.flip(KEYS[1])
        assert read(store, KEYS[:3]) == 3


def tier_is_empty(tier: StubTier) -> None:
    """Wait for the clearing, which the tier's thread does."""
    until(lambda: not tier.records, "the tier is cleared")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("bug"), MemoryError()])
def test_a_tier_that_raises_costs_its_records_and_nothing_else(error: Exception) -> None:
    tier = StubTier()
    with opened(8, [tier]) as store:
        tier.error = error
        for at in range(0, 8, 2):
            assert read(store, KEYS[at:]) == 0
            assert put(store, KEYS[at : at + 2]) == 2
            assert read(store, KEYS) == at + 2


def test_a_tier_that_answers_nonsense_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = StubTier()
    with opened(2, [tier]) as store:
        put_below(store, KEYS[:4], tier)
        right = tier.get
        monkeypatch.setattr(tier, "get", lambda *_: "nonsense")
        assert read(store, KEYS[:1]) == 0
        monkeypatch.setattr(tier, "get", right)
        assert read(store, KEYS[:2]) == 2


def test_a_tier_that_fails_is_left_alone_and_comes_back() -> None:
    tier, clock = StubTier(), Clock()
    with opened(2, [tier], clock) as store:
        put_below(store, KEYS[:4], tier)
        tier.error = OSError(5, "Input/output error")
        assert store.health()["stub"]
        for _ in range(3):
            assert read(store, KEYS[:1]) == 0
        calls = len(tier.calls)
        assert not store.health()["stub"]
        assert read(store, KEYS[:1]) == 0
        assert len(tier.calls) == calls, "it is not asked any more"
        tier.error = None
        clock.now_s += 2
        assert not store.health()["stub"]
        assert read(store, KEYS[:1]) == 1
        assert store.health()["stub"]


def test_a_stalled_read_delays_its_own_request_by_the_deadline_only() -> None:
    """llmd-kv#457. Its slot is not used again before the tier lets go of it."""
    tier, clock = StubTier(), Clock()
    with opened(3, [tier], clock) as store:
        put_below(store, KEYS[:5], tier)
        tier.going.clear()
        begun = fetch(store, KEYS[:1])
        assert tier.stalled.wait(WAIT_S)
        assert not begun.done.done()
        clock.now_s += 101
        assert not store.health()["stub"]
        assert begun.done.result(WAIT_S) == ()
        begun.close()
        assert len(store.lookup(KEYS[:1], WAIT_S).keys) == 1, "somebody still brings it"
        assert put(store, KEYS[5:8]) == 2, "a slot is the tier's"
        assert not fetch(store, KEYS[1:2]).done.result(WAIT_S), "the tier is left alone"
        tier.going.set()

        def is_back() -> int:
            clock.now_s += 70
            return read(store, KEYS[:1])

        until(is_back, "the tier is back")


def test_a_server_that_does_not_answer_is_told_at_the_start_and_asked_until_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Server(StubTier):
        is_server = True
        medium = "stub 10.0.0.1:6379"

    tier, clock = Server(), Clock()
    tier.error = ConnectionRefusedError("Connection refused")
    with opened(3, [tier], clock) as store:
        until(lambda: not store.health()["stub"], "it was asked")
        assert "Connection refused (stub 10.0.0.1:6379)" in store.problems()["stub"]
        (told,) = [one.message for one in caplog.records if "Connection refused" in one.message]
        assert "10.0.0.1:6379" in told
        assert "see that it runs" in told
        tier.error = None
        clock.now_s += 60
        until(lambda: store.health()["stub"], "it was asked again")
        assert store.problems()["stub"] == ""
    assert set(tier.calls) == {"contains"}


def test_a_tier_is_asked_once_for_all_records_that_are_wanted_again() -> None:
    """Each question is a round trip where a tier is far."""
    tier, keys = StubTier(), KEYS[:4]
    with opened(32, [tier], ingestion="second_sight") as store:
        put(store, keys)
        for _ in range(2):
            assert read(store, keys) == 4
            assert store.flush(WAIT_S)
        assert tier.calls == ["contains", "put", "put", "put", "put", "contains"]


def test_a_tier_that_is_behind_loses_records_and_holds_no_memory_back() -> None:
    """AIBrix keeps the reference of a write that it denied: 328 MB unreclaimable."""
    tier = StubTier()
    with opened(8, [tier]) as store:
        tier.going.clear()
        put(store, KEYS[:8])
        assert tier.stalled.wait(WAIT_S)
        others = [b"%032d" % index for index in range(100, 106)]
        assert put(store, others) == 6
        tier.going.set()
        for _ in range(2):
            assert tier.kept.acquire(timeout=WAIT_S)


def test_a_record_goes_below_when_it_is_wanted_a_second_time() -> None:
    tier = StubTier()
    with opened(4, [tier], ingestion="second_sight") as store:
        assert put(store, KEYS[:4]) == 4
        assert read(store, KEYS[:1]) == 1
        assert tier.kept.acquire(timeout=WAIT_S)
        put(store, KEYS[4:8])
        assert put(store, KEYS[1:2]) == 1, "memory has lost it, and its history knows it"
        assert tier.kept.acquire(timeout=WAIT_S)
        assert set(tier.records) == {KEYS[0], KEYS[1]}


def test_a_record_that_one_thread_evicted_and_another_stored_again_at_once_can_be_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one has not told yet that it went."""
    with opened(3, [StubTier()]) as store, ThreadPoolExecutor(1, "evicts") as threads:
        put(store, KEYS[:3])
        drained(store)
        stopped, go_on, tell = threading.Event(), threading.Event(), store._books.tell

        def changed() -> None:
            if threading.current_thread().name.startswith("evicts"):
                stopped.set()
                assert go_on.wait(WAIT_S)
            tell()

        monkeypatch.setattr(store._books, "tell", changed)
        evicting = threads.submit(store.reserve, KEYS[3:4], SHAPE)
        assert stopped.wait(WAIT_S)
        gone, *_ = (key for key in KEYS[:3] if store.holds([key]) == [False])
        drained(store)  # what is being written cannot be evicted
        assert put(store, [gone]) == 1
        go_on.set()
        store.abandon(evicting.result(WAIT_S))
        lease = store.lend(gone)
        assert lease is not None
        store.take_back(lease)


def test_a_record_is_told_in_memory_before_a_tier_has_it() -> None:
    """With the tokens that only then are known; a tier that tells first would tell of a record without any."""
    tier, told, goes_on = StubTier(), threading.Event(), threading.Event()

    def changed(_: object) -> None:
        told.set()
        assert_set(goes_on)

    with opened(tiers=[tier]) as store:
        store.listen(changed)
        committing = threading.Thread(target=put, args=(store, KEYS[:1]))
        committing.start()
        assert_set(told)
        assert not tier.kept.acquire(timeout=0.2), "one who listens has not heard all of it"
        goes_on.set()
        assert tier.kept.acquire(timeout=WAIT_S)
        committing.join()


def test_what_expires_is_told_though_nobody_calls() -> None:
    clock, gone = Clock(), threading.Event()
    with opened(clock=clock) as store:
        store.commit(store.reserve(KEYS[:1], SHAPE, retention=Retention(ttl_s=5)), SHAPE)
        store.listen(lambda change: None if change.is_there else gone.set())
        clock.now_s += 6
        assert_set(gone)


def test_a_record_larger_than_the_arena_is_refused_with_both_numbers() -> None:
    huge = RecordShape("uint8", 4, (Group("full", (0,), 2, 1, 1 << 20),))
    with (
        opened(2) as store,
        pytest.raises(CapacityExceeded, match=f"{huge.nbytes} bytes of {2 * SHAPE.nbytes}; raise"),
    ):
        store.reserve(KEYS[:1], huge)
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        Store(0, Lru())


def test_a_put_gets_the_memory_that_it_needs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is larger than what has memory by then is kept whole."""
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 4 * SHAPE.nbytes)
    with opened(100) as store:
        assert store.gauges()["committed"] == 4 * SHAPE.nbytes
        assert put(store, KEYS) == len(KEYS) > 4
        assert store.gauges()["committed"] >= len(KEYS) * SHAPE.nbytes
        assert read(store, KEYS) == len(KEYS)


def test_the_first_load_after_a_start_gets_the_memory_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 2 * SHAPE.nbytes)
    tier = StubTier()
    with opened(100, [tier]) as store:
        put(store, KEYS)
        assert store.flush(WAIT_S)
    with opened(100, [tier]) as store:
        assert read(store, KEYS) == len(KEYS)


def test_memory_for_all_of_a_load_comes_while_its_first_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 2 * SHAPE.nbytes)
    monkeypatch.setattr("pdlink.store.arena.Arena.wants_more", lambda *_: False)  # the keeper does nothing
    tier = StubTier()
    with opened(100, [tier]) as store:
        put(store, KEYS)
        assert store.flush(WAIT_S)
    with opened(100, [tier]) as store:
        tier.going.clear()
        begun = fetch(store, KEYS)
        assert tier.stalled.wait(WAIT_S)
        until(lambda: store.committed_nbytes >= len(KEYS) * SHAPE.nbytes, "all of it has memory")
        tier.going.set()
        assert len(begun.done.result(WAIT_S)) == len(KEYS)
        assert begun.close()


def test_a_record_larger_than_a_step_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", PAGE)
    with opened(3) as store:
        assert put(store, KEYS[:2]) == read(store, KEYS[:2]) == 2


def test_memory_comes_ahead_of_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 4 * SHAPE.nbytes)
    with opened(100) as store:
        put(store, KEYS[:3])
        until(lambda: store.gauges()["committed"] == 8 * SHAPE.nbytes, "the keeper runs ahead")


@pytest.mark.parametrize(("most", "early"), [(1000, 48), (20, 20)], ids=["half of it", "no more than that"])
def test_a_store_with_tiers_has_memory_before_anything_is_put(
    most: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 4 * SHAPE.nbytes)
    monkeypatch.setattr("pdlink.store.store._EARLY_NBYTES", most * SHAPE.nbytes)
    with opened(100, [StubTier()]) as store:
        until(lambda: store.gauges()["committed"] == early * SHAPE.nbytes, "the keeper runs ahead")
        assert not store._arena.wants_more(0)


def test_memory_comes_ahead_of_need_while_nobody_waits_for_a_read_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 4 * SHAPE.nbytes)
    monkeypatch.setattr("pdlink.store.store._EARLY_NBYTES", 0)
    tier = StubTier()
    with opened(100, [tier]) as store:
        put_below(store, KEYS[:1], tier)
        store.clear(places=[MEMORY])
        tier.going.clear()
        begun = fetch(store, KEYS[:1])
        assert tier.stalled.wait(WAIT_S)
        put(store, KEYS[1:])
        begun.finish()
        begun.close()
        until(lambda: store.gauges()["committed"] == 16 * SHAPE.nbytes, "the keeper runs ahead")
        tier.going.set()


def test_memory_is_not_put_into_huge_pages_while_somebody_waits_for_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes half of a core, and the pages that a read fills stay where they are."""
    rounds, gathered = list[None](), threading.Event()

    def next_step(*_: object) -> int:
        rounds.append(None)
        return 0

    def gather(*_: object) -> bool:
        gathered.set()
        return True

    monkeypatch.setattr(Gathering, "next", next_step)
    monkeypatch.setattr(Gathering, "tried", lambda *_: None)
    monkeypatch.setattr("pdlink.store.keeper.gather", gather)
    tier = StubTier()
    with opened(8, [tier]) as store:
        put_below(store, KEYS[:1], tier)
        store.clear(places=[MEMORY])
        tier.going.clear()
        begun = fetch(store, KEYS[:1])
        assert tier.stalled.wait(WAIT_S)
        begun_rounds = len(rounds)
        until(lambda: len(rounds) > begun_rounds + 1, "the round that began before the fetch is over")
        gathered.clear()
        until(lambda: len(rounds) > begun_rounds + 3, "the keeper has looked again")
        assert not gathered.is_set()
        begun.finish()
        begun.close()
        assert gathered.wait(WAIT_S)
        tier.going.set()


def test_a_put_wakes_the_keeper_for_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[None] = []
    with opened(4) as store:
        with monkeypatch.context() as patch:
            patch.setattr(store._books.room_taken, "notify_all", lambda: woken.append(None))
            assert put(store, KEYS[:4]) == 4
        assert not woken, "all of its arena has memory"


def test_memory_that_is_refused_lowers_the_room_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 2 * SHAPE.nbytes)
    monkeypatch.setattr("pdlink.store.arena.available_nbytes", lambda: 5 * SHAPE.nbytes)
    clock = Clock()
    with opened(100, clock=clock) as store:
        monkeypatch.setattr("pdlink.store.arena.available_nbytes", lambda: 0)
        for _ in range(2):
            assert put(store, KEYS) == 2, "what has memory is kept"
            assert store.gauges()["room"] == 2 * SHAPE.nbytes
            store.clear(KEYS)
        memory = store.state().places[0]
        assert memory.capacity_nbytes == 2 * SHAPE.nbytes
        assert "no" in memory.problem
        assert len([one for one in caplog.records if "memory stays at" in one.message]) == 1
        monkeypatch.setattr("pdlink.store.arena.available_nbytes", lambda: 1 << 40)
        clock.now_s += 11
        assert put(store, KEYS[:2]) == 2
        until(lambda: store.gauges()["room"] == 100 * SHAPE.nbytes, "it is tried again")
        assert store.state().places[0].problem == ""
        assert put(store, KEYS[2:]) == len(KEYS) - 2


def test_a_store_larger_than_the_machine_opens_with_one_step_of_memory_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four times what is free: a start that took all of it would fail, or take minutes."""
    store = Store(4 * available_nbytes(), Lru())
    store.open()
    try:
        assert "may grow to" in caplog.text
        assert store.problems()["memory"] in caplog.text
        assert "may grow to" in store.state().places[0].problem
        assert put(store, KEYS) == read(store, KEYS) == len(KEYS)
        taken_nbytes = os.fstat(store.buffer.fd).st_blocks * 512
        assert taken_nbytes == store.gauges()["committed"] == 64 << 20
        store.check()
    finally:
        store.close()


def test_a_look_up_that_nobody_waits_for_any_more_is_not_made() -> None:
    """Else a slow tier has ever more of them in line, and answers nobody in time."""
    tier, going = StubTier(), threading.Event()
    with opened(4, [tier]) as store:
        store._below.tiers[0].askers.put(lambda: assert_set(going))
        for _ in range(5):
            assert not store.lookup(KEYS[:1], 0.0).keys
        going.set()
        assert not store.lookup(KEYS[:1], WAIT_S).keys
        assert tier.calls.count("contains") == 1


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_a_record_that_nobody_waits_for_any_more_is_not_read() -> None:
    """Else a slow tier keeps the arena's room for requests that went on without it."""
    tier = StubTier()
    with opened(8, [tier]) as store:
        put_below(store, KEYS, tier)
        store.clear(places=[MEMORY])
        tier.going.clear()
        begun = fetch(store, KEYS)
        assert tier.stalled.wait(WAIT_S)
        begun.finish()
        begun.close()
        tier.going.set()
        assert read(store, KEYS[7:]) <= 1
        assert tier.calls.count("get") <= FIRST + 1, "those under way, and the one that was wanted again"


def test_a_fetch_that_is_closed_while_records_come_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a record that came between would last until its deadline."""
    tier = StubTier()
    with opened(2, [tier]) as store:
        put_below(store, KEYS[:4], tier)
        drained(store)  # the writer has let go, too
        tier.going.clear()
        begun = fetch(store, KEYS[:1])
        assert tier.stalled.wait(WAIT_S)

        closing = threading.Thread(target=begun.close)
        lease = store._catalog.lease

        def leased(*args: Any) -> SlotLease:
            closing.start()
            closing.join(0.2)  # it may have to wait for the store
            return lease(*args)

        with monkeypatch.context() as patched:
            patched.setattr(store._catalog, "lease", leased)
            tier.going.set()
            begun.done.result(WAIT_S)
        closing.join(WAIT_S)
        assert put(store, KEYS[4:6]) == 2, "no record is leased"


def test_a_fetch_may_be_finished_while_its_last_record_comes() -> None:
    class Slots(list[Slot | None]):
        def __contains__(self, slot: object) -> bool:
            found = super().__contains__(slot)
            self[:] = [came]
            return found

    with opened(2) as store:
        put(store, KEYS[:1])
        begun = fetch(store, KEYS[:1])
        (came,) = begun.done.result(WAIT_S)
        late = Fetch(
            Wanted(Found((), ()), SHAPE, "late", "engine", USUAL, False), 0.0, 0.0, lambda _, wrong: not wrong
        )
        late.slots = Slots([None])
        late.finish()
        assert late.done.result(WAIT_S) in ((), (came,))
        begun.close()


def test_what_was_cleared_while_a_tier_was_left_alone_does_not_come_back() -> None:
    tier, clock = StubTier(), Clock()
    with opened(4, [tier], clock) as store:
        put_below(store, KEYS[:2], tier)
        tier.error = OSError(5, "Input/output error")
        for _ in range(3):
            read(store, KEYS[4:5])
        assert not store.health()["stub"]
        store.clear(KEYS[:2])
        drained(store)
        tier.error = None
        clock.now_s += 2
        assert read(store, KEYS[:2]) == 0
        assert put(store, KEYS[:1]) == 1, "computed again, it is stored again"
        drained(store)
        assert list(tier.records) == KEYS[:1]


def drained(store: Store) -> None:
    """Until the tiers' writers have done what is in line."""
    for tier in store._below.tiers:
        done = threading.Event()
        tier.writers.put(done.set, alone=True)
        assert_set(done)


def test_what_was_cleared_before_a_tier_got_it_is_not_found_there_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three records that wait for a tier the second one is cleared; it is looked up while the third is written."""
    tier, third, go_on = StubTier(), threading.Event(), threading.Event()
    right = tier.put

    def slow(key: bytes, record: memoryview) -> bool:
        if key == KEYS[2]:
            third.set()
            go_on.wait(WAIT_S)
        return right(key, record)

    with opened(16, [tier]) as store:
        writers = store._below.tiers[0].writers
        with writers._changed:
            writers._width = Width(1)
        tier.going.clear()
        put(store, KEYS[:1])
        assert tier.stalled.wait(WAIT_S)
        put(store, KEYS[1:3])
        store.clear(KEYS[1:2])
        monkeypatch.setattr(tier, "put", slow)
        tier.going.set()
        assert_set(third)
        assert read(store, KEYS[1:2]) == 0
        assert put(store, KEYS[1:2]) == 1, "computed again, it is stored again"
        go_on.set()
        drained(store)
        assert sorted(tier.records) == KEYS[:3]


def test_what_is_cleared_while_it_is_moved_is_gone() -> None:
    tier = StubTier()
    with opened(16, [tier]) as store:
        put_below(store, KEYS[:1], tier)
        drained(store)
        tier.records.clear()
        tier.going.clear()
        tier.stalled.clear()
        moving = threading.Thread(target=store.move, args=(KEYS[:1], SHAPE, MEMORY, "stub"), kwargs={"copy": True})
        moving.start()
        assert tier.stalled.wait(WAIT_S)
        store.clear(KEYS[:1])
        for line in store._below.tiers[0].lines:  # a drop has happened by now, or comes later
            done = threading.Event()
            line.put(done.set)
            done.wait(0.2)
        tier.going.set()
        moving.join(WAIT_S)
        drained(store)
        assert not tier.records


@pytest.mark.parametrize(("found", "told"), [(None, Verified()), (DAMAGED, Verified(wrong=1))])
def test_a_record_that_makes_room_while_it_is_checked_is_not_wrong_and_one_that_is_damaged_is(
    found: int | None, told: Verified
) -> None:
    class Losing(StubTier):
        def get(self, key: bytes, into: memoryview) -> int | None:
            del self.records[key]
            return found

    tier = Losing()
    with opened(4, [tier]) as store:
        put_below(store, KEYS[:1], tier)
        assert store.verify(KEYS[:1], SHAPE)["stub"] == told


def test_operators_wait_for_a_tier_that_stalls_until_its_deadline_only() -> None:
    tier = StubTier()
    store = Store(8 * SHAPE.nbytes, Lru(), [tier], tier_deadline_s=0.2)
    store.open()
    put_below(store, KEYS[:2], tier)
    tier.going.clear()
    done = threading.Event()

    def operate() -> None:
        assert store.repack(KEYS[:2], SHAPE, "stub", "raw") == 0
        assert store.move(KEYS[:2], SHAPE, MEMORY, "stub", copy=True) == 0
        done.set()

    threading.Thread(target=operate).start()
    try:
        assert_set(done)
    finally:
        tier.going.set()
        store.close()


def test_a_move_that_outlives_its_lease_seals_no_other_record() -> None:
    """What is sealed under a key is believed for ever."""
    tier, clock = StubTier(), Clock()
    with opened(2, [tier], clock, lease_s=5.0) as store:
        put_below(store, KEYS[:2], tier)
        tier.records.clear()
        tier.going.clear()
        moving = threading.Thread(target=store.move, args=(KEYS[:2], SHAPE, MEMORY, "stub"), kwargs={"copy": True})
        moving.start()
        assert tier.stalled.wait(WAIT_S)
        clock.now_s += 6
        done = threading.Event()
        for _ in range(200):
            if put(store, KEYS[2:4]):
                break
            done.wait(0.05)
        tier.going.set()
        moving.join(WAIT_S)
        drained(store)
        for key, record in tier.records.items():
            whole = np.frombuffer(record, dtype=np.uint8)
            assert unseal(whole, key, SHAPE) is not None or record[HEADER_NBYTES:] == content(key)


def test_closing_a_store_waits_once_for_all_tiers_that_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [StubTier(), StubTier(), StubTier()]
    waited_s: list[float] = []
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None:
            waited_s.append(timeout)
        join(thread, timeout)

    store = Store(8 * SHAPE.nbytes, Lru(), tiers, tier_deadline_s=0.2)
    store.open()
    for tier in tiers:
        tier.going.clear()
    put(store, KEYS[:4])
    monkeypatch.setattr(threading.Thread, "join", joined)
    store.close()
    idle = 1 + FIRST  # who ask and read for the first one, and then who closes the tiers, and who notes clears
    in_time = sum(1 for timeout in waited_s if timeout > 0.1)
    assert in_time <= idle + FIRST + len(tiers) + 1, "the idle ones end at once"
    assert min(waited_s) == 0.0, "nothing is left for the last ones"
    for tier in tiers:
        tier.going.set()


def test_tiers_are_closed_where_there_is_no_memory_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("pdlink.store.store.Arena", none)
    tiers = [StubTier(), StubTier()]
    with pytest.raises(OSError, match="no memory"), opened(4, tiers):
        pass
    assert all(tier.closed for tier in tiers)


def test_two_tiers_of_a_kind_have_names_of_their_own() -> None:
    first, second = StubTier(), StubTier()
    with opened(4, [first, second]) as store:
        assert store.places == (MEMORY, "stub", "stub-2")
        assert tuple(place.name for place in store.state().places) == store.places
        put(store, KEYS[:1])
        drained(store)
        store.clear(places=[MEMORY, "stub"])
        drained(store)
        assert not first.records
        assert second.records
        assert read(store, KEYS[:1]) == 1
        assert set(store.health()) == {MEMORY, "stub", "stub-2"}


def test_a_store_is_not_well_while_the_rounds_of_its_keeper_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(4) as store:
        assert store.health()[MEMORY]
        with monkeypatch.context() as patch:
            patch.setattr(store._fetching, "late", lambda _: 1 // 0)
            until(lambda: not store.health()[MEMORY], "a round has failed")
        until(lambda: store.health()[MEMORY], "the next one has not")


def test_a_record_that_changed_in_memory_is_a_miss_and_does_not_go_below() -> None:
    tier = StubTier()
    with opened(32, [tier], verify=True) as store:
        tier.going.clear()
        put(store, KEYS)
        assert tier.stalled.wait(WAIT_S)
        with store._lock:
            slot = store._catalog._records[KEYS[6]].slot
        store.array[slot.offset + HEADER_NBYTES + 7] ^= 1
        tier.going.set()
        drained(store)
        assert sorted(tier.records) == [*KEYS[:6], KEYS[7]]
        assert store._catalog.lookup(KEYS[6:7]) == 0, "it is computed and stored again"
        assert store.flush(WAIT_S), "the tier is not to have it any more"
        assert not any(store.problems().values()), "the tier refused nothing"
        assert read(store, KEYS) == 6
        assert put(store, KEYS) == 1
        assert read(store, KEYS[:4]) == 4


def test_a_record_that_changed_in_memory_is_lent_with_the_checksum_it_was_stored_with() -> None:
    """So that the node that pulls it finds a miss, and not a damaged record sealed anew."""
    with opened(8, verify=True) as store:
        put(store, KEYS[:2])
        with store._lock:
            slot = store._catalog._records[KEYS[1]].slot
        store.array[slot.offset + HEADER_NBYTES + 7] ^= 1
        for key in KEYS[:2]:
            lease = store.lend(key)
            assert lease is not None
            lent = lease.slots[0]
            why = unseal(store.array[lent.offset : lent.offset + lent.nbytes], key, SHAPE)
            assert (why is None) == (key == KEYS[0])
            store.take_back(lease)


def test_what_came_from_a_tier_is_checked_in_memory_as_well() -> None:
    tier = StubTier()
    with opened(8, [tier], verify=True) as store:
        put_below(store, KEYS[:4], tier)
        assert read(store, KEYS[:4]) == 4
        assert read(store, KEYS[:4]) == 4


def test_shares_of_a_record_are_sealed_by_the_last_of_its_writers() -> None:
    with opened(8, verify=True) as store:
        halves = [store.reserve(KEYS[:1], SHAPE, name, Share(at, at + 1, 2)) for at, name in enumerate("ab")]
        (slot,) = halves[0]
        store.array[slot.offset + HEADER_NBYTES : slot.offset + SHAPE.nbytes] = memoryview(content(slot.key))
        for half in halves:
            store.commit(half, SHAPE)
        assert read(store, KEYS[:1]) == 1


def test_the_books_are_right_while_a_record_is_sealed_and_while_it_is_cleared_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = 0
    with opened(verify=True) as store:

        def sealed(*args: Any, **kwargs: Any) -> None:
            nonlocal checked
            store.check()
            store.clear(KEYS[:1])
            store.check()
            checked += 1
            seal(*args, **kwargs)

        monkeypatch.setattr("pdlink.store.store.seal", sealed)
        store.commit(store.reserve(KEYS[:1], SHAPE, retention=Retention(ttl_s=100)), SHAPE)
    assert checked == 1


def test_a_store_that_was_closed_answers_at_once_and_holds_nothing() -> None:
    """Its lines have ended: what they are given is not done, and nobody waits for it."""
    tier = StubTier()
    with opened(4, [tier]) as store:
        put_below(store, KEYS[:1], tier)
        drained(store)
        store.clear(places=[MEMORY])
        found = store.lookup(KEYS[:1], WAIT_S)
        for line in store._below.tiers[0].lines:
            line.end()
        assert store.fetch(found, SHAPE, "late").done.result(0.0) == ()
        assert store.lookup(KEYS[:2], WAIT_S).keys == ()
        assert not store.flush(WAIT_S)
        assert put(store, KEYS[1:2]) == 1
        assert store.move(KEYS[1:2], SHAPE, MEMORY, "stub", copy=True) == 0
        assert store.held() == {"leases": 0, "reservations": 0}


def test_serials_of_two_lives_of_a_store_have_nothing_in_common() -> None:
    with opened(4) as first, opened(4) as second:
        serials = [{slot.serial for slot in store.reserve(KEYS[:4], SHAPE)} for store in (first, second)]
        assert serials[0].isdisjoint(serials[1])
        assert max(*serials[0], *serials[1]) < 2**63, "messages carry them"


def test_listeners_hear_what_a_tier_has_that_is_added_and_that_it_has_gone_with_the_tier(tmp_path: Path) -> None:
    disk, other = (Striped([tmp_path / name], "model", 1 << 22) for name in ("a", "b"))
    heard: dict[bytes, set[str]] = {key: set() for key in KEYS}

    def hear(change: RecordChange) -> None:
        (set.add if change.is_there else set.discard)(heard[change.key], change.place)

    with opened(8, [disk]) as store:
        store.listen(hear)
        put(store, KEYS[:4])
        assert store.flush(WAIT_S)
        until(lambda: all(heard[key] == {"memory", "disk"} for key in KEYS[:4]), "they are told")
        assert store.remove_tier("disk")
        until(lambda: all(heard[key] == {"memory"} for key in KEYS[:4]), "it is told that they have gone")
        assert store.add_tier(other) == "disk"
        put(store, KEYS[4:6])
        assert store.flush(WAIT_S)
        until(lambda: all(heard[key] == {"memory", "disk"} for key in KEYS[4:6]), "those of the new one are told")
        assert all(heard[key] == {"memory"} for key in KEYS[:4])
