"""Where vLLM's decode context parallel ranks keep a token, in one line of arithmetic.

test_vllm_context_parallel.py holds it against vLLM's own kernels.
"""

from __future__ import annotations

from typing import NamedTuple


class Slot(NamedTuple):
    rank: int
    """Among the ranks that share the tokens out."""
    block: int
    """Counted in the block table."""
    offset: int
    """In the block."""


def slot_of(token: int, *, ranks: int, interleave: int, block_tokens: int) -> Slot:
    """block_tokens: of a block on each rank."""
    turn, offset = divmod(token, interleave)
    block, local = divmod(turn // ranks * interleave + offset, block_tokens)
    return Slot(turn % ranks, block, local)
