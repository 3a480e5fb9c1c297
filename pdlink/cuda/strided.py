"""`StridedPlan`: one copy of tokens between two paged places, said by strides and pairs of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdlink import _cuda

if TYPE_CHECKING:
    import numpy as np

    Pairs = np.ndarray[tuple[int, int], np.dtype[np.int64]]

PAIR_NBYTES: Final = 16
"""Of the list, for a unit."""
ADDRESSES: Final[dict[str, Any]] = {"block_stride": 1, "token_stride": 0, "block_tokens": 1, "num_slots": 2**63 - 1}
"""Of a side whose numbers are addresses."""


class Paged(NamedTuple):
    """One side. Addresses and strides in bytes."""

    base: int
    """Address, for the GPU, of the first head of block 0 of the first part."""
    part_stride: int
    block_stride: int
    token_stride: int
    head_stride: int
    block_tokens: int
    num_slots: int
    """Tokens of all blocks."""


@dataclass(frozen=True, slots=True)
class StridedPlan:
    src: Paged
    dst: Paged
    num_parts: int
    num_heads: int
    head_nbytes: int
    unit_tokens: int
    skip: int
    """Tokens of the first unit that are not copied."""
    num_tokens: int
    pairs: Pairs
    """[units, 2], C-contiguous: of the source, of the destination, counted through the blocks of each. The kernel
    skips a unit outside its side."""

    def __len__(self) -> int:
        """Units."""
        return len(self.pairs)

    def moves(self) -> _cuda.Moves:
        return _cuda.Moves.of_pairs(
            _cuda.Rows(**self.src._asdict()),
            _cuda.Rows(**self.dst._asdict()),
            self.pairs,
            unit_tokens=self.unit_tokens,
            skip=self.skip,
            num_tokens=self.num_tokens,
            num_parts=self.num_parts,
            num_heads=self.num_heads,
            head_nbytes=self.head_nbytes,
        )

    def cut(self, most_units: int) -> list[StridedPlan]:
        """The same in copies of `most_units` at most."""
        end, parts = self.skip + self.num_tokens, []
        for at in range(0, len(self.pairs), most_units):
            pairs = self.pairs[at : at + most_units]
            skip = 0 if at else self.skip
            num_tokens = min(end, (at + len(pairs)) * self.unit_tokens) - at * self.unit_tokens - skip
            parts.append(replace(self, skip=skip, num_tokens=num_tokens, pairs=pairs))
        return parts
