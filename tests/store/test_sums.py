"""Checksums without a pass of their own: copies into records make them, copies out of records compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink import _copy
from pdlink.store import record as records
from tests.waiting import WAIT_S, until

from .process import client, served
from .stubs import StubTier
from .test_source import CHUNK, LAYERS, TOKENS, Engine, check, engine, opened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdlink.memory.buffers import Bytes
    from pdlink.store.interface import AnyStore

LAYER_NBYTES = 2 * CHUNK * 2 * 64
END = 40
"""Of the whole chunks."""


def keep(made: Engine, store: AnyStore, tier: StubTier, passes: Sequence[int] = (TOKENS,)) -> list[bytes]:
    """Compute and store the prompt; the keys of its chunks, which only the tier has then."""
    prompt, blocks = made.prompt("keep"), made.blocks(1)
    made.prefill(prompt, blocks, passes)
    prompt.close()
    made.settle()
    made.pool.give_back(blocks)
    assert store.flush(WAIT_S)
    forget_memory(store)
    assert len(tier.records) == END // CHUNK
    return list(prompt.keys.by_group[0])


def forget_memory(store: AnyStore) -> None:
    store.clear(places=["memory"])


def brought(made: Engine, begin: int = 0) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Load the prompt from token `begin` on: where it ended, what was said to be there, and the blocks."""
    prompt, blocks, landed = made.prompt("load"), made.blocks(2), list[tuple[int, int]]()
    loading = prompt.load(begin, prompt.lookup(), [blocks], lambda *there: landed.append(there))
    end = loading.done.result(WAIT_S)
    return end, landed, blocks


def no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pass over the payload")

    monkeypatch.setattr(records, "sums_of", refuse)


@pytest.mark.parametrize("passes", [[TOKENS], [3, 17, 40, TOKENS]])
def test_a_record_goes_to_a_tier_and_comes_back_checked_without_a_pass_over_it(
    passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = StubTier()
    with opened(records=32, tiers=[tier]) as store, engine(store) as made, engine(store, "BLPTH", 2) as other:
        no_pass(monkeypatch)
        keys = keep(made, store, tier, passes)
        end, landed, blocks = brought(other)
        assert end == END
        assert landed == [(layer, END) for layer in range(LAYERS)]
        check(other, blocks, 0, END)
        monkeypatch.undo()
        shape = made.group.shape
        for key in keys:
            assert records.unseal(stored(tier, key), key, shape) is None


def stored(tier: StubTier, key: bytes) -> Bytes:
    return np.frombuffer(bytearray(tier.records[key]), np.uint8)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_a_layer_that_has_changed_is_never_said_to_be_there(chunk: int, layer: int) -> None:
    tier = StubTier()
    with opened(records=32, tiers=[tier]) as store, engine(store) as made:
        keys = keep(made, store, tier)
        tier.flip(keys[chunk], records.HEADER_NBYTES + layer * LAYER_NBYTES + 77)
        end, landed, blocks = brought(made)
        assert end == chunk * CHUNK
        assert [there for there in landed if there[0] >= layer and there[1] > end] == []
        assert [there for there in landed if there[0] < layer] == [(before, END) for before in range(layer)]
        check(made, blocks, 0, end)
        until(lambda: keys[chunk] not in tier.records, "the tier has forgotten it")
        assert len(store.lookup(keys, WAIT_S).keys) == chunk
        keep_again(made, store, keys)
        assert brought(made)[0] == END


def keep_again(made: Engine, store: AnyStore, keys: list[bytes]) -> None:
    prompt, blocks = made.prompt("again"), made.blocks(3)
    made.prefill(prompt, blocks, [TOKENS])
    prompt.close()
    made.settle()
    made.pool.give_back(blocks)
    assert len(store.lookup(keys, WAIT_S).keys) == len(keys)


@pytest.mark.parametrize("at", [0, LAYER_NBYTES * LAYERS - 1])
def test_a_chunk_of_which_a_part_is_wanted_is_checked_whole(at: int) -> None:
    tier = StubTier()
    with opened(records=32, tiers=[tier]) as store, engine(store) as made:
        keys = keep(made, store, tier)
        tier.flip(keys[1], records.HEADER_NBYTES + at)
        assert brought(made, CHUNK + 4)[0] == CHUNK + 4
        until(lambda: keys[1] not in tier.records, "the tier has forgotten it")


def test_what_one_reader_has_not_checked_is_checked_for_the_next_that_relies_on_the_store() -> None:
    tier = StubTier()
    with opened(records=32, tiers=[tier]) as store, engine(store) as made:
        keys, shape = keep(made, store, tier), made.group.shape
        tier.flip(keys[3])
        found = store.lookup(keys, WAIT_S)
        first = store.fetch(found, shape, "checks by itself", checks=True)
        assert len(first.done.result(WAIT_S)) == len(keys)
        assert set(first.unchecked) == set(keys)
        second = store.fetch(found, shape, "relies on the store")
        assert len(second.done.result(WAIT_S)) == 3
        assert not second.unchecked
        third = store.fetch(store.lookup(keys, WAIT_S), shape, "after it", checks=True)
        assert set(third.unchecked) == set(), "what the store has checked need not be checked again"
        for fetch in (first, second, third):
            fetch.close()


def test_a_worker_beside_a_store_process_makes_and_compares_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = StubTier()
    with served(tmp_path, 64, [tier]) as (store, listener), client(listener.path) as mine:
        with engine(mine) as made:
            no_pass(monkeypatch)
            keys = keep(made, mine, tier)
            assert brought(made)[0] == END
            monkeypatch.undo()
            forget_memory(mine)
            tier.flip(keys[2])
            assert brought(made)[0] == 2 * CHUNK
            until(lambda: keys[2] not in tier.records, "the tier has forgotten it")
            assert len(mine.lookup(keys, WAIT_S).keys) == 2
        store.check()


def test_sums_are_not_made_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_copy, "nt_runs_summed")
    with opened() as store, engine(store) as made:
        assert not store.wants_sums
        prompt, blocks = made.prompt("p"), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert brought(made)[0] == END
        made.pool.give_back(blocks)
