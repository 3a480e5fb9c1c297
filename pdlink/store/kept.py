"""What a catalog remembers: records, reservations, what leases and pins keep, and when the time of records is over.

No clock, no lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.store.slots import Held

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pdlink.store.eviction import EvictionPolicy
    from pdlink.store.slots import Retention, Serial, Slot

_STALE = 64
"""Entries of records that are gone, beside some for each that is there, before they are sorted out."""


@dataclass(slots=True, eq=False)
class Record:
    slot: Slot
    total: int
    """Parts that shares are counted in."""
    free: int
    """A bit for each part that no share has: neither reserved nor committed."""
    missing: int
    """A bit for each part that is not committed; 0 when readable."""
    retention: Retention
    expires_s: float
    """When it is found no more."""
    lapses_s: float
    """When it has the default priority again."""
    writers: int = 0
    listed: bool = True
    """Whether its key leads to it."""
    resident: bool = False
    """Whether the policy knows it: from the first commit on, so that one that nobody completes goes in its turn."""
    leases: int = 0
    pins: int = 0
    rank: int | None = None
    """Instead of its priority, while sessions keep it."""


class Writing(NamedTuple):
    """A reservation."""

    slot: Slot
    record: Record
    parts: int
    holder: str


@dataclass(slots=True, eq=False)
class Hold:
    """What a lease or the pins of one name keep."""

    records: dict[Serial, Record] = field(default_factory=dict)
    """By the serial of their slots."""
    holder: str = ""
    request: str = ""
    deadline_s: float = float("inf")

    def held(self, request: str) -> Held:
        nbytes = sum(record.slot.nbytes for record in self.records.values())
        return Held(self.holder, request, len(self.records), nbytes, self.deadline_s)


class Pins:
    """Records that a name keeps from eviction, until it takes that back or its holder's life ends, in a quota.

    Counts in each record how many pin it.
    """

    def __init__(self, quota_nbytes: int) -> None:
        self._quota_nbytes = quota_nbytes
        self.nbytes = 0
        """Of the records that are pinned."""
        self._holds: dict[tuple[str, str], Hold] = {}
        """By holder and name."""

    def held(self) -> list[Held]:
        return [hold.held(name) for (_, name), hold in self._holds.items()]

    def add(self, records: Iterable[Record], name: str, holder: str) -> int:
        """Pin the leading ones that the quota allows; how many."""
        hold = self._holds.get((holder, name), Hold(holder=holder))
        pinned = 0
        for record in records:
            if record.slot.serial not in hold.records:
                nbytes = 0 if record.pins else record.slot.nbytes
                if self.nbytes + nbytes > self._quota_nbytes:
                    break
                self.nbytes += nbytes
                record.pins += 1
                hold.records[record.slot.serial] = record
            pinned += 1
        if hold.records:
            self._holds[holder, name] = hold
        return pinned

    def end(self, *, name: str | None = None, holder: str | None = None) -> int:
        """Take back the pins of that name, or of that holder; of how many records."""
        ended = [pins for pins in self._holds if holder == pins[0] or name == pins[1]]
        records = [record for pins in ended for record in self._holds.pop(pins).records.values()]
        for record in records:
            record.pins -= 1
            self.nbytes -= 0 if record.pins else record.slot.nbytes
        return len({record.slot.serial for record in records})

    def drop(self, record: Record) -> None:
        """It has gone."""
        if record.pins:
            record.pins = 0
            self.nbytes -= record.slot.nbytes
            for hold in self._holds.values():
                hold.records.pop(record.slot.serial, None)

    def clear(self) -> None:
        """All have gone."""
        self.nbytes = 0
        self._holds = {}

    def check(self, records: Collection[Record]) -> None:
        """Raise AssertionError at the first broken invariant. records: all that take room."""
        for record in records:
            assert record.pins == sum(record.slot.serial in hold.records for hold in self._holds.values())
        assert self.nbytes == sum(record.slot.nbytes for record in records if record.pins)
        assert self.nbytes <= self._quota_nbytes


class RecordDeadlines:
    """When records expire or lose their priority. Costs a push of a heap for each."""

    def __init__(self, records: Mapping[bytes, Record]) -> None:
        """records: all that are there, by key."""
        self._records = records
        self.entries: list[tuple[float, Serial, bytes]] = []
        """A heap. Some may be of records that are gone."""

    def add(self, at_s: float, record: Record) -> None:
        """Have `due` give the record from then on, if it is there."""
        heappush(self.entries, (at_s, record.slot.serial, record.slot.key))
        if len(self.entries) > _STALE + 3 * len(self._records):
            alive = {(known.slot.serial, key) for key, known in self._records.items()}
            self.entries = [entry for entry in self.entries if entry[1:] in alive]
            heapify(self.entries)

    @property
    def next_s(self) -> float:
        """When to look again, perhaps at a record that is gone."""
        return self.entries[0][0] if self.entries else inf

    def due(self, now_s: float) -> Iterator[Record]:
        """Each one once for each deadline that is over. Records may go, and deadlines come, between two."""
        while self.entries and self.entries[0][0] <= now_s:
            _, serial, key = heappop(self.entries)
            record = self._records.get(key)
            if record is not None and record.slot.serial == serial:
                yield record


class Emptied(NamedTuple):
    """What a catalog had before it was cleared: for one who frees it piece by piece, without the catalog's lock.

    A million records that are freed at once stop all threads of the process for a third of a second.
    """

    records: dict[bytes, Record]
    policies: list[EvictionPolicy]
    tables: list[dict[Any, Any] | set[Any] | list[Any]]
    """That nobody uses any more."""

    def free(self) -> None:
        for policy in self.policies:
            while policy.evict(lambda _: True) is not None:
                pass
        for table in self.tables:
            take = table.popitem if isinstance(table, dict) else table.pop
            while table:
                take()


def check(records: Sequence[Record], leased: Sequence[Record], writing: Sequence[Writing]) -> None:
    """Raise AssertionError at the first broken invariant. leased: once for each lease."""
    taken = sorted((record.slot.offset, record.slot.nbytes) for record in records)
    for (offset, nbytes), (following, _) in zip(taken, taken[1:], strict=False):
        assert offset + nbytes <= following, "two records share bytes"
    num_leases = Counter(map(id, leased))
    reserved_of: dict[int, list[int]] = {}
    for entry in writing:
        reserved_of.setdefault(id(entry.record), []).append(entry.parts)
    for record in records:
        reserved = reserved_of.get(id(record), [])
        assert record.leases == num_leases[id(record)]
        assert record.writers == len(reserved)
        assert record.resident or record.writers or record.leases, "a record is kept for nothing"
        assert record.missing or not record.free
        assert sum(reserved) == record.missing & ~record.free, "shares overlap"
