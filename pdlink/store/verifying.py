"""`Verifying`: compares what a store holds with its checksums, for operators, and drops what is wrong."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from pdlink.store.interface import MEMORY
from pdlink.store.record import Miss, holds, unseal
from pdlink.store.tiers.base import DAMAGED
from pdlink.store.write_through import SELF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.memory.buffers import Bytes
    from pdlink.store.below import Below, GuardedTier
    from pdlink.store.books import Books
    from pdlink.store.record import RecordShape

log = logging.getLogger(__name__)

_FAILED = -2
"""What no `Tier.get` gives."""


class Verified(NamedTuple):
    """Records of one place."""

    right: int = 0
    wrong: int = 0
    """That were dropped."""
    unknown: int = 0
    """Without a checksum, or in a tier that did not answer."""

    def and_one(self, is_right: bool | None) -> Verified:
        return Verified(
            self.right + (is_right is True), self.wrong + (is_right is False), self.unknown + (is_right is None)
        )


class Verifying:
    def __init__(self, books: Books, below: Below, array: Bytes, *, sealed: bool, deadline_s: float) -> None:
        """sealed: every record in memory has its header. deadline_s: longest wait for a record of a tier."""
        self._books, self._below, self._array = books, below, array
        self._sealed, self._deadline_s = sealed, deadline_s

    def here(self, keys: Sequence[bytes] | None = None) -> Verified:
        """Of these records, or all, those in memory. In this thread, at 0.06 CPU s per GB."""
        if keys is None:
            with self._books.lock:
                keys = list(self._books.shapes)
        found = Verified()
        for key in keys:
            with self._books.lock:
                lease = self._books.catalog.lease([key], SELF, "verify", inf)
                self._books.note()
                shape, summed = self._books.shapes.get(key), key in self._books.summed
            try:
                if lease.slots and shape is not None:
                    record = self._array[lease.slots[0].offset :][: shape.nbytes]
                    is_right = self._is_right(record, key, shape, summed=summed)
                    found = found.and_one(is_right)
                    if is_right is False:
                        self._drop(key)
            finally:
                with self._books.lock:
                    self._books.catalog.release(lease)
        self._books.tell()
        return found

    def _is_right(self, record: Bytes, key: bytes, shape: RecordShape, *, summed: bool) -> bool | None:
        if self._sealed:
            return unseal(record, key, shape) is None
        return holds(record, shape) if summed else None

    def _drop(self, key: bytes) -> None:
        log.error("record %s has changed in %s, and is dropped", key.hex()[:16], MEMORY)
        with self._books.lock:
            self._books.catalog.remove([key])
            self._books.note()

    def in_tier(self, index: int, keys: Sequence[bytes], shape: RecordShape) -> Verified:
        """Read these records whole, as far as a tier says it has them; of a tier that has taken longer than the
        deadline for one it waits for no other."""
        tier, found, longest_s = self._below.tiers[index], Verified(), self._deadline_s
        asked = [tier.readers.submit(partial(_verify, tier, key, shape)) for key in keys]
        for each in asked:
            try:
                has, is_right = each.result(longest_s)
            except (TimeoutError, CancelledError):
                has, is_right, longest_s = True, None, 0.0
            if has:
                found = found.and_one(is_right)
        return found


def _verify(tier: GuardedTier, key: bytes, shape: RecordShape) -> tuple[bool, bool | None]:
    """Whether a tier has a record, and whether that is right; None where nobody can tell. A wrong one is removed. One
    that makes room for others meanwhile is not there. In this thread."""
    if tier.hides(key) or not any(tier.contains([key])):
        return False, None
    record, failed = np.empty(shape.nbytes, np.uint8), cast("int | None", _FAILED)
    nbytes = tier.call("get", partial(tier.tier.get, key, record.data), failed, [len(record)])
    if nbytes is None or nbytes == failed:
        return nbytes is not None, None
    miss = Miss("damaged") if nbytes == DAMAGED else unseal(record, key, shape, nbytes, verified=tier.verifies)
    if miss is not None:
        log.error("tier %s: record %s is wrong, and is dropped: %s", tier.name, key.hex()[:16], miss.reason)
        tier.writers.put(partial(tier.remove, key), alone=True)
    return True, miss is None
