"""`Slot`, `Share`, `SlotLease`: what a catalog and its users say to each other of room in an arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pdlink.memory.buffers import Bytes

Serial = int
"""Names one reservation or lease for ever, also among those of other lives of the store (`life_of`)."""

LIFE_BITS = 32
"""Of a serial, from its lowest bit on: which one of that life."""
MAX_LIFE = 1 << 30


def life_of(serial: Serial) -> int:
    """Of which life of the store it is."""
    return serial >> LIFE_BITS


class Share(NamedTuple):
    """What one holder writes of a record: parts [begin, end) of `total` equal ones."""

    begin: int = 0
    end: int = 1
    total: int = 1

    @property
    def parts(self) -> int:
        """A bit for each."""
        return (1 << self.end) - (1 << self.begin)


WHOLE = Share()


class Slot(NamedTuple):
    serial: Serial
    """Of its reservation; in a lease the record's first one. A key that is dropped and stored again has another."""
    key: bytes
    offset: int
    """Bytes from the start of the arena."""
    nbytes: int

    def of(self, arena: Bytes) -> Bytes:
        """Its bytes."""
        return arena[self.offset : self.offset + self.nbytes]


class SlotLease(NamedTuple):
    """Records that stay where they are until the lease ends."""

    serial: Serial
    slots: tuple[Slot, ...]


class Held(NamedTuple):
    """What a lease, or the pins of one name, keep."""

    holder: str
    request: str
    """Or the name of the pins."""
    records: int
    nbytes: int
    deadline_s: float


class Change(NamedTuple):
    kind: Literal["stored", "evicted", "removed"]
    key: bytes
    nbytes: int
