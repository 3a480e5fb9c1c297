"""The files of a disk tier: `DirectFile` has its records, and `Journal` says what lies where in its segments.

`Entries` says it in memory, by key. `Others` are such files of other namespaces, which give way.

A journal has a page of head, then a region for each segment with an entry of 64 bytes for each of its records. An
entry is written after its record, and never fsynced: what it says is believed when the digest holds. A restart makes
no Python objects of entries: they stay in memory as they are in the file, found by a sorted array of 8 bytes for
each, a mix of its key, and its row.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from pdlink.memory.buffers import Bytes

    EntryArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.void]]
    """Of `ENTRY`."""
    _Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
    _Words: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
    """[keys, 4]"""

PAGE_NBYTES = 4096
"""Unit of offsets, and of what is read and written: every device takes it."""
_BOUNCE_NBYTES = 1 << 20
_MOST_AT_ONCE = 1024
"""Pieces of memory that one system call takes (IOV_MAX)."""
ENTRY_NBYTES = 64
_REST = struct.Struct("<IIIII12s")
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"pdlinkJ3"
ENTRY = np.dtype([("key", "V32"), ("rest", "V32")])
_NUMBERS = np.dtype(
    [
        *[("key", "V32"), ("page", "<u4"), ("nbytes", "<u4"), ("at", "<u4"), ("mark", "<u4")],
        *[("expires_at_s", "<u4"), ("digest", "V12")],
    ]
)
_MARK = 0x31454A50
_STEP_NBYTES = 1 << 16
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd numbers, for keys that differ in one place only, as those of tests; others are hashes already."""
_AT_ONCE = 1 << 14
"""Rows that stay in a core's cache while their keys are mixed."""


