"""`Slot`, `Share`, `SlotLease`, `Retention`: what a catalog and its users say to each other of an arena."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Literal, NamedTuple

Serial = int
"""Names one reservation or lease for ever, also among those of other lives of the store (`life_of`)."""

LIFE_BITS = 32
"""Of a serial, from its lowest bit on: which one of that life."""
MAX_LIFE = 1 << 30
MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
"""As TensorRT-LLM counts retention."""
HELD, KEPT = MAX_PRIORITY + 1, MAX_PRIORITY + 2
"""Above what requests may ask: records of sessions that a tier has, too, and records that are not evicted."""
MAX_PRIORITY_S = 3600.0


def life_of(serial: Serial) -> int:
    """Of which life of the store it is."""
    return serial >> LIFE_BITS


class Share(NamedTuple):
    """What one holder writes of a record: parts [begin, end) of `total` equal ones."""

    begin: int = 0
    end: int = 1
    total: int = 1


WHOLE = Share()


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


class Slot(NamedTuple):
    serial: Serial
    """Of its reservation; in a lease the record's first one. A key that is dropped and stored again has another."""
    key: bytes
    offset: int
    """Bytes from the start of the arena."""
    nbytes: int


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
