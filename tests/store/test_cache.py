"""The front door of the store: what a caller stores comes back right into any pages, or is not there."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pdlink
from pdlink.errors import ConfigError, InvalidRequest, LayoutMismatch
from pdlink.store.record import HEADER_NBYTES
from tests.waiting import WAIT_S

from .stubs import StubTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ROOT = Path(__file__).parents[2]
LAYERS, HEADS, HEAD_NBYTES, CHUNK = 2, 2, 16, 16
PROMPT = list(range(1000, 1100))  # six chunks, and four tokens
CHUNK_NBYTES = LAYERS * 2 * CHUNK * HEADS * HEAD_NBYTES
RECORD_NBYTES = HEADER_NBYTES + CHUNK_NBYTES


class Pages:
    """An engine's pages, and the cache before them."""

    def __init__(
        self, order: str = "LPBTH", block_tokens: int = 16, *, num_tokens: int = 512, **settings: Any
    ) -> None:
        self.block_tokens = block_tokens
        self.layout = pdlink.paged_layout(
            dtype="uint8",
            itemsize=1,
            num_layers=LAYERS,
            num_blocks=num_tokens // block_tokens,
            block_tokens=block_tokens,
            num_heads=HEADS,
            head_dim=HEAD_NBYTES,
            order=order,
        )
        self.memory = np.zeros(self.layout.extent(0), np.uint8)
        self.cache = pdlink.Cache(
            self.layout, [self.memory], **{"nbytes": 1 << 20, "model": "m", "chunk_tokens": CHUNK, **settings}
        )

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache._store.check()
        self.cache.close()

    def table(self, seed: int, num_tokens: int = len(PROMPT)) -> list[int]:
        """Blocks for so many tokens, in disorder."""
        blocks = list(range(self.layout.num_blocks))
        random.Random(seed).shuffle(blocks)
        return blocks[self.layout.blocks_of(0, num_tokens)]

    def tokens(self, blocks: Sequence[int], layer: int, part: int) -> Bytes:
        """A view [block, token, head, byte], cut to these blocks: a copy."""
        return self._view(layer, part)[list(blocks)].reshape(-1, HEADS, HEAD_NBYTES)

    def compute(self, prompt: Sequence[int], blocks: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> None:
        for layer in layers:
            for part in range(2):
                kv = np.zeros((len(blocks) * self.block_tokens, HEADS, HEAD_NBYTES), np.uint8)
                kv[: len(prompt)] = values(prompt, layer, part)
                self._view(layer, part)[list(blocks)] = kv.reshape(-1, self.block_tokens, HEADS, HEAD_NBYTES)

    def check(
        self,
        prompt: Sequence[int],
        blocks: Sequence[int],
        begin: int,
        end: int,
        layers: Sequence[int] = range(LAYERS),
    ) -> None:
        for layer in layers:
            for part in range(2):
                assert np.array_equal(
                    self.tokens(blocks, layer, part)[begin:end], values(prompt, layer, part)[begin:end]
                ), (layer, part)

    def _view(self, layer: int, part: int) -> Bytes:
        place = self.layout.layers[layer]
        shape = (self.layout.num_blocks, self.block_tokens, HEADS, HEAD_NBYTES)
        strides = (place.block_stride, place.token_stride, place.head_stride, 1)
        return np.lib.stride_tricks.as_strided(self.memory[place.parts[part].offset :], shape, strides)

    def stored(self, prompt: Sequence[int] = PROMPT, seed: int = 1, **arguments: Any) -> int:
        blocks = self.table(seed, len(prompt))
        self.compute(prompt, blocks)
        return self.cache.store(prompt, blocks, **arguments)


def values(prompt: Sequence[int], layer: int, part: int) -> Bytes:
    """[token, head, byte]: what the model computes, which depends on all tokens up to each."""
    prefix = np.cumsum(np.asarray(prompt, np.int64)) * 4 + layer * 2 + part
    mixed = prefix[:, None] * 2654435761 + np.arange(HEADS * HEAD_NBYTES) * 40503
    return (mixed >> 7).astype(np.uint8).reshape(-1, HEADS, HEAD_NBYTES)


def forget_memory(pages: Pages, tier: StubTier) -> dict[bytes, bytes]:
    """What the tier has, which only it has from now on."""
    assert pages.cache.flush(WAIT_S)
    pages.cache.clear(places=["memory"])
    return tier.records


LAYOUTS = st.tuples(st.sampled_from(["LPBTH", "LPBHT", "BLPTH", "LBPTH"]), st.sampled_from([2, 16, 64, 128]))


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**30), st.booleans())
def test_pages_of_any_layout_share_what_one_of_them_has_stored(
    first: tuple[str, int], second: tuple[str, int], common: int, more: int, seed: int, by_layer: bool
) -> None:
    """Blocks of 16 tokens NHD and of 128 HND among them; prompts that share their first `common` tokens.

    by_layer: copied as prompts of many runs are.
    """
    tier = StubTier()
    stored = list(range(5000, 5000 + common + 20))
    asked = stored[:common] + [7] * more
    with patch("pdlink.store.source._MOST_RUNS", -1 if by_layer else 1 << 16), ExitStack() as opened:
        prefill = opened.enter_context(Pages(*first, num_tokens=1024, tiers=[tier]))
        assert prefill.stored(stored, seed) == len(stored) // CHUNK * CHUNK
        assert prefill.cache.flush(WAIT_S)
        opened.close()
        decode = opened.enter_context(Pages(*second, num_tokens=1024, tiers=[tier]))
        blocks = decode.table(seed + 1, len(asked))
        loaded = decode.cache.retrieve(asked, blocks)
        assert loaded == common // CHUNK * CHUNK
        assert decode.cache.lookup(asked) == (loaded, "")
        decode.check(asked, blocks, 0, loaded)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400), st.booleans()), max_size=20))
