"""What the store asks of a tier below its arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pdlink.store.interface import RecordChange

DAMAGED = -1
"""What `Tier.get` gives for a record that was here and is not what was put. It is gone now."""


class Tier(Protocol):
    """Keeps records by key as opaque bytes, within its capacity.

    Methods block, and are called from several of the store's threads at once. Damaged, foreign and short records are
    misses, never wrong bytes. An OSError says that the medium fails: the store takes it for a miss, and keeps away
    for a while from a tier that fails often or takes longer than its deadline.
    """

    @property
    def name(self) -> str:
        """For messages and metrics: "disk", "shared", "valkey"."""

    @property
    def medium(self) -> str:
        """What keeps the records, by a name without secrets by which the next process knows it again. Two tiers of
        one name share it."""

    @property
    def is_server(self) -> bool:
        """Whether it is asked when the store begins, so that people hear if nobody answers."""

    @property
    def verifies(self) -> bool:
        """Whether `get` compares a checksum of key and record that `put` made, so that the store need not hash the
        payload itself, neither before `put` nor after `get`."""

    @property
    def answers(self) -> bool:
        """False while its medium has not answered since the tier was made; everything is a miss meanwhile."""

    @property
    def problem(self) -> str:
        """Why it keeps less than its settings say, empty while it does not; operators see it."""

    @property
    def nbytes(self) -> int:
        """What it holds now; 0 where it cannot tell."""

    @property
    def capacity_nbytes(self) -> int:
        """What it may hold; 0 where others decide that."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are probably here. `get` decides."""

    def get(self, key: bytes, into: memoryview) -> int | None:
        """Read the record to the beginning of `into`; its bytes. None if it is not here or longer, or `DAMAGED`.

        After a miss the contents of `into` are undefined, and a damaged record is gone, so that it can be put again.
        A record that made room for others while it was read is not damaged.
        """

    def put(self, key: bytes, record: memoryview) -> bool:
        """Keep a copy; whether it is here now. A key that is here already is left as it is."""

    def remove(self, key: bytes) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None:
        """Safe to call twice. What can outlive the process does. Every later call is a miss."""


@runtime_checkable
class RunTier(Protocol):
    """What a tier has in addition that moves several records in one call, for less than one call each."""

    def get_run(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        """As `Tier.get`, of each key and the memory for its record. After an OSError each can be asked for alone."""

    def put_run(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """As `Tier.put`, of each. No key twice. After an OSError some may be here."""


@runtime_checkable
class TellingTier(Protocol):
    """What a tier has in addition that knows all that comes and goes: one that this process has for itself."""

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        """As `AnyStore.listen`, for the records of this tier."""

    def leave(self) -> None:
        """Tell listeners that all its records have gone, and nothing from then on: the store does not use it any
        more."""


@runtime_checkable
class ListingTier(Protocol):
    """What a tier has in addition that can say which records it has."""

    def keys_ending(self, ending: bytes) -> list[bytes]:
        """Keys of all records, of all writers, that end so. Costs a look at every key. Raises OSError."""


@runtime_checkable
class KeepingTier(Protocol):
    """What a tier has in addition that can keep some records while it makes room: one of this process alone."""

    @property
    def capacity_nbytes(self) -> int:
        """As of `Tier`."""

    def keep(self, keys: Collection[bytes]) -> None:
        """Make no room by dropping records whose keys are in it. Called once; what is in it changes meanwhile, in any
        thread, and is half of the capacity at most."""


@runtime_checkable
class SettlingTier(Protocol):
    """What a tier has in addition whose removals the host may lose with its power."""

    def settle(self) -> None:
        """What was removed stays so. Raises OSError."""


@runtime_checkable
class RoutedTier(Protocol):
    """What a tier has in addition that looks for records only where it was told that they are."""

    def note(self, address: str, keys: Sequence[bytes]) -> None:
        """Of these keys: there. Waits for nothing."""


class ReadOnly:
    """Base of a tier that others fill: the store writes nothing to it, and can only stop to look for a record."""

    is_server = False
    verifies = False
    answers = True
    problem = ""
    nbytes = 0
    capacity_nbytes = 0

    def put(self, _key: bytes, _record: memoryview) -> bool:
        return False

    def clear(self) -> None:
        """Others keep what they have."""
