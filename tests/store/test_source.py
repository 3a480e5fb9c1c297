"""Between an engine's pages and the store: the same KV comes back into other pages, or the request is told."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink.errors import ConfigError, DeadlineExceeded, TransferFailed
from pdlink.kv.layout import paged_layout
from pdlink.memory.blocks import BlockPool
from pdlink.memory.buffers import Buffer
from pdlink.store.eviction import Lru
from pdlink.store.groups import RecordGroup
from pdlink.store.loading import worth_a_copy
from pdlink.store.source import Source
from pdlink.store.store import Store
from pdlink.store.worth import Choice, Speed
from tests.waiting import WAIT_S, until

from .process import client, served
from .stubs import GatedTier, StubTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdlink.kv.layout import KVLayout
    from pdlink.store.gpu_pages import GpuPages
    from pdlink.store.interface import AnyStore
    from pdlink.store.loading import Load
    from pdlink.store.prompt import Prompt
    from pdlink.store.tiers.base import Tier

Page = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
CHUNK = 8
LAYERS = 3
HEADS = 4
TOKENS = 44
PROMPT = list(range(1000, 1000 + TOKENS))


class Engine:
    """Pages with blocks and axes of their own, and what reads them by hand."""

    def __init__(
        self,
        store: AnyStore,
        order: str = "LPBTH",
        block_tokens: int = 4,
        model: str = "m",
        heads: range = range(2),
        num_heads: int = 2,
    ) -> None:
        self.heads = heads
        self.layout: KVLayout = paged_layout(
            dtype="uint8",
            itemsize=1,
            num_layers=LAYERS,
            num_blocks=128 // block_tokens,
            block_tokens=block_tokens,
            num_heads=len(heads),
            head_dim=64,
            order=order,
        )
        self.buffer = self.allocate(self.layout.extent(0))
        self.pool = BlockPool(self.layout.num_blocks)
        self.freed = threading.Event()
        self.group = RecordGroup(
            self.layout, model=model, revision="r", chunk_tokens=CHUNK, heads=heads, num_heads=num_heads
        )
        self.source = Source(
            store,
            [self.group],
            [self.buffer],
            self.pool,
            released=self.freed.set,
            gpu=self.gpu(),
        )

    def prompt(self, request_id: str, tokens: Sequence[int] = PROMPT, salt: str = "") -> Prompt:
        return self.source.prompt(request_id, self.source.keys(tokens, salt))

    def allocate(self, nbytes: int) -> Any:
        """The buffer of its pages, with its bytes as `array`."""
        return Buffer(nbytes)

    def gpu(self) -> GpuPages | None:
        """What copies for that buffer."""
        return None

    def blocks(self, seed: int) -> list[int]:
        blocks = self.pool.take(-(-TOKENS // self.layout.block_tokens))
        random.Random(seed).shuffle(blocks)
        return blocks

    def page(self, layer: int, part: int, token: int, blocks: Sequence[int]) -> Page:
        """[head, element] of one token."""
        shape, block_tokens = self.layout.layers[layer], self.layout.block_tokens
        block = blocks[token // block_tokens]
        begin = shape.parts[part].offset + block * shape.block_stride + token % block_tokens * shape.token_stride
        return np.stack([self.buffer.array[begin + at * shape.head_stride :][:64] for at in range(len(self.heads))])

    def compute(self, blocks: Sequence[int], layer: int, begin: int, end: int) -> None:
        shape, block_tokens = self.layout.layers[layer], self.layout.block_tokens
        for token in range(begin, end):
            for part in range(2):
                at = shape.parts[part].offset + blocks[token // block_tokens] * shape.block_stride
                for index, head in enumerate(self.heads):
                    first = at + token % block_tokens * shape.token_stride + index * shape.head_stride
                    self.buffer.array[first : first + 64] = value(layer, part, token)[head]

    def prefill(self, prompt: Prompt, blocks: Sequence[int], passes: Sequence[int], start: int = 0) -> None:
        """Compute and store [start, passes[0]), [passes[0], passes[1]), ..."""
        for begin, end in zip([start, *passes], passes, strict=False):
            for layer in range(LAYERS):
                self.compute(blocks, layer, begin, end)
                prompt.store(begin, end, blocks, layer)

    def settle(self) -> None:
        """Until the copier has done what is in line."""
        done = threading.Event()
        self.source.when_settled(done.set)
        assert done.wait(WAIT_S)

    def close(self) -> None:
        self.source.close()
        self.buffer.close()


def value(layer: int, part: int, token: int) -> Page:
    """[head, element] of one token, all heads of the model."""
    return np.random.default_rng([layer, part, token]).integers(0, 256, (HEADS, 64), dtype=np.uint8)


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


@contextmanager
def opened(*, records: int = 16, tiers: Sequence[Tier] = (), heads: int = 2) -> Iterator[Store]:
    store = Store(records * (4096 + LAYERS * 2 * CHUNK * 64 * heads + 2048), Lru(), tiers)
    store.open()
    try:
        yield store
        store.check()
    finally:
        store.close()


@contextmanager
def reached(directory: Path, tier: Tier, apart: bool) -> Iterator[tuple[Store, AnyStore]]:
    """A store, and what an engine has of it. apart: it is another process' store."""
    if apart:
        with served(directory, 32, [tier]) as (store, listener), client(listener.path) as mine:
            yield store, mine
    else:
        with opened(tiers=[tier]) as store:
            yield store, store


