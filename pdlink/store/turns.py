"""`Turns`: which record goes next, where records have priorities and tenants a quota; `RecordDeadlines`: which one's
time is over. Pure: no clock, no lock.

Each class of records has an eviction policy of its own. The lowest priority goes first, and within it the tenant that
uses most.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import inf, isinf
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdlink.store.kept import Record
    from pdlink.store.policies.base import EvictionPolicy, Key
    from pdlink.store.slots import Serial

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
"""As TensorRT-LLM counts retention."""
MAX_PRIORITY_S = 3600.0
_STALE = 64
"""Entries of records that are gone, beside some for each that is there, before they are sorted out."""


class Retention(NamedTuple):
    """What a request asks about the records that it stores."""

    tenant: str = ""
    """Whose quota they count against; "" for nobody's."""
    priority: int = DEFAULT_PRIORITY
    """Lower ones are evicted first."""
    priority_s: float = MAX_PRIORITY_S
    """How long that priority lasts; the default one afterwards."""
    ttl_s: float = float("inf")
    """How long they are found, counted from when they are stored."""


USUAL = Retention()


@lru_cache(1024)
def tenant_of(salt: str) -> str:
    """A name of one length for requests with one salt; "" without one."""
    return hashlib.blake2b(salt.encode(), digest_size=16).hexdigest() if salt else ""


class _Class(NamedTuple):
    priority: int
    tenant: str


class Turns:
    def __init__(self, policy: EvictionPolicy, *, quota_nbytes: int = 0) -> None:
        """policy: of all records, as long as priorities and tenants are alike; others get one like it.

        quota_nbytes: of each tenant; 0 sets none, and then all tenants are one.
        """
        self.quota_nbytes = quota_nbytes
        self.used_nbytes: Counter[str] = Counter()
        """Of slots, by tenant."""
        self._usual = _Class(DEFAULT_PRIORITY, "")
        self._policies: dict[_Class, EvictionPolicy] = {self._usual: policy}
        self._class_of: dict[Key, _Class] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    def insert(self, key: Key, nbytes: int, retention: Retention) -> None:
        kind = _Class(retention.priority, retention.tenant if self.quota_nbytes else "")
        self._class_of[key] = kind
        if kind not in self._policies:
            self._policies[kind] = type(self._policies[self._usual])()
        self._policies[kind].insert(key, nbytes)

    def touch(self, key: Key) -> None:
        """Unknown ones are ignored."""
        if key in self._class_of:
            self._policies[self._class_of[key]].touch(key)

    def remove(self, key: Key) -> None:
        """Unknown ones are ignored."""
        if key in self._class_of:
            kind = self._class_of.pop(key)
            self._policies[kind].remove(key)
            self._drop_if_empty(kind)

    def clear(self) -> tuple[list[EvictionPolicy], list[dict[Any, Any] | set[Any] | list[Any]]]:
        """No key is known any more, and nothing is used. What it had, as `Emptied` wants it."""
        was: list[EvictionPolicy] = list(self._policies.values())
        tables: list[dict[Any, Any] | set[Any] | list[Any]] = [self._class_of]
        self._policies = {self._usual: type(self._policies[self._usual])()}
        self._class_of = {}
        self.used_nbytes = Counter()
        return was, tables

    def room_in_quota(self, tenant: str, nbytes: int) -> bool:
        return not self.quota_nbytes or not tenant or self.used_nbytes[tenant] + nbytes <= self.quota_nbytes

    def give_back(self, tenant: str, nbytes: int) -> None:
        self.used_nbytes[tenant] -= nbytes
        if not self.used_nbytes[tenant]:
            del self.used_nbytes[tenant]

    def evict(self, may_evict: Callable[[Key], bool], tenant: str | None = None) -> Key | None:
        """As `EvictionPolicy.evict`. tenant: only of that one. Costs a look at each class."""
        for kind in sorted(self._policies, key=lambda kind: (kind.priority, -self.used_nbytes[kind.tenant])):
            key = self._policies[kind].evict(may_evict) if tenant in (None, kind.tenant) else None
            if key is not None:
                del self._class_of[key]
                self._drop_if_empty(kind)
                return key
        return None

    def _drop_if_empty(self, kind: _Class) -> None:
        if kind != self._usual and not len(self._policies[kind]):
            del self._policies[kind]


class RecordDeadlines:
    """Costs a push of a heap for each record with a deadline."""

    def __init__(self, records: Mapping[bytes, Record]) -> None:
        """records: all that are there, by key."""
        self._records = records
        self.entries: list[tuple[float, Serial, bytes]] = []
        """A heap. Some may be of records that are gone."""

    def __len__(self) -> int:
        """Entries, also of records that are gone."""
        return len(self.entries)

    def add(self, at_s: float, record: Record) -> None:
        """Have `due` give the record from then on, if it is there."""
        if isinf(at_s):
            return
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

    def clear(self) -> None:
        self.entries.clear()
