"""`KVGroups`: a cache whose layers do not all live alike: groups of them, each with its own blocks.

Full attention keeps all tokens of a request, a sliding window the last ones, a recurrent layer a state at one
position. Layers of one kind share a list of blocks and are one group, described by a `KVLayout`. Most models have one
group. A transfer moves one range of tokens; what that means in a group is `KVLayout.needed`, which both sides work
out alike, so no message names more than the range and a list of blocks a group.

Layers are counted through all groups, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, cast

from pdlink.errors import InvalidRequest, LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.kv.layout import KVLayout

AnyTables = Sequence[int] | Sequence[Sequence[int]]
"""Block ids: one list for each group, or the list of the only group."""
Tables = tuple[tuple[int, ...], ...]
"""Block ids: one list for each group."""


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

    def nbytes(self, start: int, end: int) -> int:
        """Payload of tokens [start, end) in all groups."""
        return self.nbytes_of(self.needed(start, end))

    def nbytes_of(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Payload of positions [first, last) of each group."""
        return sum((last - first) * each for each, (first, last) in zip(self.token_nbytes, ranges, strict=True))

    def tables(self, blocks: AnyTables) -> Tables:
        """One list of blocks for each group, of Python's integers: a frame takes no others, and numpy's come as well.

        Raises InvalidRequest for another number of lists, and for what is no integer.
        """
        if len(self.layouts) == 1 and not (len(blocks) and isinstance(blocks[0], Sized)):
            return (_ids(cast("Sequence[int]", blocks)),)
        given = cast("Sequence[Sequence[int]]", blocks)
        if len(given) != len(self.layouts) or not all(isinstance(table, Sized) for table in given):
            raise InvalidRequest(
                f"blocks: got {len(given)} items for {len(self.layouts)} groups of layers; one list of blocks each"
            )
        return tuple(map(_ids, given))

    def part(self, tables: Tables, start: int, end: int) -> Tables:
        """Of lists from token 0 on the blocks that hold what is transferred of tokens [start, end)."""
        return tuple(
            table[layout.blocks_of(*layout.needed(start, end))]
            for layout, table in zip(self.layouts, tables, strict=True)
        )

    def problem(self, tables: Tables, start: int, end: int) -> str:
        """Why an offer of these lists is not one of the blocks of tokens [start, end); empty if it is."""
        if len(tables) != len(self.layouts):
            return f"of {len(tables)} lists of blocks; there are {len(self.layouts)} groups of layers"
        for group, (layout, table) in enumerate(zip(self.layouts, tables, strict=True)):
            first, last = layout.needed(start, end)
            covering = layout.blocks_of(first, last)
            if len(table) != covering.stop - covering.start:
                where = f" of group {group}" if group else ""
                tokens = f"[{first * layout.position_tokens}, {last * layout.position_tokens})"
                return f"of {len(table)} blocks{where}; tokens {tokens} take {covering.stop - covering.start}"
            if table and not 0 <= min(table) <= max(table) < layout.num_blocks:
                return f"names a block outside 0..{layout.num_blocks - 1}"
            if len(set(table)) != len(table):
                return "names a block twice"
        for one, two in self.overlaid:
            twice = {*tables[one]} & {*tables[two]}
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
        axes = [
            (layer.token_stride, 1 if layout.state else layout.block_tokens),
            (layer.head_stride, layout.num_heads),
        ]
        nbytes = layout.head_nbytes
        nbytes += sum((count - 1) * stride for stride, count in axes if stride < layer.block_stride)
        for part in layer.parts:
            yield part.region, layer.block_stride, part.offset, part.offset + nbytes


def _ids(table: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, table))
    except TypeError as error:
        raise InvalidRequest(f"blocks: got {error}; block ids are integers") from None


def groups_of(layout: KVLayout | KVGroups) -> KVGroups:
    """A cache of one group is mostly given as its layout."""
    return layout if isinstance(layout, KVGroups) else KVGroups((layout,))
