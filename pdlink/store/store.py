"""`Store`: records of KV in an arena in memory, and in tiers below it.

Puts and loads go through slots of the arena, which callers fill and read themselves (`array`): reserve, fill, commit;
fetch, read, close. What is committed is written through to every tier in the background, and what a tier has is read
into the arena when it is fetched. The lock is held for decisions only. Nobody waits for room or for a tier but the
store's own threads; what goes wrong is a shorter prefix or a record that is not kept.

Threads: those of the tiers (`GuardedTier`), and a keeper: it gives the arena memory before it is needed, puts that
into huge pages afterwards, and ends leases that are over and fetches that take too long.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from math import isinf
from types import MappingProxyType
from typing import TYPE_CHECKING

from pdlink.errors import CapacityExceeded, ConfigError
from pdlink.events import Announcer, PrefixFound, RecordsChanged, WriteDropped, emit
from pdlink.memory.buffers import Buffer, Bytes
from pdlink.store.below import Below, Question
from pdlink.store.catalog import Catalog
from pdlink.store.cleared import Cleared
from pdlink.store.codec import make_codec
from pdlink.store.extents import whole_pages
from pdlink.store.fetch import Arrival, Fetch
from pdlink.store.gathering import STEP_NBYTES, Gathering
from pdlink.store.ingestion import make_ingestion
from pdlink.store.interface import MEMORY, Forgotten, Found, Kept, PlaceState, RecordChange, StoreState
from pdlink.store.line import Line
from pdlink.store.record import seal, unseal
from pdlink.store.slots import MAX_LIFE, WHOLE, Lease, Share, Slot
from pdlink.store.tiers.base import ReadOnly, TellingTier
from pdlink.store.turns import USUAL, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pdlink.kv.hashing import Preimage
    from pdlink.store.below import Brought
    from pdlink.store.policies.base import Policy
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Change, Held
    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)

_STEP_NBYTES = 64 << 20
"""Of memory that the arena is given at a time; some hundredths of a second of first touches."""
_KEEPER_S = 0.5
_HEADROOM_SHARE = 8
"""Of the arena, how small a part is kept free by evicting ahead, where what is evicted is written first."""
_GROW_AGAIN_S = 10.0
"""After memory was refused."""
_SELF = "store"
"""The holder of the leases of write-through, which have no deadline: the thread that has one always comes back."""
_PEERS = "peers"
"""The holder of what other nodes read; no deadline either: transfers have one."""


class Store:
    """Implements `AnyStore` in this process. Thread-safe. `open` acquires; `close` ends."""

    def __init__(
        self,
        nbytes: int,
        policy: Policy,
        tiers: Sequence[Tier] = (),
        *,
        ingestion: str = "all",
        codec: Mapping[str, str] = MappingProxyType({}),
        verify: bool = False,
        ttl_s: float = float("inf"),
        tenant_quota_nbytes: int = 0,
        pin_quota_nbytes: int = 0,
        reserve_nbytes: int = 0,
        lends: bool = False,
        cleared: Sequence[Path] = (),
        tier_deadline_s: float = 10.0,
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nbytes: of the arena. ingestion: which records the tiers get, by `make_ingestion`.

        codec: how they are packed there (`make_codec`), by name of a tier; "raw" where none is given.
        verify: check records when they are read from memory, too: one hash when they are stored, one when read.
        ttl_s: how long records are found, here and in the tiers. tenant_quota_nbytes: see `Catalog`.
        lends: other nodes read records: they have digests, and all memory is taken at once, because nodes of this
        host map only an arena without holes.
        cleared: files that remember what is to be forgotten by tiers that are away (`Cleared`); none for this process
            only. reserve_nbytes: of the host's memory, never taken. lease_s: longest life of a fetch.
        tier_deadline_s: how long a tier may take for one call before it is left alone, and for all of a fetch.
        """
        if nbytes <= 0:
            raise ConfigError(f"tiers.max_local_cpu_size: got {nbytes} bytes; limit more than 0; switch tiers off")
        self._nbytes, self._reserve_nbytes, self._lends = nbytes, reserve_nbytes, lends
        self._first_nbytes = nbytes if lends else _STEP_NBYTES
        self._pin_quota_nbytes = pin_quota_nbytes
        self._lease_s, self._tier_deadline_s, self._clock = lease_s, tier_deadline_s, clock
        self._ingestion = make_ingestion(ingestion)
        self._verify, self._sealing = verify, threading.Lock()
        """Held while the last share of a record is sealed and committed, so that one of its writers sees to it."""
        self._ttl_s = ttl_s
        self._epoch_s = time.time() - clock()
        """What `clock` lacks to the clock that all hosts share."""
        self._catalog = Catalog(
            policy,
            pin_quota_nbytes=pin_quota_nbytes,
            tenant_quota_nbytes=tenant_quota_nbytes,
            life=secrets.randbelow(MAX_LIFE),
        )
        self._cleared = Cleared(cleared)
        self._given_tiers = tiers
        kinds = [tier.name for tier in tiers]
        again = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
        self._places = (MEMORY, *(f"{kind}-{n}" if n > 1 else kind for kind, n in zip(kinds, again, strict=True)))
        if unknown := set(codec) - set(self.places[1:]):
            raise ConfigError(
                f"tiers.codec: got one for {min(unknown)!r}; limit {', '.join(self.places[1:]) or 'none'}; correct it"
            )
        self._codecs = [make_codec(codec.get(name, "raw")) for name in self.places[1:]]
        self._lock = threading.Lock()
        # Guarded by `_lock`:
        self._arrivals: dict[bytes, Arrival] = {}
        self._fetches: set[Fetch] = set()
        self._shapes: dict[bytes, RecordShape] = {}
        """Of the readable records."""
        self._summed: set[bytes] = set()
        """Keys of readable records whose headers have their sums already."""
        self._unchecked: set[bytes] = set()
        """Keys of readable records that nobody has compared with their sums since they came from a tier."""
        self._uncounted: list[Change] = []
        """Changes that no metric has heard of."""
        self._announcer: Announcer[RecordChange] = Announcer()
        self._work = threading.Condition(self._lock)
        """Wakes the keeper."""
        self._gathering = Gathering()
        self._closing = False
        self.frozen = False
        """While set nothing new is kept, and so nothing is evicted."""

    def open(self) -> None:
        """Reserve the arena, give it its first memory, start the threads. Raises OSError if there is not enough."""
        self._buffer = Buffer(self._nbytes, name="pdlink-store", committed_nbytes=self._first_nbytes)
        self._catalog.grow(self._buffer.committed_nbytes)
        self._below = Below(
            self._given_tiers,
            self.places[1:],
            codecs=self._codecs,
            cleared=self._cleared,
            hashed=self._verify or self._lends,
            deadline_s=self._tier_deadline_s,
            clock=self._clock,
        )
        self._verifier = Line("pdlink-store-verify")
        self._keeper = threading.Thread(target=self._keep, name="pdlink-store", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End the threads, as far as the tiers let them, and give the memory back. Nobody may use slots any more."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
        self._keeper.join()
        self._below.close()
        self._verifier.close(self._tier_deadline_s)
        self._buffer.close()

    @property
    def has_tiers(self) -> bool:
        """Whether a look-up may wait."""
        return bool(self._given_tiers)

    @property
    def life(self) -> int:
        """Which life of this store it is: its serials name it (`life_of`)."""
        return self._catalog.life

    @property
    def places(self) -> tuple[str, ...]:
        """Where records lie, by the index that `Found` gives: the arena and the tiers' names."""
        return self._places

    @property
    def events(self) -> str:
        """None: who listens is in this process."""
        return ""

    @property
    def wants_sums(self) -> bool:
        """As `AnyStore.wants_sums`."""
        return self._below.hashed

    @property
    def array(self) -> Bytes:
        """The arena; a slot is `array[slot.offset :][: slot.nbytes]`."""
        return self._buffer.array

    @property
    def buffer(self) -> Buffer:
        """The arena's memory, for processes on this host to map."""
        return self._buffer

    def gauges(self) -> dict[str, float]:
        """For metrics: bytes by kind."""
        with self._lock:
            catalog = self._catalog
            sizes = {
                "used": catalog.used_nbytes,
                "committed": catalog.capacity_nbytes,
                "pinned": catalog.pinned_nbytes,
            }
        return {**sizes, **self._below.gauges()}

    def held(self) -> dict[str, float]:
        """For metrics: what readers and writers hold."""
        with self._lock:
            return {"leases": self._catalog.num_leases, "reservations": self._catalog.num_reservations}

    def answering(self) -> dict[str, float]:
        """For metrics: 1 for a tier that is asked, 0 for one that is left alone since it failed or stalled."""
        return {name: float(answers) for name, answers in self._below.answering().items()}

    # --- Reading

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> Found:
        """The longest prefix of `keys` that is here or in a tier. Waits `timeout_s` at most for the tiers."""
        began_s = self._clock()
        with self._lock:
            num_here = self._catalog.lookup(keys)
            here = [key in self._arrivals or self._catalog.lookup([key]) for key in keys[num_here:]]
        rest = list(keys[num_here:])
        places = [0 if found else -1 for found in here]
        if not self.frozen:
            below = self._below.ask(rest, timeout_s)
            places = [place if place == 0 else index + 1 or -1 for place, index in zip(places, below, strict=True)]
        known = places.index(-1) if -1 in places else len(places)
        found = Found(tuple(keys[: num_here + known]), (0,) * num_here + tuple(places[:known]))
        by_place = Counter(self.places[place] for place in found.places)
        emit(PrefixFound(asked=len(keys), places=by_place, took_s=self._clock() - began_s))
        return found

    def fetch(
        self,
        found: Found,
        shape: RecordShape,
        request: str,
        holder: str = "engine",
        retention: Retention = USUAL,
        *,
        checks: bool = False,
    ) -> Fetch:
        """As `AnyStore.fetch`.

        Chunks that others already bring are waited for; from the first one that finds no room on, none is brought.
        """
        now_s = self._clock()
        fetch = Fetch(
            request, holder, now_s + self._tier_deadline_s, now_s + self._lease_s, self._release, checks=checks
        )
        to_check: list[tuple[int, Slot, Lease]] = []
        begun: list[tuple[Arrival, int]] = []
        kept = retention._replace(ttl_s=float("inf"))  # a record says itself how long it is found
        with self._lock:
            first = self._lease(fetch, found.keys)
            for slot in first.slots:
                to_check += self._add_here(fetch, slot, first)
            self._write_below([slot.key for slot in first.slots if self._ingestion.on_hit(slot.key)], shape)
            for key, place in list(zip(found.keys, found.places, strict=True))[len(first.slots) :]:
                if self._catalog.lookup([key]):
                    lease = self._lease(fetch, [key])
                    to_check += self._add_here(fetch, lease.slots[0], lease)
                    continue
                arrival = self._arrivals.get(key)
                if arrival is None:
                    slots = self._catalog.reserve([key], shape.nbytes, _SELF, WHOLE, kept, now_s)
                    if not slots:
                        break
                    arrival = self._arrivals[key] = Arrival(slots[0], shape)
                    begun.append((arrival, max(0, place - 1)))
                arrival.waiting.append((fetch, fetch.add(None)))
            self._fetches.add(fetch)
            self._make_headroom()
            settled = fetch.is_settled
        self._changed()
        for arrival, tier in begun:
            if not self.has_tiers or not self._below.tiers[tier].readers.put(partial(self._bring, arrival, tier)):
                self._arrived(arrival, None)
        if to_check and not self._verifier.put(partial(self._check_here, fetch, to_check, shape)):
            settled = True  # the store is closing
        if settled:
            fetch.finish()
        return fetch

    def _add_here(self, fetch: Fetch, slot: Slot, lease: Lease) -> list[tuple[int, Slot, Lease]]:
        """The next chunk of a fetch is in the arena; what `_check_here` has to check of it. Under the lock."""
        if self._verify or (slot.key in self._unchecked and not fetch.checks):
            return [(fetch.add(None), slot, lease)]
        if slot.key in self._unchecked:
            fetch.unchecked.add(slot.key)
        fetch.add(slot)
        return []

    def _check_here(self, fetch: Fetch, here: Sequence[tuple[int, Slot, Lease]], shape: RecordShape) -> None:
        """In the verifier's thread: records that changed in memory are dropped, and end the prefix there."""
        for index, slot, lease in here:
            miss = unseal(self._slot(slot)[: shape.nbytes], slot.key, shape)
            with self._lock:
                if self._catalog.stands(lease):
                    if miss is None:
                        self._unchecked.discard(slot.key)
                    else:
                        self._found_wrong(slot, miss.reason)
                fetch.settled(index, None if miss is not None else slot)
        self._changed()
        with self._lock:
            settled = fetch.is_settled
        if settled:
            fetch.finish()

    def _found_wrong(self, slot: Slot, reason: str) -> None:
        """A record is not what was put. The caller holds the lock and a lease of it."""
        log.error("record %s has changed: %s", slot.key.hex()[:16], reason)
        if slot.key in self._unchecked:  # it came from a tier like that
            self._below.forget(slot.key)
        self._catalog.remove([slot.key])

    # --- Writing

    def reserve(
        self,
        keys: Sequence[bytes],
        shape: RecordShape,
        holder: str = "engine",
        share: Share = WHOLE,
        retention: Retention = USUAL,
    ) -> tuple[Slot, ...]:
        """Slots for the records of those keys of which this share is not here yet, up to the first one without room.

        Room is not made of the beginning of `keys`. Fill your share of each payload, then `commit` or `abandon` it.
        Raises CapacityExceeded if one can never fit.
        """
        if shape.nbytes > self._nbytes:
            raise CapacityExceeded(
                f"tiers.max_local_cpu_size: a record takes {shape.nbytes} bytes; limit {self._nbytes}; raise it, or "
                "lower chunk_size"
            )
        if self.frozen:
            return ()
        with self._lock:
            head = self._catalog.lease(keys, holder, "reserve", float("inf"))
            kept = retention._replace(ttl_s=min(retention.ttl_s, self._ttl_s))
            slots = self._catalog.reserve(keys, shape.nbytes, holder, share, kept, self._clock())
            self._catalog.release(head)
            self._make_headroom()
            self._work.notify_all()
        self._changed()
        return slots

    def commit(
        self,
        slots: Sequence[Slot],
        shape: RecordShape,
        preimages: Sequence[Preimage | None] = (),
        *,
        summed: bool = False,
    ) -> None:
        """As `AnyStore.commit`."""
        with self._sealing if self._verify else nullcontext():
            if self._verify:
                with self._lock:
                    whole = self._catalog.completes(slots)
                    times = [self._expires_at_s(slot.key) for slot in whole]
                for slot, expires_at_s in zip(whole, times, strict=True):
                    seal(self._slot(slot), slot.key, shape, expires_at_s, summed=summed)
            self._commit(slots, shape, preimages, summed=summed)

    def _commit(
        self, slots: Sequence[Slot], shape: RecordShape, preimages: Sequence[Preimage | None], *, summed: bool
    ) -> None:
        with self._lock:
            readable = self._catalog.commit(slots)
            self._shapes.update(dict.fromkeys(readable, shape))
            self._summed.update(readable if summed else ())
            self._note_changes({slot.key: known for slot, known in zip(slots, preimages, strict=False)})
            self._write_below([key for key in readable if self._ingestion.on_put(key)], shape)
        self._changed()

    def abandon(self, slots: Iterable[Slot]) -> None:
        """Nobody writes to the slots any more, and what is in them is of no use."""
        with self._lock:
            self._catalog.abandon(slots)

    def holder_gone(self, holder: str) -> None:
        """The process that all leases, reservations and pins of this holder are of has ended: they end, too."""
        with self._lock:
            self._catalog.holder_gone(holder)
        self._changed()

    # --- Other nodes

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are in the arena."""
        with self._lock:
            return [self._catalog.lookup([key]) > 0 for key in keys]

    def lend(self, key: bytes) -> Lease | None:
        """The record of a key in the arena, as a tier keeps it, until `take_back`; None if it is not here.

        Costs a pass over it where who filled it wrote no sums. What the slot has behind the record is zeros.
        """
        with self._lock:
            lease = self._catalog.lease([key], _PEERS, "lend", float("inf"))
            if not lease.slots:
                return None
            shape, summed = self._shapes[key], key in self._summed
            expires_at_s = self._expires_at_s(key)
        slot = lease.slots[0]
        view = self.array[slot.offset : slot.offset + whole_pages(slot.nbytes)]
        if not self._verify:
            seal(view, key, shape, expires_at_s, summed=summed)
        view[shape.nbytes :] = 0
        return lease

    def take_back(self, lease: Lease) -> None:
        """Nobody reads the record any more."""
        with self._lock:
            self._catalog.release(lease)

    # --- Operators

    def pin(self, keys: Sequence[bytes], name: str, holder: str = _SELF) -> int:
        """Keep what is in the arena of this prefix, within the quota, until `unpin`; how many records."""
        with self._lock:
            return self._catalog.pin(keys, name, holder)

    def unpin(self, name: str) -> int:
        with self._lock:
            return self._catalog.unpin(name)

    def clear(
        self, keys: Sequence[bytes] | None = None, places: Sequence[str] | None = None, *, ending: bytes = b""
    ) -> Forgotten:
        """As `AnyStore.clear`."""
        whole = True
        if ending:
            with self._lock:  # first: what goes below from now on is found here
                here = self._catalog.keys_ending(ending)
            there, whole = self._below.keys_ending(ending, places)
            keys = list({*here, *there})
        removed, (clear, is_noted) = 0, self._below.note_clear(keys, places)
        with self._lock:
            if places is None or MEMORY in places:
                removed = self._catalog.remove(keys)
            self._below.doom(keys, places, clear)
        self._changed()
        return Forgotten(removed, is_noted and whole)

    def move(self, keys: Sequence[bytes], shape: RecordShape, source: str, destination: str, *, copy: bool) -> int:
        """Put the prefix of `keys` that `source` has into `destination`, too; how many records are there now.

        copy: whether `source` keeps them. Waits for both places, as long as their deadlines let it.
        """
        first, last = self.places.index(source), self.places.index(destination)
        if first:
            known = self._below.prefix_in(first - 1, keys)
        else:
            with self._lock:
                known = self._catalog.lookup(keys)
        fetch = self.fetch(Found(tuple(keys[:known]), (first,) * known), shape, "move")
        try:
            moved = list(takewhile(partial(self._put, last, shape), fetch.done.result()))
        finally:
            stood = fetch.close()
        if not stood:
            return 0
        if not copy:
            self.clear([slot.key for slot in moved], [source])
        return len(moved)

    def repack(self, keys: Sequence[bytes], shape: RecordShape, place: str, codec: str) -> int:
        """Pack the prefix of `keys` that a tier has by that codec, in place; how many records. Waits for the tier."""
        index, packer = self.places.index(place) - 1, make_codec(codec, "method")
        if packer is not None and packer.lossy not in ("", shape.lossy):
            raise ConfigError(
                f"method: got {codec!r}, which changes the KV; limit KV that is kept as lossy; set lossy"
            )
        if place == MEMORY or isinstance(self._given_tiers[index], ReadOnly):
            return 0

        def packed(key: bytes) -> bool:
            return self._in_line(index, partial(self._below.repack, index, key, shape, packer))

        return sum(1 for _ in takewhile(packed, keys))

    def flush(self, timeout_s: float) -> bool:
        """Wait until every tier has been offered what was committed before; whether `timeout_s` was enough."""
        return self._below.flush(timeout_s)

    def health(self) -> dict[str, bool]:
        """By place: whether the arena's books are right, and whether a tier answers."""
        try:
            self.check()
            right = True
        except AssertionError:
            log.exception("the store's books are wrong")
            right = False
        return {MEMORY: right, **self._below.answering()}

    def state(self) -> StoreState:
        """For operators: what is where, and who keeps it."""
        now_s = self._clock()

        def kept(held: Held) -> Kept:
            ends_in_s = None if isinf(held.deadline_s) else held.deadline_s - now_s
            age_s = None if ends_in_s is None else self._lease_s - ends_in_s
            return Kept(held.holder, held.request, held.records, held.nbytes, age_s, ends_in_s)

        with self._lock:
            catalog = self._catalog
            memory = PlaceState(MEMORY, catalog.used_nbytes, self._nbytes, len(catalog), answers=True)
            pinned_nbytes, writing = catalog.pinned_nbytes, catalog.num_reservations
            leases, pins = list(map(kept, catalog.leases())), list(map(kept, catalog.pins()))
        return StoreState(
            [memory, *self._below.states()],
            pinned_nbytes,
            self._pin_quota_nbytes,
            writing,
            self.frozen,
            leases,
            pins,
        )

    def check(self) -> None:
        """Raise AssertionError if the books are wrong."""
        with self._lock:
            self._note_changes({})
            self._catalog.check()
            assert self._shapes.keys() == set(self._catalog.readable()), "shapes of other records than are readable"

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        """As `AnyStore.listen`."""
        with self._lock:
            self._note_changes({})
            self._announcer.add(changed, [RecordChange(MEMORY, True, key) for key in self._catalog.readable()])
        self._announcer.tell()
        for tier in self._given_tiers:
            if isinstance(tier, TellingTier):
                tier.listen(changed)

    # --- The tiers' threads

    def _bring(self, arrival: Arrival, first_tier: int) -> None:
        """Read a record into its slot, if anybody still waits for it."""
        with self._lock:
            wanted, checks = not all(fetch.closed for fetch, _ in arrival.waiting), arrival.checks
        slot, brought = arrival.slot, None
        try:
            if wanted:
                bring = partial(self._below.bring, first_tier, slot.key, self._slot(slot), arrival.shape)
                brought = bring(checks=checks)
                with self._lock:
                    checks = arrival.checks
                if brought is not None and checks and not brought.checked:  # somebody has come meanwhile
                    brought = bring(checks=True)
        finally:  # else its slot is lost, and nobody brings the record again
            self._arrived(arrival, brought)

    def _arrived(self, arrival: Arrival, brought: Brought | None) -> None:
        finished = []
        whole = False
        with self._lock:
            if brought is not None and (brought.checked or not arrival.checks):
                readable = self._catalog.commit([arrival.slot], brought.expires_at_s - self._epoch_s)
                self._shapes.update(dict.fromkeys(readable, arrival.shape))
                self._summed.update(readable if brought.summed else ())
                self._unchecked.update(() if brought.checked else readable)
                whole = bool(readable)
            else:
                self._catalog.abandon([arrival.slot])
            self._arrivals.pop(arrival.slot.key, None)
            for fetch, index in arrival.waiting:
                came = whole and not fetch.closed
                if came and arrival.slot.key in self._unchecked:
                    fetch.unchecked.add(arrival.slot.key)
                fetch.settled(index, self._lease(fetch, [arrival.slot.key]).slots[0] if came else None)
                if fetch.is_settled:
                    finished.append(fetch)
        self._changed()
        for fetch in finished:
            fetch.finish()

    def _write_below(self, keys: Sequence[bytes], shape: RecordShape) -> None:
        """Copies of readable records to every tier, in its thread. The caller holds the lock."""
        questions = [Question(keys) for _ in self._below.tiers]
        for key in keys:
            for index, tier in enumerate(self._below.tiers):
                if isinstance(tier.tier, ReadOnly):
                    continue
                if tier.queued_nbytes and tier.queued_nbytes + shape.nbytes > self._nbytes // 4:
                    emit(WriteDropped(tier=tier.name))  # what waits for it cannot be evicted
                    continue
                lease = self._catalog.lease([key], _SELF, "write-through", float("inf"))
                tier.queued_nbytes += shape.nbytes
                tier.queued[key] = lease.slots[0].serial
                job = partial(self._write, index, lease, shape, self._expires_at_s(key), questions[index])
                if not tier.writers.put(job):
                    tier.queued_nbytes -= shape.nbytes
                    del tier.queued[key]
                    self._catalog.release(lease)

    def _make_headroom(self) -> None:
        """Write what goes next before its room is wanted, where eviction writes. The caller holds the lock.

        A tier that is behind does not get its copy, so that nobody waits for it.
        """
        if self._ingestion.writes_back:
            headroom_nbytes = self._catalog.capacity_nbytes // _HEADROOM_SHARE
            for lease in self._catalog.leave(headroom_nbytes, _SELF, float("inf")):
                for slot in lease.slots:
                    self._write_below([slot.key], self._shapes[slot.key])
                self._catalog.release(lease)

    def _put(self, place: int, shape: RecordShape, slot: Slot) -> bool:
        """Whether the record of a slot is in that place afterwards."""
        if place == 0:
            return True
        return self._in_line(place - 1, partial(self._put_in_line, place, shape, slot))

    def _in_line(self, index: int, job: Callable[[], bool]) -> bool:
        """What a job of a tier's writer says; False if that takes longer than the tier's deadline."""
        try:
            return self._below.tiers[index].writers.submit(job).result(self._tier_deadline_s)
        except (TimeoutError, CancelledError):
            return False

    def _put_in_line(self, place: int, shape: RecordShape, slot: Slot) -> bool:
        """In the writer's thread, so that what clears the record meanwhile comes after it."""
        self._below.tiers[place - 1].drop_again()
        with self._lock:
            lease = self._catalog.lease([slot.key], _SELF, "move", float("inf"))
            expires_at_s = self._expires_at_s(slot.key)
        try:
            return lease.slots == (slot,) and self._offer(place - 1, slot, shape, expires_at_s, Question([slot.key]))
        finally:
            with self._lock:
                self._catalog.release(lease)

    def _write(self, index: int, lease: Lease, shape: RecordShape, expires_at_s: float, question: Question) -> None:
        tier, slot = self._below.tiers[index], lease.slots[0]
        try:
            tier.drop_again()
            with self._lock:
                is_wanted = tier.queued.get(slot.key) == slot.serial
                if is_wanted:
                    del tier.queued[slot.key]
            if is_wanted:
                self._offer(index, slot, shape, expires_at_s, question)
        finally:
            with self._lock:
                tier.queued_nbytes -= shape.nbytes
                self._catalog.release(lease)

    def _expires_at_s(self, key: bytes) -> float:
        """Of a readable record, by the clock that all hosts share: the same whenever it is asked, because two tiers
        may get a copy of its header at the same time. The caller holds the lock."""
        return round(self._catalog.expires_s(key) + self._epoch_s, 3)

    def _offer(
        self, index: int, slot: Slot, shape: RecordShape, expires_at_s: float | None, question: Question
    ) -> bool:
        """Whether the tier has a record afterwards. Its lease has no deadline: what is sealed must not change."""
        record = self._slot(slot)[: shape.nbytes]
        with self._lock:
            summed = slot.key in self._summed
        sealed_at_s = None if self._verify else expires_at_s
        return self._below.offer(index, slot.key, record, shape, sealed_at_s, summed=summed, question=question)

    # --- The keeper

    def _keep(self) -> None:
        refused_s = float("-inf")
        while True:
            self._below.try_again()
            self._changed()  # of what has expired, and of what went with the end of a lease
            with self._lock:
                if self._closing:
                    return
                now_s = self._clock()
                self._catalog.expire(now_s)
                late = [fetch for fetch in self._fetches if fetch.give_up_s <= now_s or fetch.done.done()]
                self._fetches.difference_update(late)
                capacity_nbytes = self._catalog.capacity_nbytes
                full = 2 * self._catalog.used_nbytes > capacity_nbytes and capacity_nbytes < self._buffer.nbytes
                grows = full and now_s - refused_s > _GROW_AGAIN_S
                begin = self._gathering.next(self._buffer.committed_nbytes)
                if not late and not grows and begin is None:
                    self._work.wait(_KEEPER_S)
                    continue
            for fetch in late:
                fetch.finish()
            if not grows and begin is not None:
                began_s = time.monotonic()
                gathered = self._buffer.gather(begin, begin + STEP_NBYTES)
                with self._lock:
                    self._gathering.tried(begin, gathered)
                    self._work.wait(time.monotonic() - began_s if gathered else _KEEPER_S)  # half of a core at most
            if grows:
                try:
                    self._buffer.commit(capacity_nbytes + _STEP_NBYTES, reserve_nbytes=self._reserve_nbytes)
                except OSError as error:
                    log.warning("the store stays at %d MiB of memory for now: %s", capacity_nbytes >> 20, error)
                    refused_s = now_s
                with self._lock:
                    self._catalog.grow(self._buffer.committed_nbytes)

    # --- Small things

    def _slot(self, slot: Slot) -> Bytes:
        return self.array[slot.offset : slot.offset + slot.nbytes]

    def _lease(self, fetch: Fetch, keys: Sequence[bytes]) -> Lease:
        lease = self._catalog.lease(keys, fetch.holder, fetch.request, fetch.deadline_s)
        fetch.leases.append(lease)
        return lease

    def _release(self, fetch: Fetch, wrong: Sequence[Slot]) -> bool:
        with self._lock:
            fetch.closed = True
            for lease in fetch.leases if wrong else ():
                if self._catalog.stands(lease):
                    for slot in set(lease.slots).intersection(wrong):
                        self._found_wrong(slot, "payload_checksum")
            stood = [self._catalog.release(lease) for lease in fetch.leases]
            fetch.leases.clear()
        if wrong:
            self._changed()
        return all(stood)

    def _note_changes(self, preimages: Mapping[bytes, Preimage | None]) -> None:
        """The caller holds the lock, and calls `_changed` without it."""
        for change in self._catalog.changes():
            self._uncounted.append(change)
            is_there = change.kind == "stored"
            if not is_there:
                self._ingestion.on_evict(change.key)
                self._summed.discard(change.key)
                self._unchecked.discard(change.key)
                self._shapes.pop(change.key, None)  # before it is stored again: `reserve` notes what went
            self._announcer.note(RecordChange(MEMORY, is_there, change.key, preimages.get(change.key)))

    def _changed(self) -> None:
        """Tell what came and went; without the lock."""
        with self._lock:
            self._note_changes({})
            changes, self._uncounted = self._uncounted, []
        self._announcer.tell()
        for (kind, nbytes), count in Counter((change.kind, change.nbytes) for change in changes).items():
            emit(RecordsChanged(kind=kind, records=count, nbytes=count * nbytes))