class DirectFile:
    """A file read and written past the page cache where its file system allows that, from any memory.

    Offsets are multiples of `PAGE_NBYTES`. Safe for several threads. Each call may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        """Open it, made if it is not there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = True
        """Whether the page cache is left out; tmpfs and some network file systems refuse."""
        self._bounce = threading.local()
        self._growth = threading.Lock()
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self.fd = os.open(path, flags, 0o600)
        if self.direct and not self._takes_direct_reads():
            os.close(self.fd)
            self.direct = False
            self.fd = os.open(path, flags, 0o600)

    def _takes_direct_reads(self) -> bool:
        """Some file systems refuse only then."""
        try:
            os.preadv(self.fd, [self._bounce_memory()[:PAGE_NBYTES]], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def write(self, offset: int, data: memoryview) -> bool:
        """All of `data`; what follows up to the end of its last page is undefined. True."""
        for at, nbytes in self._pieces(data):
            piece = data[at : at + nbytes]
            if self._takes(piece):
                _write(self.fd, offset + at, piece)
            else:
                bounce = self._bounce_memory()
                bounce[:nbytes] = piece
                _write(self.fd, offset + at, bounce[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES])
        return True

    def write_run(self, offset: int, run: Sequence[memoryview]) -> None:
        """Several, each from the first page on that the one before leaves; in one call if that is possible."""
        if len(run) > 1 and self._moves_at_once(run) and os.pwritev(self.fd, run, offset) == sum(map(len, run)):
            return
        for data in run:
            self.write(offset, data)
            offset += -(-len(data) // PAGE_NBYTES) * PAGE_NBYTES

    def read_run(self, offset: int, run: Sequence[memoryview]) -> bool:
        """Fill several that lie like that in one call; False where that is not possible or fails."""
        with contextlib.suppress(OSError):
            if len(run) > 1 and self._moves_at_once(run):
                return os.preadv(self.fd, run, offset) == sum(map(len, run))
        return False

    def _moves_at_once(self, run: Sequence[memoryview]) -> bool:
        whole = all(len(each) % PAGE_NBYTES == 0 for each in run)
        return len(run) <= _MOST_AT_ONCE and whole and (not self.direct or all(map(_on_page, run)))

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into`; whether the file had so much."""
        for at, nbytes in self._pieces(into):
            piece = into[at : at + nbytes]
            if self._takes(piece):
                if not self._read(offset + at, piece, nbytes):
                    return False
                continue
            bounce = self._bounce_memory()
            if not self._read(offset + at, bounce[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES], nbytes):
                return False
            piece[:] = bounce[:nbytes]
        return True

    def grow(self, nbytes: int) -> None:
        """Make the file so long, and take the room from the file system now. Raises OSError if there is none.

        One thread at a time: where the file system has no call for it, libc writes zeros into the new part, also over
        what is written there after another thread has made the file as long.
        """
        with self._growth:
            now = os.fstat(self.fd).st_size
            if nbytes > now:
                os.posix_fallocate(self.fd, now, nbytes - now)

    def close(self) -> None:
        os.close(self.fd)

    def _pieces(self, memory: memoryview) -> list[tuple[int, int]]:
        """Offset and bytes of what is moved at once: all at once, its last page apart if it is not whole, or as much
        as a bounce takes."""
        if not len(memory):
            return []
        if not self.direct:
            return [(0, len(memory))]
        if _on_page(memory):
            whole = len(memory) // PAGE_NBYTES * PAGE_NBYTES
            return [piece for piece in ((0, whole), (whole, len(memory) - whole)) if piece[1]]
        return [(at, min(_BOUNCE_NBYTES, len(memory) - at)) for at in range(0, len(memory), _BOUNCE_NBYTES)]

    def _takes(self, piece: memoryview) -> bool:
        """Whether the kernel moves it straight from or to this memory."""
        return not self.direct or (len(piece) % PAGE_NBYTES == 0 and _on_page(piece))

    def _read(self, offset: int, into: memoryview, nbytes: int) -> bool:
        """Whether `nbytes` of `into` were filled; a file may end within its last page."""
        done = 0
        while done < nbytes:
            got = os.preadv(self.fd, [into[done:]], offset + done)
            if not got:
                return False
            done += got
        return True

    def _bounce_memory(self) -> memoryview:
        """Aligned memory of this thread."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = memoryview(mmap.mmap(-1, _BOUNCE_NBYTES))
        memory: memoryview = self._bounce.memory
        return memory


def _write(fd: int, offset: int, data: memoryview) -> None:
    """All of it."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _on_page(memory: memoryview) -> bool:
    """Whether it begins on a page; `ctypes.data` takes three times as long."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % PAGE_NBYTES == 0


class RecordPlace(NamedTuple):
    """Where a record is, and its checksum."""

    page: int
    """In the file of records."""
    nbytes: int
    at: int
    """Of its entry in its segment's region."""
    mark: int
    expires_at_s: int
    """Whole seconds since 1970 after which the record is of no use; 0 for never."""
    digest: bytes
    """96 bits of XXH3-128 of the key, the record's length and its first page."""


class LoadedSegment(NamedTuple):
    """Rows [begin, end) of `Loaded`."""

    begin: int
    end: int
    num_entries: int
    """Of its region, empty ones included."""
    end_page: int
    """Behind the last record, from the segment's start."""
    num_pages: int
    """Of the records."""


class Loaded(NamedTuple):
    rows: EntryArray
    """Keys, and what `unpack` takes."""
    segments: list[LoadedSegment]

    @property
    def some_expire(self) -> bool:
        return bool(self.rows.view(_NUMBERS)["expires_at_s"].any())


def pack(page: int, nbytes: int, at: int, digest: bytes, expires_at_s: int = 0) -> bytes:
    """The second half of an entry; 32 bytes keep a million of them small."""
    return _REST.pack(page, nbytes, at, _MARK, expires_at_s, digest)


def unpack(rest: bytes) -> RecordPlace:
    return RecordPlace(*_REST.unpack(rest))


def journals(root: Path) -> list[Path]:
    """Every journal in a directory of `root`, the one that was written last at the end."""
    found = []
    for path in root.glob("*/journal"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


class Journal:
    """Methods may raise OSError. The caller's lock orders them."""

    def __init__(self, path: Path, segment_nbytes: int) -> None:
        """Open it, made if it is not there; one of other segments is begun anew."""
        self._segment_pages = segment_nbytes // PAGE_NBYTES
        self._region_nbytes = self._segment_pages * ENTRY_NBYTES
        self._region = np.empty(self._region_nbytes, np.uint8)
        """Where one is read to."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        head = _HEAD.pack(_MAGIC, segment_nbytes)
        if os.pread(self._fd, _HEAD.size, 0) != head:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, head, 0)

    def load(self, num_segments: int) -> Loaded:
        """What is recorded for each segment; entries that cannot be are passed over.

        Memory that is touched for the first time takes longest, so each entry is copied once into what is kept.
        """
        rows = np.empty(os.fstat(self._fd).st_blocks * 512 // ENTRY_NBYTES, ENTRY)
        segments, at = list[LoadedSegment](), 0
        for segment in range(num_segments):
            raw = self._used(segment)
            numbers = raw.view(_NUMBERS)
            pages = numbers["page"].astype(np.int64) - segment * self._segment_pages
            ends = pages + -(-numbers["nbytes"].astype(np.int64) // PAGE_NBYTES)
            right = (numbers["mark"] == _MARK) & (numbers["at"] == np.arange(len(numbers)))
            right &= (pages >= 0) & (ends <= self._segment_pages)
            end_page = int(ends[right].max(initial=0))
            right &= numbers["nbytes"] > 0
            end = at + int(right.sum())
            if end > len(rows):  # of a file system that does not say what a file takes
                rows = np.concatenate([rows[:at], np.empty(2 * end - at, ENTRY)])
            rows[at:end] = raw.view(ENTRY) if end - at == len(numbers) else raw.view(ENTRY)[right]
            segments.append(LoadedSegment(at, end, len(numbers), end_page, int((ends - pages)[right].sum())))
            at = end
        return Loaded(rows[:at], segments)

    def _used(self, segment: int) -> Bytes:
        """A segment's region up to the first step of zeros; as long as nobody asks for another one."""
        region, nbytes = self._region, 0
        step = _STEP_NBYTES
        while nbytes < self._region_nbytes:
            piece = region[nbytes : nbytes + step]
            got = os.preadv(self._fd, [piece.data], self._start(segment) + nbytes) // ENTRY_NBYTES * ENTRY_NBYTES
            marks = np.flatnonzero(piece[:got].view(_NUMBERS)["mark"])
            used = ENTRY_NBYTES * (int(marks[-1]) + 1) if len(marks) else 0
            nbytes += used
            if used < step:
                break
        return region[:nbytes]

    def append(self, segment: int, at: int, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Keys, and what `unpack` takes of each, from that place on."""
        joined = memoryview(b"".join(chain.from_iterable(entries)))
        _write(self._fd, self._start(segment) + at * ENTRY_NBYTES, joined)

    def strike(self, segment: int, key: bytes, place: RecordPlace) -> None:
        """The entry stays in its place and says nothing any more."""
        self.append(segment, place.at, [(key, pack(place.page, 0, place.at, place.digest))])

    def forget(self, segment: int) -> None:
        """The segment is written anew. From its end on: where a crash cuts that short, `load` finds what is left, and
        nothing behind a gap comes to light when the gap is filled."""
        nbytes = len(self._used(segment))
        for begin in reversed(range(0, nbytes, _STEP_NBYTES)):
            os.pwrite(self._fd, bytes(min(_STEP_NBYTES, nbytes - begin)), self._start(segment) + begin)

    def sync(self) -> None:
        """What was written is on the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _start(self, segment: int) -> int:
        return PAGE_NBYTES + segment * self._region_nbytes


class Entries:
    """By key what `unpack` takes. Not thread-safe."""

    def __init__(self, rows: EntryArray | None = None) -> None:
        """rows: in the journal's order; of several of a key the last one counts. Costs 0.1 s for a million."""
        self._rows = np.empty(0, ENTRY) if rows is None else rows
        self._keys: _Words = self._rows.view("<u8").reshape(-1, 8)[:, :4]
        num = len(self._rows)
        bits = np.uint64(max(1, num.bit_length()))
        self._row_mask = (np.uint64(1) << bits) - np.uint64(1)
        self._sorted = np.empty(num, np.uint64)
        for begin in range(0, num, _AT_ONCE):
            self._sorted[begin : begin + _AT_ONCE] = self._mixed(self._keys[begin : begin + _AT_ONCE])
        self._sorted |= np.arange(num, dtype=np.uint64)
        self._sorted.sort()
        self._gone = np.zeros(num, bool)
        self._num_loaded = num
        """That are not gone."""
        self._new: dict[bytes, bytes] = {}
        self.superseded: dict[bytes, list[bytes]] = {}
        """What earlier rows of a key say."""
        self._supersede()

    def _supersede(self) -> None:
        mixed = self._sorted & ~self._row_mask
        alike = np.flatnonzero(mixed[1:] == mixed[:-1])
        last: dict[bytes, int] = {}
        for row in np.unique(self._sorted[np.concatenate([alike, alike + 1])] & self._row_mask).tolist():
            key = self._key(row)
            if key in last:
                self.superseded.setdefault(key, []).append(self._rest(last[key]))
                self._remove(last[key])
            last[key] = row

    def __len__(self) -> int:
        return self._num_loaded + len(self._new)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._rows["key"][~self._gone].tolist()
        yield from self._new

    def __contains__(self, key: bytes) -> bool:
        return key in self._new or self._row(key) >= 0

    def __setitem__(self, key: bytes, rest: bytes) -> None:
        """For a key that is not here."""
        self._new[key] = rest

    def get(self, key: bytes) -> bytes | None:
        found = self._new.get(key)
        if found is not None:
            return found
        row = self._row(key)
        return self._rest(row) if row >= 0 else None

    def pop(self, key: bytes) -> bytes:
        """Raises KeyError."""
        found = self._new.pop(key, None)
        if found is not None:
            return found
        row = self._row(key)
        if row < 0:
            raise KeyError(key)
        self._remove(row)
        return self._rest(row)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key."""
        if not self._num_loaded:
            return [key in self._new for key in keys]
        return [key in self._new or row >= 0 for key, row in zip(keys, self._rows_of(keys), strict=True)]

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """For each key what `get` says."""
        rows = self._rows_of(keys)
        loaded = [self._rest(row) if row >= 0 else None for row in rows]
        return [self._new.get(key, rest) for key, rest in zip(keys, loaded, strict=True)]

    def _rows_of(self, keys: Sequence[bytes]) -> list[int]:
        """For each key what `_row` says; for many at once."""
        if not self._num_loaded or not keys:
            return [-1] * len(keys)
        asked = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)
        mixed = self._mixed(asked)
        at = np.minimum(np.searchsorted(self._sorted, mixed), len(self._sorted) - 1)
        rows = self._sorted[at] & self._row_mask
        here = (self._keys[rows] == asked).all(axis=1) & ~self._gone[rows]
        mixed_alike = self._sorted[at] & ~self._row_mask == mixed
        found: list[int] = np.where(here, rows.astype(np.int64), -1).tolist()
        for index in np.flatnonzero(mixed_alike & ~here).tolist():  # it is another key, or gone
            found[index] = self._row(keys[index])
        return found

    def _row(self, key: bytes) -> int:
        """-1 if there is none."""
        if not self._num_loaded:
            return -1
        mixed = self._mixed(np.frombuffer(key, "<u8").reshape(1, 4))
        first, last = np.searchsorted(self._sorted, [mixed[0], mixed[0] | self._row_mask])
        for row in (self._sorted[first:last] & self._row_mask).tolist():
            if not self._gone[row] and self._key(row) == key:
                return int(row)
        return -1

    def _mixed(self, keys: _Words) -> _Numbers:
        """A number for each key, with room for a row in its low bits."""
        mixed = np.zeros(len(keys), np.uint64)
        for column, factor in enumerate(_FACTORS):
            mixed += keys[:, column] * np.uint64(factor)
        return mixed & ~self._row_mask

    def _remove(self, row: int) -> None:
        self._gone[row] = True
        self._num_loaded -= 1

    def _key(self, row: int) -> bytes:
        return bytes(self._rows["key"][row])

    def _rest(self, row: int) -> bytes:
        return bytes(self._rows["rest"][row])


class Others:
    """Records of other namespaces in the directory of a disk tier, which give way to its own."""

    def __init__(self, directories: Iterable[Path]) -> None:
        """directories: of other namespaces, in the order in which they go."""
        self._directories = list(directories)

    def shrink(self, most_nbytes: int) -> None:
        """Remove some until all hold so much at most. One that a process has open stays, and is not tried again."""
        while self._directories and sum(map(_held_nbytes, self._directories)) > most_nbytes:
            _remove_unused(self._directories.pop(0))


def _held_nbytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    return 0


def _remove_unused(directory: Path) -> None:
    """The files of a tier that no process has open."""
    with contextlib.suppress(OSError):  # a process has it, or it went meanwhile
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in ("records", "preimages", "standing"):  # the others are of the store above it
                (directory / name).unlink(missing_ok=True)
            (directory / "journal").unlink()
            directory.rmdir()
        finally:
            os.close(lock)