def test_what_eviction_left_is_right(steps: list[tuple[int, int, bool]]) -> None:
    """An arena of eight chunks for prompts of up to 25: some store, some load."""
    with Pages("LPBHT", 4, nbytes=8 * RECORD_NBYTES) as pages:
        for number, num_tokens, store in steps:
            prompt = list(range(number * 1000, number * 1000 + num_tokens))
            if store:
                assert pages.stored(prompt) <= 8 * CHUNK
            blocks = pages.table(2, num_tokens)
            pages.memory[:] = 0
            pages.check(prompt, blocks, 0, pages.cache.retrieve(prompt, blocks))


@pytest.mark.parametrize("lost", range(6))
@pytest.mark.parametrize("damaged", [False, True])
def test_a_hole_ends_the_prefix(lost: int, damaged: bool) -> None:
    """AIBrix gave 112 tokens with block 2 missing, and kept the bytes that were in its place."""
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        records = forget_memory(pages, tier)
        key = list(records)[lost]
        chunk = pages.cache._keys(PROMPT, "").index(key)
        if damaged:
            tier.flip(key)
        else:
            del records[key]
        blocks = pages.table(2)
        for _ in range(2):
            assert pages.cache.retrieve(PROMPT, blocks) == chunk * CHUNK
            pages.check(PROMPT, blocks, 0, chunk * CHUNK)


def test_a_tier_that_fails_is_a_miss() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        tier.error = OSError("gone")
        assert pages.stored() == 96
        pages.cache.flush(WAIT_S)
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 96
        pages.cache.clear()
        assert pages.cache.lookup(PROMPT).num_tokens == 0
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 0
        assert pages.cache.health() == {"memory": True, "stub": False}


def test_threads_store_and_load_at_the_same_time() -> None:
    with Pages("LPBHT", num_tokens=8192, nbytes=40 * RECORD_NBYTES) as pages:

        def work(number: int) -> None:
            mine = range(number * 64, (number + 1) * 64)
            for turn in range(30):
                prompt = [turn % 4] * 40 + list(range(turn % 7 * 100, turn % 7 * 100 + 100))
                pages.compute(prompt, mine[:9])
                pages.cache.store(prompt, mine[:9])
                pages.check(prompt, mine[20:29], 0, pages.cache.retrieve(prompt, mine[20:29]))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


def test_what_is_here_is_not_stored_again() -> None:
    with Pages() as pages:
        assert pages.stored(PROMPT[:50]) == 48
        assert pages.stored() == 48
        assert pages.stored() == 0


