"""Between an engine's pages and the store: the same KV comes back into other pages, or the request is told."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.kv.layout import paged_layout
from pdlink.kv.sources import KVSource, Load, TokenRange
from pdlink.memory.blocks import BlockPool
from pdlink.memory.buffers import Buffer
from pdlink.store.policies.registry import make_policy
from pdlink.store.source import StoredPrompt, StoreLoad, StoreSource
from pdlink.store.store import Store

from .stubs import WAIT_S, StubTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.kv.layout import KVLayout
    from pdlink.store.tiers.base import Tier

Page = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
CHUNK = 8
LAYERS = 3
TOKENS = 44
PROMPT = list(range(1000, 1000 + TOKENS))


class Engine:
    """Pages with blocks and axes of their own, and what reads them by hand."""

    def __init__(self, store: Store, order: str, block_tokens: int, model: str = "m") -> None:
        self.layout: KVLayout = paged_layout(
            dtype="uint8",
            itemsize=1,
            num_layers=LAYERS,
            num_blocks=128 // block_tokens,
            block_tokens=block_tokens,
            num_heads=2,
            head_dim=64,
            order=order,
        )
        self.buffer = Buffer(self.layout.extent(0))
        self.pool = BlockPool(self.layout.num_blocks)
        self.freed = threading.Event()
        self.source = StoreSource(
            store,
            self.layout,
            [self.buffer],
            self.pool,
            model=model,
            revision="r",
            chunk_tokens=CHUNK,
            released=self.freed.set,
        )

    def blocks(self, seed: int) -> list[int]:
        blocks = self.pool.take(-(-TOKENS // self.layout.block_tokens))
        random.Random(seed).shuffle(blocks)
        return blocks

    def page(self, layer: int, part: int, token: int, blocks: Sequence[int]) -> Page:
        """[head, element] of one token."""
        shape, block_tokens = self.layout.layers[layer], self.layout.block_tokens
        block = blocks[token // block_tokens]
        begin = shape.parts[part].offset + block * shape.block_stride + token % block_tokens * shape.token_stride
        return np.stack([self.buffer.array[begin + head * shape.head_stride :][:64] for head in range(2)])

    def compute(self, blocks: Sequence[int], layer: int, begin: int, end: int) -> None:
        shape, block_tokens = self.layout.layers[layer], self.layout.block_tokens
        for token in range(begin, end):
            for part in range(2):
                at = shape.parts[part].offset + blocks[token // block_tokens] * shape.block_stride
                for head in range(2):
                    first = at + token % block_tokens * shape.token_stride + head * shape.head_stride
                    self.buffer.array[first : first + 64] = value(layer, part, token)[head]

    def prefill(self, prompt: StoredPrompt, blocks: Sequence[int], passes: Sequence[int], start: int = 0) -> None:
        """Compute and store [start, passes[0]), [passes[0], passes[1]), ..."""
        for begin, end in zip([start, *passes], passes, strict=False):
            for layer in range(LAYERS):
                self.compute(blocks, layer, begin, end)
                prompt.store(begin, end, blocks, layer)

    def settle(self) -> None:
        """Until the copier has done what is in line."""
        done = threading.Event()
        self.source.copier.put(done.set)
        assert done.wait(WAIT_S)

    def close(self) -> None:
        self.source.close()
        self.buffer.close()


def value(layer: int, part: int, token: int) -> Page:
    return np.random.default_rng([layer, part, token]).integers(0, 256, (2, 64), dtype=np.uint8)


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


@contextmanager
def opened(*, records: int = 16, tiers: Sequence[Tier] = ()) -> Iterator[Store]:
    store = Store(records * (4096 + LAYERS * 2 * CHUNK * 128 + 2048), make_policy("lru"), tiers)
    store.open()
    try:
        yield store
        store.check()
    finally:
        store.close()


@contextmanager
def engine(store: Store, order: str = "LPBTH", block_tokens: int = 4, model: str = "m") -> Iterator[Engine]:
    made = Engine(store, order, block_tokens, model)
    try:
        yield made
    finally:
        made.close()


def load(made: Engine, blocks: Sequence[int], begin: int = 0) -> tuple[int, StoreLoad]:
    prompt = made.source.prompt("load", PROMPT)
    (found,) = prompt.lookup()
    wanted = TokenRange(begin, found.end, prompt)
    loading = prompt.load(wanted, blocks[begin // made.layout.block_tokens :])
    return found.end, loading


def check(made: Engine, blocks: Sequence[int], begin: int, end: int) -> None:
    for layer in range(LAYERS):
        for token in range(begin, end):
            for part in range(2):
                assert (made.page(layer, part, token, blocks) == value(layer, part, token)).all(), (
                    layer,
                    token,
                    part,
                )


def test_the_parts_are_what_engines_ask_for() -> None:
    with opened() as store, engine(store) as made:
        prompt = made.source.prompt("r", PROMPT)
        source: KVSource = prompt
        assert source.lookup(()) == ()
        blocks = made.blocks(0)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        (found,) = prompt.lookup()
        loading: Load = prompt.load(found, blocks)
        loading.wait_layer(LAYERS - 1, WAIT_S)
        assert loading.has_layer(0)


@pytest.mark.parametrize(("order", "block_tokens"), [("LPBTH", 4), ("LPBHT", 16), ("BLPTH", 2), ("LBPTH", 8)])
@pytest.mark.parametrize("passes", [[TOKENS], [3, 17, 40, TOKENS]])
def test_kv_of_one_engine_comes_into_the_pages_of_another(order: str, block_tokens: int, passes: list[int]) -> None:
    with opened() as store, engine(store) as prefill, engine(store, order, block_tokens) as decode:
        prompt, blocks = prefill.source.prompt("p", PROMPT), prefill.blocks(1)
        prefill.prefill(prompt, blocks, passes)
        prompt.close()
        prefill.settle()
        prefill.pool.give_back(blocks)
        assert prefill.pool.num_held == 0
        mine = decode.blocks(2)
        end, loading = load(decode, mine)
        assert end == 40
        assert loading.done.result(WAIT_S) == 40
        check(decode, mine, 0, 40)
        decode.pool.give_back(mine)
        assert decode.pool.num_held == 0


def test_a_prompt_that_is_whole_in_the_store_leaves_its_last_token_to_compute() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks = made.source.prompt("p", PROMPT[:40]), made.blocks(1)
        made.prefill(prompt, blocks, [40])
        made.settle()
        assert [found.end for found in made.source.prompt("q", PROMPT[:40]).lookup()] == [32]
        assert [found.end for found in made.source.prompt("q", PROMPT[:41]).lookup()] == [40]


def test_a_load_may_begin_in_the_middle_of_a_chunk() -> None:
    """What the engine's own pool has of the prompt ends where its blocks end."""
    with opened() as store, engine(store) as made:
        prompt, blocks = made.source.prompt("p", PROMPT), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        mine = made.blocks(5)
        before = made.page(0, 0, 11, mine).copy()
        _, loading = load(made, mine, 12)
        assert loading.done.result(WAIT_S) == 40
        check(made, mine, 12, 40)
        assert (made.page(0, 0, 11, mine) == before).all()


