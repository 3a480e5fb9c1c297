"""How long a store of much memory takes until it keeps KV: its range is reserved at once, and has memory in steps.

It lends to stores of other nodes, whose writers map its whole range.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from pdlink.config import StoreConfig
from pdlink.fleet.child import start, stop
from pdlink.store.client import RemoteStore
from pdlink.store.eviction import Lru
from pdlink.store.record import Group, RecordShape
from pdlink.store.store import Store

if TYPE_CHECKING:
    from pdlink.store.interface import AnyStore

_WAIT_S = 60.0
_SHAPE = RecordShape("uint8", 16, (Group("latent", (0,), 1, 1, 4096),))


class ColdStart(NamedTuple):
    library_s: float
    """In this process, until a record is kept and read."""
    process_s: float
    """From the start of `pdlink store` on, until a client in this process has done so."""
    taken_nbytes: int
    """Memory that the arena has then."""


def measure(nbytes: int) -> ColdStart:
    """One start of each, with an arena of `nbytes`, perhaps more than the machine has."""
    began_s = time.perf_counter()
    store = Store(nbytes, Lru(), lends=True)
    store.open()
    try:
        _use(store)
        library_s = time.perf_counter() - began_s
        taken_nbytes = os.fstat(store.buffer.fd).st_blocks * 512
    finally:
        store.close()
    with TemporaryDirectory(prefix="pdlink-") as place:  # not the disk's: a socket's path has 107 characters at most
        return ColdStart(library_s, _process_s(Path(place) / "start" / "store", nbytes), taken_nbytes)


def _process_s(path: Path, nbytes: int) -> float:
    settings = StoreConfig.model_validate(
        {"socket": str(path), "tiers": {"max_local_cpu_size": nbytes / (1 << 30), "peer_port": 0}}
    ).model_dump(mode="json")
    began_s = time.perf_counter()
    child = start("store", "store", settings)
    try:
        child.wait_ready(_WAIT_S)
        client = RemoteStore(str(path), name="bench", timeout_s=_WAIT_S)
        client.open()
        try:
            _use(client)
            return time.perf_counter() - began_s
        finally:
            client.close()
    finally:
        stop([child], _WAIT_S)


def _use(store: AnyStore) -> None:
    keys = [os.urandom(32)]
    store.commit(store.reserve(keys, _SHAPE), _SHAPE)
    fetch = store.fetch(store.lookup(keys, _WAIT_S), _SHAPE, "bench")
    try:
        if len(fetch.done.result(_WAIT_S)) != 1:
            raise OSError("the store did not keep a record")
    finally:
        fetch.close()
