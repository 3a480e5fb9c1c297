"""What a slot holds: some layers of a range of positions, side by side. Pure.

A slot is a small cache with a `KVLayout` of its own: units of positions in their order, layer by layer and part by
part. So gathering is a plan from the writer's pages to the slot, and scattering one from the slot to the owner's.
Each is made with the layout of its own side: neither needs the other's, and the owner takes no stride on trust.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.kv.plan import bind, template

if TYPE_CHECKING:
    from pdlink.kv.plan import IntArray, Plan, Template

MAX_UNITS: Final = 32768
"""Of a slot: their pairs are the list of one launch (`SLOT_NBYTES` of `pdlink/cuda/launches.py`)."""
_MOST_KEPT: Final = 256


class Piece(NamedTuple):
    """Of a plan, what goes into one slot."""

    layers: range
    """Of their group."""
    start: int
    end: int
    """Positions."""
    unit_tokens: int
    """Positions of a unit, which lie in one block at both ends."""
    heads_first: bool
    """Of a unit, one head after the other, as in the writer's pages: what lies together there does so in the slot."""

    @property
    def num_units(self) -> int:
        return -(-self.end // self.unit_tokens) - self.start // self.unit_tokens

    @property
    def num_sent(self) -> int:
        """Positions of its units, which go whole."""
        return self.num_units * self.unit_tokens

    def nbytes(self, layout: KVLayout) -> int:
        """Of the slot, with what is not copied of the first and the last unit."""
        planes = sum(len(layer.parts) for layer in layout.layers[self.layers.start : self.layers.stop])
        return self.num_sent * planes * layout.num_heads * layout.head_nbytes


class Pages:
    """The cache of one side, and the templates between it and slots, which are kept."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._kept: dict[tuple[range, int, int, bool, bool], Template] = {}

    def require_countable(self) -> None:
        """Kernels count positions in 31 bits, whatever the unit. Raises ValueError."""
        num_positions = self.layout.num_blocks * (1 if self.layout.state else self.layout.block_tokens)
        if num_positions >= 2**31:
            raise ValueError(f"layout has {num_positions} positions; expected fewer than 2^31")

    def gather(self, piece: Piece, blocks: IntArray) -> Plan:
        """Into a slot. blocks: from the one on that holds `piece.start`."""
        return bind(self._template(piece, False), blocks, np.arange(piece.num_units), piece.start, piece.end)

    def scatter(self, piece: Piece, blocks: IntArray) -> Plan:
        """Out of a slot. Raises ValueError for blocks that do not exist, are too few, or are named twice."""
        return bind(self._template(piece, True), np.arange(piece.num_units), blocks, piece.start, piece.end)

    def _template(self, piece: Piece, out: bool) -> Template:
        key = piece.layers, piece.unit_tokens, piece.num_units, piece.heads_first, out
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            pages = replace(self.layout, layers=self.layout.layers[piece.layers.start : piece.layers.stop])
            slot = _slot(pages, piece)
            found = self._kept[key] = template(slot, pages) if out else template(pages, slot)
        return found


def _slot(pages: KVLayout, piece: Piece) -> KVLayout:
    row, at, layers = pages.num_heads * pages.head_nbytes, 0, []
    for layer in pages.layers:
        plane = piece.num_units * piece.unit_tokens * row
        parts = tuple(Part(0, at + index * plane) for index in range(len(layer.parts)))
        at += len(parts) * plane
        token_stride, head_stride = row, pages.head_nbytes
        if piece.heads_first:
            token_stride, head_stride = pages.head_nbytes, piece.unit_tokens * pages.head_nbytes
        token_stride = 0 if pages.state else token_stride
        layers.append(LayerLayout(parts, piece.unit_tokens * row, token_stride, head_stride))
    return replace(pages, block_tokens=piece.unit_tokens, num_blocks=piece.num_units, layers=tuple(layers))


def cut(plan: Plan, layers: range, most_nbytes: int) -> deque[Piece]:
    """Several layers whole, or one by ranges of positions.

    Raises ValueError if a slot has no room for a position, and for more of a state than one.
    """
    layout, unit, pieces = plan.template.src, plan.template.unit_tokens, deque[Piece]()
    if layout.state and plan.end - plan.start > 1:
        raise ValueError(f"[{plan.start}, {plan.end}) of a state; expected one position")
    first = layers.start if plan.start < plan.end else layers.stop
    while first < layers.stop:
        at, heads_first = layout.layers[first], False
        if layout.num_heads > 1 and not layout.state:
            heads_first = at.head_stride > at.token_stride
        row = Piece(range(first, first + 1), 0, 1, 1, heads_first).nbytes(layout)
        if row > most_nbytes:
            raise ValueError(f"layer {first} has {row} bytes a position; a slot has room for {most_nbytes}")
        whole = Piece(range(first, first + 1), plan.start, plan.end, unit, heads_first)
        # Not much more is sent than was asked for: a block of 544 positions (hybrid models) would be mostly empty.
        while unit > 1 and (unit * row > most_nbytes or 4 * whole.num_sent > 5 * (plan.end - plan.start)):
            unit = next(unit // divisor for divisor in range(2, unit + 1) if unit % divisor == 0)
            whole = whole._replace(unit_tokens=unit)
        if whole.num_units <= MAX_UNITS and whole.nbytes(layout) <= most_nbytes:
            more = whole
            while more.nbytes(layout) <= most_nbytes:
                whole = more
                if whole.layers.stop == layers.stop:
                    break
                more = whole._replace(layers=range(first, whole.layers.stop + 1))
            pieces.append(whole)
        else:
            step = min(MAX_UNITS, most_nbytes // (row * unit)) * unit
            begins = [plan.start, *range(plan.start // unit * unit + step, plan.end, step)]
            for start, end in zip(begins, [*begins[1:], plan.end], strict=True):
                pieces.append(whole._replace(start=start, end=end))
        first = whole.layers.stop
    return pieces


def blocks_in(plan: Plan, piece: Piece) -> tuple[IntArray, IntArray]:
    """The blocks of a piece at both ends."""
    sides = (plan.template.src, plan.src_blocks), (plan.template.dst, plan.dst_blocks)
    found = []
    for layout, blocks in sides:
        first, needed = plan.start // layout.block_tokens, layout.blocks_of(piece.start, piece.end)
        found.append(blocks[needed.start - first : needed.stop - first])
    src, dst = found
    return src, dst
