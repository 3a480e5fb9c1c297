"""What a store does first after a start: its arena has no memory yet, and the disk's file no room.

Each verb is a new process, ours and a bare one in turn: a prompt is stored, a burst goes down to the disk, and after
another start a prompt is loaded from there. The page cache is dropped before; bare lanes give memory to a range with
one call, copy with memcpy, and write and read a file unbuffered. All of it must be kept and found.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink import _copy
from pdlink.memory.buffers import Buffer
from pdlink.store.eviction import Adaptive
from pdlink.store.record import Group, RecordShape, said_sums, sums_of
from pdlink.store.store import Store
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.files import DirectFile

from .measure import Measured
from .workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Bytes

_RECORD_TOKENS = 16
_SHAPE = RecordShape("uint8", _RECORD_TOKENS, (Group("latent", (0,), 1, 1, 256 << 10),))
"""4 MiB and a header."""
_WAIT_S = 120.0
_AGAIN = 10
"""The row that is beside the first one."""


class ColdVerb(NamedTuple):
    what: str
    path: str
    """From where to where."""


VERBS = {
    "store": ColdVerb("store a prompt", "to memory"),
    "burst": ColdVerb("a burst", "memory to disk"),
    "load": ColdVerb("load a prompt", "disk to memory"),
}
BARS = {"store": 0.8, "burst": 0.9}
"""Speed of the first of ours to the first of the bare ones, at least."""


class ColdSizes(NamedTuple):
    prompt_nbytes: int = 400 << 20
    burst_nbytes: int = 1 << 30
    arena_nbytes: int = 2 << 30

    def of(self, what: str) -> int:
        """Bytes that one of the verbs moves."""
        nbytes = self.burst_nbytes if what == "burst" else self.prompt_nbytes
        return nbytes // _SHAPE.nbytes * _SHAPE.nbytes


class ColdTook(NamedTuple):
    """Seconds of a verb for the first and for the tenth time in a process, and the tokens kept or found each time."""

    first_s: float
    tenth_s: float | None
    tokens: int


def drop_cached(directory: Path) -> None:
    """What the page cache has of the files below it; the kernel need not ask for more than this permission."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def measure(directory: Path, sizes: ColdSizes, restarts: int, tick: Callable[[], None]) -> dict[str, Measured]:
    """By lane ("ours", "bare"), seconds of each of `VERBS`, for the first and for the tenth time in a process, and
    the tokens that were kept or found.

    Raises WorkerFailed where that was not all.
    """
    found = {"ours": Measured(), "bare": Measured()}
    for _ in range(restarts):
        for lane, make in (("ours", OurStart), ("bare", BareStart)):
            place = directory / f"cold, {lane}"
            for what in VERBS:
                drop_cached(directory)
                worker = WorkerProcess(f"{lane}, {what}", make, str(place), sizes)
                worker.open()
                try:
                    took: ColdTook = worker.ask(what, timeout_s=_WAIT_S)
                finally:
                    worker.close()
                found[lane].add(f"{what}, first", took.first_s)
                found[lane].add(f"{what}, tokens", took.tokens)
                if took.tenth_s is not None:
                    found[lane].add(f"{what}, tenth", took.tenth_s)
            rmtree(place)
            tick()
    return found


class _Start:
    """A process that does one of the verbs, and gives the seconds of the first and of the tenth time."""

    def __init__(self, directory: str, sizes: ColdSizes) -> None:
        self._directory, self._sizes = Path(directory), sizes
        self._directory.mkdir(exist_ok=True)
        self._count = sizes.prompt_nbytes // _SHAPE.nbytes
        self._payload: Bytes = np.frombuffer(np.random.default_rng(1).bytes(_SHAPE.nbytes), np.uint8)

    def close(self) -> None:
        """Nothing is open between verbs."""


