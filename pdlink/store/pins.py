"""`Pins`: records that a name keeps from eviction, until it takes that back or its holder's life ends, in a quota."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.store.kept import Hold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pdlink.store.kept import Record
    from pdlink.store.slots import Held


class Pins:
    """Counts in each record how many pin it. Not thread-safe."""

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
