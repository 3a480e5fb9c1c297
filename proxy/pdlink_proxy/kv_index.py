"""Which worker has the KV of which prompt, by the events that the workers publish. No I/O.

The events are those of vLLM 0.32 and SGLang 0.5.23 (`EventBatch` in MessagePack; maps, arrays in older SGLang):
blocks stored, with their tokens and the block before them; blocks removed; everything cleared. Tokens name a prefix
here, so workers whose blocks have other sizes and other names can be compared with one prompt.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from pdlink._index import HeldKV, Prefixes, Publishers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fleet import Tokens

MAX_BLOCKS = 20_000_000
"""Of all workers, per block size: about 1.1 GB (54 bytes each, measured with 10 million of 16 tokens)."""
MAX_SIZES = 8
"""Block sizes that are told apart; events about others are ignored."""
_MAX_BLOCK_TOKENS = 1 << 20

_MEDIA = {None: 0, "GPU": 0, "CPU": 1, "CPU_PINNED": 1, "cpu": 1, "EXTERNAL": 3}
"""DEVICE, HOST and SHARED, as vLLM, SGLang and their connectors call them; others are disks."""
DEVICE, HOST, DISK, SHARED = range(4)
LOADING = (0.0, 0.1, 0.5, 0.3)
"""By medium, from DEVICE to SHARED: time to bring a token's KV to the device, relative to computing the token.
Source: an 8B model with 128 KB of KV a token that computes 20,000 tokens a second (2.6 GB/s of KV), beside 25 GB/s
from host memory, 5 from an NVMe disk and 8 over a network."""
_NULL = msgspec.Raw(b"\xc0")
_WHOLE = (None, "full_attention", "mla_attention")
"""Kinds of KV of which a prefix needs all blocks. Those of sliding windows and recurrent states say little."""


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: msgspec.Raw
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    """Stands in `extra_keys`, too."""
    extra_keys: list[msgspec.Raw] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    model: str | None = None
    scope: str | None = None
    cache_salt: str | None = None
    """Of SGLang, which has no `extra_keys`."""
    locality: str | None = None
    """"REMOTE": not of this host."""


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_Event: TypeAlias = _Stored | _Removed | _Cleared
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(_Event).decode
_decode_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


class Publisher(NamedTuple):
    """A source of events that is listened to, about one model."""

    endpoint: str
    number: int
    """Of the listener, small and never given twice: one that begins anew knows nothing."""


def events_in(batch: bytes) -> list[msgspec.Raw]:
    """Raises ValueError for other bytes."""
    return _decode_batch(batch).events


class KVIndex:
    """Of all workers of one proxy. Not thread-safe."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._by_size: dict[int, Prefixes] = {}
        self._publishers = Publishers(LOADING)
        self._group: dict[Publisher, int | None] = {}
        """By publisher, the group of layers that counts: the first that keeps whole prefixes."""

    def __len__(self) -> int:
        """Blocks, those of each worker counted."""
        return sum(prefixes.num_blocks for prefixes in self._by_size.values())

    def __bool__(self) -> bool:
        """Whether anything is known: each request asks."""
        return any(map(_num_blocks, self._by_size.values()))

    @property
    def nbytes(self) -> int:
        return sum(prefixes.nbytes for prefixes in self._by_size.values())

    def apply(self, publisher: Publisher, model: str, raw: msgspec.Raw, scope: str = "") -> None:
        """Note one event, if it is about this model. Raises ValueError for other bytes.

        scope: what the publisher calls this model, for one that has KV of several; it says so of first blocks, and
        blocks after one that is not known here are passed over.
        """
        is_array = memoryview(raw)[0] >> 4 == 0x9  # a MessagePack array of less than 16
        event: _Event = (_decode_array if is_array else _decode_map)(raw)
        if isinstance(event, _Stored):
            if (event.scope == scope) if scope and event.scope else (event.model in (None, model)):
                self._stored(publisher, model, event)
        elif isinstance(event, _Cleared):
            self.forget(publisher)
        elif event.group_idx == self._group.get(publisher, event.group_idx):
            for prefixes in self._by_size.values():
                prefixes.removed(publisher.number, _medium(event), bytes(event.block_hashes))

    def forget(self, publisher: Publisher) -> None:
        """It has nothing, or nobody knows what."""
        self._group.pop(publisher, None)
        for prefixes in self._by_size.values():
            prefixes.cleared(publisher.number)
        self._by_size = {size: prefixes for size, prefixes in self._by_size.items() if prefixes.num_blocks}

    def assign(self, publisher: Publisher, workers: Sequence[int], *, shared: bool) -> None:
        """What this publisher tells is the KV of these workers (`WorkerState.number`). shared: of their store."""
        self._publishers.of(publisher.number, workers, shared)

    def held(self, model: str, extra: Sequence[str], tokens: Tokens) -> HeldKV:
        """What each worker has of a prompt with these tokens. extra: name of a LoRA, salt."""
        return self._publishers.held([*self._by_size.values()], _known_root(model, tuple(extra)), tokens)

    def _stored(self, publisher: Publisher, model: str, event: _Stored) -> None:
        if event.kv_cache_spec_kind not in _WHOLE or not 1 <= event.block_size <= _MAX_BLOCK_TOKENS:
            return
        if event.group_idx != self._group.setdefault(publisher, event.group_idx):
            return
        prefixes = self._by_size.get(event.block_size)
        if prefixes is None:
            if len(self._by_size) == MAX_SIZES:
                return
            prefixes = self._by_size[event.block_size] = Prefixes(event.block_size, self._max_blocks)
        parent = None if event.parent_block_hash == _NULL else bytes(event.parent_block_hash)
        named: Sequence[object] = ()
        if extra := event.extra_keys:
            usual = (_NULL, msgspec.Raw(msgspec.msgpack.encode([event.lora_name])))
            if any(keys not in usual for keys in (extra if parent else extra[1:])):
                return  # images and the like: their tokens do not say what is in them
            first = msgspec.msgpack.decode(extra[0])
            named = first if isinstance(first, list) else ()
        elif extra is None:
            named = [name for name in (event.lora_name, event.cache_salt) if name]
        root = _root(model, named) if named else _known_root(model, ())
        names, tokens = bytes(event.block_hashes), bytes(event.token_ids)
        prefixes.stored(publisher.number, _medium(event), names, parent, root, tokens)


def _medium(event: _Stored | _Removed) -> int:
    return SHARED if event.locality == "REMOTE" else _MEDIA.get(event.medium, DISK)


def _root(model: str, extra: Sequence[object]) -> int:
    """Stands for what the KV depends on besides the tokens. extra: as vLLM has it: name of a LoRA, salt."""
    digest = hashlib.blake2b(repr((model, *extra)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") | 1


_num_blocks = attrgetter("num_blocks")
_known_root = lru_cache(1024)(_root)
"""Of what clients ask for, which takes names and salts alone."""
