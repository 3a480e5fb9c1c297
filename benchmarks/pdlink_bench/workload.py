"""The KV of one sequence: where it lies on both sides, how it is filled, and how it is checked.

Every 8-byte word of the sequence's KV has its own value, made from its layer, part, position, head and place in the
vector, so that a byte in the wrong place is a wrong byte. Filling and checking go through numpy views of the layout
and know nothing of plans and runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pdlink.kv.layout import KVLayout, paged_layout

if TYPE_CHECKING:
    from pdlink.kv.layout import LayerLayout, Part
    from pdlink.kv.plan import Plan

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
BlockIds = np.ndarray[tuple[int], np.dtype[np.int64]]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
FOREIGN = 0xEE
"""What fills the source outside of the sequence: KV of others, which must never arrive."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is pushed. The defaults are the KV of an 8-billion-parameter model with grouped-query attention."""

    num_layers: int = 32
    num_parts: int = 2
    num_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    num_tokens: int = 2048
    src_block_tokens: int = 16
    dst_block_tokens: int = 16
    src_order: str = "LPBTH"
    dst_order: str = "LPBTH"
    pool_factor: int = 2
    """Each side's pool has so many times the blocks that the sequence needs; its blocks are drawn from all of it."""
    seed: int = 0

    @property
    def src(self) -> KVLayout:
        return self._layout(self.src_order, self.src_block_tokens)

    @property
    def dst(self) -> KVLayout:
        return self._layout(self.dst_order, self.dst_block_tokens)

    @property
    def src_blocks(self) -> BlockIds:
        return self._draw(self.src, self.seed)

    @property
    def dst_blocks(self) -> BlockIds:
        return self._draw(self.dst, self.seed + 1)

    @property
    def nbytes(self) -> int:
        return self.src.token_nbytes * self.num_tokens

    def plan(self) -> Plan:
        from pdlink.kv.plan import bind, template  # numba: only senders need it, and it takes seconds to load

        return bind(template(self.src, self.dst), self.src_blocks, self.dst_blocks, 0, self.num_tokens)

    def _layout(self, order: str, block_tokens: int) -> KVLayout:
        return paged_layout(
            dtype=self.dtype,
            itemsize=ITEMSIZE[self.dtype],
            num_layers=self.num_layers,
            num_blocks=-(-self.num_tokens // block_tokens) * self.pool_factor,
            block_tokens=block_tokens,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            order=order,
            num_parts=self.num_parts,
        )

    def _draw(self, layout: KVLayout, seed: int) -> BlockIds:
        chosen = np.random.default_rng(seed).permutation(layout.num_blocks)
        return chosen[layout.blocks_of(0, self.num_tokens)].astype(np.int64)


DEFAULT = "default"
"""The case of a run that has only one."""
NHD_TO_HND, BLOCK_16_TO_128 = "NHD to HND", "blocks 16 to 128"


def layouts(base: Workload) -> dict[str, Workload]:
    """The layout pairs that peers of different engines have; the same number of bytes in each, but for MLA."""
    return {
        DEFAULT: base,
        NHD_TO_HND: replace(base, src_order="LPBTH", dst_order="LPBHT"),
        BLOCK_16_TO_128: replace(base, src_block_tokens=16, dst_block_tokens=128),
        "both": replace(base, dst_order="LPBHT", src_block_tokens=16, dst_block_tokens=128),
        "MLA latent": replace(base, num_parts=1, num_heads=1, head_dim=576),
    }


def fill_source(array: Bytes, workload: Workload) -> None:
    """Write the sequence into its source blocks and foreign bytes everywhere else."""
    array.fill(FOREIGN)
    layout, blocks = workload.src, workload.src_blocks
    for layer_index, layer in enumerate(layout.layers):
        for part_index, part in enumerate(layer.parts):
            view_BTHD = _view(array, layout, layer, part)
            kv_BTHD = view_BTHD[blocks]
            kv_THD = kv_BTHD.reshape(-1, *kv_BTHD.shape[2:])
            kv_THD[: workload.num_tokens] = _pattern(workload, layer_index, part_index)
            view_BTHD[blocks] = kv_BTHD


def check_and_clear(array: Bytes, workload: Workload) -> str:
    """What is wrong in the destination, "" if nothing is; afterwards all of it is zero again.

    Every byte of the sequence must be there, and every other byte of the buffer still zero.
    """
    layout, blocks = workload.dst, workload.dst_blocks
    wrong = ""
    for layer_index, layer in enumerate(layout.layers):
        for part_index, part in enumerate(layer.parts):
            view_BTHD = _view(array, layout, layer, part)
            got_BTHD = view_BTHD[blocks]
            got_THD = got_BTHD.reshape(-1, *got_BTHD.shape[2:])
            expected_THD = np.zeros_like(got_THD)  # zero beyond the last token
            expected_THD[: workload.num_tokens] = _pattern(workload, layer_index, part_index)
            if not wrong and not np.array_equal(got_THD, expected_THD):
                at = tuple(int(index) for index in np.argwhere(got_THD != expected_THD)[0])
                count = int(np.count_nonzero(got_THD != expected_THD))
                wrong = (
                    f"layer {layer_index} part {part_index}: {count} bytes differ, the first one at token {at[0]}, "
                    f"head {at[1]}, byte {at[2]}: {int(got_THD[at])} instead of {int(expected_THD[at])}"
                )
            view_BTHD[blocks] = 0
    if not wrong and array.any():
        wrong = (
            f"{np.count_nonzero(array)} bytes outside of the sequence were written, first at {int(array.argmax())}"
        )
    if wrong:
        array.fill(0)
    return wrong


def _view(array: Bytes, layout: KVLayout, layer: LayerLayout, part: Part) -> Bytes:
    """[block, token, head, byte] of one part of one layer."""
    return np.lib.stride_tricks.as_strided(
        array[part.offset :],
        shape=(layout.num_blocks, layout.block_tokens, layout.num_heads, layout.head_nbytes),
        strides=(layer.block_stride, layer.token_stride, layer.head_stride, 1),
    )


def _pattern(workload: Workload, layer: int, part: int) -> Bytes:
    """[token, head, byte]: each word is its number times an odd constant, so no two are equal."""
    head_nbytes = workload.head_dim * ITEMSIZE[workload.dtype]
    words = -(-head_nbytes // 8)
    count = workload.num_tokens * workload.num_heads * words
    first = (layer * workload.num_parts + part) * count + 1
    numbers = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return numbers.view(np.uint8).reshape(-1, workload.num_heads, words * 8)[:, :, :head_nbytes]
