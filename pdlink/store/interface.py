"""`AnyStore`: the verbs by which engines, `Cache` and workers reach a store, in this process or in another one.

Each is one small message where the store is in another process. Payload is none of them: both sides map the arena,
and callers read and write the bytes of the slots that they hold themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pdlink.store.slots import USUAL, WHOLE, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from concurrent.futures import Future

    from pdlink.kv.hashing import Preimage
    from pdlink.memory.buffers import Bytes
    from pdlink.store.record import RecordShape
    from pdlink.store.scope import Scope, Scopes
    from pdlink.store.sessions import SessionTerms
    from pdlink.store.slots import Share, Slot

MEMORY = "memory"
"""The arena, among the names of places."""
REMOVED = " (removed)"
"""How the names of tiers end that were removed at run time: places are numbers of names, so they stay."""


class Found(NamedTuple):
    """A prefix that the store has, chunk by chunk."""

    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    """Per key 0 for the arena, else 1 + the index of a tier."""


class Forgotten(NamedTuple):
    """What a clear did."""

    records: int
    """That were in the arena."""
    durable: bool
    """Whether the next process knows of it, if this one ends before its tiers have forgotten. False where that cannot
    be noted (`tiers.state_dir`), and where no store answered."""


class RecordChange(NamedTuple):
    """A record has come to a place, or gone."""

    place: str
    is_there: bool
    key: bytes
    preimage: Preimage | None = None
    """Of the key of a record that has come, if the store was told it."""


class PlaceState(msgspec.Struct, frozen=True):
    name: str
    nbytes: int
    """Of records in it."""
    capacity_nbytes: int
    """0 where others decide that."""
    records: int | None
    """None where the tier does not count them."""
    answers: bool
    """False for a tier that is left alone since it failed or stalled."""
    forgets: bool = False
    """Whether a tier may still have what was cleared. It is not found there any more."""
    problem: str = ""
    """Why it keeps less than its settings say."""


class Kept(msgspec.Struct, frozen=True):
    """What a lease, or the pins of one name, keep in memory."""

    holder: str
    request: str
    """Or the name of the pins."""
    records: int
    nbytes: int
    age_s: float | None
    """None without a deadline: a pin, or a copy on its way into a tier."""
    ends_in_s: float | None


class SessionState(msgspec.Struct, frozen=True):
    """What one session keeps."""

    name: str
    tenant: str
    """Empty for requests without a `cache_salt`."""
    owner: str
    """Of the client's API key; empty without one."""
    records: int
    asked: int
    """Records of its last turn: more than `records` if the quota ended there."""
    nbytes: int
    waits: bool
    """Whether no turn of it runs."""
    ends_in_s: float


class StoreState(msgspec.Struct, frozen=True):
    """For operators."""

    places: list[PlaceState]
    pinned_nbytes: int
    pin_quota_nbytes: int
    writing: int
    """Reservations that nobody has committed or abandoned."""
    frozen: bool
    leases: list[Kept]
    pins: list[Kept]
    sessions: list[SessionState]
    sessions_nbytes: int
    """Of records that sessions keep; those of several count once."""
    session_quota_nbytes: int
    """Of those with one `cache_salt`."""


class AnyFetch(Protocol):
    """A prefix on its way into the arena, leased there until it is closed."""

    @property
    def done(self) -> Future[tuple[Slot, ...]]:
        """The leading chunks that are in the arena, once no more will come. Set in any thread."""

    def leading(self, first: int = 0) -> tuple[Slot, ...]:
        """Records that are in the arena by now, while others are read: from chunk `first` on, if those before it are.
        They stay until the fetch is closed."""

    def when_more(self, call: Callable[[], None]) -> None:
        """Call it, in any thread, when further leading chunks have come, until it is done."""

    def finish(self) -> None:
        """Wait no longer for what is still on its way."""

    @property
    def unchecked(self) -> Collection[bytes]:
        """Once it is done: keys of those chunks of which the reader compares the sums (`record.said_sums`)."""

    def close(self, wrong: Sequence[Slot] = ()) -> bool:
        """Give the leases back; whether all of them stood. If not, what was read counts for nothing.

        wrong: slots whose sums are not those of what was read: their records are forgotten.
        """


