"""How much a store does while it holds the lock of its books: in steps of Python, whatever the machine's load."""

from __future__ import annotations

import sys
import threading
from math import inf
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.store.eviction import Adaptive
from pdlink.store.record import Group, RecordShape
from pdlink.store.sessions import SessionTerms
from pdlink.store.store import Store
from tests.waiting import until

from .stubs import StubTier

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = RecordShape("uint8", 16, (Group("latent", (0,), 1, 1, 16),))
KEYS = [b"%032d" % number for number in range(20_000)]
PIN_QUOTA_NBYTES = 40 << 20
MOST_STEPS = 100_000
"""Some milliseconds. To forget a record takes some more than a hundred, to lease one ten."""


class CountingLock:
    """Counts the lines that its holder executes in functions that it calls, which takes ten times as long."""

    def __init__(self) -> None:
        self.counts = True
        self._lock = threading.Lock()
        self._steps = self.most_steps = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as of a lock
        taken = self._lock.acquire(blocking, timeout)
        if taken and self.counts:
            self._steps = 0
            sys.settrace(self._step)
        return taken

    def release(self) -> None:
        sys.settrace(None)
        self.most_steps = max(self.most_steps, self._steps)
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _step(self, _frame: FrameType, _event: str, _arg: object) -> Any:
        self._steps += 1
        return self._step


def _locking_by(lock: CountingLock) -> SimpleNamespace:
    """In place of `threading`, for a store's books."""
    return SimpleNamespace(Lock=lambda: lock, Condition=threading.Condition)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, CountingLock]]:
    """A store that has the records of `KEYS`, as far as its books know."""
    lock = CountingLock()
    lock.counts = False
    monkeypatch.setattr("pdlink.store.books.threading", _locking_by(lock))
    store = Store(2 * len(KEYS) * 8192, Adaptive(), pin_quota_nbytes=PIN_QUOTA_NBYTES)
    store.open()
    _commit_at_once(store, lock)
    lock.counts = True
    try:
        yield store, lock
    finally:
        store.close()


def _commit_at_once(store: Store, lock: CountingLock) -> None:
    """The records of `KEYS`."""
    with lock:
        store._books.commit(store._catalog.reserve(KEYS, SHAPE.nbytes, "test"), SHAPE, summed=True)


