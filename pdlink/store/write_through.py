"""`WriteThrough`: copies of records on their way from the arena into the tiers below it.

Each tier has a thread that writes. A record that waits for it is leased without a deadline, because the thread always
comes back; so the bytes that wait are bounded, and what is too much for a tier is not written there.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from pdlink.events import WriteDropped, emit
from pdlink.store.below import Question
from pdlink.store.tiers.base import ReadOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import Buffer
    from pdlink.store.below import Below
    from pdlink.store.books import Books
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Lease, Slot

SELF = "store"
"""The holder of the store's own leases and reservations."""
_WAITING_SHARE = 4
"""Of the arena, how small a part may wait for one tier: it cannot be evicted."""
_HEADROOM_SHARE = 8
"""Of the arena, how small a part is kept free by evicting ahead, where what is evicted is written first."""


class WriteThrough:
    """Thread-safe. `begin` and `make_headroom` are called with the lock of the books held."""

    def __init__(self, books: Books, below: Below, buffer: Buffer, *, sealed: bool, deadline_s: float) -> None:
        """buffer: the arena. sealed: records have their header when they become readable, else when they are written.

        deadline_s: of calls that wait for a tier's thread.
        """
        self._books, self._below, self._buffer = books, below, buffer
        self._sealed, self._deadline_s = sealed, deadline_s

    def begin(self, keys: Sequence[bytes], shape: RecordShape) -> None:
        """Write these readable records to every tier, in its thread."""
        catalog = self._books.catalog
        questions = [Question(keys) for _ in self._below.tiers]
        for key in keys:
            for index, tier in enumerate(self._below.tiers):
                if isinstance(tier.tier, ReadOnly):
                    continue
                if tier.queued_nbytes and tier.queued_nbytes + shape.nbytes > self._buffer.nbytes // _WAITING_SHARE:
                    emit(WriteDropped(tier=tier.name))
                    continue
                lease = catalog.lease([key], SELF, "write-through", inf)
                tier.queued_nbytes += shape.nbytes
                tier.queued[key] = lease.slots[0].serial
                expires_at_s = self._books.expires_at_s(key)
                job = partial(self._write, index, lease, shape, expires_at_s, questions[index])
                if not tier.writers.put(job):
                    tier.queued_nbytes -= shape.nbytes
                    del tier.queued[key]
                    catalog.release(lease)

    def make_headroom(self) -> None:
        """Write what goes next before its room is wanted, where eviction writes.

        A tier that is behind does not get its copy, so that nobody waits for it.
        """
        catalog = self._books.catalog
        if self._books.ingestion.writes_back:
            for lease in catalog.leave(catalog.capacity_nbytes // _HEADROOM_SHARE, SELF, inf):
                for slot in lease.slots:
                    self.begin([slot.key], self._books.shapes[slot.key])
                catalog.release(lease)

    def put(self, index: int, shape: RecordShape, slot: Slot) -> bool:
        """Whether one tier has the record of a slot afterwards. Waits for its thread."""
        return self.in_line(index, partial(self._put, index, shape, slot))

    def in_line(self, index: int, job: Callable[[], bool]) -> bool:
        """What a job of a tier's writer says; False if that takes longer than the deadline."""
        try:
            return self._below.tiers[index].writers.submit(job).result(self._deadline_s)
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
            return lease.slots == (slot,) and self._offer(index, slot, shape, expires_at_s, Question([slot.key]))
        finally:
            with self._books.lock:
                self._books.catalog.release(lease)

    def _write(self, index: int, lease: Lease, shape: RecordShape, expires_at_s: float, question: Question) -> None:
        tier, slot = self._below.tiers[index], lease.slots[0]
        try:
            tier.drop_again()
            with self._books.lock:
                is_wanted = tier.queued.get(slot.key) == slot.serial
                if is_wanted:
                    del tier.queued[slot.key]
            if is_wanted:
                self._offer(index, slot, shape, expires_at_s, question)
        finally:
            with self._books.lock:
                tier.queued_nbytes -= shape.nbytes
                self._books.catalog.release(lease)

    def _offer(self, index: int, slot: Slot, shape: RecordShape, expires_at_s: float, question: Question) -> bool:
        """Whether the tier has a record afterwards. Its lease has no deadline: what is sealed must not change."""
        self._books.wait_told()  # a tier tells no tokens: they are known by the record in memory
        record = slot.of(self._buffer.array)[: shape.nbytes]
        with self._books.lock:
            summed = slot.key in self._books.summed
        sealed_at_s = None if self._sealed else expires_at_s
        return self._below.offer(index, slot.key, record, shape, sealed_at_s, summed=summed, question=question)
