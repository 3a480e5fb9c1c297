"""`look_up`: how much of a prompt a store has in all groups of an engine's layers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdlink.store.interface import Found
from pdlink.store.reach import reach

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdlink.kv.layout import KVLayout
    from pdlink.store.interface import AnyStore

NOTHING = Found((), ())


def look_up(
    store: AnyStore,
    layouts: Sequence[KVLayout],
    keys: Sequence[Sequence[bytes]],
    chunk_tokens: int,
    num_chunks: int,
    limit: int,
    timeout_s: float,
    begin: int = 0,
    goes_on: int | None = None,
    barred: Collection[int] = (),
) -> tuple[int, list[Found]]:
    """Where the longest prefix of the first `num_chunks` ends that is of use, 0 for nothing; and what was found.

    keys: by group, of the prompt's chunks. limit, begin, goes_on: as of `reach`. What was found is by group, too; the
    place of a record that is not there is -1. Waits for the tiers' answers for `timeout_s` at most.
    barred: places whose records count as not known, though another one may have them, too.
    """
    deadline_s, keeps_all = time.monotonic() + timeout_s, all(layout.keeps_all for layout in layouts)
    found = [NOTHING] * len(layouts)
    for index, layout in enumerate(layouts):
        if layout.keeps_all:
            left_s = max(0.0, deadline_s - time.monotonic())
            found[index] = store.lookup(keys[index][:num_chunks], left_s)
            if barred:
                found[index] = _leading(found[index], barred)
            num_chunks = len(found[index].keys)
    if num_chunks * chunk_tokens <= begin and not keeps_all:
        return 0, found
    for index, layout in enumerate(layouts):
        if not layout.keeps_all:
            mine = tuple(keys[index][:num_chunks])
            left_s = max(0.0, deadline_s - time.monotonic())
            places = store.known_at(mine, left_s)
            if barred:
                places = tuple(-1 if place in barred else place for place in places)
            found[index] = Found(mine, places)
    known = [[place >= 0 for place in each.places[:num_chunks]] for each in found]
    return reach(layouts, known, chunk_tokens, 0 if keeps_all else begin, limit, goes_on), found


def _leading(found: Found, barred: Collection[int]) -> Found:
    """The chunks before the first that is in a barred place."""
    count = next((index for index, place in enumerate(found.places) if place in barred), len(found.keys))
    return Found(found.keys[:count], found.places[:count])
