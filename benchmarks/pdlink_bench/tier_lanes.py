"""The contestants of `pdlink bench tiers`: each puts the records of a turn and gets them back."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdlink import _copy
from pdlink.config import TransportConfig
from pdlink.kv.layout import paged_layout
from pdlink.memory.buffers import Buffer
from pdlink.memory.pages import gather
from pdlink.peers.link import PeerLink
from pdlink.store.cache import Cache
from pdlink.store.eviction import Lru
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape
from pdlink.store.store import Store
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.files import DirectFile

from .workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdlink.kv.layout import RunArray as Runs
    from pdlink.memory.buffers import Bytes
    from pdlink.store.record import Sums
    from pdlink.store.slots import Slot
    from pdlink.store.tiers.base import Tier

PART_NBYTES = 8 << 20
_RUN_NBYTES = 32 << 10
"""16 tokens of 8 heads of 128 elements of two bytes."""
MEMCPY_RUNS = "memcpy, runs"
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
_ASK_S = 120.0


class Took(NamedTuple):
    wall_s: float
    cpu_s: float
    """Of all processes that took part."""


class TierLane:
    """Has memory of its own: the records of a turn, and as much to read them into."""

    puts = True
    """Whether putting is part of the contest."""
    checks = False
    """Whether it compares a checksum of what it gives back."""
    gathers = False
    """Whether its memory is in huge pages, as the arena of our store."""

    def begin(self, nbytes: int, count: int) -> None:
        """Turns of `count` records of `nbytes` follow."""
        self.nbytes, self.count = nbytes, count
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, 2 * count * nbytes), np.uint8)
        """The records, then the room."""
        if self.gathers:
            with Buffer(2 * count * nbytes) as buffer:
                gather(buffer.array)
                self.memory = buffer.array
        self.memory[: count * nbytes] = np.frombuffer(np.random.default_rng(nbytes).bytes(count * nbytes), np.uint8)

    def put(self) -> None:
        """Keep the records, under names that nobody had yet."""
        raise NotImplementedError

    def get(self) -> None:
        """Read back what was put last."""
        raise NotImplementedError

    def timed(self, what: str) -> Took:
        """Of one of the two."""
        if what == "get":
            self._half(1)[:] = 0
        began_s, began_cpu_s = time.perf_counter(), self.cpu_s()
        getattr(self, what)()
        return Took(time.perf_counter() - began_s, self.cpu_s() - began_cpu_s)

    def whole(self) -> bool:
        """Whether what was read is what was put."""
        return bool(np.array_equal(self._half(0), self._half(1)))

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None: ...

    def _half(self, index: int) -> Bytes:
        return self.memory[index * self.count * self.nbytes :][: self.count * self.nbytes]

    def _views(self, half: int) -> list[memoryview]:
        """Its records."""
        memory = self._half(half).data
        return [memory[at : at + self.nbytes] for at in range(0, len(memory), self.nbytes)]


class Copy(TierLane):
    """One copy of each record there and back, by one core."""

    def __init__(self, copy: Callable[[Bytes, Bytes, Any], None]) -> None:
        self._copy = copy

    def begin(self, nbytes: int, count: int) -> None:
        super().begin(nbytes, count)
        self._kept = np.zeros(count * nbytes, np.uint8)
        self._runs = np.array([(at, at, nbytes) for at in range(0, count * nbytes, nbytes)], np.int64)

    def put(self) -> None:
        self._copy(self._kept, self._half(0), self._runs)

    def get(self) -> None:
        self._copy(self._half(1), self._kept, self._runs)


class CopyRuns(Copy):
    """The same by the runs that `CacheLane` copies between pages and records."""

    def begin(self, nbytes: int, count: int) -> None:
        super().begin(nbytes, count)
        num_heads, layers, head_dim = _form(nbytes)
        run_nbytes = BLOCK_TOKENS * num_heads * head_dim
        blocks, parts = CHUNK_TOKENS // BLOCK_TOKENS, 2 * layers
        chunk, block, part = np.indices((count, blocks, parts), np.int64).reshape(3, -1)
        pages = ((chunk * blocks + block) * parts + part) * run_nbytes
        records = ((chunk * parts + part) * blocks + block) * run_nbytes
        in_order = np.argsort(records)  # a record is filled layer by layer
        self._runs = np.stack([pages, records, np.full_like(pages, run_nbytes)], axis=1)[in_order]
        self._back = np.ascontiguousarray(self._runs[:, [1, 0, 2]])

    def get(self) -> None:
        self._copy(self._half(1), self._kept, self._back)


def _form(nbytes: int) -> tuple[int, int, int]:
    """Heads, layers and bytes of a head, of K or V, of tokens of which 256 have so many bytes."""
    num_heads = 8 if nbytes % (1 << 20) == 0 else 1
    layers = nbytes >> 20 if num_heads == 8 else 1
    return num_heads, layers, nbytes // CHUNK_TOKENS // 2 // num_heads // layers


class CacheLane(TierLane):
    """`pdlink.Cache` over an engine's pages: keys, look-up, lease, and copies of runs of a block of 16 tokens."""

    _cache: Cache | None = None

    def begin(self, nbytes: int, count: int) -> None:
        self.close()
        super().begin(nbytes, count)
        num_heads, layers, head_dim = _form(nbytes)
        layout = paged_layout(
            dtype="uint8",
            itemsize=1,
            num_layers=layers,
            num_blocks=2 * count * CHUNK_TOKENS // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            num_heads=num_heads,
            head_dim=head_dim,
            order="BLPTH",
        )
        self._blocks = range(layout.num_blocks)
        self._prompts = 0
        arena_nbytes = 4 * count * (nbytes + HEADER_NBYTES)
        self._cache = Cache(layout, [self.memory], nbytes=arena_nbytes, chunk_tokens=CHUNK_TOKENS)

    def put(self) -> None:
        stored = self._store()
        if stored != len(self._tokens):
            raise OSError(f"the cache kept {stored} of {len(self._tokens)} tokens")

    def _store(self) -> int:
        """Store a prompt that nobody had yet; how many tokens of it are kept."""
        assert self._cache is not None
        self._prompts += 1
        begin = self._prompts * self.count * CHUNK_TOKENS
        self._tokens = np.arange(begin, begin + self.count * CHUNK_TOKENS, dtype=np.uint32)
        return self._cache.store(self._tokens, self._blocks[: len(self._blocks) // 2])

    def get(self) -> None:
        assert self._cache is not None
        found = self._cache.retrieve(self._tokens, self._blocks[len(self._blocks) // 2 :])
        if found != len(self._tokens):
            raise OSError(f"the cache found {found} of {len(self._tokens)} tokens")

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()


class Bare(TierLane):
    """O_DIRECT, nothing else. Turns follow each other through the file, as a tier's records do: what was written just
    before may lie in a cache of the host."""

    def __init__(
        self, path: Path, file_nbytes: int, part_nbytes: int, num_threads: int, *, gathers: bool = True
    ) -> None:
        self.gathers = gathers
        self._file = DirectFile(path)
        self._file.grow(file_nbytes)
        self._file_nbytes, self._part_nbytes = file_nbytes, part_nbytes
        self._threads = ThreadPoolExecutor(num_threads)

    def begin(self, nbytes: int, count: int) -> None:
        super().begin(nbytes, count)
        self._at = 0

    def put(self) -> None:
        turn_nbytes = self.count * self.nbytes
        self._at = self._at + turn_nbytes if self._at + 2 * turn_nbytes <= self._file_nbytes else 0
        self._move(self._file.write, self._views(0))

    def get(self) -> None:
        self._move(self._file.read, self._views(1))

    def _move(self, move: Callable[[int, memoryview], bool], records: Sequence[memoryview]) -> None:
        for number, record in enumerate(records):
            step = min(self.nbytes, self._part_nbytes)
            places = range(0, self.nbytes, step)
            at = [self._at + number * self.nbytes + place for place in places]
            pieces = [record[place : place + step] for place in places]
            done = [move(at[0], pieces[0])] if len(pieces) == 1 else list(self._threads.map(move, at, pieces))
            if not all(done):
                raise OSError("the file of the bare lane is too short")


class DiskLane(TierLane):
    """Our tier on disk, which looks at a record's first page: the rest is checked by the sums in it."""

    gathers = True

    def __init__(self, path: Path, capacity_nbytes: int, segment_nbytes: int) -> None:
        self.disk: Tier = Disk(path, "bench", capacity_nbytes, segment_nbytes)
        self._round = 0

    def put(self) -> None:
        self._round += 1
        for number, record in enumerate(self._views(0)):
            self._put(number, record)

    def get(self) -> None:
        for number, record in enumerate(self._views(1)):
            self._get(number, record)

    def close(self) -> None:
        self.disk.close()

    def _put(self, number: int, record: memoryview) -> None:
        if not self.disk.put(self._key(number), record):
            raise OSError("the disk tier did not keep a record")

    def _get(self, number: int, into: memoryview) -> None:
        if self.disk.get(self._key(number), into) != self.nbytes:
            raise OSError("the disk tier did not give a record back")

    def _key(self, number: int) -> bytes:
        return self._round.to_bytes(16, "little") + number.to_bytes(16, "little")


class Copied(DiskLane):
    """The same with copies between pages and slots, of runs of 16 tokens, in which sums are made and compared."""

    def __init__(self, path: Path, capacity_nbytes: int, segment_nbytes: int, *, checks: bool) -> None:
        super().__init__(path, capacity_nbytes, segment_nbytes)
        self.checks = checks

    def begin(self, nbytes: int, count: int) -> None:
        super().begin(nbytes, count)
        with Buffer(nbytes) as buffer:
            gather(buffer.array)
            self._slot: Bytes = buffer.array
        num_runs = nbytes // _RUN_NBYTES
        pages = np.random.default_rng(nbytes).permutation(num_runs) * _RUN_NBYTES
        self._runs = np.stack(
            [pages, np.arange(num_runs) * _RUN_NBYTES, np.full(num_runs, _RUN_NBYTES)], axis=1, dtype=np.int64
        )
        self._back = np.ascontiguousarray(self._runs[:, [1, 0, 2]])
        self._sums: dict[int, Sums] = {}

    def _put(self, number: int, record: memoryview) -> None:
        self._sums[number] = self._copied(self._slot, np.frombuffer(record, np.uint8), self._runs, into_records=True)
        super()._put(number, self._slot.data)

    def _get(self, number: int, into: memoryview) -> None:
        super()._get(number, self._slot.data)
        sums = self._copied(np.frombuffer(into, np.uint8), self._slot, self._back, into_records=False)
        if not np.array_equal(sums, self._sums[number]):
            raise OSError("the disk tier gave another record back")

    def _copied(self, dst: Bytes, src: Bytes, runs: Runs, *, into_records: bool) -> Sums:
        sums = np.zeros((1, 2), np.uint64)
        if self.checks:
            end, start = np.array([len(runs)], np.int64), np.zeros(1, np.int64)
            _copy.nt_runs_summed(dst, src, runs, end, start, sums, into_records)
        else:
            _copy.nt_runs(dst, src, runs)
        return sums


class _Lending:
    """A store that others can pull from."""

    def __init__(self, name: str, kind: str, nbytes: int, count: int, peers: Sequence[str] = ()) -> None:
        self.shape = RecordShape("uint8", 1, (Group("latent", (0,), 1, 1, nbytes),))
        self.link = PeerLink(name, transport=TransportConfig(kind=kind))
        arena_nbytes = max(2 * count * (nbytes + HEADER_NBYTES), 64 << 20)
        tiers = [self.link.tier(peer) for peer in peers]
        self.store = Store(arena_nbytes, Lru(), tiers, lends=True)
        self.store.open()
        self.link.open(self.store)
        self._count, self._round = count, 0

    def keys(self, number: int) -> list[bytes]:
        return [number.to_bytes(16, "little") + one.to_bytes(16, "little") for one in range(self._count)]

    def payload(self, slot: Slot) -> Bytes:
        return self.store.array[slot.offset + HEADER_NBYTES : slot.offset + self.shape.nbytes]

    def close(self) -> None:
        self.link.close()
        self.store.close()


class PeerLaneOwner(_Lending):
    """The other process of `PeerLane`."""

    def __init__(self, kind: str, nbytes: int, count: int) -> None:
        super().__init__("owner", kind, nbytes, count)
        self._data = np.frombuffer(np.random.default_rng(nbytes).bytes(count * nbytes), np.uint8)

    def address(self) -> str:
        return self.link.address

    def fill(self, number: int) -> None:
        slots = self.store.reserve(self.keys(number), self.shape)
        for slot, record in zip(slots, self._data.reshape(self._count, -1), strict=True):
            self.payload(slot)[:] = record
        self.store.commit(slots, self.shape)

    def cpu_s(self) -> float:
        return time.process_time()


class PeerLane(TierLane):
    """Our peer tier: pulls from the memory of another process into that of this one. Both hash every record."""

    puts = False
    checks = True

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._owner: WorkerProcess | None = None
        self._here: _Lending | None = None
        self._round = 0

    def begin(self, nbytes: int, count: int) -> None:
        self.close()
        super().begin(nbytes, count)
        self._owner = WorkerProcess(f"owner ({self._kind})", PeerLaneOwner, self._kind, nbytes, count)
        self._owner.open()
        address = self._owner.ask("address", timeout_s=_ASK_S)
        self._here = _Lending("asker", self._kind, nbytes, count, [address])

    def put(self) -> None:
        assert self._owner is not None
        self._round += 1
        self._owner.ask("fill", self._round, timeout_s=_ASK_S)

    def get(self) -> None:
        here = self._here
        assert here is not None
        found = here.store.lookup(here.keys(self._round), _ASK_S)
        self._fetch = here.store.fetch(found, here.shape, "bench")
        self._slots = self._fetch.done.result(_ASK_S)
        if len(self._slots) != self.count:
            raise OSError(f"{len(self._slots)} of {self.count} records came")

    def whole(self) -> bool:
        assert self._here is not None
        for slot, room in zip(self._slots, self._half(1).reshape(self.count, -1), strict=True):
            room[:] = self._here.payload(slot)
        return self._fetch.close() and super().whole()

    def cpu_s(self) -> float:
        assert self._owner is not None
        theirs: float = self._owner.ask("cpu_s", timeout_s=_ASK_S)
        return time.process_time() + theirs

    def close(self) -> None:
        if self._here is not None:
            self._here.close()
        if self._owner is not None:
            self._owner.close()


class Remote(TierLane):
    """A lane in a process of its own, which has its memory there."""

    def __init__(self, name: str, make: Callable[..., TierLane], *arguments: object) -> None:
        """make: as `WorkerProcess` takes it."""
        self._worker = WorkerProcess(name, make, *arguments)
        self._worker.open()

    def begin(self, nbytes: int, count: int) -> None:
        self._worker.ask("begin", nbytes, count, timeout_s=_ASK_S)

    def timed(self, what: str) -> Took:
        return Took(*self._worker.ask("timed", what, timeout_s=_ASK_S))

    def whole(self) -> bool:
        return bool(self._worker.ask("whole", timeout_s=_ASK_S))

    def close(self) -> None:
        self._worker.close()


def memory_lanes() -> dict[str, TierLane]:
    return {
        "memcpy": Copy(_copy.memcpy_runs),
        "non-temporal": Copy(_copy.nt_runs),
        MEMCPY_RUNS: CopyRuns(_copy.memcpy_runs),
        "non-temporal, runs": CopyRuns(_copy.nt_runs),
        "memory": CacheLane(),
        "peer, mapped": PeerLane("mapped"),
        "peer, tcp": PeerLane("tcp"),
    }
