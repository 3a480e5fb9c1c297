"""How far a stored prefix reaches where layers do not all keep the same tokens. Plain numbers only.

Each group of layers has records of its own. To go on with a token an engine needs the chunks that hold all tokens
before it for full attention, those of the last tokens for a window, and for a recurrent state the one record of that
very boundary. A prefix that lacks one of them in one group is no prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import KVLayout


def part_of(layout: KVLayout, begin: int, end: int, goes_on: int) -> tuple[int, int]:
    """Positions of tokens [begin, end) that a group needs to go on with token `goes_on`; an empty range if none.

    end: of a chunk, or of less where a position is a token.
    """
    first, last = layout.needed(begin, goes_on)
    end //= layout.position_tokens
    return (first, min(last, end)) if first < end else (end, end)


def chunks_of(begin: int, end: int, chunk_tokens: int) -> range:
    """The chunks of so many positions that hold positions [begin, end)."""
    return range(begin // chunk_tokens, -(-end // chunk_tokens) if end > begin else begin // chunk_tokens)


def reach(
    layouts: Sequence[KVLayout],
    known: Sequence[Sequence[bool]],
    chunk_tokens: int,
    begin: int,
    limit: int,
    goes_on: int | None = None,
) -> int:
    """Where the longest prefix ends of which every group has all that it needs after token `begin`; 0 for none.

    known: by group, of the prompt's chunks. Tokens before `begin` are in the engine's blocks; groups that keep all
    tokens must know them as well.
    limit: a prefix that reaches further ends there, inside of a chunk, whose records must be of use in part.
    goes_on: the token with which the engine goes on, where what follows the prefix comes from elsewhere; by default
    the one that follows it.
    """
    num_chunks = min(map(len, known))
    for layout, has in zip(layouts, known, strict=True):
        if layout.keeps_all:
            num_chunks = min(num_chunks, (*has, False).index(False))
    partial = [(layout, has) for layout, has in zip(layouts, known, strict=True) if not layout.keeps_all]
    for whole in range(num_chunks * chunk_tokens, begin, -chunk_tokens):
        end = min(whole, limit)
        then = end if goes_on is None else goes_on
        if all(
            has[chunk]
            for layout, has in partial
            for chunk in chunks_of(*part_of(layout, begin, end, then), chunk_tokens // layout.position_tokens)
        ):
            return end
    return 0
