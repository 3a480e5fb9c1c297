"""The memory of another node as a tier: what it promises of `test_conformance.py`, case by case.

A peer is read only, and its records are those of a store, so the suite cannot fill it itself. Each of its cases
stands here under its name: with what holds of a peer, or with the reason why it is not of this contract.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pdlink.store.record import HEADER_NBYTES, Miss, unseal
from pdlink.store.slots import Slot
from tests.peers.store_node import StoreNode, content
from tests.peers.store_node import key as numbered

from . import test_conformance

NOT_OF_A_PEER = {
    "test_a_run_is_put_and_got_as_its_records_alone": "it gives one record at a time",
    "test_a_record_stays_as_it_was_put_first": "nothing is put into a peer: see test_nothing_is_put_into_a_peer",
    "test_a_removed_record_gives_its_room_back": "it has no room of its own: nbytes and capacity are 0",
    "test_a_tier_says_which_records_end_alike": "others keep what they have, so nobody asks what a peer could clear",
    "test_a_tier_never_holds_more_than_its_capacity": "it has no room of its own: nbytes and capacity are 0",
    "test_a_cleared_tier_holds_nothing_and_can_be_used_again": "others keep what they have: see "
    "test_a_peer_that_is_cleared_keeps_what_it_has",
}


@pytest.fixture
def nodes() -> Iterator[tuple[StoreNode, StoreNode]]:
    with ExitStack() as ends:
        owner = StoreNode("owner")
        ends.callback(owner.close)
        asker = StoreNode("asker", [owner.address()])
        ends.callback(asker.close)
        yield owner, asker


def pulled(asker: StoreNode, number: int, nbytes: int | None = None) -> bytes | None:
    """The payload of a record as the tier brings it into a slot of the arena; None for a miss."""
    shape = asker.shape
    (slot,) = asker.store.reserve([b"slot" + numbered(number)[4:]], shape)
    try:
        room = asker.store.array[slot.offset :][: shape.nbytes if nbytes is None else nbytes]
        found = asker.tiers[0].get(numbered(number), room.data)
        if found is None:
            return None
        assert found == shape.nbytes
        missed = unseal(room, numbered(number), shape, found)
        assert missed is None, missed
        return room[HEADER_NBYTES:].tobytes()
    finally:
        asker.store.abandon([slot])


def test_what_was_put_is_got_byte_for_byte(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    owner.put(1, 2)
    assert pulled(asker, 1) == content(1, owner.shape.payload_nbytes)
    assert pulled(asker, 2) == content(2, owner.shape.payload_nbytes)


def test_an_absent_key_is_a_miss(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    owner.put(1)
    assert asker.tiers[0].contains([numbered(2), numbered(1), numbered(3)]) == [False, True, False]
    assert asker.tiers[0].contains([]) == []
    assert pulled(asker, 2) is None
    asker.tiers[0].remove(numbered(2))


def test_a_record_longer_than_the_memory_for_it_is_a_miss_and_stays(nodes: tuple[StoreNode, StoreNode]) -> None:
    """A peer says so by an error, because no reader asks for less: shapes are part of keys."""
    owner, asker = nodes
    owner.put(1)
    with pytest.raises(OSError, match="pages"):
        pulled(asker, 1, 4096)
    assert pulled(asker, 1) == content(1, owner.shape.payload_nbytes)


def test_a_removed_record_is_a_miss(nodes: tuple[StoreNode, StoreNode]) -> None:
    """It is not found there any more; the peer has it still."""
    owner, asker = nodes
    owner.put(0, 1, 2)
    asker.tiers[0].remove(numbered(1))
    assert asker.tiers[0].contains([numbered(number) for number in range(3)]) == [True, False, True]
    assert pulled(asker, 1) is None
    assert owner.read(1) == 1


def test_keys_that_begin_alike_are_two_records(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    owner.put(1)
    assert numbered(1)[:31] == numbered(2)[:31]
    assert asker.tiers[0].contains([numbered(1), numbered(2)]) == [True, False]
    assert pulled(asker, 2) is None


def test_damaged_bytes_are_a_miss_and_can_be_put_again(nodes: tuple[StoreNode, StoreNode]) -> None:
    """`get` brings them, and the record's own checksum tells (`verifies` is not set)."""
    owner, asker = nodes
    owner.put(1)
    assert not asker.tiers[0].verifies
    right = owner.store.lend

    def damaged(key: bytes) -> object:
        lease = right(key)
        assert lease is not None
        slot: Slot = lease.slots[0]
        owner.store.array[slot.offset + HEADER_NBYTES + 7] ^= 1
        return lease

    owner.store.lend = damaged  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError, match=str(Miss("payload_checksum").reason)):
        pulled(asker, 1)
    assert asker.read(1) == 0, "the store takes it for a miss"


def test_many_threads_get_whole_records_of_their_key_or_misses(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    owner.put(0, 1, 2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: (number % 4, pulled(asker, number % 4)), range(4)))
    assert found == [(n, content(n, owner.shape.payload_nbytes) if n < 3 else None) for n in range(4)]


def test_after_close_every_call_is_a_miss(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    owner.put(1)
    tier = asker.tiers[0]
    tier.close()
    tier.close()
    assert pulled(asker, 1) is None
    assert tier.contains([numbered(1)]) == [False]
    assert not tier.put(numbered(2), memoryview(b"record"))
    tier.remove(numbered(1))
    tier.clear()
    assert owner.read(1) == 1


def test_nothing_is_put_into_a_peer(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    assert not asker.tiers[0].put(numbered(1), memoryview(b"record"))
    assert asker.tiers[0].contains([numbered(1)]) == [False]
    assert owner.read(1) == 0


def test_a_peer_that_is_cleared_keeps_what_it_has(nodes: tuple[StoreNode, StoreNode]) -> None:
    owner, asker = nodes
    owner.put(1)
    asker.tiers[0].clear()
    assert asker.tiers[0].contains([numbered(1)]) == [True]
    assert (asker.tiers[0].nbytes, asker.tiers[0].capacity_nbytes) == (0, 0)


def test_every_case_of_the_suite_is_here_or_says_why_not() -> None:
    def cases(module: object) -> set[str]:
        return {name for name, found in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_")}

    here, there = cases(sys.modules[__name__]), cases(test_conformance)
    assert there - here == NOT_OF_A_PEER.keys()
