"""`pdlink.Cache` by the names of LMCache: `LMCacheEngine`, and `LMCacheConnector`, which SGLang embeds.

Tokens, masks, slot mappings and return values mean what they mean there. Other keyword arguments (`kvcaches`, ...)
are ignored: the pages are given when the cache is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pdlink.store.cache import Cache, Tokens

    Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class LMCacheEngine:
    """slot_mapping: slot_mapping[i - offset] is the slot of token i in the pages (block * block_tokens + place); -1
    for masked tokens. The tokens of a block must be in it one after the other."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def store(
        self, tokens: Tokens, mask: Sequence[bool] | None = None, *, slot_mapping: Any, offset: int = 0, **_: object
    ) -> None:
        self.cache.store(tokens, self.blocks(slot_mapping), mask=mask, offset=offset)

    def retrieve(
        self,
        tokens: Tokens,
        mask: Sequence[bool] | None = None,
        *,
        slot_mapping: Any,
        offset: int = 0,
        req_id: str = "",
        **_: object,
    ) -> Mask:
        """bool [tokens]: which were loaded."""
        blocks = self.blocks(slot_mapping)
        loaded = self.cache.retrieve(tokens, blocks, mask=mask, offset=offset, lookup_id=req_id)
        return _loaded(tokens, mask, loaded)

    def store_layer(
        self, tokens: Tokens, mask: Sequence[bool] | None = None, *, slot_mapping: Any, offset: int = 0, **_: object
    ) -> Generator[None]:
        return self.cache.store_layers(tokens, self.blocks(slot_mapping), mask=mask, offset=offset)

    def retrieve_layer(
        self, tokens: Tokens, mask: Sequence[bool] | None = None, *, slot_mapping: Any, offset: int = 0, **_: object
    ) -> Generator[int | None | Mask]:
        """The number of tokens, None per layer, and the mask of what was loaded."""
        loading = self.cache.retrieve_layers(tokens, self.blocks(slot_mapping), mask=mask, offset=offset)
        loaded = next(loading)
        assert loaded is not None
        yield loaded
        yield from loading
        yield _loaded(tokens, mask, loaded)

    def lookup(
        self,
        tokens: Tokens,
        search_range: Sequence[str] | None = None,
        *,
        lookup_id: str = "",
        pin: bool = False,
        **_: object,
    ) -> int:
        """search_range: None; this cache looks in all its places."""
        if search_range is not None:
            raise InvalidRequest(
                f"search_range: got {search_range!r}, and this cache looks in all of {', '.join(self.cache.places)}; "
                "leave it out"
            )
        if pin and not lookup_id:
            raise InvalidRequest("lookup_id: got none; expected a name where pin is set; pass the request's id")
        return self.cache.lookup(tokens, pin=pin, lookup_id=lookup_id).num_tokens

    def lookup_unpin(self, lookup_id: str) -> None:
        self.cache.release(lookup_id)

    def async_lookup_and_prefetch(self, lookup_id: str, tokens: Tokens, **_: object) -> None:
        self.cache.prefetch(tokens, lookup_id=lookup_id)

    def cleanup_memory_objs(self, lookup_id: str) -> None:
        self.cache.release(lookup_id)

    def freeze(self, enabled: bool) -> None:
        self.cache.freeze(enabled)

    def is_frozen(self) -> bool:
        return self.cache.frozen

    def move(
        self, tokens: Tokens, old_position: str, new_position: str, event_id: str = "", do_copy: bool = True
    ) -> int:
        return self.cache.move(tokens, old_position, new_position, copy=do_copy)

    def compress(self, tokens: Tokens, method: str, location: str, event_id: str = "") -> int:
        return self.cache.compress(tokens, method, location)

    def decompress(self, tokens: Tokens, method: str, location: str, event_id: str = "") -> int:
        return self.cache.decompress(tokens, location)

    def clear(self, tokens: Tokens | None = None, locations: Sequence[str] | None = None, **_: object) -> int:
        return self.cache.clear(tokens, places=locations).records

    def health(self) -> int:
        """0, or -1 if what keeps memory in order fails."""
        return 0 if self.cache.health()["memory"] else -1

    def close(self) -> None:
        self.cache.close()

    def blocks(self, slot_mapping: Any) -> list[int]:
        """The blocks behind a slot mapping; -1 for a block of masked tokens."""
        slots, block_tokens = np.asarray(slot_mapping), self.cache.layout.block_tokens
        if slots.ndim != 1 or slots.dtype.kind not in "iu":
            raise InvalidRequest(
                f"slot_mapping: got {slots.dtype} {list(slots.shape)}; expected one axis of integers"
            )
        heads = slots[::block_tokens]
        places = np.arange(len(slots)) % block_tokens
        whole = np.repeat(heads, block_tokens)[: len(slots)] + places
        in_order = (slots == whole) & (slots % block_tokens == places)
        if not np.where(np.repeat(heads < 0, block_tokens)[: len(slots)], slots < 0, in_order).all():
            raise InvalidRequest(
                f"slot_mapping: got slots out of order; expected {block_tokens} in a row for a block; "
                "pass whole blocks"
            )
        return [int(head) // block_tokens if head >= 0 else -1 for head in heads]


class LMCacheConnector:
    """Loads and stores whole prompts in one call. slot_mapping: of the tokens from `offset` on."""

    def __init__(self, cache: Cache) -> None:
        self._engine = LMCacheEngine(cache)

    def load_kv(self, token_ids: Tokens, slot_mapping: Any, offset: int = 0) -> int:
        """How many tokens from `offset` on are in the slots. Leading ones whose slots are -1 were there before: they
        count, too."""
        slots, mask = self._masked(token_ids, slot_mapping, offset)
        padding = int((slots < 0).sum())
        mask[: offset + padding] = False
        blocks = self._engine.blocks(slots)
        loaded = self._engine.cache.retrieve(token_ids, blocks, mask=mask, offset=offset)
        return loaded + padding if loaded else 0

    def store_kv(self, token_ids: Tokens, slot_mapping: Any, offset: int = 0) -> None:
        """Keep the full chunks of the tokens from `offset` on."""
        slots, mask = self._masked(token_ids, slot_mapping, offset)
        self._engine.cache.store(token_ids, self._engine.blocks(slots), mask=mask, offset=offset)

    def chunk_size(self) -> int:
        """Tokens."""
        return self._engine.cache.chunk_tokens

    def reset(self) -> None:
        """Forget everything, everywhere."""
        self._engine.cache.clear()

    def close(self) -> None:
        self._engine.close()

    def _masked(self, token_ids: Tokens, slot_mapping: Any, offset: int) -> tuple[np.ndarray[Any, Any], Any]:
        slots, mask = np.asarray(slot_mapping), np.ones(len(token_ids), np.bool_)
        if len(slots) != len(token_ids) - offset:
            raise InvalidRequest(
                f"slot_mapping: got {len(slots)} for {len(token_ids)} tokens from {offset} on; expected one for "
                "each; leave out those before the offset"
            )
        mask[:offset] = False
        return slots, mask


def _loaded(tokens: Tokens, mask: Sequence[bool] | None, loaded: int) -> Mask:
    begin = 0 if mask is None else len(tokens) - int(np.asarray(mask, bool).sum())
    result = np.zeros(len(tokens), np.bool_)
    result[begin : begin + loaded] = True
    return result
