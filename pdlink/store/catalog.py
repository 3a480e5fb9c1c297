"""`Catalog`: which records lie where in an arena, and who may write, read and drop them.

A record is *reserved* (its holder writes, nobody reads), then *readable*, then *gone*. Its slot is used again when it
is gone and nobody can touch it any more:
- A reservation ends by `commit`, `abandon` or the end of its holder's life, never by time: a late writer would write
  into another record.
- A lease ends by `release`, the end of its holder's life or its deadline. A late reader reads garbage, so it asks
  `release` afterwards whether the lease stood, and drops what it read if not.
- A pin keeps a record from eviction, without deadline but within a quota, until it is taken back.

Nothing here waits. What does not fit is left out, so that those who want more while they hold some cannot block each
other: they get a shorter prefix. There is no clock, lock or memory in it either; the caller brings the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from pdlink.store.extents import Extents

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdlink.store.policies.base import Policy

Serial = int
"""Names one reservation or lease for ever."""

_MAX_WASTE = 4
"""Eviction for one record stops after that many times its bytes: records not in turn keep the free ones apart."""


class Slot(NamedTuple):
    serial: Serial
    """Of its reservation. A key that is dropped and stored again has another one."""
    key: bytes
    offset: int
    """Bytes from the start of the arena."""
    nbytes: int


class Lease(NamedTuple):
    """Records that stay where they are until the lease ends."""

    serial: Serial
    slots: tuple[Slot, ...]


class Change(NamedTuple):
    kind: Literal["stored", "evicted", "removed"]
    key: bytes
    nbytes: int


@dataclass(slots=True, eq=False)
class _Record:
    slot: Slot
    writer: str | None
    """The holder of its reservation; None when readable."""
    listed: bool = True
    """Whether its key leads to it."""
    leases: int = 0
    pins: int = 0


@dataclass(slots=True, eq=False)
class _Hold:
    """What a lease or the pins of one name keep."""

    records: dict[Serial, _Record] = field(default_factory=dict)
    """By the serial of their slots."""
    holder: str = ""
    request: str = ""
    deadline_s: float = 0.0


class Catalog:
    """Of one arena. Not thread-safe."""

    def __init__(self, policy: Policy, *, pin_quota_nbytes: int = 0) -> None:
        """Begins with no room: see `grow`. pin_quota_nbytes: most bytes that pins may keep together."""
        self._policy = policy
        self._pin_quota_nbytes = pin_quota_nbytes
        self._extents = Extents()
        self._records: dict[bytes, _Record] = {}
        self._writing: dict[Serial, _Record] = {}
        """All reservations, also of keys that were removed meanwhile."""
        self._leases: dict[Serial, _Hold] = {}
        self._pins: dict[str, _Hold] = {}
        self._serials = count(1)
        self._changes: list[Change] = []

    @property
    def capacity_nbytes(self) -> int:
        return self._extents.limit_nbytes

    @property
    def used_nbytes(self) -> int:
        """Slots that are not free, whole pages."""
        return self._extents.used_nbytes

    @property
    def pinned_nbytes(self) -> int:
        pinned = {record.slot for hold in self._pins.values() for record in hold.records.values()}
        return sum(slot.nbytes for slot in pinned)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_reservations(self) -> int:
        return len(self._writing)

    def __len__(self) -> int:
        """Readable records."""
        return len(self._policy)

    def grow(self, capacity_nbytes: int) -> None:
        """The arena has so many bytes now. Raises ValueError for less than before."""
        self._extents.grow(capacity_nbytes)

    def changes(self) -> list[Change]:
        """What came and went since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # --- Writing

    def reserve(self, keys: Iterable[bytes], nbytes: int, holder: str) -> tuple[Slot, ...]:
        """Slots of `nbytes` for those of `keys` that are unknown, up to the first one that does not fit.

        Room is made by eviction. A key that is being written by anybody counts as known. Each slot is the holder's
        until it commits or abandons it.
        """
        slots: list[Slot] = []
        for key in keys:
            if key in self._records:
                continue
            offset = self._take(nbytes)
            if offset is None:
                break
            slot = Slot(next(self._serials), key, offset, nbytes)
            self._records[key] = self._writing[slot.serial] = _Record(slot, holder)
            slots.append(slot)
        return tuple(slots)

    def commit(self, slots: Sequence[Slot]) -> list[bytes]:
        """The slots, in the order of the prompt, hold their records and will not change; returns the readable keys.

        A reservation that is over is ignored, and a key that was removed meanwhile stays so.
        """
        readable = []
        for slot in reversed(slots):  # the head of a prefix is the newest for the policy
            record = self._writing.pop(slot.serial, None)
            if record is None:
                continue
            record.writer = None
            if record.listed:
                self._policy.insert(slot.key, slot.nbytes)
                self._changes.append(Change("stored", slot.key, slot.nbytes))
                readable.append(slot.key)
            self._free_if_unused(record)
        return readable[::-1]

    def abandon(self, slots: Iterable[Slot]) -> None:
        """Nothing of use is in the slots, and nobody writes to them any more. What is over already is ignored."""
        for slot in slots:
            record = self._writing.pop(slot.serial, None)
            if record is not None:
                record.writer = None
                self._unlist(record)
                self._free_if_unused(record)

    # --- Reading

    def lookup(self, keys: Iterable[bytes]) -> int:
        """How many leading keys are readable now. Promises nothing."""
        found = 0
        for key in keys:
            record = self._records.get(key)
            if record is None or record.writer is not None:
                break
            found += 1
        return found

    def lease(self, keys: Sequence[bytes], holder: str, request: str, deadline_s: float) -> Lease:
        """The longest readable prefix of `keys`, kept until `release` or `deadline_s` of the caller's clock.

        request: for those who ask who keeps what.
        """
        records = [self._records[key] for key in keys[: self.lookup(keys)]]
        lease = Lease(next(self._serials), tuple(record.slot for record in records))
        for record in reversed(records):
            record.leases += 1
            self._policy.touch(record.slot.key)
        if records:
            self._leases[lease.serial] = _Hold(
                {record.slot.serial: record for record in records}, holder, request, deadline_s
            )
        return lease

    def release(self, lease: Lease) -> bool:
        """End the lease; whether it stood until now. If not, what was read under it counts for nothing."""
        if not lease.slots:
            return True
        hold = self._leases.pop(lease.serial, None)
        if hold is not None:
            self._let_go(hold)
        return hold is not None

    def expire(self, now_s: float) -> int:
        """End the leases whose deadline is over; how many."""
        return self._end_leases([serial for serial, hold in self._leases.items() if hold.deadline_s <= now_s])

    def holder_gone(self, holder: str) -> None:
        """The holder has ended and touches nothing any more: nor do its reservations and leases."""
        self.abandon([record.slot for record in self._writing.values() if record.writer == holder])
        self._end_leases([serial for serial, hold in self._leases.items() if hold.holder == holder])

    # --- Keeping and dropping

    def pin(self, keys: Sequence[bytes], name: str) -> int:
        """Keep the longest readable prefix of `keys` that the quota allows, until `unpin(name)`; how many keys."""
        hold = self._pins.get(name, _Hold())
        pinned_nbytes = self.pinned_nbytes
        pinned = 0
        for key in keys[: self.lookup(keys)]:
            record = self._records[key]
            if record.slot.serial not in hold.records:
                pinned_nbytes += 0 if record.pins else record.slot.nbytes
                if pinned_nbytes > self._pin_quota_nbytes:
                    break
                record.pins += 1
                hold.records[record.slot.serial] = record
            pinned += 1
        if hold.records:
            self._pins[name] = hold
        return pinned

    def unpin(self, name: str) -> int:
        """Take back the pins of that name; how many there were."""
        hold = self._pins.pop(name, None)
        if hold is None:
            return 0
        for record in hold.records.values():
            record.pins -= 1
        return len(hold.records)

    def remove(self, keys: Iterable[bytes] | None = None) -> int:
        """Forget these keys, or all, pinned ones included; how many were known. Readers and writers finish first."""
        known = [
            self._records[key] for key in (list(self._records) if keys is None else keys) if key in self._records
        ]
        for record in known:
            self._unlist(record)
            if record.writer is None:
                self._policy.remove(record.slot.key)
                self._changes.append(Change("removed", record.slot.key, record.slot.nbytes))
            self._free_if_unused(record)
        return len(known)

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        self._extents.check()
        leased = [record for hold in self._leases.values() for record in hold.records.values()]
        records = {id(record): record for record in (*self._records.values(), *self._writing.values(), *leased)}
        taken = sorted((record.slot.offset, record.slot.nbytes) for record in records.values())
        for (offset, nbytes), (following, _) in zip(taken, taken[1:], strict=False):
            assert offset + nbytes <= following, "two records share bytes"
        assert self._extents.num_taken == len(records), "a slot is taken for no record"
        assert len(self._policy) == sum(record.writer is None for record in self._records.values())
        for record in records.values():
            assert record.leases == leased.count(record)
            assert record.pins == sum(record.slot.serial in hold.records for hold in self._pins.values())
            assert (record.writer is None) == (record.slot.serial not in self._writing)
        assert self.pinned_nbytes <= self._pin_quota_nbytes

    def _take(self, nbytes: int) -> int | None:
        """Bytes of the arena, if need be those of records that may go."""
        if nbytes > self.capacity_nbytes:
            return None
        evicted_nbytes = 0
        while (offset := self._extents.take(nbytes)) is None:
            key = self._policy.evict(self._may_evict) if evicted_nbytes < _MAX_WASTE * nbytes else None
            if key is None:
                return None
            record = self._records[key]
            evicted_nbytes += record.slot.nbytes
            self._unlist(record)
            self._changes.append(Change("evicted", key, record.slot.nbytes))
            self._free_if_unused(record)
        return offset

    def _may_evict(self, key: bytes) -> bool:
        record = self._records[key]
        return not record.leases and not record.pins

    def _unlist(self, record: _Record) -> None:
        if record.listed:
            record.listed = False
            del self._records[record.slot.key]
        if record.pins:
            record.pins = 0
            for hold in self._pins.values():
                hold.records.pop(record.slot.serial, None)

    def _end_leases(self, serials: Sequence[Serial]) -> int:
        for serial in serials:
            self._let_go(self._leases.pop(serial))
        return len(serials)

    def _let_go(self, hold: _Hold) -> None:
        for record in hold.records.values():
            record.leases -= 1
            self._free_if_unused(record)

    def _free_if_unused(self, record: _Record) -> None:
        if not record.listed and record.writer is None and not record.leases:
            self._extents.give_back(record.slot.offset)
