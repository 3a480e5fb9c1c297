"""Packed records come back byte for byte, or are a miss; memory never sees a packed one."""

from __future__ import annotations

import threading
import tracemalloc
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import ConfigError, InvalidRequest
from pdlink.store.codec import RAW, Codec, make_codec
from pdlink.store.record import _PREFIX, HEADER_NBYTES, Group, Miss, RecordShape, header_of, pack, seal, unseal
from tests.waiting import WAIT_S

from .stubs import StubTier
from .test_cache import PROMPT, Pages

pytest.importorskip("zstandard", reason="the extra `store`")

KEY = bytes(range(32))
SHAPE = RecordShape("bfloat16", 8, (Group("full", (0, 1), 2, 3, 256),))
EASY = [0] * 100
"""A prompt whose KV packs."""
ZSTD = cast("Codec", make_codec("zstd"))


def sealed(seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A record of floats around 1, whose exponents pack."""
    record = np.zeros(SHAPE.nbytes, np.uint8)
    values = np.random.default_rng(seed).normal(1, 0.1, SHAPE.payload_nbytes // 2).astype(np.float32)
    record[HEADER_NBYTES:] = values.view(np.uint16)[1::2].copy().view(np.uint8)
    seal(record, KEY, SHAPE)
    return record


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@given(data=st.data())
def test_what_is_packed_comes_back(dtype: str, data: st.DataObject) -> None:
    payload = np.frombuffer(data.draw(st.binary(min_size=1, max_size=300)), np.uint8)
    again = np.zeros_like(payload)
    assert ZSTD.unpack_into(again, ZSTD.pack(payload, dtype), dtype)
    assert (again == payload).all()


def test_a_packed_record_is_shorter_and_unpacked_in_place() -> None:
    record, memory = sealed(), np.zeros(SHAPE.nbytes, np.uint8)
    stored = pack(record, SHAPE, ZSTD)
    assert len(stored) < 0.9 * SHAPE.nbytes
    memory[: len(stored)] = stored
    assert unseal(memory, KEY, SHAPE, len(stored)) is None
    assert (memory[HEADER_NBYTES:] == record[HEADER_NBYTES:]).all()


def test_what_does_not_get_shorter_is_kept_as_it_is() -> None:
    record = np.random.default_rng(1).integers(0, 256, SHAPE.nbytes, dtype=np.uint8)
    seal(record, KEY, SHAPE)
    stored = pack(record, SHAPE, ZSTD)
    assert (stored == record).all()
    assert _PREFIX.unpack(stored[: _PREFIX.size].tobytes())[2] == RAW


@given(data=st.data())
def test_a_damaged_packed_record_is_a_miss(data: st.DataObject) -> None:
    """The payload's own bytes count: a damage that unpacks to the same is none."""
    record = sealed()
    stored = pack(record, SHAPE, ZSTD).copy()
    end = data.draw(st.integers(1, len(stored)))
    at, bit = data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 7))
    stored[at] ^= 1 << bit
    memory = np.zeros(SHAPE.nbytes, np.uint8)
    memory[:end] = stored[:end]
    if unseal(memory, KEY, SHAPE, end) is None:
        assert (memory[HEADER_NBYTES:] == record[HEADER_NBYTES:]).all()


def test_a_frame_that_claims_a_terabyte_is_a_miss_without_the_memory() -> None:
    bomb = bytes.fromhex("28b52ffd") + b"\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    tracemalloc.start()
    try:
        assert not ZSTD.unpack_into(np.zeros(1 << 10, np.uint8), bomb, "uint8")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_codec_that_nobody_knows_is_a_miss() -> None:
    stored = pack(sealed(), SHAPE, ZSTD).copy()
    stored[10] = 99
    memory = np.zeros(SHAPE.nbytes, np.uint8)
    memory[: len(stored)] = stored
    assert unseal(memory, KEY, SHAPE, len(stored)) == Miss("codec")


@pytest.mark.parametrize("name", ["cachegen", "lz4"])
def test_other_codecs_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"tiers.codec: got '{name}'.*expected raw or zstd"):
        make_codec(name)


def test_tiers_keep_packed_records_and_other_nodes_read_them() -> None:
    """Each record says how it is packed, so that a tier may hold both kinds, and its readers be set otherwise."""
    tier = StubTier()
    with Pages(tiers=[tier], codec={"stub": "zstd"}) as pages:
        assert pages.stored(EASY[:32]) == 32
        assert pages.cache.flush(WAIT_S)
        whole = pages.cache._shape.nbytes
    with Pages(tiers=[tier]) as pages:
        assert pages.stored(EASY) == 96
        assert pages.cache.flush(WAIT_S)
        assert sorted(len(record) < whole for record in tier.records.values()) == [False] * 4 + [True] * 2
    with Pages("LPBHT", tiers=[tier], codec={"stub": "zstd"}) as pages:
        blocks = pages.table(3)
        assert pages.cache.retrieve(EASY, blocks) == 96
        pages.check(EASY, blocks, 0, 96)


