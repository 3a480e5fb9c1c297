"""`Scope`: whose prompts an engine keeps in a store, so that operators can name them by token ids.

A store knows keys alone. With its scope an engine says how its keys are made and what its records look like, and the
keys of an operator's verb are made by the function that makes those of a request.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from pdlink.kv import hashing
from pdlink.kv.hashing import Origin
from pdlink.store.record import RecordShape  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import KVLayout

_MOST = 256
"""Scopes that a store remembers."""

_Words = Annotated[str, Meta(max_length=4096)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ScopeGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group of an engine's layers."""

    revision: _Words
    shape: RecordShape
    window_step: _Tokens = 1
    """As of its `KVLayout`."""


class Scope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of one engine, or of all that find each other's KV."""

    model: _Words
    chunk_tokens: _Tokens
    groups: Annotated[tuple[ScopeGroup, ...], Meta(min_length=1, max_length=64)]
    hashed_by: Literal["pdlink", "sglang"] = "pdlink"
    """Who names the chunks of a prompt."""
    change: _Words = ""
    """Of the weights since the start, where the engine's own names do not tell it."""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """By group; of prompts without LoRA and salt."""
        return _origins(self)

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """By group: which tokens of a prefix it needs. Says nothing of where they lie."""
        return _layouts(self)

    @property
    def id(self) -> str:
        """Equal only for equal keys; 16 hex digits."""
        seeds = b"".join([*map(hashing.namespace, self.origins), f"{self.hashed_by} {self.change}".encode()])
        return hashlib.blake2b(seeds, digest_size=8).hexdigest()

    def keys(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> tuple[Sequence[bytes], ...]:
        """As `hashing.chunk_keys`. lora: of SGLang the `extra_key` of requests."""
        if self.hashed_by == "sglang":
            names = sglang_names(tokens, self.chunk_tokens, salt, lora)
            names = [f"{name} changed {self.change}" if self.change else name for name in names]
            return tuple(hashing.named(hashing.namespace(origin), names) for origin in self.origins)
        return hashing.chunk_keys(self.origins, tokens, self.chunk_tokens, salt, lora)


@lru_cache(_MOST)
def _origins(scope: Scope) -> tuple[Origin, ...]:
    return tuple(
        Origin(scope.model, group.revision, group.shape.dtype, group.shape.text, scope.chunk_tokens)
        for group in scope.groups
    )


@lru_cache(_MOST)
def _layouts(scope: Scope) -> tuple[KVLayout, ...]:
    return tuple(
        replace(
            group.shape.layout(0),
            window=group.shape.groups[0].window_tokens,
            window_step=group.window_step,
            position_tokens=max(1, scope.chunk_tokens // group.shape.chunk_tokens),
        )
        for group in scope.groups
    )


def sglang_names(tokens: Sequence[int], page_tokens: int, salt: str = "", extra_key: str = "") -> list[str]:
    """What SGLang 0.5.23 calls the full pages of a prompt: SHA-256 of the digest of the page before and its tokens.

    Raises OverflowError for a token id outside [0, 2**32).
    """
    digest, ids, names = b"", array("I", tokens).tobytes(), []
    if salt or extra_key:
        seed = hashlib.sha256(b"sglang-cache-namespace-v1")
        for part in (extra_key.encode(), salt.encode()):
            seed.update(b"\x01" + len(part).to_bytes(8, "little") + part if part else b"\x00")
        digest = seed.digest()
    page_nbytes = 4 * page_tokens
    for at in range(0, len(ids) - page_nbytes + 1, page_nbytes):
        digest = hashlib.sha256(digest + ids[at : at + page_nbytes]).digest()
        names.append(digest.hex())
    return names


class Scopes:
    """What a store was told, at most 256; the oldest go first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, Scope] = {}

    def add(self, scope: Scope, former: Scope | None = None) -> None:
        """former: that nobody uses any more."""
        with self._lock:
            for known in (scope, *filter(None, [former])):
                self._by_id.pop(known.id, None)
            self._by_id[scope.id] = scope
            if len(self._by_id) > _MOST:
                del self._by_id[next(iter(self._by_id))]

    def all(self) -> dict[str, Scope]:
        """By id; the one that was told last is last."""
        with self._lock:
            return dict(self._by_id)
