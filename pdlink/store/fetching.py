"""`Fetching`: brings prefixes into the arena, and checks what is read. A `Fetch` is one of them.

What is in the arena is leased at once. What only a tier has is read into a reservation by that tier's threads, once
for all who want it meanwhile (`Arrival`). From the first chunk that finds no room on, nothing is brought: nobody
waits for room while holding some.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, takewhile
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from pdlink.store.below import FIRST_RUN_NBYTES, RUN_NBYTES
from pdlink.store.books import let_others, pieces
from pdlink.store.line import Line
from pdlink.store.record import Miss, header_of, seal, unseal
from pdlink.store.slots import WHOLE
from pdlink.store.tiers.base import DAMAGED
from pdlink.store.write_through import SELF

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdlink.memory.buffers import Bytes
    from pdlink.store.arena import Arena
    from pdlink.store.below import Below, GuardedTier
    from pdlink.store.books import Books
    from pdlink.store.interface import Found
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Retention, Slot, SlotLease
    from pdlink.store.write_through import WriteThrough

log = logging.getLogger(__name__)

_FIRST_RECORDS = 16
"""To make room for 128 takes 3 ms, in which a tier would have nothing to read."""


class Wanted(NamedTuple):
    """What `AnyStore.fetch` is asked for; what it says of each applies here."""

    found: Found
    shape: RecordShape
    request: str
    holder: str
    retention: Retention
    checks: bool


class Brought(NamedTuple):
    """A record that a tier had."""

    tier: GuardedTier
    expires_at_s: float
    summed: bool
    """Whether its header has sums."""
    checked: bool
    """Whether its payload is what was put; else who reads it compares the sums."""


@dataclass(eq=False)
class Arrival:
    """A record that a thread reads into its slot. Those who want it wait for the same one."""

    slot: Slot
    shape: RecordShape
    waiting: list[tuple[Fetch, int]] = field(default_factory=list)
    """Who, and which of their chunks it is."""

    @property
    def end(self) -> int:
        """Of the arena, where its slot ends."""
        return self.slot.offset + self.slot.nbytes

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for it."""
        return not all(fetch.closed for fetch, _ in self.waiting)

    def is_unchecked(self, brought: Mapping[bytes, Brought]) -> bool:
        """Whether it came, and nobody has compared its sums."""
        return self.slot.key in brought and not brought[self.slot.key].checked

    @property
    def checks(self) -> bool:
        """Whether one of them relies on the store to compare the sums."""
        return not all(fetch.wanted.checks for fetch, _ in self.waiting)


class Fetch:
    """Implements `AnyFetch`. Everything else of it is for `Fetching`, under the lock of the books."""

    def __init__(
        self, wanted: Wanted, give_up_s: float, deadline_s: float, release: Callable[[Fetch, Sequence[Slot]], bool]
    ) -> None:
        """give_up_s: when to go on with what is there. deadline_s: end of the leases."""
        self.wanted, self.give_up_s, self.deadline_s = wanted, give_up_s, deadline_s
        self.unchecked: set[bytes] = set()
        """As `AnyFetch.unchecked`."""
        self.slots: list[Slot | None] = []
        """One per chunk; None while it is on its way, or if it does not come."""
        self.leases: list[SlotLease] = []
        self.closed, self.stood = False, True
        """Whether it was closed, and whether all leases stood until then."""
        self.is_begun = False
        """Whether all chunks are in `slots` that will ever be."""
        self._num_leading, self._more = 0, _nothing
        self.failed_at: int | None = None
        """The first chunk that does not come."""
        self._release = release
        self.done: Future[tuple[Slot, ...]] = Future()
        """The leading chunks that are in the arena, once no more will come. Set in any thread."""

    def add(self, slot: Slot | None) -> int:
        """The next chunk; its index."""
        self.slots.append(slot)
        return len(self.slots) - 1

    def leading(self, first: int = 0) -> tuple[Slot, ...]:
        """As `AnyFetch.leading`. Cost: of the slots that it gives, also where thousands have come before."""
        found, end = [], len(self.slots)  # more may come meanwhile
        while first < end and (slot := self.slots[first]) is not None:
            found.append(slot)
            first += 1
        return tuple(found)

    def when_more(self, call: Callable[[], None]) -> None:
        """As `AnyFetch.when_more`."""
        self._more = call

    def tell(self) -> None:
        """Without the lock."""
        self._more()

    def settled(self, index: int, slot: Slot | None) -> bool:
        """Chunk `index` has come, or will not. Whether more leading chunks are there."""
        self.slots[index] = slot
        if slot is None and (self.failed_at is None or index < self.failed_at):
            self.failed_at = index
        before = self._num_leading
        while self._num_leading < len(self.slots) and self.slots[self._num_leading] is not None:
            self._num_leading += 1
        return self._num_leading > before

    @property
    def is_settled(self) -> bool:
        """Whether nothing that matters is on its way."""
        return self.is_begun and None not in self.slots[: self.failed_at]

    def finish(self) -> None:
        """Set `done`, if it is not; without the store's lock, because callbacks run here."""
        with suppress(InvalidStateError):
            self.done.set_result(self.leading())

    def close(self, wrong: Sequence[Slot] = ()) -> bool:
        """As `AnyFetch.close`."""
        return self._release(self, wrong)


