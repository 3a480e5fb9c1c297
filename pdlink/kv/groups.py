"""`KVGroups`: a cache whose layers do not all live alike: groups of them, each with its own blocks.

Full attention keeps all tokens of a request, a sliding window the last ones, a recurrent layer a state at one
position. Layers of one kind share a list of blocks and are one group, described by a `KVLayout`. Most models have one
group. A transfer moves one range of tokens; what that means in a group is `KVLayout.needed`, which both sides work
out alike, so no message names more than the range and a list of blocks a group.

Layers are counted through all groups, in their order.

`bands` says which bytes belong to which block, for the transport that guards them. A *band* is a part of a region
in which block b has the bytes [begin + b * stride, begin + b * stride + extent). Where K and V, or all layers, of a
block lie side by side they are one band; axes outside of the blocks (heads in some layouts) make a band for each of
their steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink.errors import InvalidRequest, LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdlink.kv.layout import KVLayout, LayerLayout, Part

BlockLists = Sequence[Sequence[int]]
"""Block ids: one list for each group."""
BlocksByGroup = tuple[tuple[int, ...], ...]
"""The same, checked by `KVGroups.by_group`."""
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

    def numbers(self, blocks: Sequence[Sequence[int]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The numbers of these blocks, given by group."""
        if len(blocks) == 1:
            return np.array(blocks[0], dtype=np.int64) + self.firsts[0]
        return np.array([first + b for first, mine in zip(self.firsts, blocks, strict=True) for b in mine], np.int64)


