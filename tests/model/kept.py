"""Groups that do not keep all tokens: a layer with a sliding window, and one with a recurrent state.

The engine uses them as badly as engines do: what a window has left behind is overwritten at once, and there is one
state, of the last token that was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdlink.kv.layout import KVLayout, LayerLayout, Part

Rows = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
NUM_KEPT, ROW_NBYTES, MAX_TOKENS, WINDOW = 2, 8, 9, 3
LEFT_BEHIND = 0xDD


class KeptBlocks(NamedTuple):
    """Of one request."""

    window: tuple[int, ...]
    state: int

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.window, self.state) if self.window else ()


NO_BLOCKS = KeptBlocks((), -1)


@lru_cache(maxsize=64)
def rows_of(number: int) -> Rows:
    """[layer, token, bytes] of transfer `number`: begins with the number, as every row of a model."""
    out = np.empty((NUM_KEPT, MAX_TOKENS + 1, ROW_NBYTES), np.uint8)
    out[...] = (number >> 8 & 255, number & 255, 0, 7, 0, 0xA5, number * 37 & 255, 0x5A)
    out[..., 2] = np.arange(11, 11 + NUM_KEPT)[:, None]
    out[..., 4] = np.arange(1, MAX_TOKENS + 2)
    return out


def layouts(full: KVLayout) -> tuple[KVLayout, KVLayout]:
    """Of the two groups, in regions 1 and 2, with as many blocks as the first group."""
    tokens, count = full.block_tokens, full.num_blocks

    def group(region: int, block_tokens: int, token_stride: int) -> KVLayout:
        layer = LayerLayout(
            (Part(region, 0),),
            max(1, block_tokens * token_stride // ROW_NBYTES) * ROW_NBYTES,
            token_stride,
            ROW_NBYTES,
        )
        return KVLayout("uint8", block_tokens, count, 1, ROW_NBYTES, (layer,))

    window = replace(group(1, tokens, ROW_NBYTES), window=WINDOW, window_step=1)
    return window, replace(group(2, 100, 0), state=True)


@dataclass
class Kept:
    """The memory of both groups of a worker."""

    window: KVLayout
    state: KVLayout
    memory: tuple[Rows, Rows]
    """Bytes of regions 1 and 2."""

    def write(self, layer: int, blocks: KeptBlocks, number: int, start: int, end: int) -> None:
        """Tokens [start, end) are computed."""
        rows = rows_of(number)
        if start == end:
            return
        if layer == 1:
            self._states[blocks.state] = rows[1, end]
            return
        for token in range(end):
            kept = token > end - WINDOW
            if kept and token >= start:
                self._row(blocks, token)[:] = rows[0, token]
            elif not kept:
                self._row(blocks, token)[:] = LEFT_BEHIND

    def holds(self, layer: int, blocks: KeptBlocks, number: int, start: int, end: int) -> bool:
        """Whether what the layer keeps of tokens [start, end) is there."""
        rows = rows_of(number)
        if start == end:
            return True
        if layer == 1:
            return bool((self._states[blocks.state] == rows[1, end]).all())
        first = max(start, end - WINDOW + 1)
        return all((self._row(blocks, token) == rows[0, token]).all() for token in range(first, end))

    @property
    def _states(self) -> Rows:
        return self.memory[1].reshape(-1, ROW_NBYTES)

    def _row(self, blocks: KeptBlocks, token: int) -> Rows:
        size = self.window.block_tokens
        at: Rows = self.memory[0].reshape(-1, size, ROW_NBYTES)
        row: Rows = at[blocks.window[token // size], token % size]
        return row
