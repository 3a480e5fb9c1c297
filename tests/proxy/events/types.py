"""KV events of engines as types of msgspec, which the native reader has to judge alike."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

Name: TypeAlias = int | bytes
MAX_TOKEN = 2**32 - 1
Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]
Pair: TypeAlias = Annotated[list[Name], msgspec.Meta(min_length=2, max_length=2)]
"""Of a token and the next one. As a tuple of two types msgspec 0.22 crashes in the collector."""


class Stored(msgspec.Struct, tag="BlockStored"):
    """Of vLLM 0.32 and SGLang 0.5.23."""

    block_hashes: list[Name]
    parent_block_hash: Name | None
    token_ids: list[Token | Pair]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[msgspec.Raw] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    model: str | None = None
    scope: str | None = None
    cache_salt: str | None = None
    locality: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[Name]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class StoredArray(Stored, tag="BlockStored", array_like=True):
    """Of older SGLang, as the others that are arrays."""


class RemovedArray(Removed, tag="BlockRemoved", array_like=True):
    pass


class ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


Event: TypeAlias = Stored | Removed | Cleared
EventArray: TypeAlias = StoredArray | RemovedArray | ClearedArray
_batch = msgspec.msgpack.Decoder(Batch)
_map, _array = msgspec.msgpack.Decoder(Event), msgspec.msgpack.Decoder(EventArray)


def read(batch: bytes) -> list[Event]:
    """Raises ValueError for other bytes."""
    found: list[Event] = []
    for raw in _batch.decode(batch).events:
        first = memoryview(raw)[0]
        found.append((_array if first >> 4 == 0x9 or first in (0xDC, 0xDD) else _map).decode(raw))
    for event in found:
        for pair in event.token_ids if isinstance(event, Stored) else ():
            if isinstance(pair, list) and not (isinstance(pair[0], int) and 0 <= pair[0] <= MAX_TOKEN):
                raise ValueError(f"token_ids: got {pair[0]!r}")
    return found
