"""What a fetch promises: all its leases stood, and what it gives unchecked is known to be so."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pdlink.store import fetching
from pdlink.store.fetching import Wanted
from pdlink.store.slots import USUAL
from tests.waiting import WAIT_S, until

from .stubs import SHAPE, StubRunTier, StubTier
from .test_store import KEYS, fetch, opened, put, put_below, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from pdlink.store.fetching import Arrival, Brought, Fetch
    from pdlink.store.interface import Found
    from pdlink.store.store import Store


def found_below(store: Store, keys: Sequence[bytes], *tiers: StubTier) -> Found:
    """Records that these tiers have, and memory has not."""
    put_below(store, keys, *tiers)
    store.clear(keys, ["memory"])
    return store.lookup(keys, WAIT_S)


def test_a_fetch_of_which_one_lease_has_ended_does_not_stand() -> None:
    """Its chunks are leased at different times, so one of the leases may be over while the others are not."""
    tier = StubTier()
    with opened(4, [tier]) as store:
        put_below(store, KEYS[:2], tier)
        for ended in (0, 1):
            store.clear(KEYS[1:2], ["memory"])
            begun = fetch(store, KEYS[:2])
            assert len(begun.done.result(WAIT_S)) == 2
            leases = [lease for lease in begun.leases if lease.slots]  # type: ignore[attr-defined]
            assert len(leases) == 2, "one is in memory, one has come from the tier"
            with store._lock:
                store._catalog.release(leases[ended])
            assert not begun.close()


def test_a_record_that_nobody_checked_is_not_given_to_a_reader_that_came_while_it_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was read for a reader that compares the sums itself; the next one relies on the store."""
    tier = StubTier()
    with opened(4, [tier]) as store:
        put_below(store, KEYS[:1], tier)
        store.clear(KEYS[:1], ["memory"])
        tier.flip(KEYS[0])
        found = store.lookup(KEYS[:1], WAIT_S)
        arrived, late = store._fetching._arrived, list["Fetch"]()

        def after_it_was_read(run: Sequence[Arrival], brought: Mapping[bytes, Brought]) -> None:
            assert list(brought) == KEYS[:1]
            late.append(store._fetching.fetch(Wanted(found, SHAPE, "relies on the store", "engine", USUAL, False)))
            arrived(run, brought)

        monkeypatch.setattr(store._fetching, "_arrived", after_it_was_read)
        first = store.fetch(found, SHAPE, "checks by itself", checks=True)
        first.done.result(WAIT_S)
        assert late[0].done.result(WAIT_S) == ()
        assert late[0].close()
        first.close()


def test_the_first_records_that_somebody_waits_for_come_in_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FIRST_RUN_NBYTES", 2 * SHAPE.nbytes)
    keys, tier = [b"%032d" % number for number in range(24)], StubRunTier()
    with opened(len(keys), [tier]) as store:
        put_below(store, keys, tier)
        store.clear(keys, ["memory"])
        tier.runs.clear()
        assert read(store, keys) == len(keys)
        assert sorted(tier.runs) == [*[2] * 8, 8]


def test_records_of_a_run_are_there_while_the_next_tier_is_asked_for_one_that_has_gone() -> None:
    first, second = StubRunTier(), StubTier()
    with opened(8, [first, second]) as store:
        found = found_below(store, KEYS[:4], first, second)
        del first.records[KEYS[2]]
        second.going.clear()
        begun = store.fetch(found, SHAPE, "request")
        assert second.stalled.wait(WAIT_S)
        until(lambda: len(begun.leading()) == 2, "those before it are there")
        second.going.set()
        assert len(begun.done.result(WAIT_S)) == 4
        assert begun.close()


def test_records_of_a_tier_that_was_removed_since_they_were_found_come_from_the_next_one() -> None:
    first, second = StubRunTier(), StubTier()
    with opened(8, [first, second]) as store:
        found = found_below(store, KEYS[:4], first, second)
        store._below.remove(0)
        begun = store.fetch(found, SHAPE, "request")
        assert len(begun.done.result(WAIT_S)) == 4
        assert begun.close()


def test_a_record_of_a_run_that_nobody_waited_for_is_read_for_who_comes_meanwhile() -> None:
    tier = StubRunTier()
    with opened(8, [tier]) as store:
        found = found_below(store, KEYS[:2], tier)
        begun, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            assert goes_on.wait(WAIT_S)

        assert store._below.tiers[0].readers.put(hold, alone=True)
        assert begun.wait(WAIT_S)
        first = store.fetch(found, SHAPE, "goes before they are read")
        second = store.fetch(store.lookup(KEYS[:1], WAIT_S), SHAPE, "wants one of them")
        first.close()
        tier.going.clear()
        goes_on.set()
        assert tier.stalled.wait(WAIT_S)
        third = store.fetch(found, SHAPE, "wants both")
        tier.going.set()
        assert len(third.done.result(WAIT_S)) == 2
        assert len(second.done.result(WAIT_S)) == 1
        assert second.close()
        assert third.close()


def test_what_an_ended_holder_has_leased_can_be_evicted_at_once() -> None:
    with opened(2) as store:
        put(store, KEYS[:2])
        begun = store.fetch(store.lookup(KEYS[:2], WAIT_S), SHAPE, "request", "worker")
        assert put(store, KEYS[2:4]) == 0, "both are leased"
        store.holder_gone("worker")
        assert put(store, KEYS[2:4]) == 2
        assert not begun.close()
