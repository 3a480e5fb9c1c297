"""KV events of engines as types of msgspec, which the native reader has to judge alike. What concerns nobody may have
other names and tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, TypeAlias

import msgspec

Name: TypeAlias = int | bytes
MAX_TOKEN = 2**32 - 1
Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]
Pair: TypeAlias = Annotated[list[Name], msgspec.Meta(min_length=2, max_length=2)]
"""Of a token and the next one. As a tuple of two types msgspec 0.22 crashes in the collector."""


class Stored(msgspec.Struct, tag="BlockStored"):
    """Of vLLM 0.32 and SGLang 0.5.23."""

    block_hashes: msgspec.Raw
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
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
    block_hashes: msgspec.Raw
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
NULL = msgspec.Raw(b"\xc0")
WHOLE = (None, "full_attention", "mla_attention")
MAX_BLOCK_TOKENS = 2**20
_batch = msgspec.msgpack.Decoder(Batch)
_map, _array = msgspec.msgpack.Decoder(Event), msgspec.msgpack.Decoder(EventArray)
_names, _parent = msgspec.msgpack.Decoder(list[Name]), msgspec.msgpack.Decoder(Name | None)
_tokens = msgspec.msgpack.Decoder(list[Token | Pair])


def judge(batch: bytes, model: str) -> None:
    """What a publisher that told nothing before says of this model. Raises ValueError for other bytes."""
    groups: list[int | None] = []
    for raw in _batch.decode(batch).events:
        first = memoryview(raw)[0]
        event: Event = (_array if first >> 4 == 0x9 or first in (0xDC, 0xDD) else _map).decode(raw)
        if isinstance(event, Cleared):
            groups.clear()
            continue
        if isinstance(event, Stored):
            if event.model not in (None, model) or event.kv_cache_spec_kind not in WHOLE:
                continue
            if not 1 <= event.block_size <= MAX_BLOCK_TOKENS:
                continue
            groups = groups or [event.group_idx]
        if [event.group_idx] != groups or (isinstance(event, Stored) and _has_media(event)):
            continue
        _names.decode(event.block_hashes)
        if isinstance(event, Stored):
            _parent.decode(event.parent_block_hash)
            for token in _tokens.decode(event.token_ids):
                if isinstance(token, list) and not (isinstance(token[0], int) and 0 <= token[0] <= MAX_TOKEN):
                    raise ValueError(f"token_ids: got {token[0]!r}")


def _has_media(event: Stored) -> bool:
    """Or something else besides the name of a LoRA that its tokens do not say."""
    keys = event.extra_keys or []
    return any(map(partial(_is_unusual, event.lora_name), keys if event.parent_block_hash != NULL else keys[1:]))


def _is_unusual(lora: str | None, keys: msgspec.Raw) -> bool:
    try:
        return msgspec.msgpack.decode(keys) not in (None, [lora])
    except ValueError:  # no text of ours
        return True
