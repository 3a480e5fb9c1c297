"""The blocks that each peer may write now, looked up for every run before it is placed. Pure.

The same rule as `csrc/tcp/guard.h`: a byte belongs to a block by the bands of the layout (`pdlink/kv/groups.py`), and
a block is open to one peer at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ProtocolError
from pdlink.kv.groups import bands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.groups import KVGroups

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

_REGION, _BEGIN, _STRIDE, _EXTENT, _FIRST, _COUNT = range(6)


class OpenBlocks:
    def __init__(self, groups: KVGroups) -> None:
        """Nothing is open. Raises LayoutMismatch for a layout whose blocks cannot be told apart."""
        self._bands = bands(groups)
        self._open_to = np.zeros(self._bands.num_blocks, np.int32)
        """Number of the peer; 0 is nobody."""

    def open(self, peer: int, blocks: Sequence[Sequence[int]]) -> None:
        self._open_to[self._bands.numbers(blocks)] = peer

    def close(self, peer: int, blocks: Sequence[Sequence[int]]) -> Ints:
        """Blocks that are open to another peer stay open to it. Returns the numbers of the blocks."""
        numbers = self._bands.numbers(blocks)
        self._open_to[numbers[self._open_to[numbers] == peer]] = 0
        return numbers

    def require(self, peer: int, region: int, offsets: Ints, nbytes: Ints) -> Ints:
        """The blocks of these runs, all of which are open to the peer; one may be named more than once.

        Raises ProtocolError that names the first run that is not.
        """
        numbers = self._numbers(region, offsets, nbytes)
        if numbers is None or (self._open_to[numbers] != peer).any():
            for offset, length in zip(offsets.tolist(), nbytes.tolist(), strict=True):
                one = self._numbers(region, np.array([offset]), np.array([length]))
                if one is None or (self._open_to[one] != peer).any():
                    raise ProtocolError(
                        f"{length} bytes at {offset} of region {region} are not in blocks that are offered to it"
                    )
        assert numbers is not None
        return numbers

    def _numbers(self, region: int, offsets: Ints, nbytes: Ints) -> Ints | None:
        """None if a byte is in no block."""
        table = self._bands.table
        table = table[table[:, _REGION] == region]
        if not len(table):
            return None
        band = table[np.maximum(np.searchsorted(table[:, _BEGIN], offsets, side="right") - 1, 0)]
        from_begin = offsets - band[:, _BEGIN]
        first, inside = np.divmod(from_begin, band[:, _STRIDE])
        last = (from_begin + nbytes - 1) // band[:, _STRIDE]
        fits = (from_begin >= 0) & (last < band[:, _COUNT])
        fits &= np.where(last == first, inside + nbytes <= band[:, _EXTENT], band[:, _EXTENT] == band[:, _STRIDE])
        if fits.all():
            counts = last - first + 1
            steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            return np.asarray(np.repeat(band[:, _FIRST] + first, counts) + steps, np.int64)
        walked = [self._walk(table, int(offset), int(length)) for offset, length in zip(offsets, nbytes, strict=True)]
        return None if None in walked else np.array([n for some in walked for n in some or ()], np.int64)

    @staticmethod
    def _walk(table: np.ndarray[tuple[int, int], np.dtype[np.int64]], offset: int, nbytes: int) -> list[int] | None:
        """Block by block, for a run that goes on from one band into the next."""
        found = []
        while nbytes > 0:
            index = int(np.searchsorted(table[:, _BEGIN], offset, side="right")) - 1
            _, begin, stride, extent, first, count = table[max(index, 0)].tolist()
            block, inside = divmod(offset - begin, stride)
            if index < 0 or block >= count or inside >= extent:
                return None
            found.append(first + block)
            step = min(nbytes, extent - inside)
            offset, nbytes = offset + step, nbytes - step
        return found
