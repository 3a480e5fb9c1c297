"""Bands say of every byte of a layout to which block it belongs, compared with the definition of a layout."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pdlink.errors import LayoutMismatch
from pdlink.kv.groups import KVGroups, bands
from pdlink.kv.layout import KVLayout, LayerLayout, Part, paged_layout


def blocks_by_bands(layout: KVLayout, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Block of every byte of region 0, -1 for bytes of none; no byte is of two."""
    found = np.full(nbytes, -1, dtype=np.int64)
    for _, begin, stride, extent, _, _ in bands(KVGroups((layout,))).table.tolist():
        for block in range(layout.num_blocks):
            where = slice(begin + block * stride, begin + block * stride + extent)
            assert (found[where] == -1).all()
            found[where] = block
    return found


def blocks_by_definition(layout: KVLayout, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found = np.full(nbytes, -1, dtype=np.int64)
    for layer in layout.layers:
        for part in layer.parts:
            for block, token, head in itertools.product(
                range(layout.num_blocks), range(layout.block_tokens), range(layout.num_heads)
            ):
                at = part.offset + block * layer.block_stride + token * layer.token_stride + head * layer.head_stride
                found[at : at + layout.head_nbytes] = block
    return found


@pytest.mark.parametrize("order", ["".join(axes) for axes in itertools.permutations("LPBTH")])
def test_every_byte_of_a_dense_layout_is_of_its_block(order: str) -> None:
    for num_blocks in (1, 5):
        layout = paged_layout(
            dtype="u8",
            itemsize=1,
            num_layers=3,
            num_blocks=num_blocks,
            block_tokens=4,
            num_heads=2,
            head_dim=3,
            order=order,
        )
        nbytes = layout.extent(0)
        np.testing.assert_array_equal(blocks_by_bands(layout, nbytes), blocks_by_definition(layout, nbytes))


@pytest.mark.parametrize("seed", range(20))
def test_bytes_between_parts_of_a_block_are_of_no_other_block(seed: int) -> None:
    rng = random.Random(seed)
    block_tokens, num_heads, head_nbytes = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 5)
    head = head_nbytes + rng.randint(0, 2)
    token = num_heads * head + rng.randint(0, 3)
    part = block_tokens * token + rng.randint(0, 4)
    block = 2 * part + rng.randint(0, 7)
    num_blocks = rng.randint(1, 6)
    layers = tuple(
        LayerLayout((Part(0, begin), Part(0, begin + part)), block, token, head)
        for begin in itertools.accumulate(num_blocks * block + rng.randint(0, 9) for _ in range(3))
    )
    layout = KVLayout("u8", block_tokens, num_blocks, num_heads, head_nbytes, layers)
    nbytes = layout.extent(0)
    found, expected = blocks_by_bands(layout, nbytes), blocks_by_definition(layout, nbytes)
    np.testing.assert_array_equal(found[expected >= 0], expected[expected >= 0], err_msg=f"seed {seed}")


def test_regions_have_bands_of_their_own_in_order() -> None:
    layers = tuple(LayerLayout((Part(region, 64), Part(region, 0)), 128, 8, 8) for region in (2, 0, 1))
    found = bands(KVGroups((KVLayout("u8", 8, 4, 1, 8, layers),))).table.tolist()
    assert found == [[region, 0, 128, 128, 0, 4] for region in range(3)]


def test_blocks_of_different_lengths_side_by_side_are_refused() -> None:
    layers = (LayerLayout((Part(0, 0),), 64, 8, 8), LayerLayout((Part(0, 32),), 128, 8, 8))
    with pytest.raises(LayoutMismatch, match="strides 64 and 128"):
        bands(KVGroups((KVLayout("u8", 4, 4, 1, 8, layers),)))


def _group(num_layers: int, num_blocks: int = 4, *, offset: int = 0, region: int = 0, head_dim: int = 8) -> KVLayout:
    """Pages of 64 bytes, one layer after the other; of shorter ones the rest is not used."""
    part = [(Part(region, offset + 64 * num_blocks * layer),) for layer in range(num_layers)]
    layers = tuple(LayerLayout(parts, 64, head_dim, head_dim) for parts in part)
    return KVLayout("u8", 4, num_blocks, 1, head_dim, layers)


def test_groups_in_one_memory_share_block_numbers_and_others_have_their_own() -> None:
    """vLLM lays the layers of all groups over each other: a block is one group's at a time."""
    groups = KVGroups((_group(2), _group(1, head_dim=16), _group(1, 3, region=1), _group(1, offset=512)))
    table, num_blocks, firsts = bands(groups)
    assert firsts == (0, 0, 4, 7)
    assert num_blocks == 11
    assert table.tolist() == [
        [0, 0, 64, 64, 0, 4],
        [0, 256, 64, 32, 0, 4],
        [0, 512, 64, 32, 7, 4],
        [1, 0, 64, 32, 4, 3],
    ]
    assert bands(groups).numbers(((3, 1), (2,), (0, 2), (3,))).tolist() == [3, 1, 2, 4, 6, 10]


@pytest.mark.parametrize("other", [_group(1, 3), _group(1, head_dim=16, offset=32)], ids=["number", "place"])
def test_groups_that_share_bytes_but_not_blocks_are_refused(other: KVLayout) -> None:
    with pytest.raises(LayoutMismatch, match=r"share memory|interleaves"):
        bands(KVGroups((_group(1), other)))
