"""`Store`: records of KV in an arena in memory, and in tiers below it.

Puts and loads go through slots of the arena, which callers fill and read themselves (`array`): reserve, fill, commit;
fetch, read, close. What is committed is written through to every tier in the background (`WriteThrough`), and what a
tier has is read into the arena when it is fetched (`Fetching`). The lock of the `Books` is held for decisions only.
Nobody waits for room or for a tier but the store's own threads; what goes wrong is a shorter prefix or a record that
is not kept.

Threads: those of the tiers (`GuardedTier`), one that checks what was read (`Fetching`), and the `Keeper`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import count, takewhile
from math import inf, isinf
from types import MappingProxyType
from typing import TYPE_CHECKING

from pdlink import threads
from pdlink.errors import CapacityExceeded, ConfigError
from pdlink.events import PrefixFound, emit
from pdlink.store.arena import STEP_NBYTES, Arena
from pdlink.store.below import Below
from pdlink.store.books import Books, let_others, pieces
from pdlink.store.catalog import Catalog
from pdlink.store.cleared import Cleared
from pdlink.store.codec import make_codec
from pdlink.store.extents import whole_pages
from pdlink.store.fetching import Fetching, Wanted
from pdlink.store.interface import (
    MEMORY,
    REMOVED,
    AnyStore,
    Forgotten,
    Found,
    Kept,
    PlaceState,
    StoreState,
)
from pdlink.store.keeper import Keeper
from pdlink.store.record import seal
from pdlink.store.scope import Scopes
from pdlink.store.sessions import SessionHolds
from pdlink.store.slots import MAX_LIFE, USUAL, WHOLE
from pdlink.store.standing import KeptBelow, Standing
from pdlink.store.tiers.base import KeepingTier, ReadOnly, RoutedTier, TellingTier
from pdlink.store.verifying import Verified, Verifying
from pdlink.store.write_through import SELF, WriteThrough, make_ingestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pdlink.kv.hashing import Preimage
    from pdlink.memory.buffers import Buffer, Bytes
    from pdlink.store.eviction import EvictionPolicy
    from pdlink.store.interface import AnyFetch, RecordChange
    from pdlink.store.record import RecordShape
    from pdlink.store.sessions import SessionTerms
    from pdlink.store.slots import Held, Retention, Share, Slot, SlotLease
    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)

_EARLY_NBYTES, _EARLY_S = 1 << 30, 0.5
"""What is to have memory before the first request, where prompts come from tiers: reading them needs the cores. A
start waits for it so long at most."""
_SESSIONS_SHARE = 4
"""Of the last place that keeps records, how small a part sessions may keep."""
_LOOK_S = 0.5
"""For whether the store closes, while the disk does not say what stands."""
_PEERS = "peers"
"""The holder of what other nodes read; no deadline: transfers have one."""


class Store(AnyStore):
    """In this process. `open` acquires; `close` ends."""

    lends_at = ""
    """Who lends for it sets this."""

    def __init__(
        self,
        nbytes: int,
        policy: EvictionPolicy,
        tiers: Sequence[Tier] = (),
        *,
        ingestion: str = "all",
        codec: Mapping[str, str] = MappingProxyType({}),
        verify: bool = False,
        ttl_s: float = float("inf"),
        tenant_quota_nbytes: int = 0,
        pin_quota_nbytes: int = 0,
        session_quota_nbytes: int | None = None,
        reserve_nbytes: int = 0,
        numa_node: int | None = None,
        lends: bool = False,
        cleared: Sequence[Path] = (),
        standing: Path | None = None,
        tier_deadline_s: float = 10.0,
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nbytes: of the arena. ingestion: which records the tiers get, by `make_ingestion`.

        codec: how they are packed there (`make_codec`), by name of a tier; "raw" where none is given.
        verify: check records when they are read from memory, too: one hash when they are stored, one when read.
        ttl_s: how long records are found, here and in the tiers. tenant_quota_nbytes: see `Catalog`.
        session_quota_nbytes: what sessions of one tenant keep at most (`SessionHolds`). All of them together keep a
            quarter of the tiers that can keep records (`KeepingTier`), or of memory without any: so the default.
        lends: other nodes read records, so they have digests.
        cleared: files that remember what is to be forgotten by tiers that are away (`Cleared`); none for this process
            only. standing: a file beside the records of the tier that can keep them, of what operators have set
            (`Standing`). reserve_nbytes: of the host's memory, never taken. numa_node: see `Buffer`.
        lease_s: longest life of a fetch.
        tier_deadline_s: how long a tier may take for one call before it is left alone, and for all of a fetch.
        """
        if nbytes <= 0:
            raise ConfigError(f"tiers.max_local_cpu_size: got {nbytes} bytes; expected more than 0; switch tiers off")
        self._nbytes, self._reserve_nbytes, self._lends = nbytes, reserve_nbytes, lends
        self._pin_quota_nbytes, self._numa_node = pin_quota_nbytes, numa_node
        self._lease_s, self._tier_deadline_s, self._clock = lease_s, tier_deadline_s, clock
        self._verify, self._sealing = verify, threading.Lock()
        """Held while the last share of a record is sealed and committed, so that one of its writers sees to it."""
        self._ttl_s = ttl_s
        keeping = [tier for tier in tiers if isinstance(tier, KeepingTier)]
        last_nbytes = sum(tier.capacity_nbytes for tier in keeping) if keeping else nbytes
        total_nbytes = last_nbytes // _SESSIONS_SHARE
        self._session_quota_nbytes = min(total_nbytes, session_quota_nbytes or total_nbytes)
        sessions = SessionHolds(self._session_quota_nbytes, total_nbytes)
        self._standing = Standing(standing if keeping else None, total_nbytes)
        for tier in keeping:
            tier.keep(KeptBelow(sessions.kept, self._standing))
        self._catalog = Catalog(
            policy,
            pin_quota_nbytes=pin_quota_nbytes,
            tenant_quota_nbytes=tenant_quota_nbytes,
            sessions=sessions,
            life=secrets.randbelow(MAX_LIFE),
        )
        self._books = Books(self._catalog, lambda: time.time() - clock())
        self._ingestion = make_ingestion(ingestion)
        self._lock = self._books.lock
        self._cleared = Cleared(cleared)
        self._closing = threading.Event()
        self._set_quotas_again()
        self._given_tiers = list(tiers)
        kinds = [tier.name for tier in tiers]
        again = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
        self._places = (MEMORY, *(f"{kind}-{n}" if n > 1 else kind for kind, n in zip(kinds, again, strict=True)))
        if unknown := set(codec) - set(self.places[1:]):
            raise ConfigError(
                f"tiers.codec: got one for {min(unknown)!r}; expected {', '.join(self.places[1:]) or 'none'}; "
                f"correct it"
            )
        self._codecs = [make_codec(codec.get(name, "raw")) for name in self.places[1:]]
        self._listeners: list[Callable[[RecordChange], None]] = []
        self.frozen, self.scopes = False, Scopes()
        """While it is frozen nothing new is kept, and so nothing is evicted."""
        self.places_changed: Callable[[tuple[str, ...]], None] = lambda _: None
        """Told, before anything is found in a new place."""
        self.memory_settled: Callable[[int], None] = lambda _: None

    def open(self) -> None:
        """Reserve the arena, give it its first memory, start the threads. Raises OSError if there is not enough; the
        tiers are closed then."""
        try:
            self._arena = Arena(
                self._nbytes,
                step_nbytes=STEP_NBYTES,
                early_nbytes=min(_EARLY_NBYTES, self._nbytes // 2) if self.has_tiers else 0,
                numa_node=self._numa_node,
                reserve_nbytes=self._reserve_nbytes,
                clock=self._clock,
            )
            self._arena.run_early(_EARLY_S)
        except OSError:
            for tier in self._given_tiers:
                tier.close()
            raise
        if shortage := self._arena.shortage():
            log.warning("the store's memory %s; lower tiers.max_local_cpu_size, or free memory", shortage)
        self._catalog.resize(self._arena.room_nbytes)
        self._below = Below(
            self._given_tiers,
            self.places[1:],
            codecs=self._codecs,
            cleared=self._cleared,
            hashed=self._verify or self._lends,
            deadline_s=self._tier_deadline_s,
            clock=self._clock,
        )
        self._writing = WriteThrough(
            self._books,
            self._below,
            self._arena.buffer,
            self._ingestion,
            sealed=self._verify,
            deadline_s=self._tier_deadline_s,
            clock=self._clock,
        )
        self._fetching = Fetching(
            self._books,
            self._below,
            self._writing,
            self._arena,
            verify=self._verify,
            tier_deadline_s=self._tier_deadline_s,
            lease_s=self._lease_s,
            clock=self._clock,
        )
        self._verifying = Verifying(
            self._books, self._below, self._arena.array, sealed=self._verify, deadline_s=self._tier_deadline_s
        )
        self._keeper = Keeper(
            self._books,
            self._below,
            self._fetching,
            self._writing,
            self._arena,
            settled=lambda nbytes: self.memory_settled(nbytes),
            clock=self._clock,
        )
        self._pinning = threads.guarded("pdlink-store-pins", self._pin_again, lambda _: None)
        if self._standing.pins or not self._standing.ready.is_set():
            self._pinning.start()

    def close(self) -> None:
        """End the threads, as far as the tiers let them, and give the memory back. Nobody may use slots any more."""
        self._closing.set()
        if self._pinning.ident is not None:
            self._pinning.join()
        self._keeper.close()
        if any(self._books.debts.values()):
            self.flush(self._tier_deadline_s)
        self._below.close()
        self._fetching.close()
        self._arena.close()

    @property
    def has_tiers(self) -> bool:
        return bool(self._given_tiers)

    @property
    def life(self) -> int:
        """Which life of this store it is: its serials name it (`life_of`)."""
        return self._catalog.life

    @property
    def places(self) -> tuple[str, ...]:
        return self._places

    @property
    def events(self) -> str:
        """None: who listens is in this process."""
        return ""

    @property
    def wants_sums(self) -> bool:
        return self._below.hashed

    @property
    def array(self) -> Bytes:
        return self._arena.array

    @property
    def buffer(self) -> Buffer:
        """The arena's memory, for processes on this host to map."""
        return self._arena.buffer

    @property
    def committed_nbytes(self) -> int:
        """Of the arena, from its begin on, have memory."""
        return self._arena.committed_nbytes

    def gauges(self) -> dict[str, float]:
        with self._lock:
            catalog = self._catalog
            sizes = {
                "used": catalog.used_nbytes,
                "committed": self._arena.committed_nbytes,
                "room": catalog.capacity_nbytes,
                "pinned": catalog.pinned_nbytes,
            }
        return {**sizes, **self._below.gauges()}

    def held(self) -> dict[str, float]:
        """For metrics: what readers and writers hold."""
        with self._lock:
            return {"leases": self._catalog.num_leases, "reservations": self._catalog.num_reservations}

    def problems(self) -> dict[str, str]:
        return {MEMORY: self._arena.shortage(), **self._below.problems()}

    # --- Reading

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> Found:
        """The longest prefix of `keys` that is here or in a tier. Waits `timeout_s` at most for the tiers."""
        began_s = self._clock()
        num_here = self._num_here(keys)
        places = self.known_at(keys[num_here:], timeout_s)
        known = places.index(-1) if -1 in places else len(places)
        found = Found(tuple(keys[: num_here + known]), (0,) * num_here + places[:known])
        by_place = Counter(self._places[place] for place in found.places)
        emit(PrefixFound(asked=len(keys), places=by_place, took_s=self._clock() - began_s))
        return found

    def _num_here(self, keys: Sequence[bytes]) -> int:
        """How many leading ones are in the arena."""
        num_here = 0
        for piece in pieces(keys):
            with self._lock:
                found_here = self._catalog.lookup(piece)
            num_here += found_here
            if found_here < len(piece):
                break
        return num_here

    def known_at(self, keys: Sequence[bytes], timeout_s: float) -> tuple[int, ...]:
        """As `AnyStore.known_at`."""
        here: list[int] = []
        for piece in pieces(keys):
            with self._lock:
                here += [self._fetching.coming(key) or self._catalog.lookup([key]) for key in piece]
        places = [0 if found else -1 for found in here]
        if not self.frozen and -1 in places:
            below = self._below.ask(list(keys), timeout_s)
            places = [place if place == 0 else index + 1 or -1 for place, index in zip(places, below, strict=True)]
        return tuple(places)

    def comes_from(self, address: str, keys: Sequence[bytes]) -> None:
        for tier in self._given_tiers:
            if isinstance(tier, RoutedTier):
                tier.note(address, keys)

    def announce(self, keys: Sequence[bytes], shape: RecordShape, preimages: Sequence[Preimage | None]) -> None:
        for piece in pieces(list(zip(keys, preimages, strict=True))):
            with self._lock:
                self._books.announce(piece)
        self._books.tell()

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
        return self._fetching.fetch(Wanted(found, shape, request, holder, retention, checks))

    # --- Writing

    def reserve(
        self,
        keys: Sequence[bytes],
        shape: RecordShape,
        holder: str = "engine",
        share: Share = WHOLE,
        retention: Retention = USUAL,
    ) -> tuple[Slot, ...]:
        return self._with_memory(self._take(keys, shape, holder, share, retention), self._arena.commit)

    def reserve_for(
        self,
        keys: Sequence[bytes],
        shape: RecordShape,
        holder: str,
        share: Share,
        retention: Retention,
        *,
        most_nbytes: int,
    ) -> tuple[Slot, ...]:
        """The same for another process to fill, at most so many bytes. Waits for nothing: memory comes meanwhile."""
        return self._with_memory(self._take(keys, shape, holder, share, retention, most_nbytes), self._arena.begin)

    def _with_memory(self, slots: tuple[Slot, ...], have: Callable[[int], int]) -> tuple[Slot, ...]:
        """Those before the first that gets none, without the lock."""
        end = have(max((slot.offset + slot.nbytes for slot in slots), default=0))
        kept = tuple(takewhile(lambda slot: slot.offset + slot.nbytes <= end, slots))
        if len(kept) < len(slots):
            self.abandon(slots[len(kept) :])
            with self._lock:
                self._catalog.resize(self._arena.room_nbytes)
            self._books.tell()
        return kept

    def _take(
        self,
        keys: Sequence[bytes],
        shape: RecordShape,
        holder: str,
        share: Share,
        retention: Retention,
        most_nbytes: float = inf,
    ) -> tuple[Slot, ...]:
        nbytes = shape.nbytes
        if nbytes > self._nbytes:
            raise CapacityExceeded(
                f"tiers.max_local_cpu_size: a record takes {nbytes} bytes of {self._nbytes}; raise it, or "
                "lower chunk_size"
            )
        if self.frozen:
            return ()
        head = self._books.leases(keys, holder, "reserve", inf)
        kept = retention._replace(ttl_s=min(retention.ttl_s, self._ttl_s))
        reserving = self._catalog.reserving(keys, nbytes, holder, share, kept, self._clock(), most_nbytes=most_nbytes)
        slots: list[Slot] = []
        for looked in self._books.steps(reserving):
            slots += [slot for slot in looked if slot is not None]
        for lease in reversed(head):
            with self._lock:
                self._catalog.release(lease, used=True)
            if lease is not head[0]:
                let_others()
        with self._lock:
            if self._arena.wants_more(self._catalog.used_nbytes):
                self._books.room_taken.notify_all()
        self._books.tell()
        return tuple(slots)

    def commit(
        self,
        slots: Sequence[Slot],
        shape: RecordShape,
        preimages: Sequence[Preimage | None] = (),
        *,
        summed: bool = False,
    ) -> None:
        with self._sealing if self._verify else nullcontext():
            whole = list(pieces(slots))
            for piece in reversed(whole) if len(whole) > 1 else ():
                with self._lock:
                    self._catalog.place(piece)
                let_others()
            known = {slot.key: preimage for slot, preimage in zip(slots, preimages, strict=False)}
            for piece in whole:
                if self._verify:
                    self._seal(piece, shape, summed=summed)
                with self._lock:
                    readable = self._books.commit(piece, shape, summed=summed, preimages=known)
                    self._writing.stored(readable)
                if piece is not whole[-1]:
                    let_others()
        self._books.tell()

    def _seal(self, slots: Sequence[Slot], shape: RecordShape, *, summed: bool) -> None:
        """Those whose records will be readable when they are committed."""
        with self._lock:
            whole = self._catalog.completes(slots)
            times = [self._books.expires_at_s(slot.key) for slot in whole]
        for slot, expires_at_s in zip(whole, times, strict=True):
            seal(self.array[slot.offset :][: slot.nbytes], slot.key, shape, expires_at_s, summed=summed)

    def abandon(self, slots: Iterable[Slot]) -> None:
        for piece in pieces(list(slots)):
            with self._lock:
                self._catalog.abandon(piece)

    def holder_gone(self, holder: str) -> None:
        """The process that all leases, reservations and pins of this holder are of has ended: they end, too."""
        with self._lock:
            written = self._catalog.written_by(holder)
        self.abandon(written)
        self._books.while_more(partial(self._catalog.holder_gone, holder))
        self._books.tell()

    # --- Other nodes

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are in the arena."""
        with self._lock:
            return [self._catalog.lookup([key]) > 0 for key in keys]

    def lend(self, key: bytes) -> SlotLease | None:
        """The record of a key in the arena, as a tier keeps it, until `take_back`; None if it is not here.

        Costs a pass over it where who filled it wrote no sums. What the slot has behind the record is zeros.
        """
        with self._lock:
            lease = self._catalog.lease([key], _PEERS, "lend", inf)
            if not lease.slots:
                return None
            shape, summed = self._books.shapes[key], key in self._books.summed
            expires_at_s = self._books.expires_at_s(key)
        slot = lease.slots[0]
        view = self.array[slot.offset : slot.offset + whole_pages(slot.nbytes)]
        if not self._verify:
            seal(view, key, shape, expires_at_s, summed=summed)
        view[shape.nbytes :] = 0
        return lease

    def take_back(self, lease: SlotLease) -> None:
        """Nobody reads the record any more."""
        with self._lock:
            self._catalog.release(lease, used=True)

    # --- Operators

    def pin(self, keys: Sequence[bytes], name: str) -> int:
        """Keep what is in the arena of this prefix, within the quota, until `unpin`; how many records."""
        pinned = 0
        for piece in pieces(keys):
            with self._lock:
                of_piece = self._catalog.pin(piece, name, SELF)
            pinned += of_piece
            if of_piece < len(piece):
                break
        return pinned

    def stand(self, keys: Sequence[bytes], shape: RecordShape, name: str) -> bool:
        """Have the next process pin them, too; whether it will. Records that are pinned here, of one prefix."""
        with self._lock:
            self._writing.keep([key for key in keys if key in self._books.shapes])
        return self._standing.pin(name, shape, keys)

    def _set_quotas_again(self) -> None:
        for quota in self._standing.quotas:
            self._catalog.set_quota(quota.nbytes, quota.tenant)

    def _pin_again(self) -> None:
        """What stands from the process before, as far as the disk has it."""
        if not self._standing.ready.is_set():  # a disk that hung at the start
            while not self._standing.ready.wait(_LOOK_S):
                if self._closing.is_set():
                    return
            with self._lock:
                self._set_quotas_again()
        disk = next((place for place, tier in enumerate(self._given_tiers, 1) if isinstance(tier, KeepingTier)), 0)
        for pin in self._standing.pins:
            num_pinned = 0
            for piece in pieces(pin.keys):
                if self._closing.is_set() or pin not in self._standing.pins:
                    break
                fetch = self.fetch(Found(tuple(piece), (disk,) * len(piece)), pin.shape, "pin", SELF)
                try:
                    of_piece = self.pin(piece[: len(fetch.done.result())], pin.name)
                finally:
                    fetch.close()
                num_pinned += of_piece
                if of_piece < len(piece):
                    log.warning(
                        "pin %r: %d of %d records are pinned again; pin the prompt again",
                        *(pin.name, num_pinned, len(pin.keys)),
                    )
                    break

    def unpin(self, name: str) -> int:
        self._standing.unpin(name)
        with self._lock:
            return self._catalog.unpin(name)

    def hold(self, session: SessionTerms, keys: Sequence[bytes], sizes: Sequence[int], *, waits: bool) -> int:
        kept, gone = list[bytes](), list[bytes]()
        holding = self._catalog.sessions.holding(session, keys, sizes, self._clock(), waits=waits)
        for piece in self._books.steps(holding):
            for key, is_kept in piece:
                (kept if is_kept else gone).append(key)
        self._rank(kept + gone[::-1])
        return len(kept)

    def end_session(self, name: str, tenant: str, owner: str | None = None) -> bool:
        with self._lock:
            ended = self._catalog.sessions.end(name, tenant, owner)
        for each in ended:
            self._books.while_more(partial(self._catalog.forget_ended, each))
        return bool(ended)

    def _rank(self, keys: Sequence[bytes]) -> None:
        """After sessions have changed what they keep of these. The head of a prompt is the newest then."""
        for piece in pieces(keys, last_first=True):
            with self._lock:
                owed = self._catalog.rank(piece)
                self._writing.keep(owed)

    def clear(
        self, keys: Sequence[bytes] | None = None, places: Sequence[str] | None = None, *, ending: bytes = b""
    ) -> Forgotten:
        whole = True
        if ending:
            with self._lock:  # first: what goes below from now on is found here
                here = self._catalog.keys()
            there, whole = self._below.keys_ending(ending, places)
            keys = list({*(key for key in here if key.endswith(ending)), *there})
        removed, (clear, is_noted) = 0, self._below.note_clear(keys, places)
        in_memory = places is None or MEMORY in places
        if in_memory:
            self._standing.forget(keys)
        if keys is None:
            with self._lock:
                removed = self._books.clear() if in_memory else 0
                self._writing.forgive(None, places)
                self._below.doom(None, places, clear)
        for piece in pieces(keys or ()):  # each record goes everywhere at once
            with self._lock:
                removed += self._catalog.remove(piece) if in_memory else 0
                self._writing.forgive(piece, places)
                self._below.doom(piece, places, clear)
                self._books.note()
        if places is not None and not in_memory and self._writing.keeps_in(places):
            self._keep_here(keys, again=False)
        self._books.tell()
        return Forgotten(removed, is_noted and whole)

    def _keep_here(self, keys: Sequence[bytes] | None, *, again: bool) -> None:
        """No tier may have these records, or all, any more. What sessions keep of them stays in memory.

        again: it goes below now, else with their next turn.
        """
        with self._lock:
            kept = self._catalog.sessions.kept
            mine = list(kept) if keys is None else [key for key in keys if key in kept]
        for piece in pieces(mine, last_first=True):
            with self._lock:
                owed = self._catalog.is_not_below(piece)
                self._writing.keep(owed if again else ())

    def move(self, keys: Sequence[bytes], shape: RecordShape, source: str, destination: str, *, copy: bool) -> int:
        """Put the prefix of `keys` that `source` has into `destination`, too; how many records are there now.

        copy: whether `source` keeps them. Waits for both places, as long as their deadlines let it.
        """
        first, last = self.places.index(source), self.places.index(destination)
        known = self._below.prefix_in(first - 1, keys) if first else self._num_here(keys)
        fetch = self.fetch(Found(tuple(keys[:known]), (first,) * known), shape, "move")
        try:
            slots = fetch.done.result()
            moved = list(slots if last == 0 else takewhile(partial(self._writing.put, last - 1, shape), slots))
        finally:
            stood = fetch.close()
        if not stood:
            return 0
        if not copy:
            self.clear([slot.key for slot in moved], [source])
        return len(moved)

    def repack(self, keys: Sequence[bytes], shape: RecordShape, place: str, codec: str) -> int:
        """Pack the prefix of `keys` that a tier has by that codec (`make_codec`), in place; how many records.

        Readers find a record or miss it meanwhile. Waits for the tier. Raises ConfigError for a codec that is not
        there.
        """
        index, packer = self.places.index(place) - 1, make_codec(codec, "method")
        if place == MEMORY or isinstance(self._given_tiers[index], ReadOnly):
            return 0
        return sum(1 for _ in takewhile(lambda key: self._writing.repack(index, key, shape, packer), keys))

    def add_tier(self, tier: Tier, codec: str = "raw") -> str:
        """Below the others from now on; the place that it is. It gets what is kept from now on, and `close` closes
        it. For one caller at a time. Raises ConfigError for a codec that is not there."""
        packer, kind = make_codec(codec), tier.name
        name = next(name for n in count(1) if (name := f"{kind}-{n}" if n > 1 else kind) not in self._places)
        self._places = (*self._places, name)
        self.places_changed(self._places)
        self._given_tiers.append(tier)
        self._below.add(tier, name, packer)
        if isinstance(tier, TellingTier):
            for changed in self._listeners:
                tier.listen(changed)
        with self._lock:
            self._writing.owe(self._below.tiers[-1])
        return name

    def remove_tier(self, place: str) -> bool:
        """Whether it had got all that it was to have. Nothing is found there from now on; what it has stays there.

        Fetches of what it has end as if it was not found. For one caller at a time.
        """
        index = self._places.index(place)
        drained = self._writing.drain(index - 1, self._tier_deadline_s)
        self._keep_here(None, again=True)
        self._below.remove(index - 1)
        self._places = (*self._places[:index], place + REMOVED, *self._places[index + 1 :])
        self.places_changed(self._places)
        return drained

    def set_quota(self, nbytes: int | None, tenant: str = "") -> bool:
        """As `Catalog.set_quota`. What exceeds it is evicted. Whether the next process has it, too."""
        with self._lock:
            self._catalog.set_quota(nbytes, tenant)
        more = True
        while more:
            with self._lock:
                more = self._catalog.trim()
                self._books.note()
            self._books.tell()
        return self._standing.quota(tenant, nbytes if tenant else nbytes or 0)

    def quota(self, tenant: str = "") -> tuple[int, int]:
        """As `Catalog.quota`."""
        with self._lock:
            return self._catalog.quota(tenant)

    def verify(self, keys: Sequence[bytes] | None = None, shape: RecordShape | None = None) -> dict[str, Verified]:
        """By place: how many of these records, of one shape, are what was put; what is not is dropped.

        Without keys: all that is in memory, which is read without being checked where `verify` is off.
        """
        found = {MEMORY: self._verifying.here(keys)}
        if keys is not None and shape is not None:
            found |= {
                place: self._verifying.in_tier(index, keys, shape)
                for index, place in enumerate(self.places[1:])
                if not self._below.tiers[index].removed
            }
        return found

    def flush(self, timeout_s: float) -> bool:
        return self._writing.flush(timeout_s)

    def health(self) -> dict[str, bool]:
        return {MEMORY: self._keeper.works, **self._below.answering()}

    def state(self) -> StoreState:
        """For operators: what is where, and who keeps it."""
        now_s, shortage = self._clock(), self._arena.shortage()

        def kept(held: Held) -> Kept:
            ends_in_s = None if isinf(held.deadline_s) else held.deadline_s - now_s
            age_s = None if ends_in_s is None else self._lease_s - ends_in_s
            return Kept(held.holder, held.request, held.records, held.nbytes, age_s, ends_in_s)

        with self._lock:
            catalog = self._catalog
            memory = PlaceState(
                MEMORY,
                catalog.used_nbytes,
                catalog.capacity_nbytes,
                len(catalog),
                answers=True,
                problem=shortage,
            )
            pinned_nbytes, writing = catalog.pinned_nbytes, catalog.num_reservations
            leases, pins = list(map(kept, catalog.leases())), list(map(kept, catalog.pins()))
            sessions, sessions_nbytes = catalog.sessions.states(now_s), catalog.sessions.nbytes
        return StoreState(
            [memory, *self._below.states()],
            pinned_nbytes,
            self._pin_quota_nbytes,
            writing,
            self.frozen,
            leases,
            pins,
            sessions,
            sessions_nbytes,
            self._session_quota_nbytes,
        )

    def check(self) -> None:
        """Raise AssertionError if the books are wrong."""
        self._books.check()

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        self._books.listen(changed)
        self._listeners.append(changed)
        for tier in self._given_tiers:
            if isinstance(tier, TellingTier):
                tier.listen(changed)