class OurStart(_Start):
    def store(self) -> ColdTook:
        store = self._opened()
        try:
            return _first_and_tenth(lambda number: self._put(store, self._keys(number, self._count)))
        finally:
            store.close()

    def burst(self) -> ColdTook:
        """Once: the disk has room for one."""
        store = self._opened(with_disk=True)
        try:
            keys = self._keys(0, self._sizes.burst_nbytes // _SHAPE.nbytes)
            slots = store.reserve(keys, _SHAPE)
            for slot in slots:
                record = store.array[slot.offset :][: slot.nbytes]
                _copied(record[: _SHAPE.nbytes], self._payload)
                said_sums(record, _SHAPE)[:] = sums_of(record, _SHAPE)
            began_s = time.perf_counter()
            store.commit(slots, _SHAPE, summed=True)
            whole = store.flush(_WAIT_S)
            took_s = time.perf_counter() - began_s
            known = sum(self._disk.contains(keys))
            if not whole or known < len(keys):
                raise OSError(f"{known} of {len(keys)} records of a burst are on disk")
            return ColdTook(took_s, None, known * _RECORD_TOKENS)
        finally:
            store.close()

    def load(self) -> ColdTook:
        store = self._opened(with_disk=True)
        try:
            keys = self._keys(0, self._count)

            def load(number: int) -> int:
                if number:
                    store.clear(places=["memory"])
                fetch = store.fetch(store.lookup(keys, _WAIT_S), _SHAPE, "bench", checks=True)
                came = len(fetch.done.result(_WAIT_S))
                fetch.close()
                if came < len(keys):
                    raise OSError(f"{came} of {len(keys)} records came from disk")
                return came

            return _first_and_tenth(load)
        finally:
            store.close()

    def _opened(self, *, with_disk: bool = False) -> Store:
        tiers = []
        if with_disk:
            capacity_nbytes = 2 * self._sizes.burst_nbytes
            self._disk = Disk(self._directory, "cold", capacity_nbytes, record_nbytes=_SHAPE.nbytes)
            tiers.append(self._disk)
        store = Store(self._sizes.arena_nbytes, Adaptive(), tiers, tier_deadline_s=_WAIT_S)
        store.open()
        return store

    def _put(self, store: Store, keys: list[bytes]) -> int:
        slots = store.reserve(keys, _SHAPE)
        if len(slots) < len(keys):
            raise OSError(f"{len(slots)} of {len(keys)} records found room")
        for slot in slots:
            _copied(store.array[slot.offset :][: _SHAPE.nbytes], self._payload)
        store.commit(slots, _SHAPE)
        return sum(store.holds(keys))

    def _keys(self, number: int, count: int) -> list[bytes]:
        return [number.to_bytes(16, "little") + one.to_bytes(16, "little") for one in range(count)]


class BareStart(_Start):
    """The same bytes without a store: as large files, in the same pieces, past the page cache, and nothing synced."""

    def store(self) -> ColdTook:
        nbytes = self._count * _SHAPE.nbytes
        with Buffer(nbytes, committed_nbytes=0) as buffer:

            def put(number: int) -> int:
                if not number:
                    buffer.populate(0, nbytes)
                for begin in range(0, nbytes, _SHAPE.nbytes):
                    np.copyto(buffer.array[begin : begin + _SHAPE.nbytes], self._payload)
                return self._count

            return _first_and_tenth(put)

    def burst(self) -> ColdTook:
        """From as much memory: a record that is written again and again lies in caches."""
        nbytes = self._sizes.of("burst")
        file = DirectFile(self._directory / "bare")
        with Buffer(nbytes) as buffer:
            began_s = time.perf_counter()
            file.grow(nbytes)
            _moved(file.write, buffer, nbytes)
            took_s = time.perf_counter() - began_s
        file.close()
        return ColdTook(took_s, None, nbytes // _SHAPE.nbytes * _RECORD_TOKENS)

    def load(self) -> ColdTook:
        nbytes = self._count * _SHAPE.nbytes
        file = DirectFile(self._directory / "bare")
        with Buffer(nbytes, committed_nbytes=0) as buffer:

            def read(number: int) -> int:
                if not number:
                    buffer.populate(0, nbytes)
                if not _moved(file.read, buffer, nbytes):
                    raise OSError("the bare file is too short")
                return self._count

            try:
                return _first_and_tenth(read)
            finally:
                file.close()


def _moved(move: Callable[[int, memoryview], bool], buffer: Buffer, nbytes: int) -> bool:
    """A record at a time by each of two threads: with one the disk waits between two records."""
    begins = range(0, nbytes, _SHAPE.nbytes)
    with ThreadPoolExecutor(2) as threads:
        views = [buffer.array[begin : begin + _SHAPE.nbytes].data for begin in begins]
        return all(threads.map(move, begins, views))


def _first_and_tenth(call: Callable[[int], int]) -> ColdTook:
    """call: with the number of the time; how many records it kept or found."""
    took, records = [], []
    for number in range(_AGAIN):
        began_s = time.perf_counter()
        records.append(call(number))
        took.append(time.perf_counter() - began_s)
    return ColdTook(took[0], took[-1], min(records) * _RECORD_TOKENS)


def _copied(dst: Bytes, src: Bytes) -> None:
    _copy.nt_runs(dst, src, np.array([(0, 0, len(src))], np.int64))
