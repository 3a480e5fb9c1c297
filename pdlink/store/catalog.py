"""`Catalog`: which records lie where in an arena, and who may write, read and drop them.

A record is *reserved* (its holders write, nobody reads), then *readable*, then *gone*. Several holders may write one
record, each a *share* of it, as tensor parallel ranks do with their heads; it is readable when every share is
committed. Its slot is used again when it is gone and nobody can touch it any more:
- A reservation ends by `commit`, `abandon` or the end of its holder's life, never by time: a late writer would write
  into another record.
- A lease ends by `release`, the end of its holder's life or its deadline. A late reader reads garbage, so it asks
  `release` afterwards whether the lease stood, and drops what it read if not.
- A pin keeps a record from eviction, without deadline but within a quota, until it is taken back or the life of its
  holder ends.
- A session keeps records from eviction until a tier has them, and then until nothing else may go (`SessionHolds`). In
  half of the arena: beyond it, what was used longest ago is as others, so none leaves before LRU would evict it.

Nothing here waits. What does not fit is left out, so that those who want more while they hold some cannot block each
other: they get a shorter prefix. There is no clock, lock or memory in it either; the caller brings the time.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING

from pdlink.store.eviction import Turns
from pdlink.store.extents import ALIGNMENT_NBYTES, Extents
from pdlink.store.kept import Emptied, Hold, Pins, Record, RecordDeadlines, Writing, check
from pdlink.store.sessions import SessionHolds
from pdlink.store.slots import (
    DEFAULT_PRIORITY,
    HELD,
    KEPT,
    LIFE_BITS,
    USUAL,
    WHOLE,
    Change,
    Retention,
    Slot,
    SlotLease,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdlink.store.eviction import EvictionPolicy
    from pdlink.store.sessions import Holder
    from pdlink.store.slots import Held, Serial, Share

_MOST_DUE = 512
"""Records whose time is over, dropped at once: some milliseconds."""
_MOST_OUT = 4
"""Records that leave the share of the sessions at most, to make room for one more."""
_MAX_WASTE = 4
"""Eviction for one record stops after that many times its bytes: records not in turn keep the free ones apart."""
_KEPT_SHARE = 2
"""Of the arena, how small a part sessions may keep from eviction."""


class Catalog:
    """Of one arena. Not thread-safe."""

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        pin_quota_nbytes: int = 0,
        tenant_quota_nbytes: int = 0,
        sessions: SessionHolds | None = None,
        life: int = 0,
    ) -> None:
        """Begins with no room: see `resize`. pin_quota_nbytes: most bytes that pins may keep together.

        tenant_quota_nbytes: most bytes of each tenant that has a name; 0 sets no limit.
        sessions: whose records are kept; see `rank`. None keeps none.
        life: a number below `MAX_LIFE`, which its serials name.
        """
        self.life = life
        self._turns = Turns(policy, quota_nbytes=tenant_quota_nbytes)
        self._extents = Extents()
        self._records: dict[bytes, Record] = {}
        self._num_readable = 0
        self._deadlines = RecordDeadlines(self._records)
        self._writing: dict[Serial, Writing] = {}
        """All reservations, also of keys that were removed meanwhile."""
        self._leases: dict[Serial, Hold] = {}
        self._pins = Pins(pin_quota_nbytes)
        self.sessions = SessionHolds(0, 0) if sessions is None else sessions
        """Who changes them calls `rank` afterwards."""
        self._kept_nbytes = 0
        """Of records with a rank."""
        self._serials = count((life << LIFE_BITS) + 1)
        self.changes: list[Change] = []
        """What came and went, in order. Who hears of it empties it."""

    @property
    def capacity_nbytes(self) -> int:
        return self._extents.limit_nbytes

    @property
    def used_nbytes(self) -> int:
        """Slots that are not free, whole pages."""
        return self._extents.used_nbytes

    @property
    def pinned_nbytes(self) -> int:
        return self._pins.nbytes

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_reservations(self) -> int:
        return len(self._writing)

    def __len__(self) -> int:
        """Readable records."""
        return self._num_readable

    def keys(self) -> list[bytes]:
        """Of all records, also while they are written."""
        return list(self._records)

    def readable(self) -> list[bytes]:
        """Of the readable records."""
        return [key for key, record in self._records.items() if not record.missing]

    def writing(self) -> set[bytes]:
        """Keys that somebody writes, also if they were removed meanwhile."""
        return {entry.slot.key for entry in self._writing.values()}

    def written_by(self, holder: str) -> list[Slot]:
        """The reservations of a holder."""
        return [entry.slot for entry in self._writing.values() if entry.holder == holder]

    def leases(self) -> list[Held]:
        """Oldest first."""
        return [hold.held(hold.request) for hold in self._leases.values()]

    def pins(self) -> list[Held]:
        return self._pins.held()

    def resize(self, capacity_nbytes: int) -> None:
        """So many bytes of the arena may be used, from its begin on. What lies beyond stays until it goes."""
        self._extents.limit_nbytes = capacity_nbytes // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES

    # --- Writing

    def reserve(
        self,
        keys: Iterable[bytes],
        nbytes: int,
        holder: str,
        share: Share = WHOLE,
        retention: Retention = USUAL,
        now_s: float = 0.0,
        *,
        most_nbytes: float = inf,
    ) -> tuple[Slot, ...]:
        """Slots of `nbytes` for those of `keys` of which nobody has this share, up to the first one without room.

        Room is made by eviction. A share that is being written by anybody, or overlaps one that is, counts as known.
        Each slot is the holder's, as far as its share goes, until it commits or abandons it.
        retention, now_s: for new records; one that is known already may only rise in priority.
        most_nbytes: of all these slots.
        """
        return tuple(
            slot
            for slot in self.reserving(keys, nbytes, holder, share, retention, now_s, most_nbytes=most_nbytes)
            if slot is not None
        )

    def reserving(
        self,
        keys: Iterable[bytes],
        nbytes: int,
        holder: str,
        share: Share = WHOLE,
        retention: Retention = USUAL,
        now_s: float = 0.0,
        *,
        most_nbytes: float = inf,
    ) -> Iterator[Slot | None]:
        """The same one key at a time, so that others use the catalog in between; None for a key that gets no slot."""
        reserved_nbytes, parts = 0, (1 << share.end) - (1 << share.begin)  # a bit for each
        every = (1 << share.total) - 1
        for key in keys:
            record = self._records.get(key)
            if record is not None and parts == every and record.missing and not record.writers:
                self._forget(record)  # others began it, and this one brings all of it
                record = None
            if reserved_nbytes + nbytes > most_nbytes:
                return
            if record is None:
                offset = self._take(nbytes, retention.tenant)
                if offset is None:
                    return
                self._turns.used_nbytes[retention.tenant] += nbytes
                slot = Slot(next(self._serials), key, offset, nbytes)
                record = self._records[key] = Record(
                    slot, share.total, every, every, retention, now_s + retention.ttl_s, float("inf")
                )
                if record.expires_s < inf:
                    self._deadlines.add(record.expires_s, record)
                self._raise(record, retention, now_s)
                if key in self.sessions.kept:
                    self.sessions.place(key, is_below=False)
                    self.rank([key])
            elif share.total == record.total and not parts & ~record.free:
                slot = record.slot._replace(serial=next(self._serials))
            else:
                if retention.priority > record.retention.priority:
                    self._raise(record, retention, now_s)
                yield None
                continue
            record.free &= ~parts
            record.writers += 1
            self._writing[slot.serial] = Writing(slot, record, parts, holder)
            reserved_nbytes += nbytes
            yield slot

    def completes(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those of them whose records will be readable when they are committed."""
        writing = [self._writing[slot.serial] for slot in slots if slot.serial in self._writing]
        return [entry.slot for entry in writing if entry.record.missing == entry.parts]

    def stands(self, lease: SlotLease) -> bool:
        """Whether it has not ended."""
        return lease.serial in self._leases

    def place(self, slots: Sequence[Slot]) -> None:
        """These slots are committed next, in pieces. The policy knows their records from now on: it is to hear of the
        last one of a prompt first, and listeners of the first one first."""
        for slot in reversed(slots):
            if slot.serial in self._writing:
                self._place(self._writing[slot.serial].record)

    def _place(self, record: Record) -> None:
        if record.listed and not record.resident:
            record.resident = True
            self._insert(record)

    def commit(self, slots: Sequence[Slot], expires_s: float = float("inf")) -> list[bytes]:
        """The slots, in the order of the prompt, hold their shares for good; returns the keys that are readable now.

        A reservation that is over is ignored, and a key that was removed meanwhile stays so. expires_s: when they are
        found no more, if that is sooner than was asked.
        """
        readable: list[Slot] = []
        for slot in reversed(slots):  # the head of a prefix is the newest for the policy
            writing = self._writing.pop(slot.serial, None)
            if writing is None:
                continue
            record = writing.record
            record.writers -= 1
            record.missing &= ~writing.parts
            if expires_s < record.expires_s:
                record.expires_s = expires_s
                self._deadlines.add(expires_s, record)
            self._place(record)
            if record.listed and not record.missing:
                self._num_readable += 1
                readable.append(slot)
            self._free_if_unused(record)
        readable.reverse()  # who is told of a record knows the one before it
        self.changes += [Change("stored", slot.key, slot.nbytes) for slot in readable]
        return [slot.key for slot in readable]

    def abandon(self, slots: Iterable[Slot]) -> None:
        """Nothing of use is in these shares, and nobody writes to them any more. What is over already is ignored."""
        for slot in slots:
            writing = self._writing.pop(slot.serial, None)
            if writing is not None:
                record = writing.record
                record.writers -= 1
                record.free |= writing.parts
                if not record.writers and not record.resident:
                    self._unlist(record)
                self._free_if_unused(record)

    # --- Reading

    def lookup(self, keys: Iterable[bytes]) -> int:
        """How many leading keys are readable now. Promises nothing."""
        found = 0
        for key in keys:
            record = self._records.get(key)
            if record is None or record.missing:
                break
            found += 1
        return found

    def expires_s(self, key: bytes) -> float:
        """When a record is found no more."""
        return self._records[key].expires_s if key in self._records else float("-inf")

    def lease(self, keys: Sequence[bytes], holder: str, request: str, deadline_s: float) -> SlotLease:
        """The longest readable prefix of `keys`, kept until `release` or `deadline_s` of the caller's clock.

        request: whose lease it is, for reports.
        """
        records = [self._records[key] for key in keys[: self.lookup(keys)]]
        lease = SlotLease(next(self._serials), tuple([record.slot for record in records]))
        held = {record.slot.serial: record for record in records}  # a key may be asked for twice
        for record in held.values():
            record.leases += 1
        if held:
            self._leases[lease.serial] = Hold(held, holder, request, deadline_s)
        return lease

    def release(self, lease: SlotLease, *, used: bool = False) -> bool:
        """End the lease; whether it stood until now. If not, what was read under it counts for nothing.

        used: somebody wanted the records, which postpones their eviction; that of a prompt's head most.
        """
        if not lease.slots:
            return True
        hold = self._leases.pop(lease.serial, None)
        if hold is not None:
            for record in reversed(hold.records.values()) if used else ():
                if record.listed and record.slot.key in self.sessions.kept:
                    self.rank([record.slot.key])
                elif record.listed:
                    self._turns.touch(record.slot.key)
            self._let_go(hold)
        return hold is not None

    def expire(self, now_s: float) -> int:
        """End leases whose deadline is over; how many. Forget records, priorities, sessions, whose time is over.

        `_MOST_DUE` records of each kind at most: see `is_due`.
        """
        self.sessions.expire(now_s)
        self.forget_ended()
        for record in islice(self._deadlines.due(now_s), _MOST_DUE):
            if record.expires_s <= now_s:
                self._forget(record)
            elif record.lapses_s <= now_s:
                self._set_priority(record, DEFAULT_PRIORITY)
        return self._end_leases([serial for serial, hold in self._leases.items() if hold.deadline_s <= now_s])

    def is_due(self, now_s: float) -> bool:
        """Whether the time of some record, session or lease is over, which `expire` is to end."""
        over = any(hold.deadline_s <= now_s for hold in self._leases.values())
        return over or self._deadlines.next_s <= now_s or self.sessions.is_due(now_s)

    def holder_gone(self, holder: str) -> bool:
        """The holder has ended and touches nothing any more. So its reservations and pins end, and its leases: of
        `_MOST_DUE` records at once; whether there are more."""
        self.abandon(self.written_by(holder))
        self._pins.end(holder=holder)
        serials = [serial for serial, hold in self._leases.items() if hold.holder == holder]
        return self._end_leases(serials) < len(serials)

    # --- Keeping and dropping

    def pin(self, keys: Sequence[bytes], name: str, holder: str = "") -> int:
        """Keep the longest readable prefix of `keys` that the quota allows; how many keys.

        Until `unpin(name)`, or the end of the holder's life.
        """
        return self._pins.add([self._records[key] for key in keys[: self.lookup(keys)]], name, holder)

    def unpin(self, name: str) -> int:
        """Take back all pins of that name; of how many records."""
        return self._pins.end(name=name)

    def rank(self, keys: Sequence[bytes]) -> list[bytes]:
        """Have records go in the turn that the sessions give them now, as the newest of it; keys of those that only
        memory has, and that can be read: tiers are to get them next."""
        owed = []
        for key in reversed(keys):  # the head of a prefix is the newest, as in `commit`
            record = self._records.get(key)
            if record is None:
                continue
            rank = self.sessions.rank(key)
            if rank == KEPT and not record.missing:
                owed.append(key)
            if rank is not None and rank == record.rank:
                self._turns.touch(key)
            else:
                self._set_rank(record, rank)
            self._keep_to_share(record)
        owed.reverse()
        return owed

    def _keep_to_share(self, newest: Record) -> None:
        """Sessions keep no more than their share: what was used longest ago is as others, as if it was used now; this
        one instead, where no tier has anything of the rest."""
        for _ in range(_MOST_OUT):  # more after the arena has shrunk: later, with others
            if self._kept_nbytes <= self.capacity_nbytes // _KEPT_SHARE:
                return
            oldest = self._turns.evict(lambda _: True, from_priority=HELD)
            self._set_rank(newest if oldest is None else self._records[oldest], None)
            if oldest is None:
                return

    def forget_ended(self, of: Holder | None = None) -> bool:
        """Of what ended sessions keep, or one of them, `_MOST_DUE` records at most; whether there may be more."""
        gone = self.sessions.take_ended(_MOST_DUE) if of is None else self.sessions.take_of(of, _MOST_DUE)
        self.rank(gone)
        return bool(gone)

    def is_below(self, key: bytes) -> None:
        """A tier has this record, too."""
        if key in self.sessions.kept:
            self.sessions.place(key, is_below=True)
            self.rank([key])

    def is_not_below(self, keys: Sequence[bytes]) -> list[bytes]:
        """No tier may have these records any more. What sessions keep of them stays here; as of `rank`."""
        for key in keys:
            self.sessions.place(key, is_below=False)
        return self.rank(keys)

    def set_quota(self, nbytes: int | None, tenant: str = "") -> None:
        """Of all tenants without one of their own, or of one; 0 sets none, None gives the tenant that of all again.

        `trim` evicts what exceeds it. Costs a look at each record where the first quota is set, or the last one taken
        away.
        """
        turns, were_told_apart = self._turns, self._turns.by_tenant
        if not tenant:
            turns.quota_nbytes = nbytes or 0
        elif nbytes is None:
            turns.own_quotas_nbytes.pop(tenant, None)
        else:
            turns.own_quotas_nbytes[tenant] = nbytes
        for record in self._records.values() if turns.by_tenant != were_told_apart else ():
            self._insert_again(record)

    def trim(self) -> bool:
        """Evict some of what exceeds quotas, as far as it may be; whether there may be more of it."""
        left = _MOST_DUE
        for tenant in list(self._turns.used_nbytes):
            while left and not self._turns.room_in_quota(tenant, 0):
                key = self._turns.evict(self._may_evict, tenant)
                if key is None:
                    break
                self._evicted(self._records[key])
                left -= 1
        return not left

    def quota(self, tenant: str = "") -> tuple[int, int]:
        """What a tenant uses, and its quota; of none in particular 0, and that of all. In bytes."""
        turns = self._turns
        return (turns.used_nbytes[tenant], turns.quota_of(tenant)) if tenant else (0, turns.quota_nbytes)

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forget these keys, pinned ones included; how many were known. Readers and writers finish first."""
        known = [self._records[key] for key in keys if key in self._records]
        for record in known:
            self._forget(record)
        return len(known)

    def clear(self) -> Emptied:
        """Forget all keys, also pinned ones. Readers and writers finish first. Returns what was known.

        `changes` say nothing of it. Costs as much as is read and written now, however many there are.
        """
        was = Emptied(self._records, *self._turns.clear())
        was.tables.extend((*self._extents.tables, self._deadlines.entries))
        held = {id(writing.record): writing.record for writing in self._writing.values()}
        for hold in self._leases.values():
            held.update((id(record), record) for record in hold.records.values())
        for record in held.values():
            record.listed = False
            record.pins = 0
        self._records, self._num_readable, self._kept_nbytes = {}, 0, 0
        self._deadlines = RecordDeadlines(self._records)
        self._pins.clear()
        self._extents = self._extents.only(record.slot.offset for record in held.values())
        for record in held.values():
            self._turns.used_nbytes[record.retention.tenant] += record.slot.nbytes
        return was

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        self._extents.check()
        leased = [record for hold in self._leases.values() for record in hold.records.values()]
        writing = [writing.record for writing in self._writing.values()]
        records = {id(record): record for record in (*self._records.values(), *writing, *leased)}
        assert self._num_readable == len(self.readable())
        assert self._extents.num_taken == len(records), "a slot is taken for no record"
        assert len(self._turns) == sum(record.resident for record in self._records.values())
        used = Counter[str]()
        for record in records.values():
            used[record.retention.tenant] += record.slot.nbytes
        assert used == self._turns.used_nbytes
        check(list(records.values()), leased, list(self._writing.values()))
        self._pins.check(records.values())
        self.sessions.check()
        kept = [record.slot.nbytes for record in self._records.values() if record.rank is not None]
        assert self._kept_nbytes == sum(kept) <= self.capacity_nbytes

    def _take(self, nbytes: int, tenant: str) -> int | None:
        """Bytes of the arena, if need be those of records that may go; of the tenant's own where its quota ends."""
        if nbytes > self.capacity_nbytes:
            return None
        while not self._turns.room_in_quota(tenant, nbytes):
            key = self._turns.evict(self._may_evict, tenant)
            if key is None:
                return None
            self._evicted(self._records[key])
        evicted_nbytes = 0
        while (offset := self._extents.take(nbytes)) is None:
            key = self._turns.evict(self._may_evict) if evicted_nbytes < _MAX_WASTE * nbytes else None
            if key is None:
                return None
            record = self._records[key]
            evicted_nbytes += record.slot.nbytes
            self._evicted(record)
        return offset

    def _evicted(self, record: Record) -> None:
        self._unlist(record)
        if not record.missing:
            self.changes.append(Change("evicted", record.slot.key, record.slot.nbytes))
        self._free_if_unused(record)

    def _raise(self, record: Record, retention: Retention, now_s: float) -> None:
        """Give it that priority, for as long as it lasts if that is more than the default."""
        self._set_priority(record, retention.priority)
        if retention.priority > DEFAULT_PRIORITY:
            record.lapses_s = now_s + retention.priority_s
            self._deadlines.add(record.lapses_s, record)

    def _set_priority(self, record: Record, priority: int) -> None:
        if priority != record.retention.priority:
            record.retention = record.retention._replace(priority=priority)
            self._insert_again(record)

    def _set_rank(self, record: Record, rank: int | None) -> None:
        if rank != record.rank:
            self._kept_nbytes += record.slot.nbytes * ((rank is not None) - (record.rank is not None))
            record.rank = rank
            self._insert_again(record)

    def _insert_again(self, record: Record) -> None:
        if record.resident:
            self._turns.remove(record.slot.key)
            self._insert(record)

    def _insert(self, record: Record) -> None:
        retention = record.retention
        if record.rank is not None:
            retention = retention._replace(priority=record.rank)
        self._turns.insert(record.slot.key, record.slot.nbytes, retention)

    def _may_evict(self, key: bytes) -> bool:
        record = self._records[key]
        return not record.leases and not record.pins and not record.writers

    def _forget(self, record: Record) -> None:
        """It is not wanted any more. Somebody may still read or write it."""
        self._unlist(record)
        if record.resident:
            self._turns.remove(record.slot.key)
        if not record.missing:
            self.changes.append(Change("removed", record.slot.key, record.slot.nbytes))
        self._free_if_unused(record)

    def _unlist(self, record: Record) -> None:
        if record.listed:
            record.listed = False
            self._num_readable -= not record.missing
            del self._records[record.slot.key]
            self._kept_nbytes -= record.slot.nbytes * (record.rank is not None)
        self._pins.drop(record)

    def _end_leases(self, serials: Sequence[Serial]) -> int:
        """Of `_MOST_DUE` records, or of one lease; how many leases."""
        num_ended = num_records = 0
        while num_ended < len(serials) and num_records < _MOST_DUE:
            hold = self._leases.pop(serials[num_ended])
            self._let_go(hold)
            num_ended, num_records = num_ended + 1, num_records + len(hold.records)
        return num_ended

    def _let_go(self, hold: Hold) -> None:
        for record in hold.records.values():
            record.leases -= 1
            self._free_if_unused(record)

    def _free_if_unused(self, record: Record) -> None:
        if not record.listed and not record.writers and not record.leases:
            self._extents.give_back(record.slot.offset)
            self._turns.give_back(record.retention.tenant, record.slot.nbytes)