class AnyStore(ABC):
    """`Store` or `RemoteStore`. Thread-safe. Nothing waits for room; only look-ups and `flush` wait for tiers."""

    scopes: Scopes
    """Of the engines that use it; of a store in another process, of those of this one."""
    memory_settled: Callable[[int], None]
    """Told by a store in this process how many bytes from the arena's begin have memory that stays in the pages it is
    in. For one who pins them."""

    @property
    @abstractmethod
    def has_tiers(self) -> bool:
        """Whether a look-up may wait."""

    @property
    @abstractmethod
    def places(self) -> tuple[str, ...]:
        """Where records lie, by the index that `Found` gives: the arena and the tiers' names."""

    @property
    @abstractmethod
    def events(self) -> str:
        """Where another process publishes what is kept: ENDPOINT or ENDPOINT,REPLAY; empty if none does now."""

    @property
    @abstractmethod
    def lends_at(self) -> str:
        """The address at which stores of other nodes ask this one; empty if they cannot now."""

    @property
    @abstractmethod
    def wants_sums(self) -> bool:
        """Whether who fills a record may spare the store a pass over it by writing its sums (`record.said_sums`)."""

    @property
    @abstractmethod
    def array(self) -> Bytes:
        """The arena; a slot is `array[slot.offset :][: slot.nbytes]`."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Nobody may use slots any more."""

    # --- Reading

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> Found:
        """The longest prefix of `keys` that is known. Waits `timeout_s` at most for the tiers."""

    @abstractmethod
    def known_at(self, keys: Sequence[bytes], timeout_s: float) -> tuple[int, ...]:
        """The place of each key, as in `Found`; -1 where it is not known. Waits `timeout_s` at most for the tiers.

        For what is needed of a prompt only in part: the last chunks of a window, a state.
        """

    @abstractmethod
    def comes_from(self, address: str, keys: Sequence[bytes]) -> None:
        """The store of another node at this address may have them: look-ups that follow ask it, too.

        Waits for nothing. Does nothing in a store that lends to nobody.
        """

    @abstractmethod
    def announce(self, keys: Sequence[bytes], shape: RecordShape, preimages: Sequence[Preimage | None]) -> None:
        """Listeners hear what these keys are hashes of, as far as their records are in memory: nobody has said it of
        those that came from other stores. In the order of `keys`. Waits for nothing.
        """

    @abstractmethod
    def fetch(
        self,
        found: Found,
        shape: RecordShape,
        request: str,
        holder: str = "engine",
        retention: Retention = USUAL,
        *,
        checks: bool = False,
    ) -> AnyFetch:
        """Bring the prefix into the arena and keep it there until the fetch is closed.

        shape: of its records. request, holder: who the leases are of, for operators; a store in another process names
        the client as holder. retention: of what comes from below, but for its `ttl_s`: a record says that itself.
        checks: the caller compares the sums of the chunks that are `unchecked` then; else the store has done it.
        """

    # --- Writing

    @abstractmethod
    def reserve(
        self,
        keys: Sequence[bytes],
        shape: RecordShape,
        holder: str = "engine",
        share: Share = WHOLE,
        retention: Retention = USUAL,
    ) -> tuple[Slot, ...]:
        """Slots for the records of those keys of which this share is not here yet, up to the first one without room.

        Room is not made of the beginning of `keys`. Waits for memory from the system, for nobody else. Fill your
        share of each payload, then `commit` or `abandon` it.
        Raises CapacityExceeded if one can never fit; a store in another process warns instead.
        """

    @abstractmethod
    def commit(
        self,
        slots: Sequence[Slot],
        shape: RecordShape,
        preimages: Sequence[Preimage | None] = (),
        *,
        summed: bool = False,
    ) -> None:
        """The shares are there: others can read records that have all of theirs, and the tiers get a copy.

        preimages: of the slots' keys, for listeners; the store does not keep them. Not checked here.
        summed: the shares are whole records, with their sums in the header.
        """

    @abstractmethod
    def abandon(self, slots: Iterable[Slot]) -> None:
        """Nobody writes to the slots any more, and what is in them is of no use."""

    # --- Operators

    def know(self, scope: Scope, former: Scope | None = None) -> None:
        """An engine keeps such prompts here, for operators; no longer those of `former`. Also before `open`."""
        self.scopes.add(scope, former)

    @abstractmethod
    def hold(self, session: SessionTerms, keys: Sequence[bytes], sizes: Sequence[int], *, waits: bool) -> int:
        """Keep the records of these keys, and no others of its scope, for a session, also if they come later: in
        memory until a tier has them and others need the room, and in the tier. How many leading ones the quota
        allows.

        sizes: bytes of a record, in turns. waits: the session's turn has ended; for reports.
        Costs some hundredths of a second for ten thousand keys.
        """

    @abstractmethod
    def end_session(self, name: str, tenant: str, owner: str | None = None) -> bool:
        """It keeps nothing any more; whether it was known. owner: None for those of all."""

    @abstractmethod
    def clear(
        self, keys: Sequence[bytes] | None = None, places: Sequence[str] | None = None, *, ending: bytes = b""
    ) -> Forgotten:
        """Forget these records, or all, in these places, or everywhere: hidden now, removed from tiers later.

        ending: instead of `keys`: those whose keys end so (`hashing.ending`). Waits for the tiers to say which.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Have written to every tier what it was to get; whether all that was committed since the last one is there.

        Waits `timeout_s` at most, and not for a tier that takes nothing. False, too, where a record was evicted
        before a tier had it.
        """

    @abstractmethod
    def health(self) -> dict[str, bool]:
        """By place: whether what keeps memory in order works, and whether a tier answers."""

    @abstractmethod
    def gauges(self) -> dict[str, float]:
        """For metrics: bytes by kind."""

    @abstractmethod
    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        """Call `changed` for every record of memory and of the disk that is there, then for each that comes or goes.

        In any thread, with no lock held, one after the other for each place; it should be quick.
        """

    @abstractmethod
    def problems(self) -> dict[str, str]:
        """By place: why it keeps less than its settings say; empty while it does not."""