@contextmanager
def engine(*args: Any, **kwargs: Any) -> Iterator[Engine]:
    made = Engine(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def load(made: Engine, blocks: Sequence[int], begin: int = 0) -> tuple[int, Load]:
    prompt = made.prompt("load")
    end = prompt.lookup()
    return end, prompt.load(begin, end, [blocks])


def holds(made: Engine, blocks: Sequence[int], begin: int, end: int) -> bool:
    try:
        check(made, blocks, begin, end)
    except AssertionError:
        return False
    return True


def check(made: Engine, blocks: Sequence[int], begin: int, end: int) -> None:
    for layer in range(LAYERS):
        for token in range(begin, end):
            for part in range(2):
                expected = value(layer, part, token)[made.heads.start : made.heads.stop]
                assert (made.page(layer, part, token, blocks) == expected).all(), (
                    layer,
                    token,
                    part,
                )


def test_the_parts_are_what_engines_ask_for() -> None:
    with opened() as store, engine(store) as made:
        prompt = made.prompt("r")
        assert prompt.lookup() == 0
        blocks = made.blocks(0)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        loading: Load = prompt.load(0, prompt.lookup(), [blocks])
        loading.wait_layer(LAYERS - 1, WAIT_S)
        assert loading.has_layer(0)


@pytest.mark.parametrize(("order", "block_tokens"), [("LPBTH", 4), ("LPBHT", 16), ("BLPTH", 2), ("LBPTH", 8)])
@pytest.mark.parametrize("passes", [[TOKENS], [3, 17, 40, TOKENS]])
def test_kv_of_one_engine_comes_into_the_pages_of_another(order: str, block_tokens: int, passes: list[int]) -> None:
    with opened() as store, engine(store) as prefill, engine(store, order, block_tokens) as decode:
        prompt, blocks = prefill.prompt("p"), prefill.blocks(1)
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
        prompt, blocks = made.prompt("p", PROMPT[:40]), made.blocks(1)
        made.prefill(prompt, blocks, [40])
        made.settle()
        assert made.prompt("q", PROMPT[:41]).lookup() == 40
        whole, mine = made.prompt("q", PROMPT[:40]), made.blocks(2)
        assert whole.lookup() == 39
        assert whole.choose(0, Speed(), always=True).end == 39
        before = made.page(0, 0, 39, mine).copy()
        assert whole.load(0, 39, [mine]).done.result(WAIT_S) == 39
        check(made, mine, 0, 39)
        assert (made.page(0, 0, 39, mine) == before).all()


def test_what_the_blocks_lack_of_the_last_block_is_computed() -> None:
    """An engine finds all blocks of a prompt that it has but for the last one; a load takes longer than computing."""
    with opened() as store, engine(store) as made:
        prompt, blocks = made.prompt("p", PROMPT[:40]), made.blocks(1)
        made.prefill(prompt, blocks, [40])
        made.settle()
        again = made.prompt("q", PROMPT[:40])
        assert again.lookup() == 39
        assert again.choose(36, Speed(), always=True) == Choice(36, "in_blocks")
        assert again.choose(32, Speed(), always=True).end == 39


def test_a_load_may_begin_in_the_middle_of_a_chunk() -> None:
    """What the engine's own pool has of the prompt ends where its blocks end."""
    with opened() as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
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
        prompt, blocks = made.prompt("p"), made.blocks(1)
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
        prompt, blocks = made.prompt("p", salt="tenant"), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert made.prompt("q", salt="tenant").lookup()
        assert not made.prompt("q").lookup()
        assert not made.prompt("q", salt="another").lookup()
        assert not other.prompt("q", salt="tenant").lookup()


def test_a_request_that_ends_in_the_middle_leaves_whole_chunks_and_no_blocks_held() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        made.prefill(prompt, blocks, [20])
        for layer in range(LAYERS - 1):  # the pass fails before its last layer
            made.compute(blocks, layer, 20, TOKENS)
            prompt.store(20, TOKENS, blocks, layer)
        prompt.close()
        made.settle()
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0
        assert made.prompt("q").lookup() == 16
        assert store.gauges()["used"] == 2 * -(-made.group.shape.nbytes // 4096) * 4096


def test_blocks_are_held_until_the_copy_has_been_made() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks, stop = made.prompt("p"), made.blocks(1), threading.Event()
        made.source.copier.put(partial(wait_for, stop))
        made.prefill(prompt, blocks, [TOKENS])
        made.pool.give_back(blocks)
        assert made.pool.num_held == 10
        made.freed.clear()
        stop.set()
        made.settle()
        assert made.freed.is_set()
        assert made.pool.num_held == 0


def test_an_engine_does_not_wait_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in another process may answer late."""
    with opened() as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        asked, answer, reserve = threading.Event(), threading.Event(), store.reserve

        def late(*args: Any) -> Any:
            asked.set()
            wait_for(answer)
            return reserve(*args)

        monkeypatch.setattr(store, "reserve", late)
        made.prefill(prompt, blocks, [20, TOKENS])
        wait_for(asked)
        made.pool.give_back(blocks)
        assert made.pool.num_held == 5 + 5, "both passes hold the blocks of their whole chunks"
        answer.set()
        prompt.close()
        made.settle()
        assert made.pool.num_held == 0
        assert found(made) == 40
        mine = made.blocks(2)
        assert load(made, mine)[1].done.result(WAIT_S) == 40
        check(made, mine, 0, 40)


def test_a_withdrawn_prompt_gives_back_the_blocks_of_all_its_passes() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks, stop = made.prompt("p"), made.blocks(1), threading.Event()
        made.source.copier.put(partial(wait_for, stop))
        made.prefill(prompt, blocks, [20, TOKENS])
        prompt.withdraw()
        stop.set()
        made.settle()
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0
        assert found(made) == 0


def test_a_chunk_that_its_tier_has_lost_ends_the_prefix_there() -> None:
    tier = StubTier()
    with opened(tiers=[tier]) as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert all(tier.kept.acquire(timeout=WAIT_S) for _ in range(5))
        records = dict(tier.records)
        store.clear()
        cleared = threading.Event()
        store._below.tiers[0].writers.put(cleared.set)
        assert cleared.wait(WAIT_S)
        tier.records = records
        tier.flip(prompt.keys.by_group[0][2])
        mine = made.blocks(2)
        end, loading = load(made, mine)
        assert end == 40
        assert loading.done.result(WAIT_S) == 16
        check(made, mine, 0, 16)
        with pytest.raises(TransferFailed):
            loading.wait_layer(0, WAIT_S)
        made.pool.give_back(mine)
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0


def only_below(made: Engine, store: Store, tier: GatedTier, late: int) -> list[bytes]:
    """Store the prompt, and leave it to the tier, which waits before it gives chunk `late`; all keys."""
    prompt, blocks = made.prompt("p"), made.blocks(1)
    made.prefill(prompt, blocks, [TOKENS])
    made.settle()
    made.pool.give_back(blocks)
    assert made.source.store.flush(WAIT_S)
    store.clear(places=["memory"])
    keys = list(prompt.keys.by_group[0])
    tier.late = keys[late]
    return keys


@pytest.mark.parametrize("num_wanted", [1, 2, 15, 16, 128, 1000])
def test_a_long_prompt_is_copied_in_few_parts_and_little_is_left_at_the_end(num_wanted: int) -> None:
    parts, copied, came = 0, 0, 0
    for here in range(1, num_wanted):  # the last chunk is copied when it has come
        came = here - copied
        if worth_a_copy(came, num_wanted - here, num_wanted):
            parts, copied = parts + 1, here
    assert num_wanted - copied <= 2
    assert parts <= 16 + num_wanted.bit_length()


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in another one"])
@pytest.mark.parametrize("begin", [0, 12])
def test_chunks_are_copied_while_the_last_one_is_read(begin: int, apart: bool, tmp_path: Path) -> None:
    tier = GatedTier()
    with reached(tmp_path, tier, apart) as (store, reader), engine(reader) as made:
        only_below(made, store, tier, 4)
        mine = made.blocks(2)
        end, loading = load(made, mine, begin)
        assert end == 40
        until(lambda: holds(made, mine, begin, 32), "four chunks are in the blocks")
        assert not loading.has_layer(0)
        tier.gate.set()
        assert loading.done.result(WAIT_S) == 40
        assert loading.has_layer(LAYERS - 1)
        check(made, mine, begin, 40)


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in another one"])
def test_what_was_copied_before_a_chunk_that_does_not_come_counts(apart: bool, tmp_path: Path) -> None:
    tier = GatedTier()
    with reached(tmp_path, tier, apart) as (store, reader), engine(reader) as made:
        keys = only_below(made, store, tier, 3)
        mine = made.blocks(2)
        _, loading = load(made, mine)
        until(lambda: holds(made, mine, 0, 24), "three chunks are in the blocks")
        del tier.records[keys[3]]
        tier.gate.set()
        assert loading.done.result(WAIT_S) == 24
        check(made, mine, 0, 24)
        made.pool.give_back(mine)
        assert made.pool.num_held == 0


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in another one"])
def test_a_chunk_that_is_found_wrong_while_others_are_read_ends_the_prefix(apart: bool, tmp_path: Path) -> None:
    tier = GatedTier()
    with reached(tmp_path, tier, apart) as (store, reader), engine(reader) as made:
        keys = only_below(made, store, tier, 4)
        tier.flip(keys[2])
        mine = made.blocks(2)
        _, loading = load(made, mine)
        until(lambda: holds(made, mine, 0, 16), "two chunks are in the blocks")
        tier.gate.set()
        assert loading.done.result(WAIT_S) == 16
        check(made, mine, 0, 16)
        until(lambda: keys[2] not in tier.records, "the tier has forgotten it")


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in another one"])
def test_a_load_that_is_cancelled_while_chunks_are_read_gives_its_blocks_back(apart: bool, tmp_path: Path) -> None:
    tier = GatedTier()
    with reached(tmp_path, tier, apart) as (store, reader), engine(reader) as made:
        only_below(made, store, tier, 4)
        mine = made.blocks(2)
        _, loading = load(made, mine)
        until(lambda: holds(made, mine, 0, 32), "four chunks are in the blocks")
        loading.cancel()
        assert loading.done.result(WAIT_S) == 0
        made.pool.give_back(mine)
        assert made.pool.num_held == 0
        tier.gate.set()


def test_an_aborted_load_gives_its_blocks_back_when_nothing_writes_to_them() -> None:
    tier = StubTier()
    with opened(tiers=[tier]) as store, engine(store) as made:
        prompt, blocks, stop = made.prompt("p"), made.blocks(1), threading.Event()
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        made.source.copier.put(partial(wait_for, stop))
        mine = made.blocks(2)
        _, loading = load(made, mine)
        with pytest.raises(DeadlineExceeded):
            loading.wait_layer(0, 0.0)
        loading.cancel()
        made.pool.give_back(mine)
        assert made.pool.num_held == 11 + 10, "the load holds the blocks of whole chunks"
        stop.set()
        assert loading.done.result(WAIT_S) == 0
        assert made.pool.num_held == 11


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("broken", ["copy", "close", "give_back", "told", "brought"])
def test_a_job_that_raises_in_the_copier_fails_its_load(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        mine = made.blocks(2)
        held = made.pool.num_held
        with monkeypatch.context() as patch:
            if broken == "close":
                patch.setattr("pdlink.store.fetching.Fetch.close", raises)
            elif broken != "told":
                patch.setattr(made.source, broken, raises)
            prompt = made.prompt("load")
            end = prompt.lookup()
            loading = prompt.load(0, end, [mine], raises if broken == "told" else None)
            assert loading.done.result(WAIT_S) == (end if broken == "give_back" else 0)
            if broken != "give_back":
                with pytest.raises(TransferFailed):
                    loading.wait_layer(LAYERS - 1, WAIT_S)
                assert made.pool.num_held == held, "its blocks are given back"
        again = made.prompt("again")
        assert again.load(0, again.lookup(), [mine]).done.result(WAIT_S) == end
        check(made, mine, 0, end)


@pytest.mark.parametrize("broken", ["reserve", "commit", "copy"])
def test_a_job_that_raises_in_the_copier_gives_the_blocks_of_its_pass_back(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        with monkeypatch.context() as patch:
            patch.setattr(made.source if broken == "copy" else store, broken, raises)
            made.prefill(prompt, blocks, [20])
            made.settle()
        made.prefill(prompt, blocks, [TOKENS], start=20)
        made.settle()
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0
        prompt.close()
        made.settle()
        assert store.held() == {"leases": 0, "reservations": 0}


def test_a_mark_is_given_back_of_a_layer_that_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them takes an event of the GPU with it."""
    marks = list[object]()

    def mark() -> object:
        marks.append(object())
        return marks[-1]

    with opened() as store, engine(store) as made:
        monkeypatch.setattr(made.source, "mark", mark)
        monkeypatch.setattr(made.source, "unmark", marks.remove)
        monkeypatch.setattr(store, "reserve", raises)
        made.prefill(made.prompt("p"), made.blocks(1), [TOKENS])
        made.settle()
        assert not marks


def test_a_lease_that_ended_during_the_copy_makes_the_load_worthless() -> None:
    with opened() as store, engine(store) as made:
        prompt, blocks, stop = made.prompt("p"), made.blocks(1), threading.Event()
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


def test_what_was_fetched_ahead_stays_in_memory_until_it_is_loaded() -> None:
    with opened(records=4) as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        made.prefill(prompt, blocks, [32])
        made.settle()
        ahead = made.prompt("q")
        assert ahead.lookup() == 32
        assert ahead.fetch(8, 32).done.result(WAIT_S) == 32
        other = [token + 1 for token in PROMPT]
        made.prefill(made.prompt("other", other), blocks, [TOKENS])
        made.settle()
        assert made.prompt("other", other).lookup() == 8, "the rest had no room"
        mine = made.blocks(2)
        loading = ahead.load(10, 30, [mine])
        assert loading.done.result(WAIT_S) == 30
        check(made, mine, 10, 30)
        assert not store._catalog._leases


def test_a_withdrawn_prompt_keeps_what_was_copied_before_and_nothing_after() -> None:
    """Its blocks get the KV of another request at once: no record may hold any of that."""
    with opened() as store, engine(store) as made:
        prompt, blocks, stop = made.prompt("p"), made.blocks(1), threading.Event()
        made.prefill(prompt, blocks, [20])
        made.settle()
        made.source.copier.put(partial(wait_for, stop))
        made.prefill(prompt, blocks, [TOKENS], start=20)
        prompt.withdraw()
        made.buffer.array[:] = 0
        stop.set()
        made.settle()
        made.pool.give_back(blocks)
        assert made.pool.num_held == 0
        mine = made.blocks(2)
        end, loading = load(made, mine)
        assert (end, loading.done.result(WAIT_S)) == (16, 16)
        check(made, mine, 0, 16)


def test_records_of_whole_blocks_are_counted_in_blocks() -> None:
    """Where only the kernel knows the inside of a block, a position of the layout is a block."""
    with opened() as store, engine(store, block_tokens=1) as made:
        layout = replace(made.layout, position_tokens=8)
        with pytest.raises(ConfigError, match=r"tiers\.chunk_size: got 20 tokens; expected a multiple of 8"):
            RecordGroup(layout, model="m", revision="r", chunk_tokens=20)
        group = RecordGroup(layout, model="m", revision="r", chunk_tokens=16)
        source = Source(store, [group], [made.buffer], made.pool)
        prompt, blocks = source.prompt("p", source.keys(PROMPT)), made.blocks(1)
        made.prefill(prompt, blocks, [24, 40])
        source.close()
        assert prompt.lookup() == 32, "two records of two blocks of eight tokens"
        assert source.prompt("q", source.keys(PROMPT[:32])).lookup() == 16, "a block is of no use in part"


def test_a_full_store_keeps_the_head_of_a_prompt() -> None:
    with opened(records=2) as store, engine(store) as made:
        prompt, blocks = made.prompt("p"), made.blocks(1)
        made.prefill(prompt, blocks, [TOKENS])
        made.settle()
        assert made.prompt("q").lookup() == 16
        prompt.close()
        made.settle()


def ranks(store: Store, size: int, order: str, block_tokens: int) -> list[Engine]:
    held = HEADS // size
    heads = [range(rank * held, (rank + 1) * held) for rank in range(size)]
    return [Engine(store, order, block_tokens, heads=mine, num_heads=HEADS) for mine in heads]


def prefilled(made: Engine) -> None:
    prompt, blocks = made.prompt("p"), made.blocks(made.heads.start)
    made.prefill(prompt, blocks, [17, TOKENS])
    prompt.close()
    made.settle()


def found(made: Engine) -> int:
    return made.prompt("q").lookup()


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (1, 2), (4, 1)])
def test_ranks_of_one_number_store_what_ranks_of_another_load(sizes: tuple[int, int]) -> None:
    with opened(heads=HEADS) as store:
        writers, readers = ranks(store, sizes[0], "LPBTH", 4), ranks(store, sizes[1], "LPBHT", 16)
        for index, made in enumerate(writers):
            assert found(made) == 0, f"{index} of {sizes[0]} ranks have stored"
            prefilled(made)
        for made in readers:
            mine = made.blocks(2)
            assert load(made, mine)[1].done.result(WAIT_S) == 40
            check(made, mine, 0, 40)
        used = 5 * -(-readers[0].group.shape.nbytes // 4096) * 4096
        assert store.gauges()["used"] == used, "all ranks share five records"
        for made in (*writers, *readers):
            made.close()


def test_a_chunk_that_one_rank_has_not_stored_is_a_miss_for_all() -> None:
    with opened(heads=HEADS) as store:
        left, right = ranks(store, 2, "LPBTH", 4)
        prefilled(left)
        prompt, blocks = right.prompt("p"), right.blocks(0)
        right.prefill(prompt, blocks, [20])
        prompt.close()
        right.settle()
        assert (found(left), found(right)) == (16, 16)
        prefilled(right)
        assert (found(left), found(right)) == (40, 40)
        for made in (left, right):
            made.close()


def test_ranks_that_hold_the_same_heads_store_them_once() -> None:
    """More ranks than KV heads, and MLA, whose ranks all have everything."""
    with opened(heads=HEADS) as store:
        half = range(2)
        both = [Engine(store, heads=half, num_heads=HEADS) for _ in range(2)]
        for made in both:
            prefilled(made)
        assert found(both[0]) == 0
        rest = Engine(store, heads=range(2, 4), num_heads=HEADS)
        prefilled(rest)
        assert found(both[1]) == 40
        for made in (*both, rest):
            made.close()


@pytest.mark.parametrize(("heads", "num_heads"), [(range(3), 4), (range(2), 1), (range(0, 4, 2), 4), (None, 4)])
def test_heads_that_the_pages_do_not_hold_are_refused(heads: range | None, num_heads: int) -> None:
    with opened(heads=HEADS) as store, engine(store) as made, pytest.raises(ConfigError, match="heads: got"):
        RecordGroup(made.layout, model="m", revision="r", chunk_tokens=CHUNK, heads=heads, num_heads=num_heads)