def test_the_rest_of_a_prompt_does_not_push_out_its_beginning() -> None:
    with Pages(nbytes=8 * -(-RECORD_NBYTES // 4096) * 4096) as pages:
        pages.stored(PROMPT[:64])
        pages.stored([5] * 64)
        assert pages.stored() == 32
        assert pages.cache.lookup(PROMPT).num_tokens == 96


def test_salt_and_model_keep_prompts_apart() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages, Pages(tiers=[tier], model="other") as other:
        pages.stored(salt="tenant")
        assert pages.cache.flush(WAIT_S)
        assert pages.cache.lookup(PROMPT, salt="tenant").num_tokens == 96
        assert pages.cache.lookup(PROMPT).num_tokens == 0
        assert other.cache.lookup(PROMPT, salt="tenant").num_tokens == 0


@pytest.mark.parametrize("kind", [np.uint32, np.int64, list])
def test_tokens_may_be_a_list_or_an_array(kind: Any) -> None:
    with Pages() as pages:
        pages.stored()
        tokens = PROMPT if kind is list else np.array(PROMPT, kind)
        assert pages.cache.lookup(tokens).num_tokens == 96


def test_tokens_before_the_begin_are_left_alone() -> None:
    with Pages("LPBTH", 8) as pages:
        blocks = pages.table(1)
        pages.compute(PROMPT, blocks)
        assert pages.cache.store(PROMPT, blocks[4:], begin=32) == 64
        assert pages.cache.lookup(PROMPT).num_tokens == 0
        assert pages.cache.store(PROMPT, blocks) == 32
        mine = pages.table(2)
        for begin in (0, 24, 32):
            pages.memory[:] = 9
            assert pages.cache.retrieve(PROMPT, mine[begin // 8 :], begin=begin) == 96 - begin
            pages.check(PROMPT, mine, begin, 96)
            assert (pages.tokens(mine, 0, 0)[:begin] == 9).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [2**32] * 100}, r"tokens: .*expected integers in \[0, 2\*\*32\)"),
        ({"tokens": [-1] * 100}, r"tokens: .*expected integers"),
        ({"tokens": ["a"] * 100}, r"tokens: .*expected integers"),
        ({"tokens": np.zeros((2, 50), np.int64)}, r"tokens: got int64 \[2, 50\]"),
        ({"tokens": np.zeros(100)}, r"tokens: got float64 \[100\]"),
        ({"tokens": np.full(100, -1)}, r"tokens: got -1 to -1"),
        ({"blocks": range(5)}, r"blocks: got 5; expected 6 or more"),
        ({"blocks": [0, 1, 2, 3, 4, 32]}, r"blocks: got 32; expected \[0, 32\)"),
        ({"blocks": [0, 1, 2, 3, 4, -1]}, r"blocks: got -1; expected \[0, 32\)"),
        ({"begin": 8}, r"begin: got 8 of 100 tokens; expected multiples of chunk_tokens \(16\)"),
        ({"begin": -16}, r"begin: got -16 of 100 tokens"),
        ({"begin": 112}, r"begin: got 112 of 100 tokens"),
    ],
)
def test_arguments_that_cannot_be_meant_change_nothing(arguments: dict[str, Any], message: str) -> None:
    with Pages() as pages:
        pages.memory[:] = 3
        for verb in (pages.cache.store, pages.cache.retrieve):
            with pytest.raises(InvalidRequest, match=message):
                verb(**{"tokens": PROMPT, "blocks": range(7), **arguments})
        assert pages.cache._store.gauges()["used"] == 0
        assert (pages.memory == 3).all()


def test_a_block_is_not_filled_twice() -> None:
    with Pages() as pages, pytest.raises(InvalidRequest, match="one block twice"):
        pages.cache.retrieve(PROMPT, [0, 1, 2, 3, 4, 4])


