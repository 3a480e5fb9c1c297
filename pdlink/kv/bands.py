"""Which bytes belong to which block: a layout seen from its memory, for the transport that guards it.

A *band* is a part of a region in which block b has the bytes [begin + b * stride, begin + b * stride + extent).
Where K and V, or all layers, of a block lie side by side they are one band; axes outside of the blocks (heads in some
layouts) make a band for each of their steps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink.errors import LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdlink.kv.groups import KVGroups
    from pdlink.kv.layout import KVLayout, LayerLayout, Part

BandArray = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""[n, 6] int64, C-contiguous: region, begin, stride, extent, first, count: of block `first` + b, for b below `count`.
In order of region and begin, not overlapping."""

_Band = tuple[int, int, int, int]
"""Region, begin, stride, extent."""


class Bands(NamedTuple):
    """All bands of a cache. The blocks of its groups are counted one group after the other."""

    table: BandArray
    num_blocks: int
    firsts: tuple[int, ...]
    """By group: number of its block 0. Groups that share memory share numbers: a block is one group's at a time."""

    def numbers(self, tables: Sequence[Sequence[int]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The numbers of these blocks, given by group."""
        if len(tables) == 1:
            return np.array(tables[0], dtype=np.int64) + self.firsts[0]
        return np.array(
            [first + b for first, table in zip(self.firsts, tables, strict=True) for b in table], np.int64
        )


def bands(groups: KVGroups) -> Bands:
    """All bands of a cache. Raises LayoutMismatch if its blocks do not lie so, as where their bytes overlap."""
    pools: list[tuple[int, int, list[_Band]]] = []
    """Number of the first block, number of blocks, and bands, of groups that share memory."""
    firsts = []
    for layout in groups.layouts:
        layout.check("own")
        layout.check_writable("own")
        mine = _bands(layout)
        shared = [
            pool
            for pool in pools
            if any(_overlap(one, pool[1], two, layout.num_blocks) for one in pool[2] for two in mine)
        ]
        if not shared:
            pools.append((sum(pool[1] for pool in pools), layout.num_blocks, mine))
            firsts.append(pools[-1][0])
            continue
        first, count, theirs = shared[0]
        if len(shared) > 1 or count != layout.num_blocks:
            raise LayoutMismatch(f"own groups share memory, but not blocks: {count} and {layout.num_blocks}")
        theirs[:] = _joined((*theirs, *mine), count)
        firsts.append(first)
    rows = sorted((*band, first, count) for first, count, found in pools for band in found)
    return Bands(np.array(rows, dtype=np.int64).reshape(-1, 6), sum(pool[1] for pool in pools), tuple(firsts))


def _overlap(one: _Band, one_count: int, two: _Band, two_count: int) -> bool:
    """Whether two bands have a byte in common, going by their whole lengths."""
    one_end, two_end = (
        begin + (count - 1) * stride + extent
        for (_, begin, stride, extent), count in ((one, one_count), (two, two_count))
    )
    return one[0] == two[0] and one[1] < two_end and two[1] < one_end


def _bands(layout: KVLayout) -> list[_Band]:
    found = []
    for layer in layout.layers:
        for part in layer.parts:
            outer, stride, extent = _axes(layout, layer, part)
            found += [(part.region, part.offset + begin, stride, extent) for begin in outer]
    return _joined(found, layout.num_blocks)


def _joined(bands: Iterable[_Band], num_blocks: int) -> list[_Band]:
    """Bands side by side, or with bytes in common, made one. Raises LayoutMismatch for bands that interleave."""
    joined: list[list[int]] = []
    for region, begin, stride, extent in sorted(bands):
        if joined:
            last = joined[-1]
            inside = begin + extent - last[1]
            if (region, stride) == (last[0], last[2]) and inside <= stride:
                last[3] = max(last[3], inside)
                continue
            if region == last[0] and begin < last[1] + (num_blocks - 1) * last[2] + last[3]:
                raise LayoutMismatch(f"own layout interleaves blocks of strides {last[2]} and {stride} at {begin}")
        joined.append([region, begin, stride, extent])
    return [(region, begin, stride, extent) for region, begin, stride, extent in joined]


def _axes(layout: KVLayout, layer: LayerLayout, part: Part) -> tuple[list[int], int, int]:
    """Where the bands of a part begin, counted from it, and their stride and extent."""
    axes = [(layer.token_stride, 1 if layout.state else layout.block_tokens), (layer.head_stride, layout.num_heads)]
    # An only block may have all of the region.
    block_stride = layer.block_stride if layout.num_blocks > 1 else layout.extent(part.region)
    inner = [axis for axis in axes if axis[0] < block_stride]
    extent = layout.head_nbytes + sum((count - 1) * stride for stride, count in inner)
    outer = [range(0, stride * count, stride) for stride, count in axes if count > 1 and (stride, count) not in inner]
    return [sum(steps) for steps in itertools.product(*outer)], block_stride, extent
