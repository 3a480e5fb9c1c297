"""KV events in vLLM's format, and `Ledger`: what is kept where, and what of it subscribers have not heard.

The structs are those of `vllm/distributed/kv_events.py` (0.32): a batch is an array, an event a map with its name
under "type". Consumers pass over keys that they do not know. No socket, no thread, no lock.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdlink.kv.hashing import Preimage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks of one chain, the first of which follows `parent_block_hash`."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """None for the first block of a prompt, and where it is not known."""
    token_ids: list[int]
    """Of all the blocks together; empty where they are not known."""
    block_size: int
    """Tokens of each."""
    lora_id: int | None
    medium: str | None
    """"GPU", "CPU" or "STORAGE"."""
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """One per block: for the first one of a prompt its LoRA and salt; None for all without any."""
    locality: str | None = None
    """"LOCAL" or "REMOTE", of tiers below memory."""
    ownership: str | None = None
    """Name of such a tier."""
    model: str | None = None
    """Of a prompt's first block where a publisher has the KV of several models. pdlink's own key, as the next."""
    scope: str | None = None
    """`pdlink.kv.hashing.Origin.scope`: blocks that differ in it are of use to different workers."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing that was told before counts. What is there follows."""

    incarnation: str = ""
    """Names one life of the publisher. pdlink's own key."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    """Seconds since 1970."""
    events: list[Event]
    data_parallel_rank: int | None = 0


class BlockPlace(NamedTuple):
    """Where blocks of one size are kept."""

    block_size: int
    """Tokens."""
    medium: str
    locality: str | None = None
    ownership: str | None = None


News = tuple[BlockPlace, bytes, Preimage | None]
"""Where, which block, and what it holds; None: it is gone."""
_UNKNOWN = Preimage(None, ())


class Ledger:
    """What waits to be told is a state and no history: a block that comes and goes in between is not told at all. So
    it is bounded by what the places hold and held, however late it is taken."""

    def __init__(self) -> None:
        self._present: dict[tuple[BlockPlace, bytes], Preimage] = {}
        self._waiting: dict[tuple[BlockPlace, bytes], bool] = {}
        """What subscribers have not heard, oldest first: that a block is there, or that it is gone."""
        self._places: dict[BlockPlace, None] = {}

    def __len__(self) -> int:
        """Blocks that are present."""
        return len(self._present)

    def stored(self, place: BlockPlace, key: bytes, preimage: Preimage | None = None) -> None:
        """A block is there. preimage: of its key; None takes that of the same block in another place. A block of
        which nobody knew it is told again with it."""
        block = place, key
        known = self._present.get(block)
        if known is not None and (known is not _UNKNOWN or preimage is None):
            return
        self._places[place] = None
        if preimage is None:
            elsewhere = (self._present.get((other, key), _UNKNOWN) for other in self._places)
            preimage = next((known for known in elsewhere if known is not _UNKNOWN), _UNKNOWN)
        self._present[block] = preimage
        if self._waiting.pop(block, True):  # else subscribers have not heard that it was gone
            self._waiting[block] = True

    def removed(self, place: BlockPlace, key: bytes) -> None:
        block = place, key
        if self._present.pop(block, None) is not None and not self._waiting.pop(block, False):
            self._waiting[block] = False

    @property
    def has_news(self) -> bool:
        return bool(self._waiting)

    def take(self, max_blocks: int) -> list[News]:
        """The oldest that subscribers have not heard; it counts as told. Cost: next to nothing a block."""
        blocks = list(islice(self._waiting, max_blocks))
        return [(*block, self._present[block] if self._waiting.pop(block) else None) for block in blocks]

    def tell_again(self) -> None:
        """Subscribers have forgotten what is there."""
        gone = {block: False for block, is_there in self._waiting.items() if not is_there}
        self._waiting = gone | {(place, key): True for place, key, _ in parents_first(self._present)}

    def told(self) -> list[News]:
        """All that subscribers have heard of and is there still, each block after the one before it."""
        return parents_first(
            {block: preimage for block, preimage in self._present.items() if block not in self._waiting}
        )


def parents_first(blocks: Mapping[tuple[BlockPlace, bytes], Preimage]) -> list[News]:
    """A block is of no use to an index that does not know the one before it, which may have come back later."""
    left, news = dict(blocks), list[News]()
    for block in blocks:
        line: list[News] = []
        while (preimage := left.pop(block, None)) is not None:
            line.append((*block, preimage))
            block = block[0], preimage.parent or b""
        news += reversed(line)
    return news


def events_of(news: Iterable[News]) -> list[Event]:
    """What to tell, in as few events as hold it."""
    events: list[Event] = []
    for place, key, preimage in news:
        last = events[-1] if events else None
        block_size, *where = place
        if preimage is None:
            if isinstance(last, BlockRemoved) and [last.medium, last.locality, last.ownership] == where:
                last.block_hashes.append(key)
            else:
                events.append(BlockRemoved([key], *where))
            continue
        parent, tokens, extra, origin = preimage
        if (
            isinstance(last, BlockStored)
            and [last.block_size, last.medium, last.locality, last.ownership] == [*place]
            and bool(last.token_ids) == bool(tokens)
            and (last.block_hashes[-1] == parent or not tokens)
        ):
            last.block_hashes.append(key)
            last.token_ids.extend(tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            medium, *below = where
            extra_keys: list[tuple[str, ...] | None] | None = [extra] if extra else None
            of = (None, None) if origin is None else (origin.model, origin.scope)
            lora = origin.lora or None if origin is not None else None
            events.append(
                BlockStored([key], parent, list(tokens), block_size, None, medium, lora, extra_keys, *below, *of)
            )
    return events
