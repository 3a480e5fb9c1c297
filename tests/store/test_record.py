"""A record holds the same KV for every engine, and nothing else is ever taken for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdlink import _copy
from pdlink.errors import ConfigError
from pdlink.kv.layout import paged_layout
from pdlink.kv.plan import bind, template
from pdlink.store.record import (
    _PREFIX,
    HEADER_NBYTES,
    SCHEMA,
    Group,
    Miss,
    RecordShape,
    said_sums,
    seal,
    shape_of,
    unseal,
)

if TYPE_CHECKING:
    from pdlink.kv.layout import KVLayout
    from pdlink.memory.buffers import Bytes

KEY = bytes(range(32))
SHAPE = RecordShape("float32", 8, (Group("full", (0, 1), 2, 3, 16),))


def engine(order: str, block_tokens: int) -> KVLayout:
    return paged_layout(
        dtype="float32",
        itemsize=4,
        num_layers=2,
        num_blocks=64 // block_tokens,
        block_tokens=block_tokens,
        num_heads=3,
        head_dim=4,
        order=order,
    )


def copy(dst: Bytes, src: Bytes, source: KVLayout, target: KVLayout, blocks: tuple[list[int], list[int]]) -> None:
    plan = bind(template(source, target), *blocks, 0, 8)
    for layer in range(len(source.layers)):
        for run_list in plan.run_lists(layer):
            _copy.memcpy_runs(dst, src, run_list.runs + np.array([run_list.src_base, run_list.dst_base, 0]))


def sealed(seed: int = 0, shape: RecordShape = SHAPE) -> Bytes:
    record = np.random.default_rng(seed).integers(0, 256, shape.nbytes, dtype=np.uint8)
    seal(record, KEY, shape)
    return record


@pytest.mark.parametrize(("order", "block_tokens"), [("LPBTH", 2), ("LPBHT", 16), ("BLPTH", 8), ("LBPHT", 4)])
def test_kv_of_one_engine_reaches_another_with_blocks_and_axes_of_its_own(order: str, block_tokens: int) -> None:
    """Values are numbered by (layer, part, token, head, element), so that both caches can be read by hand."""
    prefill, decode, shape = engine("LPBTH", 4), engine(order, block_tokens), shape_of(engine("LPBTH", 4), 8)
    assert shape == shape_of(decode, 8)
    values = np.arange(2 * 2 * 8 * 3 * 4, dtype=np.float32).reshape(2, 2, 8, 3, 4)
    cache = np.zeros((2, 2, 16, 4, 3, 4), np.float32)
    cache[:, :, [9, 5]] = values.reshape(2, 2, 2, 4, 3, 4)
    record = np.zeros(shape.nbytes, np.uint8)
    copy(record, cache.reshape(-1).view(np.uint8), prefill, shape.layout(0), ([9, 5], [0]))
    assert (record[HEADER_NBYTES:].view(np.float32) == values.reshape(-1)).all()

    loaded = np.zeros(decode.extent(0), np.uint8)
    blocks = list(range(decode.num_blocks))[1 : 1 + max(1, 8 // block_tokens)][::-1]
    copy(loaded, record, shape.layout(0), decode, ([0], blocks))
    again = np.zeros(shape.nbytes, np.uint8)
    copy(again, loaded, decode, shape.layout(0), (blocks, [0]))
    assert (again[HEADER_NBYTES:] == record[HEADER_NBYTES:]).all()


def test_layers_may_lie_in_a_record_in_orders_of_their_own() -> None:
    """As vLLM keeps them on CPUs: K by head and element, V by head and token."""
    layout = engine("LPBTH", 4)
    shape = shape_of(layout, 8, orders=("HPT", "HTP"))
    values = np.arange(2 * 2 * 8 * 3 * 4, dtype=np.float32).reshape(2, 2, 8, 3, 4)
    pages = np.zeros((2, 2, 16, 4, 3, 4), np.float32)
    pages[:, :, [9, 5]] = values.reshape(2, 2, 2, 4, 3, 4)
    cache = pages.reshape(-1).view(np.uint8)
    record, back = np.zeros(shape.nbytes, np.uint8), np.zeros_like(cache)
    copy(record, cache, layout, shape.whole(), ([9, 5], [0]))
    first, second = record[HEADER_NBYTES:].view(np.float32).reshape(2, -1)
    assert (first.reshape(3, 2, 8, 4) == values[0].transpose(2, 0, 1, 3)).all()
    assert (second.reshape(3, 8, 2, 4) == values[1].transpose(2, 1, 0, 3)).all()
    copy(back, record, shape.whole(), layout, ([0], [9, 5]))
    assert (back == cache).all()


def test_ranks_that_hold_some_heads_each_share_a_record() -> None:
    record = np.zeros(SHAPE.nbytes, np.uint8)
    for heads in (range(1), range(1, 3)):
        rank = paged_layout(
            dtype="float32",
            itemsize=4,
            num_layers=2,
            num_blocks=2,
            block_tokens=4,
            num_heads=len(heads),
            head_dim=4,
        )
        cache = np.full(rank.extent(0), heads.start + 1, np.uint8)
        copy(record, cache, rank, SHAPE.layout(0, heads), ([0, 1], [0]))
    by_head = record[HEADER_NBYTES:].reshape(-1, 3, 16)
    assert (by_head == np.array([1, 2, 2])[:, None]).all()


def test_groups_of_a_hybrid_model_lie_one_after_the_other() -> None:
    shape = RecordShape(
        "bfloat16",
        256,
        (
            Group("full", (5, 11), 2, 4, 256),
            Group("sliding", (0, 1, 2), 2, 2, 128, window_tokens=1024),
            Group("state", (3, 4), 1, 1, 9000),
            Group("latent", (6,), 1, 1, 1152),
        ),
    )
    sizes = [2 * 2 * 256 * 4 * 256, 3 * 2 * 256 * 2 * 128, 2 * 9000, 256 * 1152]
    assert shape.payload_nbytes == sum(sizes)
    ends = [shape.layout(index).extent(0) for index in range(4)]
    assert ends == [HEADER_NBYTES + sum(sizes[: index + 1]) for index in range(4)]
    for index in range(4):
        shape.layout(index).check("record")
        shape.layout(index).check_writable("record")
    shape.check()
    record = sealed(shape=shape)
    assert unseal(record, KEY, shape) is None


def test_a_record_is_found_whole_under_its_key_and_shape_only() -> None:
    record = sealed()
    assert unseal(record, KEY, SHAPE) is None
    assert unseal(record, bytes(32), SHAPE) == Miss("other_key")
    other = RecordShape("float32", 8, (Group("full", (0, 1), 2, 1, 48),))
    assert other.nbytes == SHAPE.nbytes
    assert unseal(record, KEY, other) == Miss("other_shape")
    assert unseal(record, KEY, msgspec.structs.replace(SHAPE, dtype="int32")) == Miss("other_shape")


@given(at=st.integers(0, SHAPE.nbytes - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_miss(at: int, bit: int) -> None:
    record = sealed()
    used = _PREFIX.size + _PREFIX.unpack(record[: _PREFIX.size].tobytes())[3]
    record[at] ^= 1 << bit
    missed = unseal(record, KEY, SHAPE) is not None
    sums_nbytes = said_sums(record, SHAPE).nbytes
    assert missed == (at < used or at >= HEADER_NBYTES - sums_nbytes)  # the rest of the header's page means nothing


@given(nbytes=st.integers(0, SHAPE.nbytes - 1))
def test_a_short_read_is_a_miss_whatever_lay_there_before(nbytes: int) -> None:
    record = sealed(1)
    record[:nbytes] = sealed(2)[:nbytes]
    missed = unseal(record, KEY, SHAPE) is not None
    assert missed == bool((record != sealed(1)).any())  # magic and schema are the same in both
    assert unseal(sealed()[:nbytes], KEY, SHAPE) == Miss("short")


@given(body=st.binary(max_size=200), codec=st.integers(0, 2), schema=st.integers(0, 2))
def test_hostile_headers_are_misses(body: bytes, codec: int, schema: int) -> None:
    record = np.zeros(SHAPE.nbytes, np.uint8)
    header = _PREFIX.pack(b"pdlinkKV", schema, codec, len(body), xxhash.xxh3_64_intdigest(body)) + body
    record[: len(header)] = memoryview(header)
    assert isinstance(unseal(record, KEY, SHAPE), Miss)


def test_a_header_whose_text_is_none_is_a_miss() -> None:
    record = sealed()
    (nbytes,) = _PREFIX.unpack(record[: _PREFIX.size].tobytes())[3:4]
    body = (
        record[_PREFIX.size : _PREFIX.size + nbytes]
        .tobytes()
        .replace(SHAPE.dtype.encode(), b"\xff" * len(SHAPE.dtype))
    )
    header = _PREFIX.pack(b"pdlinkKV", SCHEMA, 0, nbytes, xxhash.xxh3_64_intdigest(body)) + body
    record[: len(header)] = memoryview(header)
    assert unseal(record, KEY, SHAPE) == Miss("not_a_record")


def test_a_shape_whose_header_does_not_fit_is_refused() -> None:
    groups = tuple(Group("full", (layer,), 2, 8, 256) for layer in range(400))
    with pytest.raises(ConfigError, match="at most 4072"):
        RecordShape("float32", 8, groups).check()
