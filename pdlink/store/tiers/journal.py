"""`Journal`: what lies where in the segments of a disk tier, in a file that survives the process.

A page of head, then a region for each segment with an entry of 64 bytes for each of its records. An entry is written
after its record, and never fsynced: what it says is believed when the digest holds.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .direct import PAGE_NBYTES

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TypeAlias

    from pdlink.memory.buffers import Bytes

    EntryArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.void]]
    """Of `ENTRY`."""

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

    def append(self, segment: int, at: int, key: bytes, rest: bytes) -> None:
        os.pwrite(self._fd, key + rest, self._start(segment) + at * ENTRY_NBYTES)

    def strike(self, segment: int, key: bytes, place: RecordPlace) -> None:
        """The entry stays in its place and says nothing any more."""
        self.append(segment, place.at, key, pack(place.page, 0, place.at, place.digest))

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
