"""What it costs to look a long prompt up: its keys, and what a store in memory says of them."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from pdlink.kv import hashing
from pdlink.store.policies.registry import make_policy
from pdlink.store.record import Group, RecordShape
from pdlink.store.store import Store

NUM_TOKENS, CHUNK_TOKENS = 128 << 10, 256


def cpu_s(rounds: int) -> dict[str, float]:
    """Median CPU seconds of a prompt of `NUM_TOKENS` that is all there, by the form of its ids."""
    shape = RecordShape("uint8", CHUNK_TOKENS, (Group("latent", (0,), 1, 1, 1),))
    ids = np.random.default_rng(0).integers(0, 128_000, NUM_TOKENS, np.uint32)
    namespace = hashing.namespace(model="bench", revision="", dtype="uint8")
    store = Store(4 * NUM_TOKENS // CHUNK_TOKENS * shape.nbytes, make_policy("lru"))
    store.open()
    try:
        store.commit(store.reserve(hashing.chain(namespace, ids, CHUNK_TOKENS), shape), shape)
        forms: dict[str, Any] = {"array": ids, "list": ids.tolist()}
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
