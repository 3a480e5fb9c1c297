"""Tiers that the conformance suite runs over, and the tests' own, in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import xxhash

from pdlink.store.record import HEADER_NBYTES, Group, RecordShape, seal, unseal
from pdlink.store.tiers import striped
from pdlink.store.tiers.base import DAMAGED, Tier
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.files import PAGE_NBYTES, unpack
from pdlink.store.tiers.shared_dir import SharedDir
from pdlink.store.tiers.striped import Striped
from pdlink.store.tiers.valkey import Valkey

from .server import valkey_server

CAPACITY_NBYTES = 8 << 20
"""Of the tiers with a bound: room for some 120 records of the suite."""


def key(number: int) -> bytes:
    return xxhash.xxh3_128_digest(str(number).encode()) * 2


def record(number: int, nbytes: int = 65536) -> memoryview:
    return memoryview(Random(number).randbytes(nbytes))


def read(tier: Tier, which: bytes, room: int = 1 << 20) -> memoryview | None:
    """The record of a key, as the tier gives it; None for a miss."""
    into = bytearray(b"\xee") * room
    nbytes = tier.get(which, memoryview(into))
    if nbytes is None or nbytes == DAMAGED:
        return None
    assert into[nbytes:] == b"\xee" * (room - nbytes), "written behind the record"
    return memoryview(into)[:nbytes]


@dataclass(frozen=True)
class Entry:
    """A tier of the suite."""

    name: str
    open: Callable[[Path], Tier]
    """A tier over this directory; over the same directory again, the same records if `persists`."""
    damage: Callable[[Tier, Path, bytes, Callable[[bytes], bytes]], None]
    """Replace what is stored of a record, header and all, by what the function makes of it."""
    persists: bool = True


class MemoryTier:
    """Records in a dict, oldest out first."""

    name = medium = "memory"
    is_server = False
    verifies = False
    answers = True
    problem = ""

    def __init__(self, capacity_nbytes: int = CAPACITY_NBYTES) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.closed = False
        self.records: dict[bytes, bytes] = {}
        """Digest of the record, and the record."""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(map(len, self.records.values()))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self.records for key in keys]

    def get(self, key: bytes, into: memoryview) -> int | None:
        with self._lock:
            stored = self.records.get(key)
        if stored is None or len(stored) - 16 > len(into):
            return None
        if xxhash.xxh3_128_digest(stored[16:]) != stored[:16]:
            self.remove(key)
            return DAMAGED
        into[: len(stored) - 16] = stored[16:]
        return len(stored) - 16

    def put(self, key: bytes, record: memoryview) -> bool:
        stored = xxhash.xxh3_128_digest(record) + record
        with self._lock:
            if self.closed or len(stored) > self.capacity_nbytes:
                return False
            if key in self.records:
                return True
            while sum(map(len, self.records.values())) + len(stored) > self.capacity_nbytes:
                del self.records[next(iter(self.records))]
            self.records[key] = stored
        return True

    def remove(self, key: bytes) -> None:
        with self._lock:
            self.records.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self.records.clear()

    def close(self) -> None:
        self.closed = True
        self.clear()


class SealedDisk(Disk):
    """With records that are sealed and checked, as a store does: the tier itself looks at their first page only."""

    def put_run(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        def sealed(key: bytes, record: memoryview) -> memoryview:
            whole = np.empty(HEADER_NBYTES + len(record), np.uint8)
            whole[HEADER_NBYTES:] = record
            seal(whole, key, _shape(len(record)))
            return whole.data

        return super().put_run([(key, sealed(key, record)) for key, record in records])

    def get_run(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        wholes = [np.empty(HEADER_NBYTES + len(into), np.uint8) for _, into in wanted]
        found = super().get_run([(key, whole.data) for (key, _), whole in zip(wanted, wholes, strict=True)])
        for number, ((key, into), whole, came) in enumerate(zip(wanted, wholes, found, strict=True)):
            if came is None or came == DAMAGED:
                continue
            nbytes = found[number] = came - HEADER_NBYTES
            if unseal(whole, key, _shape(nbytes), came) is not None:
                self.remove(key)
                found[number] = DAMAGED
            into[:nbytes] = whole[HEADER_NBYTES:came].data
        return found


def _shape(nbytes: int) -> RecordShape:
    return RecordShape("uint8", 1, (Group("latent", (0,), 1, 1, nbytes),))


def _damage_memory(tier: Tier, _: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    assert isinstance(tier, MemoryTier)
    tier.records[key] = change(tier.records[key])


def _damage_shared_dir(_: Tier, path: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    file = path / "model" / key.hex()[:2] / key.hex()[2:]
    file.write_bytes(change(file.read_bytes()))


def _open_valkey(path: Path) -> Tier:
    return Valkey(valkey_server().url, str(path))


def _damage_valkey(_: Tier, path: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    name = f"pdlink:{path}:{key.hex()}".encode()
    stored = valkey_server().ask(b"GET", name)
    assert isinstance(stored, bytes)
    valkey_server().ask(b"SET", name, change(stored))


def _open_objects(path: Path) -> Tier:
    store = pytest.importorskip("obstore.store", reason="no obstore; pip install 'pdlink[store]'")
    from pdlink.store.tiers.object_store import Objects

    return Objects(store.LocalStore(path), "model")


def _damage_objects(_: Tier, path: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    file = path / "model" / key.hex()
    file.write_bytes(change(file.read_bytes()))


def _damage_disk(tier: Tier, path: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    """What a shorter one leaves is other bytes than before."""
    assert isinstance(tier, Disk)
    rest = tier._index.get(key)
    assert rest is not None
    place = unpack(rest)
    with (path / "model/records").open("r+b") as file:
        file.seek(place.page * PAGE_NBYTES)
        stored = file.read(place.nbytes)
        changed = change(stored)
        file.seek(place.page * PAGE_NBYTES)
        file.write(changed + bytes(byte ^ 0xFF for byte in stored[len(changed) :]))


def _open_striped(path: Path) -> Tier:
    with patch.object(striped, "Disk", SealedDisk):
        return Striped([path / name for name in "ab"], "model", 3 * CAPACITY_NBYTES // 2 + (1 << 19))


def _damage_striped(tier: Tier, path: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    assert isinstance(tier, Striped)
    for disk, name in zip(tier._disks, "ab", strict=True):
        if disk.contains([key]) == [True]:
            _damage_disk(disk, path / name, key, change)


ENTRIES = [
    Entry("disk", lambda path: SealedDisk(path, "model", CAPACITY_NBYTES), _damage_disk),
    Entry("disk of many segments", lambda path: SealedDisk(path, "model", 64 << 20, 4 << 20), _damage_disk),
    Entry("disks", _open_striped, _damage_striped),
    Entry("memory", lambda _: MemoryTier(), _damage_memory, persists=False),
    Entry("shared_dir", lambda path: SharedDir(path, "model"), _damage_shared_dir),
    Entry("shared_dir with a bound", lambda path: SharedDir(path, "model", CAPACITY_NBYTES), _damage_shared_dir),
    Entry("valkey", _open_valkey, _damage_valkey),
    Entry("objects", _open_objects, _damage_objects),
]
