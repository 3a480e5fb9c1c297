"""The slow and obvious way to move KV: one (layer, part, token, head) vector at a time, in plain torch.

Nothing here joins, collapses or shares anything, so that it can be believed by reading it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.kv.layout import KVLayout

Regions = dict[int, torch.Tensor]
"""Region index → its bytes, uint8 [extent]."""


def regions_for(layout: KVLayout, seed: int) -> Regions:
    """Buffers just large enough for `layout`, filled with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = sorted({part.region for layer in layout.layers for part in layer.parts})
    return {
        number: torch.randint(0, 256, (layout.extent(number),), dtype=torch.uint8, generator=generator)
        for number in numbers
    }


def copy_tokens(
    src: KVLayout,
    src_regions: Regions,
    src_blocks: Sequence[int],
    dst: KVLayout,
    dst_regions: Regions,
    dst_blocks: Sequence[int],
    start: int,
    end: int,
) -> None:
    """Write tokens [start, end) of a sequence into the destination's blocks and touch nothing else."""
    scatter(dst, dst_regions, dst_blocks, start, end, gather(src, src_regions, src_blocks, start, end))


def gather(layout: KVLayout, regions: Regions, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
    """KV of tokens [start, end) as a dense tensor: [layers x parts, tokens, heads, head_nbytes] uint8."""
    num_parts = sum(len(layer.parts) for layer in layout.layers)
    dense = torch.zeros(num_parts, end - start, layout.num_heads, layout.head_nbytes, dtype=torch.uint8)
    for at, region, offset in _vectors(layout, blocks, start, end):
        dense[at] = regions[region][offset : offset + layout.head_nbytes]
    return dense


def scatter(
    layout: KVLayout, regions: Regions, blocks: Sequence[int], start: int, end: int, dense: torch.Tensor
) -> None:
    """The inverse of `gather`."""
    for at, region, offset in _vectors(layout, blocks, start, end):
        regions[region][offset : offset + layout.head_nbytes] = dense[at]


def _vectors(
    layout: KVLayout, blocks: Sequence[int], start: int, end: int
) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """((layer and part, token, head), region, byte offset) of every vector, by the formula of `KVLayout`."""
    first_block = start // layout.block_tokens
    row = -1
    for layer in layout.layers:
        for part in layer.parts:
            row += 1
            for position in range(start, end):
                block = blocks[position // layout.block_tokens - first_block]
                token = position % layout.block_tokens
                for head in range(layout.num_heads):
                    offset = (
                        part.offset
                        + block * layer.block_stride
                        + token * layer.token_stride
                        + head * layer.head_stride
                    )
                    yield (row, position - start, head), part.region, offset
