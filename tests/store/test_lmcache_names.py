"""Callers of LMCache's engine find its verbs, with its arguments and answers."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink.errors import InvalidRequest
from pdlink.integrations.lmcache import LMCacheConnector, LMCacheEngine

from .test_cache import LAYERS, PROMPT, Pages


def slots(blocks: list[int], block_tokens: int, num_tokens: int = len(PROMPT)) -> list[int]:
    return [blocks[token // block_tokens] * block_tokens + token % block_tokens for token in range(num_tokens)]


def test_kv_comes_back_through_slot_mappings_and_masks() -> None:
    with Pages("LPBHT", 8) as pages:
        engine = LMCacheEngine(pages.cache)
        blocks, mine = pages.table(1), pages.table(2)
        pages.compute(PROMPT, blocks)
        engine.store(PROMPT, slot_mapping=slots(blocks, 8), kvcaches=None)
        assert engine.lookup(PROMPT) == 96
        pages.memory[:] = 0
        mask = [False] * 32 + [True] * 68
        mapping = np.array([-1] * 32 + slots(mine, 8)[32:])
        loaded = engine.retrieve(PROMPT, mask, slot_mapping=mapping)
        assert loaded.tolist() == [False] * 32 + [True] * 64 + [False] * 4
        pages.check(PROMPT, mine, 32, 96)
        assert engine.health() == 0


def test_layers_end_with_the_mask_of_what_was_loaded() -> None:
    with Pages() as pages:
        engine, blocks = LMCacheEngine(pages.cache), pages.table(1)
        assert len(list(engine.store_layer(PROMPT, slot_mapping=slots(blocks, 16)))) == LAYERS + 1
        *steps, mask = engine.retrieve_layer(PROMPT, slot_mapping=slots(blocks, 16))
        assert steps == [96, *[None] * LAYERS]
        assert isinstance(mask, np.ndarray)
        assert mask.sum() == 96


def test_pins_of_a_lookup_need_a_name_and_are_given_back() -> None:
    with Pages() as pages:
        engine = LMCacheEngine(pages.cache)
        pages.stored()
        with pytest.raises(InvalidRequest, match="lookup_id: got none"):
            engine.lookup(PROMPT, pin=True)
        with pytest.raises(InvalidRequest, match="search_range: got 'nonsense'"):
            engine.lookup(PROMPT, "nonsense")
        assert engine.lookup(PROMPT, lookup_id="r", pin=True) == 96
        assert pages.cache._store._catalog.num_leases == 1
        engine.lookup_unpin("r")
        assert pages.cache._store._catalog.num_leases == 0
        engine.async_lookup_and_prefetch("s", PROMPT)
        assert engine.retrieve(PROMPT, slot_mapping=slots(pages.table(2), 16), req_id="s").sum() == 96
        engine.cleanup_memory_objs("s")
        engine.freeze(True)
        assert engine.is_frozen()
        with pytest.raises(InvalidRequest, match="place: got 'memory'"):
            engine.compress(PROMPT, "cachegen", "memory", "event")
        assert engine.clear(PROMPT, ["memory"]) == 6


@pytest.mark.parametrize("wrong", [[1, 0, *range(2, 100)], range(1, 101), [*range(50), -1, *range(51, 100)]])
def test_slots_that_are_no_blocks_are_refused(wrong: list[int]) -> None:
    with Pages() as pages, pytest.raises(InvalidRequest, match="slot_mapping: got slots out of order"):
        LMCacheEngine(pages.cache).retrieve(PROMPT, slot_mapping=list(wrong))


def test_sglangs_connector_loads_behind_what_is_there_already() -> None:
    """SGLang rounds its offset down to a chunk, and gives -1 for the pages in between that it has."""
    with Pages("LPBHT", 8) as pages:
        connector = LMCacheConnector(pages.cache)
        blocks, mine = pages.table(1), pages.table(2)
        pages.compute(PROMPT, blocks)
        connector.store_kv(PROMPT, slots(blocks, 8))
        pages.memory[:] = 0
        assert connector.load_kv(PROMPT, [-1] * 8 + slots(mine, 8)[24:], offset=16) == 80
        pages.check(PROMPT, mine, 24, 96)
        assert (pages.tokens(mine, 0, 0)[:24] == 0).all()
        assert connector.chunk_size() == 16
        with pytest.raises(InvalidRequest, match="slot_mapping: got 100 for 100 tokens from 16 on"):
            connector.load_kv(PROMPT, slots(mine, 8), offset=16)
        connector.reset()
        assert connector.load_kv(PROMPT, slots(mine, 8)) == 0
        assert connector.load_kv(PROMPT, [-1] * 8 + slots(mine, 8)[8:]) == 0