def test_a_cache_that_cannot_work_is_not_opened() -> None:
    for arguments, error, message in (
        ({"nbytes": 100}, ConfigError, "nbytes: got 100; expected"),
        ({"chunk_tokens": 0}, ConfigError, "chunk_tokens: got 0"),
        ({"tiers": ["file:///no/such/directory"]}, ConfigError, "got '/no/such/directory'"),
        ({"tiers": ["nothing"]}, ConfigError, "^tiers.remote_url: got no URL and no path of a module"),
        ({"disk": "/tmp", "disk_nbytes": 100}, ConfigError, "got 100 bytes"),
    ):
        with pytest.raises(error, match=message):
            Pages(**arguments)
    layout = pdlink.paged_layout(
        dtype="uint8", itemsize=1, num_layers=2, num_blocks=2, block_tokens=16, num_heads=2, head_dim=16
    )
    with pytest.raises(LayoutMismatch, match=r"buffers\[0\]: got 10 bytes"):
        pdlink.Cache(layout, [bytearray(10)], nbytes=1 << 20)


def test_a_cache_may_allocate_the_pages() -> None:
    layout = pdlink.paged_layout(
        dtype="uint8", itemsize=1, num_layers=2, num_blocks=4, block_tokens=16, num_heads=2, head_dim=16
    )
    with pdlink.Cache(layout, nbytes=1 << 20, chunk_tokens=16) as cache:
        assert cache.buffers[0].nbytes >= layout.extent(0)
        assert cache.store(PROMPT[:32], [0, 1]) == cache.retrieve(PROMPT[:32], [2, 3]) == 32


# --- Before a load


