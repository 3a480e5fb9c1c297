"""`Disk`: records in large segments of one preallocated file, past the page cache, found again after a restart.

A record goes to the end of the segment that is being filled, then its entry into the journal. Room is made by whole
segments: the oldest that is not read far more than others goes, with all its records (`FullSegments`), but for those
that are to be kept (`keep`), which are written again before. Nothing is fsynced. Every read is compared with a digest
of key, length and first page; the rest is checked by the sums that are in it (`record.py`), by who reads the record.
So what a crash, a bad disk or a segment written anew left behind is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from pdlink.errors import ConfigError
from pdlink.events import ChangeTeller
from pdlink.store.interface import RecordChange
from pdlink.store.record import ends_at_s

from .base import DAMAGED
from .files import (
    ENTRY_NBYTES,
    PAGE_NBYTES,
    DirectFile,
    Entries,
    Journal,
    Others,
    RecordPlace,
    journals,
    pack,
    unpack,
)
from .segments import FullSegments, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

SEGMENT_NBYTES = 256 << 20
_MANY_SEGMENTS, _FEW_SEGMENTS = 16, 4
"""Of a small disk: where the largest record is known, and where it is not, and might not fit into a segment."""
_SMALL_NBYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Carry:
    """Records that are kept, from the next segment to go into the active one."""

    segment: Segment
    epoch: int
    to: Segment
    to_epoch: int
    records: list[tuple[bytes, bytes, int]]
    """Key, what the index says of it, and the page where it goes."""
    begun: bool = False


class _Reading(NamedTuple):
    """A record that is to be read."""

    number: int
    """Its place in what is wanted."""
    key: bytes
    rest: bytes
    """What the index says of it."""
    place: RecordPlace
    into: memoryview


class _Writing(NamedTuple):
    """A record that is to be written."""

    number: int
    """Its place in what is put."""
    key: bytes
    record: memoryview
    at: int
    """Its first page, from that of the first record on."""


class Disk:
    """In ROOT/NAMESPACE, which one process has at a time."""

    name = "disk"
    is_server = False
    verifies = False
    answers = True

    def __init__(
        self,
        root: Path,
        namespace: str,
        capacity_nbytes: int,
        segment_nbytes: int = SEGMENT_NBYTES,
        *,
        record_nbytes: int = 0,
    ) -> None:
        """Open the directory, made if it is not there, and read the journal.

        namespace: a digest of all that the records' bytes depend on; others of the same root keep their own capacity.

        capacity_nbytes: of all files in it. segment_nbytes: at most, but for records that are larger.
        record_nbytes: of the largest records, if that is known: segments are some of them, and a small disk has more.
        Raises ConfigError if the directory cannot be used or is in use.
        """
        self._segment_pages = _segment_pages(capacity_nbytes - PAGE_NBYTES, segment_nbytes, record_nbytes)
        if self._segment_pages < 1:
            raise ConfigError(
                f"tiers.max_local_disk_size: got {capacity_nbytes} bytes; expected 16,384 or more; raise it"
            )
        self.capacity_nbytes = capacity_nbytes
        segment_nbytes = self._segment_pages * PAGE_NBYTES
        self._max_segments = (capacity_nbytes - PAGE_NBYTES) // (segment_nbytes + self._segment_pages * ENTRY_NBYTES)
        directory = root / namespace
        self._directory, self.medium = directory, f"disk {directory.absolute()}"
        with contextlib.ExitStack() as stack:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = DirectFile(directory / "records")
                stack.callback(self._file.close)
                self._journal = Journal(directory / "journal", segment_nbytes)
                stack.callback(self._journal.close)
                self._others = Others(path.parent for path in journals(root) if path.parent != directory)
                self._load()
            except BlockingIOError:
                raise ConfigError(
                    f"tiers.local_disk: got {str(directory)!r}, which another process uses; expected one at a time; "
                    "give each process a directory of its own"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"tiers.local_disk: got {str(directory)!r}, which cannot be used ({error.strerror}); expected "
                    "a directory that this process may write to; name another"
                ) from error
            self._resources = stack.pop_all()
        if not self._file.direct:
            log.info("tiers.local_disk: %s takes no unbuffered access; the page cache is used", directory)

    def _load(self) -> None:
        self._lock = threading.Lock()
        self._closed, self._num_calls = False, 0
        self._announcer: ChangeTeller[RecordChange] = ChangeTeller()
        self._unstruck: dict[bytes, list[bytes]] = {}
        """Entries that stand in the journal and are not in the index: of records that could not be read."""
        self._kept: Collection[bytes] = ()
        """Keys of records that do not go when room is made."""
        self._carry: _Carry | None = None
        """That is to be made, or under way, by the thread that planned it."""
        self._carried = threading.Condition(self._lock)
        self._ungrown = self._unwritten = ""
        self._growing = -1
        """The segment whose room was taken ahead last."""
        self.nbytes = 0
        """Of whole pages of records that are here."""
        segment_nbytes = self._segment_pages * PAGE_NBYTES
        if os.fstat(self._file.fd).st_size > self._max_segments * segment_nbytes:
            os.ftruncate(self._file.fd, self._max_segments * segment_nbytes)
        num_segments = os.fstat(self._file.fd).st_size // segment_nbytes
        self._make_room_for(num_segments)
        self._segments: list[Segment] = []
        loaded = self._journal.load(num_segments)
        self._some_expire = loaded.some_expire
        for index, found in enumerate(loaded.segments):
            rows = loaded.rows[found.begin : found.end]
            self._segments.append(Segment(index, found.end_page, found.num_entries, rows))
        self._index = Entries(loaded.rows)
        num_pages = sum(found.num_pages for found in loaded.segments)
        self._unstruck.update(self._index.superseded)  # could not be struck out, or of a damaged journal
        for rests in self._unstruck.values():
            num_pages -= sum(_num_pages(unpack(rest).nbytes) for rest in rests)
        self.nbytes = num_pages * PAGE_NBYTES
        used = [segment for segment in self._segments if segment.num_entries]
        self._active = min(used, key=lambda segment: segment.end_page, default=None)
        self._empty = [segment for segment in self._segments if not segment.num_entries]
        full = [segment for segment in used if segment is not self._active]
        last = -1 if self._active is None else self._active.index  # they are filled in turn: the one behind is oldest
        self._full = FullSegments(sorted(full, key=lambda segment: (segment.index < last, segment.index)))

    @property
    def segment_nbytes(self) -> int:
        return self._segment_pages * PAGE_NBYTES

    @property
    def problem(self) -> str:
        """As `Tier` says."""
        return self._unwritten or self._ungrown

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            found = [False] * len(keys) if self._closed else self._index.contains(keys)
            if self._some_expire:
                return [here and not self._is_over(key) for key, here in zip(keys, found, strict=True)]
            return found

    def get(self, key: bytes, into: memoryview) -> int | None:
        """As `Tier.get`. An OSError takes the record with it."""
        return self.get_run([(key, into)])[0]

    def get_run(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        """As `RunTier.get_run`. The record that raises an OSError is gone."""
        found: list[int | None] = [None] * len(wanted)
        with self._call() as may:
            if may:
                for run in self._placed(wanted):
                    self._get(run, found)
        return found

    def put(self, key: bytes, record: memoryview) -> bool:
        """As `Tier.put`. A full or read-only file system is False and no error: it keeps nobody from reading."""
        return self.put_run([(key, record)])[0]

    def put_run(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """As `RunTier.put_run`, and `put` of each."""
        kept: list[bool] = []
        with self._call() as may:
            try:
                while may and len(kept) < len(records):
                    kept += self._put(records[len(kept) :])
            except OSError as error:
                if error.errno not in (*_NO_ROOM, errno.EROFS):
                    raise
                self._unwritten = f"{self._directory} takes no more: {error.strerror}"
        return kept + [False] * (len(records) - len(kept))

    def remove(self, key: bytes) -> None:
        with self._call() as may, self._lock:
            if may:
                for rest in list(self._unstruck.get(key, ())):
                    self._strike_entry(key, rest)
                    self._unstruck[key].remove(rest)
                self._unstruck.pop(key, None)
                if key in self._index:
                    self._strike(key)

    def clear(self) -> None:
        with self._call() as may, self._lock:
            if may:
                for segment in self._segments:
                    self._reset(segment)
                self._unstruck.clear()
                self._full.clear()
                self._active, self._empty = None, []
                for segment in self._segments:
                    if segment.writers:  # taken when they have ended
                        self._full.add(segment)
                    else:
                        self._empty.append(segment)

    def keys_ending(self, ending: bytes) -> list[bytes]:
        """As `ListingTier.keys_ending`."""
        with self._lock:
            return [] if self._closed else [key for key in self._index if key.endswith(ending)]

    def settle(self) -> None:
        """As `SettlingTier.settle`."""
        with self._call() as may:
            if may:
                self._journal.sync()

    def keep(self, keys: Collection[bytes]) -> None:
        """As `KeepingTier.keep`. Where records of this one are in every segment, those of one are written again."""
        self._kept = keys

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        """As `TellingTier.listen`."""
        with self._lock:
            self._announcer.add(changed, [RecordChange(self.name, True, key) for key in self._index])
        self._announcer.tell()

    def leave(self) -> None:
        """As `TellingTier.leave`."""
        with self._lock:
            self._announcer.note_all([RecordChange(self.name, False, key) for key in self._index])
            self._announcer.listeners = ()
        self._announcer.tell()

    def close(self) -> None:
        """As `Tier.close`. Files are closed when the last call under way has ended."""
        with self._call(), self._lock:
            self._closed = True

    @contextlib.contextmanager
    def _call(self) -> Iterator[bool]:
        """Around all that uses the files; whether it may."""
        with self._lock:
            may = not self._closed
            self._num_calls += may
        try:
            yield may
        finally:
            with self._lock:
                self._num_calls -= may
                if may and self._closed and not self._num_calls:
                    self._resources.close()
            self._announcer.tell()

    # --- Under the lock

    def _segment_with(self, pages: int) -> Segment | None:
        """One with so much room at its end. Raises OSError."""
        active = self._active
        if active is not None and active.end_page + pages > self._segment_pages:
            self._full.add(active)
            active = self._active = None
        if active is None:
            active = self._active = self._empty.pop() if self._empty else self._grown() or self._reclaimed()
            if active is not None:
                self._plan_carry(active, self._segment_pages - pages)
        return active

    def _grown(self) -> Segment | None:
        """A new one; None at the capacity, or if the file system is full."""
        index = len(self._segments)
        if index >= self._max_segments:
            return None
        self._make_room_for(index + 1)
        self._journal.forget(index)
        try:
            self._file.grow((index + 1) * self._segment_pages * PAGE_NBYTES)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._ungrown = f"{self._directory} has room for {index} of {self._max_segments} parts: {error.strerror}"
            return None
        self._ungrown = ""
        self._segments.append(Segment(index))
        return self._segments[-1]

    def _make_room_for(self, num_segments: int) -> None:
        """Beside other namespaces."""
        own_nbytes = PAGE_NBYTES + num_segments * self._segment_pages * (PAGE_NBYTES + ENTRY_NBYTES)
        self._others.shrink(self.capacity_nbytes - own_nbytes)

    def _reclaimed(self) -> Segment | None:
        """One that nobody writes to, without its records: a disk that takes nothing is worse than to lose one that is
        to be kept."""
        segment = self._full.take(lambda segment: bool(self._kept_in(segment)))
        if segment is None and self._carry is None:
            segment = self._full.take()
        if segment is None:
            return None
        try:
            self._reset(segment)
        except OSError:
            self._full.add(segment)
            raise
        return segment

    def _reset(self, segment: Segment) -> None:
        """Forget its records."""
        self._journal.forget(segment.index)
        for key in segment.keys:
            rest = self._index.get(key)
            if rest is not None and self._segment_of(place := unpack(rest)) is segment:
                self._index.pop(key)
                self._announcer.note(RecordChange(self.name, False, key))
                self.nbytes -= _num_pages(place.nbytes) * PAGE_NBYTES
        segment.loaded, segment.new = None, []
        segment.num_entries = 0
        segment.end_page = 0
        segment.epoch += 1

    def _list(self, segment: Segment, written: Sequence[tuple[bytes, RecordPlace]]) -> None:
        """These records are here from now on. One that is here already keeps its place."""
        known = self._index.contains([key for key, _ in written])
        fresh = [each for each, is_here in zip(written, known, strict=True) if not is_here]
        entries = [
            (key, pack(place.page, place.nbytes, at, place.digest, place.expires_at_s))
            for at, (key, place) in enumerate(fresh, segment.num_entries)
        ]
        if entries:
            self._journal.append(segment.index, segment.num_entries, entries)
        segment.num_entries += len(entries)
        for (key, rest), (_, place) in zip(entries, fresh, strict=True):
            self._some_expire |= place.expires_at_s > 0
            segment.new.append(key)
            self._index[key] = rest
            self._announcer.note(RecordChange(self.name, True, key))
            self.nbytes += _num_pages(place.nbytes) * PAGE_NBYTES

    def _is_over(self, key: bytes) -> bool:
        """Whether a record is of no use any more, or gone."""
        rest = self._index.get(key)
        return rest is None or 0 < unpack(rest).expires_at_s <= time.time()

    def _begin_writing(self, segment: Segment, pages: int) -> tuple[int, int]:
        """Where at its end, and its epoch."""
        page = segment.index * self._segment_pages + segment.end_page
        segment.end_page += pages
        segment.writers += 1
        return page, segment.epoch

    def _kept_in(self, segment: Segment) -> dict[bytes, bytes]:
        """Its records that are not to go: what the index says of each. Costs a look at every key of it."""
        if not self._kept:
            return {}
        found = {key: self._index.get(key) for key in segment.keys if key in self._kept}
        return {key: rest for key, rest in found.items() if rest and self._segment_of(unpack(rest)) is segment}

    def _is_mostly_kept(self, segment: Segment) -> bool:
        pages = sum(_num_pages(unpack(rest).nbytes) for rest in self._kept_in(segment).values())
        return 2 * pages > self._segment_pages

    def _plan_carry(self, to: Segment, most_pages: int) -> None:
        """Take room in a segment that has just become the active one for those records of the next to go that are
        kept, so that this one can go when the active one is full. Later, others may have filled it."""
        if not self._kept or self._carry is not None or self._empty or len(self._segments) < self._max_segments:
            return
        segment = self._full.take(self._is_mostly_kept)
        if segment is None:
            return
        records = []
        for key, rest in self._kept_in(segment).items():
            pages = _num_pages(unpack(rest).nbytes)
            if to.end_page + pages > most_pages:
                break
            records.append((key, rest, to.index * self._segment_pages + to.end_page))
            to.end_page += pages
        if not records:
            self._full.add_first(segment)
            return
        to.writers += 1
        segment.writers += 1
        self._carry = _Carry(segment, segment.epoch, to, to.epoch, records)

    def _strike(self, key: bytes) -> None:
        """First in the journal: what is not in the index any more does not come back with a restart."""
        rest = self._index.get(key)
        assert rest is not None
        self._strike_entry(key, rest)
        self._unlist(key)

    def _strike_entry(self, key: bytes, rest: bytes) -> None:
        place = unpack(rest)
        self._journal.strike(self._segment_of(place).index, key, place)

    def _unlist(self, key: bytes) -> None:
        place = unpack(self._index.pop(key))
        self._announcer.note(RecordChange(self.name, False, key))
        self.nbytes -= _num_pages(place.nbytes) * PAGE_NBYTES

    def _segment_of(self, place: RecordPlace) -> Segment:
        return self._segments[place.page // self._segment_pages]

    # --- Without it

    def _placed(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[list[_Reading]]:
        """Those of `wanted` that are here and fit, in runs that follow each other on the disk."""
        reading = []
        with self._lock:
            rests = self._index.find([key for key, _ in wanted])
            for number, ((key, into), rest) in enumerate(zip(wanted, rests, strict=True)):
                if rest is not None and (place := unpack(rest)).nbytes <= len(into):
                    self._segment_of(place).reads += 1
                    reading.append(_Reading(number, key, rest, place, into[: place.nbytes]))
        runs: list[list[_Reading]] = []
        end_page = -1
        for each in sorted(reading, key=lambda each: each.place.page):
            if each.place.page != end_page:
                runs.append([])
            runs[-1].append(each)
            end_page = each.place.page + _num_pages(each.place.nbytes)
        return runs

    def _get(self, run: Sequence[_Reading], found: list[int | None]) -> None:
        """Read what follows each other, at once if that is possible. The first that raises an OSError goes, and those
        behind it are not tried: a disk that fails now may have them later."""
        at_once = self._file.read_run(run[0].place.page * PAGE_NBYTES, [each.into for each in run])
        for number, key, rest, place, into in run:
            try:
                digest = _digest(key, into) if at_once else self._read(place.page, key, into)
            except OSError:
                self._drop(key, rest)
                raise
            if digest == place.digest:
                found[number] = place.nbytes
            elif self._drop(key, rest):
                found[number] = DAMAGED

    def _put(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """The first ones, as many as follow each other in one segment; whether each is here now."""
        kept, fresh, pages = list[bool](), list[_Writing](), 0
        with self._lock:
            segment = None
            for key, _ in records if self._some_expire else ():
                if key in self._index and self._is_over(key):
                    self._strike(key)  # it may fail, as long as nothing is taken
            known = self._index.contains([key for key, _ in records])
            for (key, record), is_known in zip(records, known, strict=True):
                more = _num_pages(len(record))
                fits = 0 < more <= self._segment_pages
                is_here = fits and is_known and key in self._index  # not gone with the segment that is filled now
                if more > self._segment_pages:
                    most = self._segment_pages * PAGE_NBYTES >> 20
                    self._unwritten = f"{self._directory} takes records of {most} MiB, not of {len(record) >> 20}"
                if fits and not is_here:
                    if segment is not None and segment.end_page + pages + more > self._segment_pages:
                        break
                    segment = segment or self._segment_with(more)
                    if segment is not None:
                        fresh.append(_Writing(len(kept), key, record, pages))
                        pages += more
                    elif self._carry is not None:  # another thread makes room
                        self._carried.wait()
                        break
                kept.append(is_here)
            if segment is None:
                return kept
            page, epoch = self._begin_writing(segment, pages)
        try:
            written = self._written(page, fresh)
            with self._lock:
                self._unwritten = ""
                if segment.epoch == epoch:
                    self._list(segment, written)
                    for each in fresh:
                        kept[each.number] = True
            return kept
        finally:
            with self._lock:
                segment.writers -= 1
            self._grow_ahead()
            self._carry_ahead()

    def _carry_ahead(self) -> None:
        """Write again what `_plan_carry` has room for."""
        with self._lock:
            carry = self._carry
            if carry is None or carry.begun:
                return
            carry.begun = True
        try:
            with contextlib.suppress(OSError):  # the rest stays where it is
                for key, rest, page in carry.records:
                    self._write_again(carry, key, rest, page)
        finally:
            with self._lock:
                self._carry = None
                self._carried.notify_all()
                carry.to.writers -= 1
                carry.segment.writers -= 1
                if carry.segment.epoch == carry.epoch:  # else it was cleared meanwhile, and is in line
                    self._full.add_first(carry.segment)

    def _write_again(self, carry: _Carry, key: bytes, rest: bytes, page: int) -> None:
        """One that is damaged goes."""
        place = unpack(rest)
        record = memoryview(bytearray(place.nbytes))
        if self._read(place.page, key, record) != place.digest:
            self._drop(key, rest)
            return
        self._written(page, [_Writing(0, key, record, 0)])
        with self._lock:
            if carry.to.epoch == carry.to_epoch and self._index.get(key) == rest:
                self._strike(key)
                self._list(carry.to, [(key, place._replace(page=page))])

    def _grow_ahead(self) -> None:
        """Take the next segment's room from the file system when this one is half full. All writers would wait for it
        later, 10 to 90 ms on a busy disk."""
        with contextlib.suppress(OSError):  # who needs the room says why there is none
            with self._lock:
                index, active = len(self._segments), self._active
                is_early = active is None or 2 * active.end_page <= self._segment_pages
                if is_early or self._empty or index in (self._max_segments, self._growing):
                    return
                self._growing = index
                self._make_room_for(index + 1)
                self._journal.forget(index)  # what it had before the file was cut: `load` looks where there is room
            self._file.grow((index + 1) * self._segment_pages * PAGE_NBYTES)

    def _drop(self, key: bytes, rest: bytes) -> bool:
        """A record that could not be read, unless it went, or was put again, meanwhile; whether it was here still."""
        with self._lock:
            if self._index.get(key) != rest:
                return False
            try:
                self._strike(key)
            except OSError:  # it can be put again all the same, and is struck out when it is removed
                self._unlist(key)
                self._unstruck.setdefault(key, []).append(rest)
            return True

    def _written(self, page: int, run: Sequence[_Writing]) -> list[tuple[bytes, RecordPlace]]:
        """Write records one after the other from a page on, in one call, which takes less CPU than parts; where they
        are."""
        places = []
        for _, key, record, at in run:
            digest = _digest(key, record)  # others may seal it again meanwhile, to the same bytes
            places.append((key, RecordPlace(page + at, len(record), 0, 0, _expires_at_s(record), digest)))
        self._file.write_run(page * PAGE_NBYTES, [each.record for each in run])
        return places

    def _read(self, page: int, key: bytes, into: memoryview) -> bytes:
        """Fill `into`; the digest of what came, none if the file was too short."""
        return _digest(key, into) if self._file.read(page * PAGE_NBYTES, into) else b""


def _digest(key: bytes, record: memoryview) -> bytes:
    """Of the key, the record's length, and its first page, which has its header."""
    hashed = b"".join((key, len(record).to_bytes(8, "little"), record[:PAGE_NBYTES]))
    return xxhash.xxh3_128_digest(hashed)[:12]


def _expires_at_s(record: memoryview) -> int:
    """As `RecordPlace.expires_at_s`."""
    at_s = ends_at_s(record)
    return 0 if at_s >= 1 << 32 else max(1, ceil(at_s))


def _segment_pages(room_nbytes: int, segment_nbytes: int, record_nbytes: int) -> int:
    """As `Disk` says; at least two segments fit into the room.

    All of the oldest segment goes at once, so a disk of few segments is less full than one of many.
    """
    most_pages = room_nbytes // (PAGE_NBYTES + ENTRY_NBYTES)
    record_pages = _num_pages(record_nbytes)
    if 0 < record_pages <= most_pages // 2:
        wanted = min(segment_nbytes // PAGE_NBYTES, most_pages // _MANY_SEGMENTS)
        return max(1, wanted // record_pages) * record_pages
    least = _FEW_SEGMENTS if room_nbytes >= _FEW_SEGMENTS * _SMALL_NBYTES else 2
    return most_pages // max(least, -(-most_pages * PAGE_NBYTES // segment_nbytes))


def _num_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES)
