"""What subscribers are told adds up to what is there, whatever waits how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdlink.kv.hashing import Preimage
from pdlink.observe.kv_ledger import BlockPlace, BlockRemoved, BlockStored, EventBatch, Ledger, events_of
from pdlink_proxy.kv_index import KVIndex
from tests.proxy.test_kv_index import apply, tokens_in

if TYPE_CHECKING:
    from pdlink.observe.kv_ledger import Event

POOL, DISK = BlockPlace(4, "GPU"), BlockPlace(8, "STORAGE", "LOCAL", "disk")


def key(number: int) -> bytes:
    return bytes([number]) * 32


def of(number: int) -> Preimage:
    return Preimage(key(number - 1) if number else None, range(4 * number, 4 * number + 4))


class Subscriber:
    """An index as a router keeps it, which counts what is told twice."""

    def __init__(self) -> None:
        self.known: dict[tuple[str | None, bytes], int] = {}

    def hear(self, events: list[Event]) -> None:
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            for block in event.block_hashes:
                step = 1 if isinstance(event, BlockStored) else -1
                self.known[event.medium, block] = self.known.get((event.medium, block), 0) + step

    @property
    def present(self) -> set[tuple[str | None, bytes]]:
        assert set(self.known.values()) <= {0, 1}, "told twice, or gone before it came"
        return {block for block, count in self.known.items() if count}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.booleans(), st.sampled_from([POOL, DISK]), st.integers(0, 5)),
            st.integers(1, 4),  # so many are taken
        )
    )
)
def test_what_is_told_adds_up_to_what_is_there(steps: list[tuple[bool, BlockPlace, int] | int]) -> None:
    ledger, truth = Ledger(), set[tuple[str | None, bytes]]()
    early, late = Subscriber(), Subscriber()
    late.hear(events_of(ledger.told()))
    for step in steps:
        if isinstance(step, int):
            early.hear(events_of(ledger.take(step)))
            continue
        stored, place, number = step
        if stored:
            ledger.stored(place, key(number), of(number))
            truth.add((place.medium, key(number)))
        else:
            ledger.removed(place, key(number))
            truth.discard((place.medium, key(number)))
        assert len(ledger) == len(truth)
    late.hear(events_of(ledger.told()))  # it joins here, then hears what all hear
    while ledger.has_news:
        events = events_of(ledger.take(2))
        early.hear(events)
        for event in events:  # of what left in between it has never heard
            if isinstance(event, BlockRemoved):
                event.block_hashes = [one for one in event.block_hashes if (event.medium, one) in late.known]
        late.hear(events)
    assert early.present == truth
    assert late.present == truth


def test_what_waits_is_bounded_by_what_is_there_and_was_told() -> None:
    ledger = Ledger()
    for _ in range(1000):
        ledger.stored(POOL, key(1), of(1))
        ledger.removed(POOL, key(1))
    assert not ledger.has_news


def test_a_chain_is_one_event_and_what_does_not_follow_another() -> None:
    ledger = Ledger()
    for number in (0, 1, 2, 5):
        ledger.stored(POOL, key(number), of(number))
    first, second = events_of(ledger.take(9))
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [key(0), key(1), key(2)]
    assert (first.parent_block_hash, first.token_ids, first.block_size) == (None, list(range(12)), 4)
    assert isinstance(second, BlockStored)
    assert (second.parent_block_hash, second.token_ids) == (key(4), [20, 21, 22, 23])


def test_a_block_that_reaches_another_place_keeps_its_tokens() -> None:
    """A tier knows keys only."""
    ledger = Ledger()
    memory = BlockPlace(4, "CPU")
    ledger.stored(memory, key(3), of(3))
    ledger.stored(DISK, key(3))
    ledger.stored(DISK, key(4))
    told = events_of(ledger.take(9))
    assert [(event.medium, event.token_ids) for event in told if isinstance(event, BlockStored)] == [
        ("CPU", [12, 13, 14, 15]),
        ("STORAGE", [12, 13, 14, 15]),
        ("STORAGE", []),
    ]


def test_a_block_whose_tokens_become_known_is_told_again_with_them() -> None:
    """It came from another store, which knows keys only."""
    ledger = Ledger()
    ledger.stored(POOL, key(0))
    assert [event.token_ids for event in events_of(ledger.take(9)) if isinstance(event, BlockStored)] == [[]]
    ledger.stored(POOL, key(0), of(0))
    ledger.stored(POOL, key(0), of(0))
    ledger.stored(POOL, key(0))
    assert [event.token_ids for event in events_of(ledger.take(9)) if isinstance(event, BlockStored)] == [
        [0, 1, 2, 3]
    ]
    ledger.removed(POOL, key(0))
    assert len(ledger.take(9)) == 1


def test_the_bytes_are_those_of_vllm() -> None:
    """Arrays for batches, maps for events, defaults of vLLM's structs left out."""
    ledger = Ledger()
    ledger.stored(POOL, key(1), of(1))
    ledger.stored(DISK, key(1))
    stored = events_of(ledger.take(9))
    ledger.removed(DISK, key(1))
    batch = EventBatch(1.5, [*stored, *events_of(ledger.take(9))])
    block = {
        "type": "BlockStored",
        "block_hashes": [key(1)],
        "parent_block_hash": key(0),
        "token_ids": [4, 5, 6, 7],
        "lora_id": None,
        "lora_name": None,
    }
    below = {"medium": "STORAGE", "locality": "LOCAL", "ownership": "disk"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            block | {"block_size": 4, "medium": "GPU"},
            block | {"block_size": 8} | below,
            {"type": "BlockRemoved", "block_hashes": [key(1)]} | below,
        ],
        0,
    ]


