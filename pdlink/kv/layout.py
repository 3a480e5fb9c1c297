"""`KVLayout`: where every (layer, K/V, block, token, head) byte of a paged KV cache lies.

Sizes plus strides, nothing else: any order of axes, K and V fused or in separate buffers, MLA (one part) and
layers of different geometry are all data. Offsets are in bytes and 64-bit; memory is named by a region index (the
order in which buffers were registered with the transport), never by an address.

The byte of (layer, part, block, token, head) is at
    parts[part].offset + block * block_stride + token * token_stride + head * head_stride
of region parts[part].region, and `head_nbytes` bytes from there are contiguous.

What lies at one such place is a *position*: a token of most caches, or several tokens that cannot be told apart, such
as a block that only a kernel can read, or an entry of a compressed cache. Blocks and plans count in positions,
transfers count in tokens, and `KVLayout.needed` translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pdlink.errors import LayoutMismatch

MAX_OFFSET = 2**62
"""Layouts that reach further are refused, so that no sum of two offsets can overflow 64 bits."""

MAX_REGIONS = 4096
"""More buffers than anybody registers; region indices cross into native code."""

RunArray = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""[n, 3] int64, C-contiguous: source offset, destination offset, nbytes."""


class RunList(NamedTuple):
    """Runs between one source region and one destination region: what `plan` makes and a transport copies.

    A tuple, because that is what native engines take.
    """

    src_region: int
    src_base: int
    """Bytes added to every source offset of `runs`."""
    dst_region: int
    dst_base: int
    runs: RunArray

    @property
    def nbytes(self) -> int:
        return int(self.runs[:, 2].sum())