def test_what_is_done_at_once_is_seen(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    assert store.clear().records == len(KEYS)
    lock.most_steps = 0
    _commit_at_once(store, lock)
    assert lock.most_steps > MOST_STEPS


def test_a_long_prompt_is_looked_up_leased_and_released_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    found = store.lookup(KEYS, 1.0)
    fetch = store.fetch(found, SHAPE, "test")
    assert [slot.key for slot in fetch.done.result(0)] == KEYS
    assert fetch.close()
    assert store.held() == {"leases": 0, "reservations": 0}
    assert 0 < lock.most_steps < MOST_STEPS


def test_a_long_prompt_is_pinned_in_pieces_up_to_the_quota(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    assert store.pin(KEYS, "prompt") == PIN_QUOTA_NBYTES // SHAPE.nbytes > 1024
    assert lock.most_steps < MOST_STEPS // 10
    assert store.unpin("prompt") == PIN_QUOTA_NBYTES // SHAPE.nbytes
    store.check()


def test_room_for_the_end_of_a_long_prompt_is_taken_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    end = [b"%032d" % number for number in range(len(KEYS), len(KEYS) + 4)]
    slots = store.reserve([*KEYS, *end], SHAPE)
    assert [slot.key for slot in slots] == end
    store.abandon(slots)
    assert store.held() == {"leases": 0, "reservations": 0}
    assert lock.most_steps < MOST_STEPS


def test_many_slots_are_committed_in_pieces_which_listeners_hear_of_in_order(
    counted: tuple[Store, CountingLock],
) -> None:
    store, lock = counted
    more = [b"%032d" % number for number in range(len(KEYS), 2 * len(KEYS))]
    heard: list[bytes] = []
    store.listen(lambda change: heard.append(change.key))
    slots = store.reserve(more, SHAPE)
    store._books.wait_told()  # the store's own thread may be telling what was there
    heard.clear()
    lock.most_steps = 0
    store.commit(slots, SHAPE)
    store._books.wait_told()
    assert heard == more
    assert store.lookup(more, 1.0).keys == tuple(more)
    assert 0 < lock.most_steps < MOST_STEPS


def test_a_session_keeps_a_long_prompt_changes_and_ends_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    half, session = len(KEYS) // 2, SessionTerms("agent", "", 60.0)  # the quota
    assert store.hold(session, KEYS, [8192], waits=True) == half
    assert store.hold(session, KEYS[half:], [8192], waits=True) == half
    assert store._catalog.sessions.kept.keys() == set(KEYS[half:])
    assert store.end_session("agent", "")
    assert not store._catalog.sessions.kept
    assert 0 < lock.most_steps < MOST_STEPS
    store.check()


def test_sessions_beyond_their_share_of_memory_give_it_up_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    for number in range(2):
        keys = KEYS[number * 10_000 :][:10_000]
        assert store.hold(SessionTerms(f"agent {number}", "", 60.0), keys, [4096], waits=True) == 10_000
    with lock:
        store._catalog.resize(store._catalog.capacity_nbytes // 4)  # as if the system had refused memory
    assert store.hold(SessionTerms("another", "", 60.0), KEYS[:5000], [4096], waits=True) == 5000
    assert 0 < lock.most_steps < MOST_STEPS


def test_leases_that_are_over_and_those_of_a_holder_who_is_gone_end_in_pieces(
    counted: tuple[Store, CountingLock],
) -> None:
    store, lock = counted
    for deadline_s in (inf, 0.0):
        assert sum(len(each.slots) for each in store._books.leases(KEYS, "gone", "test", deadline_s)) == len(KEYS)
    until(lambda: store.held()["leases"] == -(-len(KEYS) // 512), "the second ones are over")
    store.holder_gone("gone")
    assert store.held()["leases"] == 0
    assert 0 < lock.most_steps < MOST_STEPS


def test_reservations_of_a_holder_who_is_gone_end_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    more = [b"%032d" % number for number in range(len(KEYS), 2 * len(KEYS))]
    assert len(store.reserve(more, SHAPE, "gone")) == len(more)
    lock.most_steps = 0
    store.holder_gone("gone")
    assert store.held() == {"leases": 0, "reservations": 0}
    assert 0 < lock.most_steps < MOST_STEPS


def test_a_tier_gets_many_records_in_pieces() -> None:
    """A burst is put into the line of the tier's writer as far as that has room."""
    lock = CountingLock()
    tier = StubTier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdlink.store.books.threading", _locking_by(lock))
        store = Store(2 * len(KEYS) * 8192, Adaptive(), [tier])
    store.open()
    try:
        store.commit(store.reserve(KEYS[:6000], SHAPE), SHAPE, summed=True)
        assert store.flush(60.0)
        assert len(tier.records) == 6000
        assert 0 < lock.most_steps < MOST_STEPS
    finally:
        store.close()


def test_all_records_are_cleared_at_once(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    heard: list[bytes] = []
    store.listen(lambda change: heard.append(change.key) if not change.is_there else None)
    kept = store.fetch(store.lookup(KEYS[:2], 1.0), SHAPE, "test")
    lock.most_steps = 0
    assert store.clear().records == len(KEYS)
    assert lock.most_steps < 1000
    store._books.wait_told()
    assert sorted(heard) == KEYS
    assert not store.lookup(KEYS, 1.0).keys
    assert store.gauges()["used"] == 2 * 8192
    assert kept.close()
    assert store.gauges()["used"] == 0
    store.check()


def test_named_records_are_cleared_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    assert store.clear(KEYS[1:]).records == len(KEYS) - 1
    assert store.clear(ending=KEYS[0][-8:]).records == 1
    assert lock.most_steps < MOST_STEPS
    store.check()


def test_records_that_expire_together_go_in_pieces(counted: tuple[Store, CountingLock]) -> None:
    store, lock = counted
    gone = threading.Event()
    store.listen(lambda change: gone.set() if change.key == KEYS[-1] and not change.is_there else None)
    with store._lock:
        for record in store._catalog._records.values():
            record.expires_s = 1.0
            store._catalog._deadlines.add(1.0, record)
        lock._steps = 0
        store._books.room_taken.notify_all()
    assert gone.wait(60.0)
    assert lock.most_steps < MOST_STEPS