def test_our_router_finds_a_prompt_under_its_salt_only() -> None:
    ledger, index, publisher = Ledger(), KVIndex(), 1

    def hear(events: list[Event]) -> None:
        apply(index, publisher, "m", msgspec.msgpack.encode(EventBatch(0.0, events)))

    salted = of(0)._replace(extra=("tenant",))
    for number, preimage in ((0, salted), (1, of(1)), (2, of(2))):
        ledger.stored(POOL, key(number), preimage)
    events = events_of(ledger.take(9))
    assert isinstance(events[0], BlockStored)
    assert events[0].extra_keys == [("tenant",), None, None]
    hear(events)
    prompt = np.arange(12, dtype=np.uint32)
    assert tokens_in(index, "m", ("tenant",), prompt) == {1: 12}
    assert tokens_in(index, "m", (), prompt) == {}
    ledger.removed(POOL, key(1))
    hear(events_of(ledger.take(9)))
    assert tokens_in(index, "m", ("tenant",), prompt) == {1: 4}


def test_a_block_is_told_again_after_the_one_before_it_whichever_came_first() -> None:
    ledger = Ledger()
    for number in (3, 1, 2, 0, 7):
        ledger.stored(POOL, key(number), of(number))
    ledger.take(100)
    assert [block for _, block, _ in ledger.told()] == [key(number) for number in (0, 1, 2, 3, 7)]


def test_all_that_is_there_is_told_again_parents_first_and_what_has_gone_meanwhile() -> None:
    ledger = Ledger()
    for number in (1, 0, 2):
        ledger.stored(POOL, key(number), of(number))
    ledger.take(9)
    ledger.removed(POOL, key(2))
    ledger.stored(POOL, key(3), of(3))
    ledger.tell_again()
    news = ledger.take(9)
    told = {block: known is not None for _, block, known in news}
    assert told == {key(0): True, key(1): True, key(2): False, key(3): True}
    names = [block for _, block, _ in news]
    assert names.index(key(0)) < names.index(key(1))
    assert not ledger.has_news
