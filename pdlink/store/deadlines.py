"""`RecordDeadlines`: when to look at which record of a catalog again. No clock in it."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf, isinf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdlink.store.kept import Record
    from pdlink.store.slots import Serial

_STALE = 64
"""Entries of records that are gone, beside some for each that is there, before they are sorted out."""


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
