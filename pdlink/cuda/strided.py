"""`StridedPlan`: one copy of tokens between two paged places, said by strides and a slot for each token.

A list of byte runs takes 24 bytes for each run, and between HND pages and another order of axes a run is one head of
one token: 256 bytes. Here a token takes 16 bytes, whatever its heads and parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink import _cuda

if TYPE_CHECKING:
    Slots = np.ndarray[tuple[int, int], np.dtype[np.int64]]

TOKEN_NBYTES = 16
"""Of the list, for a token: its slot on both sides."""


class Paged(NamedTuple):
    """One side. Addresses and strides in bytes; a slot is block * `block_tokens` + token inside the block."""

    base: int
    """Address, for the GPU, of the first head of slot 0 of the first part."""
    part_stride: int
    block_stride: int
    token_stride: int
    head_stride: int
    block_tokens: int
    num_slots: int

    def placed(self, slots: int) -> _cuda.Rows:
        """slots: address of the list of this side."""
        return _cuda.Rows(**self._asdict(), slots=slots)


@dataclass(frozen=True, slots=True)
class StridedPlan:
    src: Paged
    dst: Paged
    num_parts: int
    num_heads: int
    head_nbytes: int
    slots: Slots
    """[2, tokens], C-contiguous: of the source, of the destination. The kernel skips a slot outside its side."""

    def __len__(self) -> int:
        """Tokens."""
        return self.slots.shape[1]

    def launches(self, at: int) -> list[_cuda.Launch]:
        """at: where the GPU finds `slots`."""
        return _cuda.plan_reshape(
            self.src.placed(at),
            self.dst.placed(at + self.slots.nbytes // 2),
            num_tokens=len(self),
            num_parts=self.num_parts,
            num_heads=self.num_heads,
            head_nbytes=self.head_nbytes,
        )

    def cut(self, most_tokens: int) -> list[StridedPlan]:
        """The same in copies of `most_tokens` at most."""
        cuts = range(0, len(self), most_tokens)
        sides = self.src, self.dst, self.num_parts, self.num_heads, self.head_nbytes
        return [StridedPlan(*sides, np.ascontiguousarray(self.slots[:, at : at + most_tokens])) for at in cuts]