def _nothing() -> None:
    """Nobody asked."""


class Fetching:
    """Thread-safe. `coming` and `late` are called with the lock of the books held."""

    def __init__(
        self,
        books: Books,
        below: Below,
        writing: WriteThrough,
        arena: Arena,
        *,
        verify: bool,
        tier_deadline_s: float,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Starts the verifier's thread. verify: check what is in memory, too, whenever it is read.

        tier_deadline_s: when a fetch goes on with what is there. lease_s: longest life of a fetch.
        """
        self._books, self._below, self._writing, self._arena = books, below, writing, arena
        self._verify, self._clock = verify, clock
        self._tier_deadline_s, self._lease_s = tier_deadline_s, lease_s
        self._verifier = Line("pdlink-store-verify")
        # Guarded by the lock of the books:
        self._arrivals: dict[bytes, Arrival] = {}
        self._fetches: set[Fetch] = set()

    def close(self) -> None:
        """After the tiers' threads."""
        self._verifier.close(self._tier_deadline_s)

    def coming(self, key: bytes) -> bool:
        """Whether a record is on its way into the arena."""
        return key in self._arrivals

    @property
    def brings(self) -> bool:
        """Whether somebody waited for records of tiers at the last `late`; of a stuck tier not for ever. Under the
        lock."""
        return bool(self._fetches)

    def late(self, now_s: float) -> list[Fetch]:
        """Fetches that go on now with what is there, or are done. The caller finishes them without the lock. Once."""
        late = [fetch for fetch in self._fetches if fetch.give_up_s <= now_s or fetch.done.done()]
        self._fetches.difference_update(late)
        return late

    def fetch(self, wanted: Wanted) -> Fetch:
        """As `AnyStore.fetch`. Chunks that others already bring are waited for."""
        now_s, shape = self._clock(), wanted.shape
        fetch = Fetch(wanted, now_s + self._tier_deadline_s, now_s + self._lease_s, self._release)
        to_check: list[tuple[int, Slot, SlotLease]] = []
        run_nbytes = FIRST_RUN_NBYTES
        for piece in pieces(list(zip(wanted.found.keys, wanted.found.places, strict=True)), first=_FIRST_RECORDS):
            begun: list[tuple[Arrival, int]] = []
            with self._books.lock:
                goes_on = self._begin(fetch, piece, to_check, begun, now_s)
                self._books.note()
            if begun:  # tiers read the first records meanwhile
                self._arena.begin(max(arrival.end for arrival, _ in begun))
            for index, of_tier in groupby(begun, key=itemgetter(1)):
                self._have_read([arrival for arrival, _ in of_tier], index, run_nbytes)
                run_nbytes = RUN_NBYTES
            if not goes_on:
                break
        with self._books.lock:
            self._fetches.add(fetch)
            fetch.is_begun = True
            settled = fetch.is_settled
        self._books.tell()
        if to_check and not self._verifier.put(partial(self._check_here, fetch, to_check, shape)):
            settled = True  # the store is closing
        if settled:
            fetch.finish()
        return fetch

    def _begin(
        self,
        fetch: Fetch,
        piece: Sequence[tuple[bytes, int]],
        to_check: list[tuple[int, Slot, SlotLease]],
        begun: list[tuple[Arrival, int]],
        now_s: float,
    ) -> bool:
        """Lease what is here of the next chunks, and reserve room for the rest; whether there was room.

        Under the lock. piece: keys and places. to_check, begun: get what is to be checked here, and to be read from
        which tier.
        """
        catalog, wanted = self._books.catalog, fetch.wanted
        first = self._lease(fetch, [key for key, _ in piece])
        for slot in first.slots:
            to_check += self._add_here(fetch, slot, first)
        self._writing.hit([slot.key for slot in first.slots])
        kept = wanted.retention._replace(ttl_s=inf)  # a record says itself how long it is found
        at = len(first.slots)
        while at < len(piece):
            key, before = piece[at][0], at
            if catalog.lookup([key]):
                lease = self._lease(fetch, [key])
                to_check += self._add_here(fetch, lease.slots[0], lease)
                at += 1
                continue
            if key in self._arrivals:
                self._arrivals[key].waiting.append((fetch, fetch.add(None)))
                at += 1
                continue
            fresh = [key for key, _ in takewhile(self._is_fresh, piece[at:])]
            for room in catalog.reserving(fresh, wanted.shape.nbytes, SELF, WHOLE, kept, now_s):
                if room is None:  # others write it, or it is asked for twice
                    break
                arrival = self._arrivals[room.key] = Arrival(room, wanted.shape, [(fetch, fetch.add(None))])
                begun.append((arrival, max(0, piece[at][1] - 1)))
                at += 1
            if at == before:
                return False
        return True

    def _is_fresh(self, chunk: tuple[bytes, int]) -> bool:
        """Whether the record of a key is not here, nor on its way."""
        return chunk[0] not in self._arrivals and not self._books.catalog.lookup(chunk[:1])

    def _lease(self, fetch: Fetch, keys: Sequence[bytes]) -> SlotLease:
        """Under the lock."""
        wanted = fetch.wanted
        lease = self._books.catalog.lease(keys, wanted.holder, wanted.request, fetch.deadline_s)
        fetch.leases.append(lease)
        return lease

    def _add_here(self, fetch: Fetch, slot: Slot, lease: SlotLease) -> list[tuple[int, Slot, SlotLease]]:
        """The next chunk of a fetch is in the arena; what `_check_here` has to check of it. Under the lock."""
        unchecked = slot.key in self._books.unchecked
        if self._verify or (unchecked and not fetch.wanted.checks):
            return [(fetch.add(None), slot, lease)]
        if unchecked:
            fetch.unchecked.add(slot.key)
        fetch.add(slot)
        return []

    def _release(self, fetch: Fetch, wrong: Sequence[Slot]) -> bool:
        """From the last chunk to the first: the head of a prompt is used last, and so evicted last."""
        catalog = self._books.catalog
        with self._books.lock:
            fetch.closed = True
            leases, fetch.leases = [lease for lease in fetch.leases if lease.slots], []
        at = {key: index for index, key in enumerate(fetch.wanted.found.keys)}
        leases.sort(key=lambda lease: at[lease.slots[0].key], reverse=True)
        for lease in leases:
            with self._books.lock:
                if catalog.stands(lease):
                    for slot in set(lease.slots).intersection(wrong):
                        self._found_wrong(slot, "payload_checksum")
                fetch.stood &= catalog.release(lease, used=True)
            if len(lease.slots) > 1 and lease is not leases[-1]:
                let_others()
        if wrong:
            self._books.tell()
        return fetch.stood

    def _found_wrong(self, slot: Slot, reason: str) -> None:
        """A record is not what was put. Under the lock, and a lease of it."""
        log.error("record %s has changed: %s", slot.key.hex()[:16], reason)
        if slot.key in self._books.unchecked:  # it came from a tier like that
            self._below.forget(slot.key)
        self._books.catalog.remove([slot.key])

    # --- The verifier's thread

    def _check_here(self, fetch: Fetch, here: Sequence[tuple[int, Slot, SlotLease]], shape: RecordShape) -> None:
        """Records that changed in memory are dropped, and end the prefix there."""
        for index, slot, lease in here:
            miss = unseal(self._arena.array[slot.offset :][: shape.nbytes], slot.key, shape)
            with self._books.lock:
                if self._books.catalog.stands(lease):
                    if miss is None:
                        self._books.unchecked.discard(slot.key)
                    else:
                        self._found_wrong(slot, miss.reason)
                fetch.settled(index, None if miss is not None else slot)
        self._books.tell()
        with self._books.lock:
            settled = fetch.is_settled
        if settled:
            fetch.finish()

    def _have_read(self, some: Sequence[Arrival], index: int, run_nbytes: int = FIRST_RUN_NBYTES) -> None:
        """Have a tier's threads bring these, or those of the next one if this one is not used any more."""
        if index >= len(self._below.tiers):
            self._arrived(some, {})
            return
        tier = self._below.tiers[index]
        for run in tier.runs([(one, one.slot.nbytes) for one in some], run_nbytes):
            if not tier.readers.put(partial(self._bring, run, index)):
                self._have_read(run, index + 1, run_nbytes)

    # --- The tiers' threads

    def _bring(self, run: Sequence[Arrival], index: int) -> None:
        """Read records of one shape into their slots, as far as anybody still waits for them and this tier has them
        whole. The next one is asked for the others, which these do not wait for."""
        brought: dict[bytes, Brought] = {}
        missing, late = set[Arrival](), set[Arrival]()
        try:
            with self._books.lock:
                wanted = [(one, one.checks) for one in run if one.is_wanted]
            has_memory = self._arena.commit(max((one.end for one, _ in wanted), default=0))
            fitting = [each for each in wanted if each[0].end <= has_memory]
            brought = self._read(fitting, index)
            with self._books.lock:  # somebody may have come meanwhile
                again = [(one, True) for one in run if one.checks and one.is_unchecked(brought)]
                wanted_now = {one for one in run if one.is_wanted}
            for one, _ in again:
                del brought[one.slot.key]
            brought |= self._read(again, index)
            late = wanted_now.difference([one for one, _ in wanted])
            if index + 1 < len(self._below.tiers):
                missing = {one for one, _ in fitting if one.slot.key not in brought}
        finally:  # else their slots are lost, and nobody brings the records again
            if ended := [one for one in run if one not in missing and one not in late]:
                self._arrived(ended, brought)
        for some, next_index in ((missing, index + 1), (late, index)):
            if some:
                self._have_read([one for one in run if one in some], next_index)

    def _read(self, wanted: Sequence[tuple[Arrival, bool]], index: int) -> dict[bytes, Brought]:
        """Read each from a tier, as far as that has it whole.

        wanted: and whether to check the payload, too, where the tier does not see to that.
        """
        tier, brought = self._below.tiers[index], dict[bytes, Brought]()
        shown = [each for each in wanted if not tier.hides(each[0].slot.key)]
        records = [self._arena.array[one.slot.offset :][: one.slot.nbytes] for one, _ in shown]
        came = tier.get([(one.slot.key, record.data) for (one, _), record in zip(shown, records, strict=True)])
        for (one, checks), record, nbytes in zip(shown, records, came, strict=True):
            if nbytes is not None and nbytes != DAMAGED:
                found = self._opened(one, record, nbytes, tier, checks=checks)
                if found is not None:
                    brought[one.slot.key] = found
        return brought

    def _opened(
        self, arrival: Arrival, record: Bytes, nbytes: int, tier: GuardedTier, *, checks: bool
    ) -> Brought | None:
        """What came of a tier, if it is the record."""
        key, shape = arrival.slot.key, arrival.shape
        header = header_of(record, key, shape, nbytes, verified=tier.verifies or not checks)
        if not isinstance(header, Miss) and not (tier.verifies or header.is_hashed):
            header = Miss("payload_checksum")  # of those who need none: nobody could check it
        if not isinstance(header, Miss) and header.expires_at_s > time.time():
            seals = self._below.hashed and not header.is_hashed  # put when there were other tiers
            if seals:
                seal(record, key, shape, header.expires_at_s)
            return Brought(tier, header.expires_at_s, header.is_hashed or seals, tier.verifies or checks)
        if isinstance(header, Miss):
            log.warning("tier %s: record %s is none: %s", tier.name, key.hex()[:16], header.reason)
        tier.writers.put(partial(tier.remove, key), alone=True)
        return None

    def _arrived(self, run: Sequence[Arrival], brought: Mapping[bytes, Brought]) -> None:
        """These have come, as far as they were brought, or will not."""
        books = self._books
        finished, further = [], []
        came: dict[Brought, list[Slot]] = {}
        waiting: dict[Fetch, list[tuple[int, Slot]]] = {}
        with books.lock:
            for arrival in run:
                slot = arrival.slot
                what = brought.get(slot.key)
                if what is not None and (what.checked or not arrival.checks):
                    came.setdefault(what, []).append(slot)
                else:
                    books.catalog.abandon([slot])
                self._arrivals.pop(slot.key, None)
                for fetch, index in arrival.waiting:
                    waiting.setdefault(fetch, []).append((index, slot))
            whole = self._commit(came, run[0].shape)
            for fetch, chunks in waiting.items():
                has_more = self._settle(fetch, chunks, whole)
                if fetch.is_settled:
                    finished.append(fetch)
                elif has_more:
                    further.append(fetch)
        books.tell()
        for fetch in finished:
            fetch.finish()
        for fetch in further:
            fetch.tell()

    def _commit(self, came: Mapping[Brought, Sequence[Slot]], shape: RecordShape) -> set[bytes]:
        """The keys that are readable now. Under the lock."""
        whole = set[bytes]()
        for what, slots in came.items():
            readable = self._books.commit(
                slots, shape, summed=what.summed, checked=what.checked, expires_at_s=what.expires_at_s
            )
            self._writing.brought(readable, what.tier)
            whole.update(readable)
        return whole

    def _settle(self, fetch: Fetch, chunks: Sequence[tuple[int, Slot]], whole: Collection[bytes]) -> bool:
        """Tell a fetch of chunks that have come, or will not; whether it has more leading ones. Under the lock."""
        keys = [slot.key for _, slot in chunks if slot.key in whole and not fetch.closed]
        fetch.unchecked.update(self._books.unchecked.intersection(keys))
        leased = {slot.key: slot for slot in self._lease(fetch, keys).slots} if keys else {}
        has_more = False
        for index, slot in chunks:
            has_more |= fetch.settled(index, leased.get(slot.key))
        return has_more
