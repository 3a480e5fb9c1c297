"""What a fetch promises: all its leases stood, and what it gives unchecked is known to be so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.store.fetching import Wanted
from pdlink.store.slots import USUAL
from tests.waiting import WAIT_S

from .stubs import SHAPE, StubTier
from .test_store import KEYS, fetch, opened, put, put_below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from pdlink.store.fetching import Arrival, Brought, Fetch


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


def test_what_an_ended_holder_has_leased_can_be_evicted_at_once() -> None:
    with opened(2) as store:
        put(store, KEYS[:2])
        begun = store.fetch(store.lookup(KEYS[:2], WAIT_S), SHAPE, "request", "worker")
        assert put(store, KEYS[2:4]) == 0, "both are leased"
        store.holder_gone("worker")
        assert put(store, KEYS[2:4]) == 2
        assert not begun.close()