@dataclass(frozen=True)
class KVGroups:
    """All layers of a worker's KV cache."""

    layouts: tuple[KVLayout, ...]
    """By group."""

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """By layer."""
        return tuple(group for group, layout in enumerate(self.layouts) for _ in layout.layers)

    @cached_property
    def index_of(self) -> tuple[int, ...]:
        """By layer: which one of its group it is."""
        return tuple(index for layout in self.layouts for index in range(len(layout.layers)))

    @cached_property
    def num_layers(self) -> int:
        return len(self.group_of)

    @cached_property
    def token_nbytes(self) -> tuple[int, ...]:
        """By group: payload of one position in all of its layers."""
        return tuple(layout.token_nbytes for layout in self.layouts)

    @cached_property
    def layer_nbytes(self) -> tuple[int, ...]:
        """By layer: payload of one position."""
        return tuple(
            len(layer.parts) * layout.num_heads * layout.head_nbytes
            for layout in self.layouts
            for layer in layout.layers
        )

    @cached_property
    def keeps_all(self) -> bool:
        """Whether any range of a prompt's tokens can be sent, in every group."""
        return all(layout.keeps_all for layout in self.layouts)

    def needed(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """By group: positions [first, last) of what is transferred of tokens [start, end)."""
        return tuple(layout.needed(start, end) for layout in self.layouts)

    def nbytes_of(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Payload of positions [first, last) of each group."""
        return sum((last - first) * each for each, (first, last) in zip(self.token_nbytes, ranges, strict=True))

    def by_group(self, blocks: BlockLists) -> BlocksByGroup:
        """One list of blocks for each group, of Python's integers: a frame takes no others, and numpy's come as well.

        Raises InvalidRequest for another number of lists, and for what is no integer.
        """
        try:
            given = tuple(tuple(map(index, mine)) for mine in blocks)
        except TypeError as error:
            raise InvalidRequest(f"blocks: {error}; pass one list of integers for each group of layers") from None
        if len(given) != len(self.layouts):
            raise InvalidRequest(f"blocks: got {len(given)} lists; expected {len(self.layouts)}, one for each group")
        return given

    def no_layer(self, layer: int) -> InvalidRequest:
        """The error that says that there is no such layer."""
        return InvalidRequest(f"layer: got {layer}; expected 0 to {self.num_layers - 1}")

    def part(self, blocks: BlocksByGroup, start: int, end: int) -> BlocksByGroup:
        """Of lists from token 0 on the blocks that hold what is transferred of tokens [start, end)."""
        return tuple(
            mine[layout.blocks_of(*layout.needed(start, end))]
            for layout, mine in zip(self.layouts, blocks, strict=True)
        )

    def problem(self, blocks: BlocksByGroup, start: int, end: int) -> str:
        """Why an offer of these lists is not one of the blocks of tokens [start, end); empty if it is."""
        if not 0 <= start <= end:
            return f"of tokens [{start}, {end})"
        if len(blocks) != len(self.layouts):
            return f"of {len(blocks)} lists of blocks; there are {len(self.layouts)} groups of layers"
        for group, (layout, mine) in enumerate(zip(self.layouts, blocks, strict=True)):
            first, last = layout.needed(start, end)
            covering = layout.blocks_of(first, last)
            if len(mine) != covering.stop - covering.start:
                where = f" of group {group}" if group else ""
                tokens = f"[{first * layout.position_tokens}, {last * layout.position_tokens})"
                return f"of {len(mine)} blocks{where}; tokens {tokens} take {covering.stop - covering.start}"
            if mine and not 0 <= min(mine) <= max(mine) < layout.num_blocks:
                return f"names a block outside 0..{layout.num_blocks - 1}"
            if len(set(mine)) != len(mine):
                return "names a block twice"
        for one, two in self.overlaid:
            twice = {*blocks[one]} & {*blocks[two]}
            if twice:
                return (
                    f"names block {min(twice)} in groups {one} and {two}, which share memory; a block is one group's"
                )
        return ""

    @cached_property
    def overlaid(self) -> tuple[tuple[int, int], ...]:
        """Pairs of groups that lie over each other: their blocks of one number have bytes in common."""
        if len(self.layouts) == 1:
            return ()
        places = sorted((*place, group) for group, layout in enumerate(self.layouts) for place in _places(layout))
        found: set[tuple[int, int]] = set()
        here, ends = (-1, -1), dict[int, int]()
        for region, stride, begin, end, group in places:
            if (region, stride) != here:
                here, ends = (region, stride), {}
            ends = {other: until for other, until in ends.items() if until > begin}
            found.update((min(group, other), max(group, other)) for other in ends if other != group)
            ends[group] = max(end, ends.get(group, 0))
        return tuple(sorted(found))

    def check(self, side: str) -> None:
        """As `KVLayout.check`, of every group. Raises LayoutMismatch, also where there is no layer at all."""
        if not self.layouts or not all(layout.layers for layout in self.layouts):
            raise LayoutMismatch(f"{side} layout is malformed: a group has no layers")
        for layout in self.layouts:
            layout.check(side)

    def extent(self, region: int) -> int:
        """Bytes of `region` that any group can touch."""
        return max(layout.extent(region) for layout in self.layouts)

    @property
    def num_regions(self) -> int:
        return 1 + max(
            (part.region for one in self.layouts for layer in one.layers for part in layer.parts), default=0
        )


def _places(layout: KVLayout) -> Iterator[tuple[int, int, int, int]]:
    """Of each part region, stride of the blocks, and where block 0 begins and ends.

    Of a part with axes outside of its blocks (heads, in some orders) its first bytes, which say enough of two groups
    of one form; the layout may be a peer's, and its steps are not counted through.
    """
    for layer in layout.layers:
        nbytes, _ = _in_block(layout, layer, layer.block_stride)
        for part in layer.parts:
            yield part.region, layer.block_stride, part.offset, part.offset + nbytes


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
            outer, stride, extent = _steps(layout, layer, part)
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


def _steps(layout: KVLayout, layer: LayerLayout, part: Part) -> tuple[list[int], int, int]:
    """Where the bands of a part begin, counted from it, and their stride and extent."""
    # An only block may have all of the region.
    block_stride = layer.block_stride if layout.num_blocks > 1 else layout.extent(part.region)
    extent, outside = _in_block(layout, layer, block_stride)
    outer = [range(0, stride * count, stride) for stride, count in outside if count > 1]
    return [sum(steps) for steps in itertools.product(*outer)], block_stride, extent


def _in_block(layout: KVLayout, layer: LayerLayout, block_stride: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes that a part of a block has side by side, and (stride, count) of the axes outside of the blocks."""
    axes = [(layer.token_stride, 1 if layout.state else layout.block_tokens), (layer.head_stride, layout.num_heads)]
    inside = [axis for axis in axes if axis[0] < block_stride]
    nbytes = layout.head_nbytes + sum((count - 1) * stride for stride, count in inside)
    return nbytes, [axis for axis in axes if axis not in inside]