def test_what_the_pool_had_is_stored_with_what_is_computed_after_it() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks = made.source.prompt("p", PROMPT), made.blocks(1)
        for layer in range(LAYERS):
            made.compute(blocks, layer, 0, 20)
        made.prefill(prompt, blocks, [TOKENS], start=20)
        made.settle()
        mine = made.blocks(2)
        assert load(made, mine)[1].done.result(WAIT_S) == 40
        check(made, mine, 0, 40)


def test_another_model_and_another_tenant_find_nothing() -> None:
    """AIBrix: keys without model or dtype gave bfloat16 blocks to a float16 engine."""
    with opened() as store, engine(store) as made, engine(store, model="other") as other:
        prompt, blocks = made.source.prompt("p", PROMPT, salt="tenant"), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert made.source.prompt("q", PROMPT, salt="tenant").lookup()
        assert not made.source.prompt("q", PROMPT).lookup()
        assert not made.source.prompt("q", PROMPT, salt="another").lookup()
        assert not other.source.prompt("q", PROMPT, salt="tenant").lookup()


def test_a_request_that_ends_in_the_middle_leaves_whole_chunks_and_no_blocks_held() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks = made.source.prompt("p", PROMPT), made.blocks(1)
        made.prefill(prompt, blocks, [20])
        for layer in range(LAYERS - 1):  # the pass fails before its last layer
            made.compute(blocks, layer, 20, TOKENS)
            prompt.store(20, TOKENS, blocks, layer)
        prompt.close()
        made.settle()
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0
        assert [found.end for found in made.source.prompt("q", PROMPT).lookup()] == [16]
        assert store.gauges()["used"] == 2 * -(-made.source.shape.nbytes // 4096) * 4096


def test_blocks_are_held_until_the_copy_has_been_made() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks, stop = made.source.prompt("p", PROMPT), made.blocks(1), threading.Event()
        made.source.copier.put(partial(wait_for, stop))
        made.prefill(prompt, blocks, [TOKENS])
        made.pool.give_back(blocks)
        assert made.pool.num_held == 10
        made.freed.clear()
        stop.set()
        made.settle()
        assert made.freed.is_set()
        assert made.pool.num_held == 0


def test_a_chunk_that_its_tier_has_lost_ends_the_prefix_there() -> None:
    tier = StubTier()
    with opened(tiers=[tier]) as store, engine(store) as made:
        prompt, blocks = made.source.prompt("p", PROMPT), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert all(tier.kept.acquire(timeout=WAIT_S) for _ in range(4))
        records = dict(tier.records)
        store.clear()
        cleared = threading.Event()
        store._tiers[0].writers.put(cleared.set)
        assert cleared.wait(WAIT_S)
        tier.records = records
        tier.flip(prompt.keys[2])
        mine = made.blocks(2)
        end, loading = load(made, mine)
        assert end > 24
        assert loading.done.result(WAIT_S) == 16
        check(made, mine, 0, 16)
        with pytest.raises(TransferFailed):
            loading.wait_layer(0, WAIT_S)
        made.pool.give_back(mine)
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0


def test_an_aborted_load_gives_its_blocks_back_when_nothing_writes_to_them() -> None:
    tier = StubTier()
    with opened(tiers=[tier]) as store, engine(store) as made:
        prompt, blocks, stop = made.source.prompt("p", PROMPT), made.blocks(1), threading.Event()
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        made.source.copier.put(partial(wait_for, stop))
        mine = made.blocks(2)
        _, loading = load(made, mine)
        with pytest.raises(DeadlineExceeded):
            loading.wait_layer(0, 0.0)
        loading.cancel()
        made.pool.give_back(mine)
        assert made.pool.num_held == 2 * 11
        stop.set()
        assert loading.done.result(WAIT_S) == 0
        assert made.pool.num_held == 11


def test_a_lease_that_ended_during_the_copy_makes_the_load_worthless() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks, stop = made.source.prompt("p", PROMPT), made.blocks(1), threading.Event()
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        made.source.copier.put(partial(wait_for, stop))
        _, loading = load(made, made.blocks(2))
        with store._lock:
            assert store._catalog.expire(float("1e18")) == 1
        stop.set()
        assert loading.done.result(WAIT_S) == 0
        with pytest.raises(TransferFailed):
            loading.has_layer(0)


def test_a_full_store_keeps_the_head_of_a_prompt() -> None:
    with opened(records=2) as store, engine(store) as made:
        prompt, blocks = made.source.prompt("p", PROMPT), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert [found.end for found in made.source.prompt("q", PROMPT).lookup()] == [16]
        prompt.close()
        made.settle()