def test_a_prompt_is_packed_and_unpacked_in_its_tier() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored(EASY)
        assert pages.cache.flush(WAIT_S)
        raw = dict(tier.records)
        assert pages.cache.compress(EASY, "zstd", "stub") == 96
        assert {key: len(record) < len(raw[key]) for key, record in tier.records.items()} == dict.fromkeys(raw, True)
        pages.cache.clear(places=["memory"])
        blocks = pages.table(3)
        assert pages.cache.retrieve(EASY, blocks) == 96
        pages.check(EASY, blocks, 0, 96)
        assert pages.cache.compress(EASY, "raw", "stub") == 96
        assert tier.records == raw
        assert pages.cache.compress([7] * 40, "zstd", "stub") == 0


def test_readers_of_a_record_that_is_being_packed_find_it_or_miss_it() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored(EASY)
        assert pages.cache.flush(WAIT_S)
        done = threading.Event()

        def pack_and_unpack() -> None:
            for _ in range(20):
                pages.cache.compress(EASY, "zstd", "stub")
                pages.cache.compress(EASY, "raw", "stub")
            done.set()

        thread = threading.Thread(target=pack_and_unpack)
        thread.start()
        while not done.is_set():
            pages.cache.clear(places=["memory"])
            blocks = pages.table(3)
            loaded = pages.cache.retrieve(EASY, blocks)
            pages.check(EASY, blocks, 0, loaded)
        thread.join()
        assert pages.cache.compress(EASY, "zstd", "stub") == 96


def test_a_record_that_was_cleared_meanwhile_is_not_put_back() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored(EASY)
        assert pages.cache.flush(WAIT_S)
        tier.going.clear()
        packing = threading.Thread(target=pages.cache.compress, args=(EASY, "zstd", "stub"))
        packing.start()
        assert tier.stalled.wait(WAIT_S)
        pages.cache.clear()
        tier.going.set()
        packing.join()
        assert pages.cache.flush(WAIT_S)
        assert not tier.records


def test_memory_is_not_packed() -> None:
    with Pages() as pages, pytest.raises(InvalidRequest, match="place: got 'memory'"):
        pages.cache.compress(PROMPT, "zstd", "memory")


@pytest.mark.parametrize("verifies", [False, True])
def test_a_payload_is_hashed_once_on_its_way_up(verifies: bool) -> None:
    """By the tier if it says so, as `Disk` does; a tier of somebody else's is not believed."""
    tier = StubTier()
    tier.verifies = verifies
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        assert pages.cache.flush(WAIT_S)
        pages.cache.clear(places=["memory"])
        for key in list(tier.records):
            tier.flip(key)
        assert pages.cache.retrieve(PROMPT, pages.table(3)) == (96 if verifies else 0)


@pytest.mark.parametrize("verifies", [False, True])
def test_a_payload_is_hashed_once_on_its_way_down(verifies: bool) -> None:
    tier = StubTier()
    tier.verifies = verifies
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        assert pages.cache.flush(WAIT_S)
        stored = [(key, np.frombuffer(record, np.uint8)) for key, record in tier.records.items()]
        headers = [header_of(record, key, pages.cache._shape, verified=True) for key, record in stored]
        assert {header.is_hashed for header in headers if not isinstance(header, Miss)} == {not verifies}


def test_only_the_tier_that_checked_a_record_without_a_digest_is_believed() -> None:
    tier = StubTier()
    tier.verifies = True
    with Pages(tiers=[tier]) as pages:
        pages.stored()
        assert pages.cache.flush(WAIT_S)
    tier.verifies = False
    with Pages(tiers=[tier]) as pages:
        assert pages.cache.retrieve(PROMPT, pages.table(3)) == 0


def test_a_record_without_a_digest_gets_one_where_others_need_it() -> None:
    tier, other = StubTier(), StubTier()
    tier.verifies = True
    with Pages(tiers=[tier]) as pages:
        pages.stored(EASY)
        assert pages.cache.flush(WAIT_S)
    with Pages(tiers=[tier, other]) as pages:
        assert pages.cache.compress(EASY, "zstd", "stub") == 96
    for source in (tier, other):
        source.verifies = False
        with Pages(tiers=[tier, other]) as pages:
            blocks = pages.table(3)
            assert pages.cache.retrieve(EASY, blocks) == 96
            pages.check(EASY, blocks, 0, 96)
            assert pages.cache.move(EASY, "memory", "stub-2") == 96
        tier.records.clear()
