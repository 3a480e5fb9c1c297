"""The blocks that each peer may write now, looked up for every slot before it is placed. Pure.

A block is open to one peer at most. Which bytes are a block's is for `pdlink/kv/groups.py` to say: blocks of groups
that share memory are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ProtocolError
from pdlink.kv.groups import bands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.groups import KVGroups
    from pdlink.kv.plan import IntArray


class OpenBlocks:
    def __init__(self, groups: KVGroups) -> None:
        """Nothing is open. Raises LayoutMismatch for a layout whose blocks cannot be told apart."""
        self._bands = bands(groups)
        self._open_to = np.zeros(self._bands.num_blocks, np.int32)
        """Number of the peer; 0 is nobody."""

    def open(self, peer: int, blocks: Sequence[Sequence[int]]) -> None:
        self._open_to[self._bands.numbers(blocks)] = peer

    def close(self, peer: int, blocks: Sequence[Sequence[int]]) -> IntArray:
        """Blocks that are open to another peer stay open to it. Returns the numbers of the blocks."""
        numbers = self._bands.numbers(blocks)
        self._open_to[numbers[self._open_to[numbers] == peer]] = 0
        return numbers

    def require(self, peer: int, group: int, blocks: IntArray) -> IntArray:
        """The numbers of these blocks, which exist, and all of which are open to the peer.

        Raises ProtocolError that names the first one that is not.
        """
        numbers: IntArray = blocks + self._bands.firsts[group]
        closed = self._open_to[numbers] != peer
        if closed.any():
            raise ProtocolError(f"block {blocks[closed][0]} of group {group} is not offered to it")
        return numbers
