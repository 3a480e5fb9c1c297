"""`Deadlines`: when to look at which record of a catalog again. No clock in it."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import isinf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdlink.store.kept import Record
    from pdlink.store.slots import Serial

_STALE = 64
"""Entries of records that are gone, beside some for each that is there, before they are sorted out."""


class Deadlines:
    """Costs a push of a heap for each record with a deadline."""

    def __init__(self, records: Mapping[bytes, Record]) -> None:
        """records: all that are there, by key."""
        self._records = records
        self._heap: list[tuple[float, Serial, bytes]] = []
        """Some may be of records that are gone."""

    def __len__(self) -> int:
        """Entries, also of records that are gone."""
        return len(self._heap)

    def add(self, at_s: float, record: Record) -> None:
        """Have `due` give the record from then on, if it is there."""
        if isinf(at_s):
            return
        heappush(self._heap, (at_s, record.slot.serial, record.slot.key))
        if len(self._heap) > _STALE + 3 * len(self._records):
            alive = {(known.slot.serial, key) for key, known in self._records.items()}
            self._heap = [entry for entry in self._heap if entry[1:] in alive]
            heapify(self._heap)

    def due(self, now_s: float) -> Iterator[Record]:
        """Each one once for each deadline that is over. Records may go, and deadlines come, between two."""
        while self._heap and self._heap[0][0] <= now_s:
            _, serial, key = heappop(self._heap)
            record = self._records.get(key)
            if record is not None and record.slot.serial == serial:
                yield record

    def clear(self) -> None:
        self._heap.clear()
