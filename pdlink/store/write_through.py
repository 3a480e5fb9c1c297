"""`WriteThrough`: copies of records on their way from the arena into the tiers below it.

What a tier is to have stands in its list of debts (`Books.debts`), in the order in which it came; a hit puts a record
first. Debts are paid while the bytes that wait for the tier's writer are few: such a record is leased without a
deadline, because the thread always comes back, and so cannot be evicted; a debt holds nothing. A record that the tier
did not take is owed again, and a tier that takes nothing is offered one record after each pause, until it does.

Which records a tier is to have is for an `Ingestion` to say, on a put and on a hit.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from itertools import compress, islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from pdlink.errors import ConfigError
from pdlink.store.record import Miss, header_of, pack, seal, unseal
from pdlink.store.tiers.base import KeepingTier, ReadOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import Buffer
    from pdlink.store.below import Below, GuardedTier
    from pdlink.store.books import Books
    from pdlink.store.codec import Codec
    from pdlink.store.eviction import Key
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Slot, SlotLease

log = logging.getLogger(__name__)

SELF = "store"
"""The holder of the store's own leases and reservations."""
_MOST_PAID = 512
"""Debts that are put into a tier's line at once: some milliseconds."""
_WAITING_SHARE = 4
"""Of the arena, how small a part may wait for one tier: it cannot be evicted."""
HISTORY_KEYS = 1 << 18
"""Remembered by `second_sight`, about 130 bytes each. Four times as many as the tier below holds are enough."""


class Ingestion(Protocol):
    """Each answer is whether to write the record below now, if it is not there yet."""

    def on_put(self, key: Key) -> bool:
        """It came into RAM, computed or loaded."""

    def on_hit(self, key: Key) -> bool:
        """It was used in RAM."""


class All:
    """Write-through: most hits below, most writes."""

    def on_put(self, _key: Key) -> bool:
        return True

    def on_hit(self, _key: Key) -> bool:
        return False


class SecondSight:
    """When it is wanted a second time, however long RAM kept it. A third to a sixth of the writes of `All`."""

    def __init__(self, history_keys: int = HISTORY_KEYS) -> None:
        self._history_keys = history_keys
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def on_put(self, key: Key) -> bool:
        seen = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._history_keys:
            self._seen.popitem(last=False)
        return seen

    def on_hit(self, _key: Key) -> bool:
        return True


INGESTIONS: dict[str, Callable[[], Ingestion]] = {"all": All, "second_sight": SecondSight}


def make_ingestion(name: str) -> Ingestion:
    """Raises ConfigError for a name that is not in `INGESTIONS`."""
    if name not in INGESTIONS:
        raise ConfigError(f"ingestion: got {name!r}; expected {', '.join(INGESTIONS)}; use one of them")
    return INGESTIONS[name]()


