"""`Store`: records of KV in an arena in memory, and in tiers below it.

Puts and loads go through slots of the arena, which callers fill and read themselves (`array`): reserve, fill, commit;
fetch, read, close. What is committed is written through to every tier in the background, and what a tier has is read
into the arena when it is fetched. The lock is held for decisions only. Nobody waits for room or for a tier but the
store's own threads; what goes wrong is a shorter prefix or a record that is not kept.

Threads: per tier one that asks, two that read and one that writes (`GuardedTier`), and a keeper: it gives the arena
memory before it is needed, and ends leases that are over and fetches that take too long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from pdlink.errors import CapacityExceeded, ConfigError
from pdlink.events import PrefixFound, RecordsChanged, emit
from pdlink.memory.buffers import Buffer, Bytes
from pdlink.store.catalog import Catalog, Lease, Slot
from pdlink.store.fetch import Arrival, Fetch
from pdlink.store.guard import GuardedTier
from pdlink.store.ingestion import make_ingestion
from pdlink.store.record import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.store.policies.base import Policy
    from pdlink.store.record import RecordShape
    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)

_STEP_NBYTES = 64 << 20
"""Of memory that the arena is given at a time; some hundredths of a second of first touches."""
_KEEPER_S = 0.5
_GROW_AGAIN_S = 10.0
"""After memory was refused."""
MEMORY = "memory"
"""The arena, among the names of places."""
_SELF = "store"
"""The holder of the leases of write-through, which have no deadline: the thread that has one always comes back."""


class Found(NamedTuple):
    """A prefix that the store has, chunk by chunk."""

    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    """Per key 0 for the arena, else 1 + the index of a tier."""


class Store:
    """Thread-safe. `open` acquires; `close` ends."""

    def __init__(
        self,
        nbytes: int,
        policy: Policy,
        tiers: Sequence[Tier] = (),
        *,
        ingestion: str = "all",
        pin_quota_nbytes: int = 0,
        reserve_nbytes: int = 0,
        tier_deadline_s: float = 10.0,
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nbytes: of the arena. ingestion: which records the tiers get: "all", "hot" or "second_sight".

        reserve_nbytes: of the host's memory, never taken. lease_s: longest life of a fetch.
        tier_deadline_s: how long a tier may take for one call before it is left alone, and for all of a fetch.
        """
        if nbytes <= 0:
            raise ConfigError(f"tiers.max_local_cpu_size: got {nbytes} bytes; limit more than 0; switch tiers off")
        self._nbytes, self._reserve_nbytes = nbytes, reserve_nbytes
        self._lease_s, self._tier_deadline_s, self._clock = lease_s, tier_deadline_s, clock
        if ingestion == "evicted":
            raise ConfigError(
                "tiers.ingestion: got 'evicted'; limit all, hot, second_sight: memory does not keep a record for a "
                "tier when its room is wanted; use second_sight for fewer writes"
            )
        self._ingestion = make_ingestion(ingestion)
        self._catalog = Catalog(policy, pin_quota_nbytes=pin_quota_nbytes)
        self._given_tiers = tiers
        self._tiers: list[GuardedTier] = []
        self._lock = threading.Lock()
        # Guarded by `_lock`:
        self._arrivals: dict[bytes, Arrival] = {}
        self._fetches: set[Fetch] = set()
        self._work = threading.Condition(self._lock)
        """Wakes the keeper."""
        self._closing = False
        self.frozen = False
        """While set nothing new is kept, and so nothing is evicted."""

    def open(self) -> None:
        """Reserve the arena, give it its first memory, start the threads. Raises OSError if there is not enough."""
        self._buffer = Buffer(self._nbytes, name="pdlink-store", committed_nbytes=_STEP_NBYTES)
        self._catalog.grow(self._buffer.committed_nbytes)
        self._tiers = [
            GuardedTier(tier, deadline_s=self._tier_deadline_s, clock=self._clock) for tier in self._given_tiers
        ]
        self._keeper = threading.Thread(target=self._keep, name="pdlink-store", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End the threads, as far as the tiers let them, and give the memory back. Nobody may use slots any more."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
        self._keeper.join()
        for tier in self._tiers:
            tier.close(self._tier_deadline_s)
        self._buffer.close()

    @property
    def has_tiers(self) -> bool:
        """Whether a look-up may wait."""
        return bool(self._tiers)

    @property
    def places(self) -> tuple[str, ...]:
        """Where records lie, by the index that `Found` gives: the arena and the tiers' names."""
        return (MEMORY, *(tier.name for tier in self._given_tiers))

    @property
    def array(self) -> Bytes:
        """The arena; a slot is `array[slot.offset :][: slot.nbytes]`."""
        return self._buffer.array

    def gauges(self) -> dict[str, float]:
        """For metrics: bytes by kind."""
        with self._lock:
            catalog = self._catalog
            sizes = {
                "used": catalog.used_nbytes,
                "committed": catalog.capacity_nbytes,
                "pinned": catalog.pinned_nbytes,
            }
        return {**sizes, **{tier.tier.name: tier.tier.nbytes for tier in self._tiers}}

    def answering(self) -> dict[str, float]:
        """For metrics: 1 for a tier that is asked, 0 for one that is left alone since it failed or stalled."""
        return {tier.tier.name: float(tier.answers) for tier in self._tiers}

    # --- Reading

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> Found:
        """The longest prefix of `keys` that is here or in a tier. Waits `timeout_s` at most for the tiers."""
        with self._lock:
            num_here = self._catalog.lookup(keys)
            here = [key in self._arrivals or self._catalog.lookup([key]) for key in keys[num_here:]]
        rest = list(keys[num_here:])
        places = [0 if found else -1 for found in here]
        for index, answers in enumerate(self._ask(rest, timeout_s) if rest and not self.frozen else ()):
            for at, found in enumerate(answers[: len(rest)]):
                if found and places[at] < 0 and not self._tiers[index].hides(rest[at]):
                    places[at] = index + 1
        known = places.index(-1) if -1 in places else len(places)
        emit(PrefixFound(asked=len(keys), in_memory=num_here, below=known))
        return Found(tuple(keys[: num_here + known]), (0,) * num_here + tuple(places[:known]))

    def fetch(self, found: Found, shape: RecordShape, request: str) -> Fetch:
        """Bring the prefix into the arena and keep it there until the fetch is closed.

        Chunks that others already bring are waited for; from the first one that finds no room on, none is brought.
        """
        now_s = self._clock()
        fetch = Fetch(request, now_s + self._tier_deadline_s, now_s + self._lease_s, self._release)
        begun: list[tuple[Arrival, int]] = []
        with self._lock:
            first = self._lease(fetch, found.keys)
            for slot in first.slots:
                fetch.add(slot)
            self._write_below([slot.key for slot in first.slots if self._ingestion.on_hit(slot.key)], shape)
            for key, place in list(zip(found.keys, found.places, strict=True))[len(first.slots) :]:
                if self._catalog.lookup([key]):
                    fetch.add(self._lease(fetch, [key]).slots[0])
                    continue
                arrival = self._arrivals.get(key)
                if arrival is None:
                    slots = self._catalog.reserve([key], shape.nbytes, _SELF)
                    if not slots:
                        break
                    arrival = self._arrivals[key] = Arrival(slots[0])
                    begun.append((arrival, max(0, place - 1)))
                arrival.waiting.append((fetch, fetch.add(None)))
            self._fetches.add(fetch)
            settled = fetch.is_settled
        self._changed()
        for arrival, tier in begun:
            if self._tiers:
                self._tiers[tier].readers.put(partial(self._bring, arrival, shape, tier))
            else:
                self._arrived(arrival, whole=False)
        if settled:
            fetch.finish()
        return fetch

    # --- Writing

    def reserve(self, keys: Sequence[bytes], shape: RecordShape, holder: str = "engine") -> tuple[Slot, ...]:
        """Slots for the records of those keys that are not here yet, up to the first one that finds no room.

        Room is not made of the beginning of `keys`. Fill the payload of each, then `commit` or `abandon` it.
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
            slots = self._catalog.reserve(keys, shape.nbytes, holder)
            self._catalog.release(head)
            self._work.notify_all()
        self._changed()
        return slots

    def commit(self, slots: Sequence[Slot], shape: RecordShape) -> None:
        """The payloads are there: others can read them, and the tiers get a copy."""
        with self._lock:
            readable = self._catalog.commit(slots)
            self._write_below([key for key in readable if self._ingestion.on_put(key)], shape)
        self._changed()

    def abandon(self, slots: Iterable[Slot]) -> None:
        """Nobody writes to the slots any more, and what is in them is of no use."""
        with self._lock:
            self._catalog.abandon(slots)

    # --- Operators

    def pin(self, keys: Sequence[bytes], name: str) -> int:
        """Keep what is in the arena of this prefix, within the quota, until `unpin`; how many records."""
        with self._lock:
            return self._catalog.pin(keys, name)

    def unpin(self, name: str) -> int:
        with self._lock:
            return self._catalog.unpin(name)

    def clear(self, keys: Sequence[bytes] | None = None, places: Sequence[str] | None = None) -> int:
        """Forget these records, or all, in these places, or everywhere; how many were in the arena."""
        removed = 0
        tiers = [tier for tier in self._tiers if places is None or tier.tier.name in places]
        with self._lock:
            if places is None or MEMORY in places:
                removed = self._catalog.remove(keys)
            for tier in tiers:
                tier.all_doomed |= keys is None
                tier.doomed.update(keys or ())
        self._changed()
        for tier in tiers:
            tier.writers.put(partial(tier.drop, keys))
        return removed

    def move(self, keys: Sequence[bytes], shape: RecordShape, source: str, destination: str, *, copy: bool) -> int:
        """Put the prefix of `keys` that `source` has into `destination`, too; how many records are there now.

        copy: whether `source` keeps them. Waits for both places, as long as their deadlines let it.
        """
        first, last = self.places.index(source), self.places.index(destination)
        if first:
            tier = self._tiers[first - 1]
            nothing: list[bool] = []
            has = tier.call("contains", partial(tier.tier.contains, keys), nothing)
        else:
            with self._lock:
                has = [True] * self._catalog.lookup(keys)
        known = (*has, False).index(False)
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

    def flush(self, timeout_s: float) -> bool:
        """Wait until every tier has been offered what was committed before; whether `timeout_s` was enough."""
        written = threading.Semaphore(0)
        for tier in self._tiers:
            tier.writers.put(written.release)
        deadline_s = self._clock() + timeout_s
        return all(written.acquire(timeout=max(0.0, deadline_s - self._clock())) for _ in self._tiers)

    def health(self) -> dict[str, bool]:
        """By place: whether the arena's books are right, and whether a tier answers."""
        try:
            self.check()
            right = True
        except AssertionError:
            log.exception("the store's books are wrong")
            right = False
        return {MEMORY: right, **{tier.tier.name: tier.answers for tier in self._tiers}}

    def check(self) -> None:
        """Raise AssertionError if the books are wrong."""
        with self._lock:
            self._catalog.check()

    # --- The tiers' threads

    def _ask(self, keys: list[bytes], timeout_s: float) -> list[list[bool]]:
        """Each tier's answer about `keys`; empty for a tier that does not answer in time."""
        answers: list[list[bool]] = [[] for _ in self._tiers]
        nothing: list[bool] = []
        missing = threading.Semaphore(0)
        gone = threading.Event()

        def ask(index: int, tier: GuardedTier) -> None:
            if not gone.is_set():
                answers[index] = tier.call("contains", partial(tier.tier.contains, keys), nothing)
                missing.release()

        asked = [(index, tier) for index, tier in enumerate(self._tiers) if tier.available]
        for index, tier in asked:
            tier.askers.put(partial(ask, index, tier))
        deadline_s = self._clock() + timeout_s
        for _ in asked:
            missing.acquire(timeout=max(0.0, deadline_s - self._clock()))
        gone.set()
        return answers[:]

    def _bring(self, arrival: Arrival, shape: RecordShape, first_tier: int) -> None:
        """Read a record into its slot, from the first tier that has it whole."""
        slot = arrival.slot
        view = self._slot(slot)
        with self._lock:
            gone = all(fetch.closed for fetch, _ in arrival.waiting)
        for tier in () if gone else self._tiers[first_tier:]:
            if tier.hides(slot.key):
                continue
            nbytes = tier.call("get", partial(tier.tier.get, slot.key, view.data), None, slot.nbytes)
            if nbytes is None:
                continue
            miss = unseal(view[:nbytes], slot.key, shape)
            if miss is None:
                self._arrived(arrival, whole=True)
                return
            log.warning("tier %s: record %s is none: %s", tier.tier.name, slot.key.hex()[:16], miss.reason)
            tier.call("remove", partial(tier.tier.remove, slot.key), None)
        self._arrived(arrival, whole=False)

    def _arrived(self, arrival: Arrival, *, whole: bool) -> None:
        finished = []
        with self._lock:
            if whole:
                whole = bool(self._catalog.commit([arrival.slot]))
            else:
                self._catalog.abandon([arrival.slot])
            self._arrivals.pop(arrival.slot.key, None)
            for fetch, index in arrival.waiting:
                came = whole and not fetch.closed
                fetch.settled(index, self._lease(fetch, [arrival.slot.key]).slots[0] if came else None)
                if fetch.is_settled:
                    finished.append(fetch)
        self._changed()
        for fetch in finished:
            fetch.finish()

    def _write_below(self, keys: Iterable[bytes], shape: RecordShape) -> None:
        """Copies of readable records to every tier, in its thread. The caller holds the lock."""
        for key in keys:
            for tier in self._tiers:
                if tier.queued_nbytes and tier.queued_nbytes + shape.nbytes > self._nbytes // 4:
                    continue  # it is behind, and what waits for it cannot be evicted: it does not get this one
                lease = self._catalog.lease([key], _SELF, "write-through", float("inf"))
                tier.queued_nbytes += shape.nbytes
                tier.writers.put(partial(self._write, tier, lease, shape))

    def _put(self, place: int, shape: RecordShape, slot: Slot) -> bool:
        """Whether the record of a slot is in that place afterwards."""
        if place == 0:
            return True
        with self._lock:
            lease = self._catalog.lease([slot.key], _SELF, "move", float("inf"))
        try:
            return lease.slots == (slot,) and self._offer(self._tiers[place - 1], slot, shape)
        finally:
            with self._lock:
                self._catalog.release(lease)

    def _write(self, tier: GuardedTier, lease: Lease, shape: RecordShape) -> None:
        try:
            self._offer(tier, lease.slots[0], shape)
        finally:
            with self._lock:
                tier.queued_nbytes -= shape.nbytes
                self._catalog.release(lease)

    def _offer(self, tier: GuardedTier, slot: Slot, shape: RecordShape) -> bool:
        """Whether the tier has a record afterwards. Its lease has no deadline: what is sealed must not change."""
        if tier.all_doomed or tier.doomed:  # it was left alone, or failed
            tier.drop(None if tier.all_doomed else list(tier.doomed))
        if tier.hides(slot.key):
            return False
        nothing: list[bool] = []
        found = tier.call("contains", partial(tier.tier.contains, [slot.key]), nothing)
        if not found or found[0]:
            return bool(found)
        view = self._slot(slot)[: shape.nbytes]
        seal(view, slot.key, shape)
        return tier.call("put", partial(tier.tier.put, slot.key, view.data), False, shape.nbytes)

    # --- The keeper

    def _keep(self) -> None:
        refused_s = float("-inf")
        while True:
            with self._lock:
                if self._closing:
                    return
                now_s = self._clock()
                self._catalog.expire(now_s)
                late = [fetch for fetch in self._fetches if fetch.give_up_s <= now_s or fetch.done.done()]
                self._fetches.difference_update(late)
                capacity_nbytes = self._catalog.capacity_nbytes
                full = 2 * self._catalog.used_nbytes > capacity_nbytes and capacity_nbytes < self._buffer.nbytes
                if not late and not (full and now_s - refused_s > _GROW_AGAIN_S):
                    self._work.wait(_KEEPER_S)
                    continue
            for fetch in late:
                fetch.finish()
            if full and now_s - refused_s > _GROW_AGAIN_S:
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
        lease = self._catalog.lease(keys, "engine", fetch.request, fetch.deadline_s)
        fetch.leases.append(lease)
        return lease

    def _release(self, fetch: Fetch) -> bool:
        with self._lock:
            fetch.closed = True
            stood = [self._catalog.release(lease) for lease in fetch.leases]
            fetch.leases.clear()
        return all(stood)

    def _changed(self) -> None:
        """Tell what came and went; without the lock."""
        with self._lock:
            changes = self._catalog.changes()
            for change in changes:
                if change.kind != "stored":
                    self._ingestion.on_evict(change.key)
        for (kind, nbytes), count in Counter((change.kind, change.nbytes) for change in changes).items():
            emit(RecordsChanged(kind=kind, records=count, nbytes=count * nbytes))
