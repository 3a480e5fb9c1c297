"""`Journal`: what lies where in the segments of a disk tier, in a file that survives the process.

A page of head, then a region for each segment with an entry of 64 bytes for each of its records. An entry is written
after its record, and never fsynced: what it says is believed when the record's checksum holds.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .direct import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENTRY_NBYTES = 64
_REST = struct.Struct("<IIII16s")
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"pdlinkJ1"
_ENTRY = np.dtype([("key", "V32"), ("rest", "V32")])
_NUMBERS = np.dtype(
    [("key", "V32"), ("page", "<u4"), ("nbytes", "<u4"), ("at", "<u4"), ("mark", "<u4"), ("x", "V16")]
)
_MARK = 0x31454A50


class Place(NamedTuple):
    """Where a record is, and its checksum."""

    page: int
    """In the file of records."""
    nbytes: int
    at: int
    """Of its entry in its segment's region."""
    mark: int
    digest: bytes
    """XXH3-128 of key and record."""


class Loaded(NamedTuple):
    """The records of one segment."""

    keys: list[bytes]
    rests: list[bytes]
    """What `unpack` takes."""
    num_entries: int
    """Of its region, empty ones included."""
    end_page: int
    """Behind the last record, from the segment's start."""
    num_pages: int
    """Of the records."""


def pack(page: int, nbytes: int, at: int, digest: bytes) -> bytes:
    """The second half of an entry; 32 bytes keep a million of them small."""
    return _REST.pack(page, nbytes, at, _MARK, digest)


def unpack(rest: bytes) -> Place:
    return Place(*_REST.unpack(rest))


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
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        head = _HEAD.pack(_MAGIC, segment_nbytes)
        if os.pread(self._fd, _HEAD.size, 0) != head:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, head, 0)

    def load(self, num_segments: int) -> Iterator[Loaded]:
        """What is recorded for each segment; entries that cannot be are passed over."""
        for segment in range(num_segments):
            raw = self._used(segment)
            entries = np.frombuffer(raw, _ENTRY)
            numbers = np.frombuffer(raw, _NUMBERS)
            first = segment * self._segment_pages
            pages = numbers["page"].astype(np.int64) - first
            ends = pages + -(-numbers["nbytes"].astype(np.int64) // PAGE_NBYTES)
            right = (numbers["mark"] == _MARK) & (numbers["at"] == np.arange(len(numbers)))
            right &= (pages >= 0) & (ends <= self._segment_pages)
            end_page = int(ends[right].max(initial=0))
            right &= numbers["nbytes"] > 0
            num_pages = int((ends - pages)[right].sum())
            keys, rests = entries["key"][right].tolist(), entries["rest"][right].tolist()
            yield Loaded(keys, rests, len(entries), end_page, num_pages)

    def _used(self, segment: int) -> bytes:
        """A segment's region up to the first entry of zeros."""
        raw = b""
        step = 1 << 16
        while len(raw) < self._region_nbytes:
            piece = os.pread(self._fd, min(step, self._region_nbytes - len(raw)), self._start(segment) + len(raw))
            piece = piece[: len(piece) // ENTRY_NBYTES * ENTRY_NBYTES]
            marks = np.flatnonzero(np.frombuffer(piece, _NUMBERS)["mark"])
            num = int(marks[-1]) + 1 if len(marks) else 0
            raw += piece[: num * ENTRY_NBYTES]
            if num * ENTRY_NBYTES < step:
                break
        return raw

    def append(self, segment: int, at: int, key: bytes, rest: bytes) -> None:
        os.pwrite(self._fd, key + rest, self._start(segment) + at * ENTRY_NBYTES)

    def strike(self, segment: int, key: bytes, place: Place) -> None:
        """The entry stays in its place and says nothing any more."""
        self.append(segment, place.at, key, pack(place.page, 0, place.at, place.digest))

    def forget(self, segment: int) -> None:
        """The segment is written anew."""
        os.pwrite(self._fd, bytes(len(self._used(segment))), self._start(segment))

    def close(self) -> None:
        os.close(self._fd)

    def _start(self, segment: int) -> int:
        return PAGE_NBYTES + segment * self._region_nbytes