def test_what_a_lookup_pins_stays_until_it_is_retrieved() -> None:
    with Pages(nbytes=6 * -(-RECORD_NBYTES // 4096) * 4096) as pages:
        pages.stored()
        hit = pages.cache.lookup(PROMPT, pin=True)
        assert hit.num_tokens == 96
        assert pages.stored(list(range(200))) == 0
        assert pages.cache.retrieve(PROMPT, pages.table(2), lookup_id=hit.lookup_id) == 96
        pages.check(PROMPT, pages.table(2), 0, 96)
        assert pages.stored(list(range(200))) == 96
        assert not pages.cache.release(hit.lookup_id)


def test_a_pinned_lookup_whose_lease_has_ended_is_looked_up_again() -> None:
    with Pages(nbytes=6 * -(-RECORD_NBYTES // 4096) * 4096, lease_s=0.0) as pages:
        pages.stored()
        hit = pages.cache.lookup(PROMPT, pin=True)
        with pages.cache._store._lock:
            pages.cache._store._catalog.expire(float("1e18"))
        other = list(range(200))
        assert pages.stored(other) == 96
        assert pages.cache.retrieve(PROMPT, pages.table(2), lookup_id=hit.lookup_id) == 0


def test_a_prefetch_brings_a_prompt_into_memory() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        forget_memory(pages, tier)
        tier.going.clear()
        lookup_id = pages.cache.prefetch(PROMPT)
        assert tier.stalled.wait(WAIT_S)
        assert pages.cache.state(lookup_id) == "ongoing"
        tier.going.set()
        assert pages.cache.retrieve(PROMPT, pages.table(2), lookup_id=lookup_id) == 96
        pages.check(PROMPT, pages.table(2), 0, 96)
        tier.records.clear()
        again = pages.cache.prefetch(PROMPT, lookup_id="mine")
        pages.cache._askers.submit(lambda: None).result(WAIT_S)
        assert (again, pages.cache.state("mine")) == ("mine", "done")
        unknown = pages.cache.prefetch([1] * 50)
        pages.cache._askers.submit(lambda: None).result(WAIT_S)
        assert pages.cache.state(unknown) == "not_found" == pages.cache.state("nobody's")


@pytest.mark.parametrize("late", [False, True])
def test_a_prefetch_that_nobody_wants_gives_everything_back(late: bool) -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        forget_memory(pages, tier)
        if late:
            tier.going.clear()
        lookup_id = pages.cache.prefetch(PROMPT)
        if late:
            assert tier.stalled.wait(WAIT_S)
            assert pages.cache.release(lookup_id)
            tier.going.set()
        else:
            pages.cache._askers.submit(lambda: None).result(WAIT_S)
            assert pages.cache.release(lookup_id)
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 96
        assert pages.cache._store._catalog.num_leases == 0


# --- Keeping and dropping


def test_pins_keep_a_prompt_within_their_quota() -> None:
    with Pages(nbytes=16 * RECORD_NBYTES, pin_quota_nbytes=3 * RECORD_NBYTES) as pages:
        pages.stored()
        assert pages.cache.pin(PROMPT, "system prompt") == 48
        for number in range(8):
            pages.stored([number] * 200)
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 48
        assert pages.cache.unpin("system prompt") == 48
        assert pages.cache.unpin("system prompt") == 0


def test_a_prompt_is_moved_between_places() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        forget_memory(pages, tier)
        assert pages.cache.move(PROMPT, "memory", "stub") == 0
        assert pages.cache.move(PROMPT, "stub", "memory", copy=False) == 96
        assert pages.cache.flush(WAIT_S)
        assert not tier.records
        assert pages.cache.move(PROMPT, "memory", "stub", copy=False) == 96
        assert pages.cache._store.gauges()["used"] == 0
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 96
        pages.check(PROMPT, pages.table(2), 0, 96)
        tier.records.clear()
        tier.error = OSError("full")
        assert pages.cache.move(PROMPT, "memory", "stub", copy=False) == 0
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 96
        for arguments, message in (
            (("memory", "peer"), "place: got 'peer'; expected memory, stub"),
            (("stub", "stub"), "destination: got 'stub', the source"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                pages.cache.move(PROMPT, *arguments)


def test_a_prompt_is_forgotten_where_the_caller_says() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        pages.stored([5] * 32)
        assert pages.cache.flush(WAIT_S)
        assert pages.cache.clear(PROMPT, begin=64, places=["memory"]) == (2, True)
        assert pages.cache.clear(PROMPT, places=["memory"]) == (4, True)
        assert pages.cache.lookup(PROMPT).num_tokens == 96
        assert pages.cache.clear(PROMPT) == (0, True)
        assert pages.cache.flush(WAIT_S)
        assert pages.cache.lookup(PROMPT).num_tokens == 0
        assert pages.cache.lookup([5] * 32).num_tokens == 32
        assert pages.cache.clear() == (2, True)
        assert pages.cache.flush(WAIT_S)
        assert not tier.records


def test_a_frozen_cache_keeps_nothing_new() -> None:
    with Pages() as pages:
        pages.stored(PROMPT[:32])
        pages.cache.freeze()
        assert pages.cache.frozen
        assert pages.stored() == 0
        assert pages.cache.retrieve(PROMPT, pages.table(2)) == 32
        pages.cache.freeze(False)
        assert pages.stored() == 64


# --- asyncio


def test_a_coroutine_that_is_cancelled_waits_until_nothing_touches_its_blocks() -> None:
    tier = StubTier()

    async def main(pages: Pages) -> None:
        assert await pages.cache.run(pages.cache.retrieve, PROMPT, pages.table(2)) == 96
        forget_memory(pages, tier)
        tier.going.clear()
        task = asyncio.create_task(pages.cache.run(pages.cache.retrieve, PROMPT, pages.table(3)))
        await asyncio.to_thread(tier.stalled.wait, WAIT_S)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        tier.going.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        pages.check(PROMPT, pages.table(3), 0, 96)

    with Pages(tiers=[tier]) as pages:
        pages.stored()
        asyncio.run(main(pages))


def test_a_closed_cache_says_so() -> None:
    with Pages() as pages:
        pages.stored()
        pages.cache.lookup(PROMPT, pin=True)
        before = threading.active_count()
    assert threading.active_count() < before
    pages.cache.close()
    with pytest.raises(InvalidRequest, match="it is closed"):
        pages.cache.retrieve(PROMPT, pages.table(2))


# --- The program that docs/library.md shows


def test_readme_shows_the_program_as_it_is() -> None:
    assert f"```python\n{(ROOT / 'examples/cache.py').read_text()}```" in (ROOT / "docs/library.md").read_text()


def test_program_finds_in_another_process_what_it_stored(tmp_path: Path) -> None:
    for verb, told in (
        ("get", "0 of 512 tokens are here"),
        ("store", "512 tokens are kept"),
        ("get", "512 of 512 tokens are here"),
    ):
        command = [sys.executable, str(ROOT / "examples/cache.py"), verb, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
        assert (done.returncode, done.stdout) == (0, told + "\n"), done.stderr
