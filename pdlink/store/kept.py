"""`Record`, `Writing`, `Hold`: what a catalog remembers of a record, of a reservation, of a lease or a pin."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.store.slots import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.store.policies.base import EvictionPolicy
    from pdlink.store.slots import Serial, Slot
    from pdlink.store.turns import Retention


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