class Question:
    """Which records of a batch one tier has: asked once, for all of them, when the first of them is to be written."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._known: dict[bytes, bool] | None = None
        self._lock = threading.Lock()

    def known(self, ask: Callable[[Sequence[bytes]], list[bool]]) -> dict[bytes, bool]:
        """Whether the tier has each; empty where it does not answer."""
        with self._lock:
            if self._known is None:
                self._known = dict(zip(self._keys, ask(self._keys), strict=False))
            return self._known


class _Sealing(NamedTuple):
    """A record that is to be written."""

    slot: Slot
    shape: RecordShape
    expires_at_s: float


class _Offered(NamedTuple):
    """What became of records. The tier did not take a record that is in neither."""

    taken: set[Slot]
    changed: set[Slot]
    """In memory, since they were sealed."""


class WriteThrough:
    """Thread-safe. `stored`, `keep`, `brought`, `hit` and `pay` are called with the lock of the books held."""

    def __init__(
        self,
        books: Books,
        below: Below,
        buffer: Buffer,
        ingestion: Ingestion,
        *,
        sealed: bool,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """buffer: the arena. sealed: records have their header when they become readable, else when they are written.

        deadline_s: of calls that wait for a tier's thread.
        """
        self._books, self._below, self._buffer, self._ingestion = books, below, buffer, ingestion
        self._sealed, self._deadline_s, self._clock = sealed, deadline_s, clock
        self._last: set[GuardedTier] = set()
        """Tiers that keep the records of sessions."""
        for tier in below.tiers:
            self.owe(tier)

    def owe(self, tier: GuardedTier) -> None:
        """Have records written to it from now on. Under the lock."""
        if not isinstance(tier.tier, ReadOnly):
            self._books.debts[tier] = OrderedDict()
            self._choose_last()

    def _choose_last(self) -> None:
        debts, there = self._books.debts, self._below.there
        keeping = {tier for tier in there if tier in debts and isinstance(tier.tier, KeepingTier)}
        self._last = keeping or set(debts)

    def drain(self, index: int, timeout_s: float) -> bool:
        """Write to one tier what it is to have, and nothing from then on; whether it has it all."""
        tier, deadline_s, before = self._below.tiers[index], self._clock() + timeout_s, inf
        while True:
            with self._books.lock:
                self._pay(index, at_once=True)
                left = len(self._books.debts.get(tier, ())) + len(tier.queued)
                if not left or left >= before or self._clock() >= deadline_s:
                    self._books.debts.pop(tier, None)
                    self._choose_last()
                    tier.queued.clear()
                    return not left
            before = left
            with suppress(TimeoutError, CancelledError):
                tier.writers.submit(lambda: None, alone=True).result(max(0.0, deadline_s - self._clock()))

    def stored(self, keys: Sequence[bytes]) -> None:
        """These records are readable now."""
        kept = self._books.catalog.sessions.kept
        self._owe([key for key in keys if self._ingestion.on_put(key) or key in kept])

    def keep(self, keys: Sequence[bytes]) -> None:
        """Sessions or standing pins keep these readable records, which no tier that keeps them is known to have."""
        self._owe(keys)

    def _owe(self, keys: Sequence[bytes]) -> None:
        """Have these records written to every tier."""
        if not keys:
            return
        for tier in self._below.tiers:
            if (debts := self._books.debts.get(tier)) is not None:
                debts.update((key, None) for key in keys if key not in tier.queued)
        self.pay()

    def brought(self, keys: Sequence[bytes], tier: GuardedTier) -> None:
        """Records came from that tier into memory. What sessions keep is to be in one that keeps it."""
        if tier in self._last:
            for key in keys:
                self._books.catalog.is_below(key)
        else:
            self._owe([key for key in keys if key in self._books.catalog.sessions.kept])

    def hit(self, keys: Sequence[bytes]) -> None:
        """These readable records were used: a tier that lacks one gets it next."""
        for debts in self._books.debts.values():
            for key in reversed(keys) if debts else ():
                if key in debts:
                    debts.move_to_end(key, last=False)
        self._owe([key for key in keys if self._ingestion.on_hit(key)])

    def forgive(self, keys: Sequence[bytes] | None, places: Sequence[str] | None) -> None:
        """Tiers of these names, or all, are not to have these records, or any, any more."""
        for tier in self._below.tiers:
            if places is None or tier.name in places:
                for wanted in (tier.queued, self._books.debts.get(tier, {})):
                    if keys is None:
                        wanted.clear()
                    for key in keys or ():
                        wanted.pop(key, None)

    def keeps_in(self, places: Sequence[str]) -> bool:
        """Whether one of these places has what sessions keep."""
        return any(tier.name in places for tier in self._last)

    def pay(self, *, at_once: bool = False) -> None:
        """Put what tiers are to have into the lines of their writers. at_once: also where a pause is not over."""
        for index in range(len(self._below.tiers)):
            self._pay(index, at_once=at_once)

    def _pay(self, index: int, *, at_once: bool = False) -> None:
        tier, catalog = self._below.tiers[index], self._books.catalog
        self._books.note()  # what has gone since is owed no more, and cannot be leased
        debts = self._books.debts.get(tier)
        most_nbytes = self._buffer.nbytes // _WAITING_SHARE
        if not debts or tier.queued_nbytes > most_nbytes // 2:
            return
        if tier.refuses and (tier.queued or not (at_once or self._clock() >= tier.try_again_s)):
            return
        if tier.forgets:
            tier.writers.put(tier.drop_again, alone=True)
        next_ones, waiting_nbytes = list[tuple[bytes, int]](), tier.queued_nbytes
        for key in islice(debts, 1 if tier.refuses else _MOST_PAID):
            nbytes = self._books.shapes[key].nbytes
            if waiting_nbytes and waiting_nbytes + nbytes > most_nbytes:
                break
            next_ones.append((key, nbytes))
            waiting_nbytes += nbytes
        question = Question([key for key, _ in next_ones])
        for keys in tier.runs(next_ones):
            lease = catalog.lease(keys, SELF, "write-through", inf)
            run = [
                _Sealing(slot, self._books.shapes[slot.key], self._books.expires_at_s(slot.key))
                for slot in lease.slots
            ]
            if not tier.writers.put(partial(self._write, index, lease, run, question)):  # the store is closing
                catalog.release(lease)
                return
            for slot in lease.slots:
                del debts[slot.key]
                tier.queued_nbytes += slot.nbytes
                tier.queued[slot.key] = slot.serial

    def flush(self, timeout_s: float) -> bool:
        """Pay all debts; whether every tier has what it was to have since the last flush."""
        deadline_s, before = self._clock() + timeout_s, inf
        while True:
            with self._books.lock:
                self.pay(at_once=True)
            if not self._below.flush(deadline_s - self._clock()):
                return False
            with self._books.lock:
                there = self._below.there
                goes_on = [tier for tier in there if not tier.stalls]
                left = sum(len(self._books.debts.get(tier, ())) for tier in goes_on)
                waits = any(tier.queued for tier in goes_on)
                if not left and not waits:
                    num_dropped, self._books.num_dropped = self._books.num_dropped, 0
                    return not num_dropped and len(goes_on) == len(there)
            if left >= before and not waits:  # a tier takes nothing
                return False
            before = left

    def put(self, index: int, shape: RecordShape, slot: Slot) -> bool:
        """Whether one tier has the record of a slot afterwards. Waits for its thread."""
        return self._alone(index, partial(self._put, index, shape, slot))

    def repack(self, index: int, key: bytes, shape: RecordShape, codec: Codec | None) -> bool:
        """Whether one tier has a record in that codec afterwards; readers miss it for a moment. Waits for its
        thread."""
        return self._alone(index, partial(self._repack, index, key, shape, codec))

    def _alone(self, index: int, job: Callable[[], bool]) -> bool:
        """What a job says that a tier's writers do alone; False if that takes longer than the deadline."""
        try:
            return self._below.tiers[index].writers.submit(job, alone=True).result(self._deadline_s)
        except (TimeoutError, CancelledError):
            return False

    # --- The tiers' threads

    def _put(self, index: int, shape: RecordShape, slot: Slot) -> bool:
        """Here, so that what clears the record meanwhile comes after it."""
        self._below.tiers[index].drop_again()
        with self._books.lock:
            lease = self._books.catalog.lease([slot.key], SELF, "move", inf)
            expires_at_s = self._books.expires_at_s(slot.key)
        try:
            one = _Sealing(slot, shape, expires_at_s)
            return lease.slots == (slot,) and slot in self._offer(index, [one], Question([slot.key])).taken
        finally:
            with self._books.lock:
                self._books.catalog.release(lease)

    def _write(self, index: int, lease: SlotLease, run: Sequence[_Sealing], question: Question) -> None:
        tier, offered = self._below.tiers[index], _Offered(set(), set())
        try:
            with self._books.lock:
                wanted = [one for one in run if tier.queued.get(one.slot.key) == one.slot.serial]
            if wanted:
                offered = self._offer(index, wanted, question)
        finally:
            with self._books.lock:
                self._settle(tier, lease.slots, offered)
                self._books.catalog.release(lease)
                self._pay(index)
            self._books.tell()

    def _settle(self, tier: GuardedTier, slots: Sequence[Slot], offered: _Offered) -> None:
        """A run is over: what became of its records, as far as they are still to be there. Under the lock."""
        debts, last_taken = self._books.debts.get(tier), None  # no debts of a tier that was removed meanwhile
        for slot in slots:
            tier.queued_nbytes -= slot.nbytes
            if tier.queued.get(slot.key) != slot.serial:
                continue
            del tier.queued[slot.key]
            if slot in offered.changed:
                log.error("record %s has changed in memory, and is dropped", slot.key.hex()[:16])
                self._books.catalog.remove([slot.key])
                continue
            last_taken = slot in offered.taken
            if last_taken and tier in self._last:
                self._books.catalog.is_below(slot.key)
            elif not last_taken and debts is not None and slot.key in self._books.shapes:
                debts[slot.key] = None
        if last_taken is not None:
            tier.took(self._clock(), taken=last_taken)

    def _offer(self, index: int, run: Sequence[_Sealing], question: Question) -> _Offered:
        """Have one tier write the records of these slots, as far as it has not got them.

        The lease of the slots has no deadline: what is sealed must not change. question: of the records' batch.
        """
        tier, offered = self._below.tiers[index], _Offered(set(), set())
        self._books.wait_told()  # a tier tells no tokens: they are known by the record in memory
        with self._books.lock:
            summed = self._books.summed.intersection([one.slot.key for one in run])
        slots: list[Slot] = []
        records: list[tuple[bytes, memoryview]] = []
        shown = [one for one in run if not tier.hides(one.slot.key)]
        known = question.known(tier.contains) if shown else {}
        for slot, shape, expires_at_s in shown:
            key = slot.key
            if known.get(key):
                offered.taken.add(slot)
            if known.get(key) is not False:  # or it does not answer
                continue
            record = self._buffer.array[slot.offset :][: shape.nbytes]
            if not self._sealed:
                seal(record, key, shape, expires_at_s, hashed=self._below.hashed, summed=key in summed)
            elif unseal(record, key, shape) is not None:
                offered.changed.add(slot)
                continue
            slots.append(slot)
            records.append((key, pack(record, shape, tier.codec).data))
        offered.taken.update(compress(slots, tier.put(records)))
        return offered

    def _repack(self, index: int, key: bytes, shape: RecordShape, codec: Codec | None) -> bool:
        tier, record = self._below.tiers[index], np.empty(shape.nbytes, np.uint8)
        (nbytes,) = tier.get([(key, record.data)])
        if nbytes is None or tier.hides(key):
            return False
        header = header_of(record, key, shape, nbytes, verified=tier.verifies)
        if isinstance(header, Miss):
            return False
        seal(record, key, shape, header.expires_at_s, hashed=self._below.hashed)
        tier.remove(key)
        return tier.put([(key, pack(record, shape, codec).data)]) == [True]
