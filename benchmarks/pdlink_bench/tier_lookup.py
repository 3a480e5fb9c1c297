"""What it costs to look a long prompt up: its keys, and what a store in memory says of them.

Keys alone have another maker beside them: chained SHA-256 of pickled tuples, vLLM's default (`sha256`, 0.32).
"""

from __future__ import annotations

import hashlib
import pickle
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdlink.kv import hashing
from pdlink.store.eviction import Lru
from pdlink.store.record import Group, RecordShape
from pdlink.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS, CHUNK_TOKENS = 128 << 10, 256
LEAST_HASHED = {("array", 256): 150e6, ("list", 16): 20e6}
"""Tokens for each CPU second, by the form of the ids and the tokens of a key."""


class Hashed(NamedTuple):
    """Tokens for each CPU second."""

    form: str
    """Of the ids."""
    chunk_tokens: int
    per_s: float
    others_per_s: float
    """The other maker, in turns with ours."""

    @property
    def ahead(self) -> float:
        return self.per_s / self.others_per_s


def cpu_s(rounds: int) -> dict[str, float]:
    """Median CPU seconds of a prompt of `NUM_TOKENS` that is all there, by the form of its ids."""
    shape = RecordShape("uint8", CHUNK_TOKENS, (Group("latent", (0,), 1, 1, 1),))
    forms, namespace = _forms(), _namespace()
    store = Store(4 * NUM_TOKENS // CHUNK_TOKENS * shape.nbytes, Lru())
    store.open()
    try:
        store.commit(store.reserve(hashing.chain(namespace, forms["array"], CHUNK_TOKENS), shape), shape)
        return {name: median(_once(store, namespace, form) for _ in range(rounds)) for name, form in forms.items()}
    finally:
        store.close()


def _once(store: Store, namespace: bytes, ids: Any) -> float:
    began_s = time.thread_time()
    found = store.lookup(hashing.chain(namespace, ids, CHUNK_TOKENS), 1.0)
    took_s = time.thread_time() - began_s
    if len(found.keys) != NUM_TOKENS // CHUNK_TOKENS:
        raise OSError(f"the look-up found {len(found.keys)} of {NUM_TOKENS // CHUNK_TOKENS} keys")
    return took_s


def hashed(rounds: int) -> list[Hashed]:
    """How fast keys are made of a long prompt: medians of `rounds` turns."""
    namespace = _namespace()
    found = []
    for form, ids in _forms().items():
        for chunk_tokens in (16, 256):
            ours, others = [], []
            for _ in range(rounds):
                ours.append(_cpu_s(partial(hashing.chain, namespace, ids, chunk_tokens)))
                others.append(_cpu_s(partial(_pickled, ids, chunk_tokens)))
            found.append(Hashed(form, chunk_tokens, NUM_TOKENS / median(ours), NUM_TOKENS / median(others)))
    return found


def _forms() -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, 128_000, NUM_TOKENS, np.uint32)
    return {"array": ids, "list": ids.tolist()}


def _namespace() -> bytes:
    return hashing.namespace(hashing.Origin("bench", revision="", dtype="uint8"))


def _pickled(ids: Any, chunk_tokens: int) -> list[bytes]:
    keys, parent, tokens = [], b"", list(ids) if isinstance(ids, list) else ids.tolist()
    for at in range(0, len(tokens), chunk_tokens):
        said = (parent, tuple(tokens[at : at + chunk_tokens]), None)
        parent = hashlib.sha256(pickle.dumps(said, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        keys.append(parent)
    return keys


def _cpu_s(make: Callable[[], list[bytes]]) -> float:
    began_s = time.thread_time()
    made = make()
    took_s = time.thread_time() - began_s
    if len(set(made)) != len(made):
        raise OSError(f"{len(made)} chunks have {len(set(made))} keys")
    return took_s