@dataclass(frozen=True, slots=True)
class Part:
    """Where one part (K, V, or MLA's single latent) of one layer begins."""

    region: int
    offset: int
    """Bytes from the start of the region to (block 0, token 0, head 0)."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    parts: tuple[Part, ...]
    block_stride: int
    token_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the layers that share a list of blocks: the whole KV cache of most models, or one of its groups.

    Exchanged in the handshake. Several of them are a `KVGroups` (`groups.py`).
    """

    dtype: str
    """Element type as torch spells it ("bfloat16"); only compared, never interpreted."""
    block_tokens: int
    """Positions of a block."""
    num_blocks: int
    num_heads: int
    head_nbytes: int
    """Bytes of one (position, head) vector: head_dim x element size where a position is a token."""
    layers: tuple[LayerLayout, ...]
    window: int = 0
    """Tokens that a token attends to, itself included (a sliding window); 0 stands for all before it."""
    window_step: int = 1
    """Windows are transferred from a multiple of so many tokens on: blocks are reserved and shared whole."""
    state: bool = False
    """A block holds no tokens but a recurrent state: all that is known after the last of its tokens. `block_tokens`
    says which block that is; `token_stride` is 0, because one token's worth is the whole state."""
    position_tokens: int = 1
    """Tokens to a position."""

    @property
    def keeps_all(self) -> bool:
        """Whether all tokens of a prompt are in its blocks, so that any range of them can be sent."""
        return not (self.window or self.state)

    def needed(self, start: int, end: int) -> tuple[int, int]:
        """Of tokens [start, end) the positions [first, last) that a model needs in these layers for token `end`."""
        if self.state:
            return max(start, end - 1), end
        if self.window:
            start = max(start, min(end, end - self.window + 1) // self.window_step * self.window_step)
        return self.positions(start, end)

    def positions(self, start: int, end: int) -> tuple[int, int]:
        """Positions [first, last) that hold tokens [start, end)."""
        if self.position_tokens == 1:
            return start, end
        last = -(-end // self.position_tokens)
        return (start // self.position_tokens if start < end else last), last

    def blocks_of(self, start: int, end: int) -> slice:
        """Which of a request's blocks, counted from token 0, hold positions [start, end)."""
        first = start // self.block_tokens
        return slice(first, -(-end // self.block_tokens) if end > start else first)

    @property
    def token_nbytes(self) -> int:
        """Payload bytes of one position over all layers and parts."""
        return sum(len(layer.parts) for layer in self.layers) * self.num_heads * self.head_nbytes

    def extent(self, region: int) -> int:
        """Bytes of `region` that this layout can touch; 0 if it touches none. A buffer must be at least this long."""
        ends = [
            part.offset + self._reach(layer) for layer in self.layers for part in layer.parts if part.region == region
        ]
        return max(ends, default=0)

    def check(self, side: str) -> None:
        """Refuse a layout whose numbers are negative or do not fit 64 bits: it may have come from a peer.

        The compiled loops step once beyond the end of every axis, so that has to fit too, also where an axis has one
        element only and its stride is never used.

        Raises LayoutMismatch, naming `side` and the layer. Whether it fits the registered buffers is for the
        transport to check.
        """
        for name in ("block_tokens", "num_blocks", "num_heads", "head_nbytes", "position_tokens"):
            value = getattr(self, name)
            if not 1 <= value < MAX_OFFSET:
                raise LayoutMismatch(f"{side} layout is malformed: {name} is {value}")
        window, step = self.window, self.window_step
        if not 0 <= window < MAX_OFFSET or not 1 <= step < MAX_OFFSET or (window and self.state):
            raise LayoutMismatch(
                f"{side} layout is malformed: window {window} in steps of {step}, state {self.state}"
            )
        if self.state and self.position_tokens > 1:
            raise LayoutMismatch(
                f"{side} layout is malformed: a state of {self.position_tokens} tokens to a position"
            )
        for index, layer in enumerate(self.layers):
            if self.state and layer.token_stride:
                raise LayoutMismatch(f"{side} layer {index} is malformed: a state with a step between tokens")
            if not layer.parts:
                raise LayoutMismatch(f"{side} layer {index} is malformed: it has no parts")
            if min(layer.block_stride, layer.token_stride, layer.head_stride) < 0:
                raise LayoutMismatch(f"{side} layer {index} is malformed: a stride is negative")
            beyond = self.head_nbytes + sum(count * stride for stride, count in self._axes(layer))
            for part in layer.parts:
                if not 0 <= part.region < MAX_REGIONS or part.offset < 0 or part.offset + beyond >= MAX_OFFSET:
                    raise LayoutMismatch(f"{side} layer {index} is malformed: {part} of {beyond} bytes")

    def check_writable(self, side: str) -> None:
        """Refuse a destination where one byte would stand for two places: KV would be overwritten silently.

        Each part's axes must nest without overlap, and no two parts may begin at the same byte. (A source may repeat
        itself, for instance one head for several by a stride of 0.) Raises LayoutMismatch.
        """
        seen: dict[Part, int] = {}
        for index, layer in enumerate(self.layers):
            for part in layer.parts:
                if part in seen:
                    raise LayoutMismatch(f"{side} layers {seen[part]} and {index} both have a part at {part}")
                seen[part] = index
            reach = self.head_nbytes
            for stride, count in sorted(self._axes(layer)):
                if count > 1:
                    if stride < reach:
                        raise LayoutMismatch(
                            f"{side} layer {index} is malformed: stride {stride} is shorter than {reach} bytes inside"
                        )
                    reach += (count - 1) * stride

    def _axes(self, layer: LayerLayout) -> tuple[tuple[int, int], ...]:
        """(stride, count) of blocks, tokens and heads."""
        return (
            (layer.block_stride, self.num_blocks),
            (layer.token_stride, 1 if self.state else self.block_tokens),
            (layer.head_stride, self.num_heads),
        )

    def _reach(self, layer: LayerLayout) -> int:
        """Bytes from the beginning of a part to its last byte."""
        return self.head_nbytes + sum((count - 1) * stride for stride, count in self._axes(layer))


def paged_layout(
    *,
    dtype: str,
    itemsize: int,
    num_layers: int,
    num_blocks: int,
    block_tokens: int,
    num_heads: int,
    head_dim: int,
    order: str = "LPBTH",
    region: int = 0,
    num_parts: int = 2,
) -> KVLayout:
    """Layout of one dense buffer whose axes are stored in `order`, outermost first.

    order: a permutation of L (layer), P (part: K, V), B (block), T (token), H (head); the head vector is innermost.
    "LPBTH" is NHD with K and V separate within a layer, "LPBHT" HND, "LBPTH" K and V of a block side by side,
    "BLPTH" all layers of a block together. Raises ValueError if `order` is no permutation.
    """
    if sorted(order) != sorted("LPBTH"):
        raise ValueError(f"order must be a permutation of LPBTH, got {order!r}")
    sizes = {"L": num_layers, "P": num_parts, "B": num_blocks, "T": block_tokens, "H": num_heads}
    strides: dict[str, int] = {}
    step = head_dim * itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    layers = tuple(
        LayerLayout(
            parts=tuple(Part(region, layer * strides["L"] + part * strides["P"]) for part in range(num_parts)),
            block_stride=strides["B"],
            token_stride=strides["T"],
            head_stride=strides["H"],
        )
        for layer in range(num_layers)
    )
    return KVLayout(
        dtype=dtype,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        num_heads=num_heads,
        head_nbytes=head_dim * itemsize,
        layers=layers,
    )
