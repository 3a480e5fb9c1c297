"""`Span`: the full chunks of a prompt that a call is about, and where they are in an engine's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pdlink.errors import InvalidRequest
from pdlink.store.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import KVLayout

    Tokens = Sequence[int] | np.ndarray[Any, Any]
    """Ids in [0, 2**32). An array or a CPU tensor is read without a loop in Python."""


@dataclass(frozen=True, slots=True)
class Span:
    keys: list[bytes]
    first: int
    """Number of the chunk of keys[0] in the prompt."""
    blocks: Blocks


def ids_of(tokens: Tokens) -> Sequence[int]:
    """What `hashing.chain` takes. Raises ValueError for an array of anything else."""
    if not hasattr(tokens, "__array__"):
        return tokens
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"got {ids.dtype} {list(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**32:
        raise ValueError(f"got {ids.min()} to {ids.max()}")
    return cast("Sequence[int]", np.ascontiguousarray(ids, dtype=np.uint32))


def first_unmasked(mask: Sequence[bool] | None, num_tokens: int, unit: str, unit_tokens: int) -> int:
    """The first token that a call is about; 0 without a mask. unit: name of what it may begin with.

    Raises InvalidRequest for a mask of another form.
    """
    if mask is None:
        return 0
    given = np.asarray(mask, dtype=bool)
    begin = len(given) - int(given.sum())
    if len(given) != num_tokens or given[:begin].any():
        raise InvalidRequest(
            f"mask: got {len(given)} values for {num_tokens} tokens; expected one each, False for leading ones only"
        )
    if begin % unit_tokens:
        raise InvalidRequest(
            f"mask: got {begin} times False; expected multiples of {unit} ({unit_tokens}); round it down"
        )
    return begin


def span(
    keys: list[bytes],
    chunk_tokens: int,
    layout: KVLayout,
    blocks: Sequence[int],
    begin: int,
    offset: int,
    *,
    distinct: bool,
) -> Span:
    """Chunks from token `begin` on, with the block table from token `offset` on. distinct: they are written to.

    Raises InvalidRequest for blocks that cannot hold them.
    """
    block_tokens = layout.block_tokens
    if offset < 0 or offset % block_tokens or offset > begin:
        raise InvalidRequest(
            f"offset: got {offset}; expected a multiple of block_tokens ({block_tokens}) in [0, {begin}], up to the "
            "first token that is not masked; pass blocks from there on"
        )
    end = max(begin, len(keys) * chunk_tokens)
    needed = layout.blocks_for(end) - offset // block_tokens
    if len(blocks) < needed:
        raise InvalidRequest(
            f"blocks: got {len(blocks)}; expected {needed} or more, for tokens [{offset}, {end}); pass all of them"
        )
    used = np.asarray(blocks[begin // block_tokens - offset // block_tokens : max(0, needed)], dtype=np.int64)
    if (wrong := used[(used < 0) | (used >= layout.num_blocks)]).size:
        raise InvalidRequest(f"blocks: got {wrong[0]}; expected [0, {layout.num_blocks}); correct the table")
    if distinct and len(np.unique(used)) < len(used):
        raise InvalidRequest("blocks: got one block twice; expected distinct ones, or KV is overwritten; correct it")
    return Span(keys[begin // chunk_tokens :], begin // chunk_tokens, Blocks(tuple(used.tolist()), begin))
