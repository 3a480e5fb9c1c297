"""Which bytes belong to which block: a layout seen from its memory, for the transport that guards it.

A *band* is a part of a region in which block b has the bytes [begin + b * stride, begin + b * stride + extent).
Where K and V, or all layers, of a block lie side by side they are one band; axes outside of the blocks (heads in some
layouts) make a band for each of their steps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import LayoutMismatch

if TYPE_CHECKING:
    from pdlink.kv.layout import KVLayout, LayerLayout, Part

BandArray = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""[n, 4] int64, C-contiguous: region, begin, stride, extent; in order of region and begin, not overlapping."""


def bands(layout: KVLayout) -> BandArray:
    """All bands of a layout. Raises LayoutMismatch if its blocks do not lie so, as where their bytes overlap."""
    layout.check("own")
    layout.check_writable("own")
    found = []
    for layer in layout.layers:
        for part in layer.parts:
            outer, stride, extent = _axes(layout, layer, part)
            found += [[part.region, part.offset + begin, stride, extent] for begin in outer]
    joined: list[list[int]] = []
    for region, begin, stride, extent in sorted(found):
        if joined:
            last = joined[-1]
            inside = begin + extent - last[1]
            if (region, stride) == (last[0], last[2]) and inside <= stride:
                last[3] = max(last[3], inside)
                continue
            if region == last[0] and begin < last[1] + (layout.num_blocks - 1) * last[2] + last[3]:
                raise LayoutMismatch(f"own layout interleaves blocks of strides {last[2]} and {stride} at {begin}")
        joined.append([region, begin, stride, extent])
    return np.array(joined, dtype=np.int64).reshape(-1, 4)


def _axes(layout: KVLayout, layer: LayerLayout, part: Part) -> tuple[list[int], int, int]:
    """Where the bands of a part begin, counted from it, and their stride and extent."""
    axes = [(layer.token_stride, layout.block_tokens), (layer.head_stride, layout.num_heads)]
    # An only block may have all of the region.
    block_stride = layer.block_stride if layout.num_blocks > 1 else layout.extent(part.region)
    inner = [axis for axis in axes if axis[0] < block_stride]
    extent = layout.head_nbytes + sum((count - 1) * stride for stride, count in inner)
    outer = [range(0, stride * count, stride) for stride, count in axes if count > 1 and (stride, count) not in inner]
    return [sum(steps) for steps in itertools.product(*outer)], block_stride, extent
