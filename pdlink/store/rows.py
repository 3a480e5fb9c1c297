"""`RecordRows`: rows of an engine's memory, each a record of its own: bytes of which the store knows no layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlink import _copy
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdlink.memory.buffers import Bytes
    from pdlink.store.interface import AnyStore
    from pdlink.store.record import Sums
    from pdlink.store.slots import Slot


def row_shape(nbytes: int) -> RecordShape:
    """Of the record of a row with so many bytes, a multiple of 64."""
    return RecordShape("uint8", 1, (Group("latent", (0,), 1, 1, nbytes),))


class RecordRows:
    """Copies in the calling thread, without the GIL, in one native call. Rows are named by number."""

    def __init__(self, memory: Bytes, row_nbytes: int) -> None:
        """memory: of all rows, one after the other; borrowed."""
        self._memory, self._row_nbytes = memory, row_nbytes

    def save(self, store: AnyStore, slots: Sequence[Slot], rows: Sequence[int]) -> bool:
        """Fill reserved records, one for each row. Whether they have sums, as `AnyStore.commit` wants to know."""
        summed = store.wants_sums
        sums = self._copy(store, slots, rows, loading=False, summed=summed)
        if summed:
            _pairs(store.array)[_said_at(slots)] = sums
        return summed

    def load(
        self, store: AnyStore, slots: Sequence[Slot], rows: Sequence[int], unchecked: Collection[bytes]
    ) -> list[Slot]:
        """Fill rows from leased records; the slots of the unchecked records that are not what was put.

        unchecked: as of `AnyFetch`.
        """
        unsure = [slot.key in unchecked for slot in slots]
        sums = self._copy(store, slots, rows, loading=True, summed=any(unsure))
        if not any(unsure):
            return []
        differ = (_pairs(store.array)[_said_at(slots)] != sums).any(axis=1)
        return [slots[number] for number in np.flatnonzero(differ & unsure).tolist()]

    def _copy(
        self, store: AnyStore, slots: Sequence[Slot], rows: Sequence[int], *, loading: bool, summed: bool
    ) -> Sums:
        """The sums of each record; zeros if not summed."""
        sums = np.zeros((len(slots), 2), np.uint64)
        if not slots:
            return sums
        starts = np.array([slot.offset + HEADER_NBYTES for slot in slots])
        places = np.array(rows, np.int64) * self._row_nbytes
        of, to = (starts, places) if loading else (places, starts)
        runs = np.stack([of, to, np.full(len(slots), self._row_nbytes)], axis=1)
        source, target = (store.array, self._memory) if loading else (self._memory, store.array)
        if summed:
            ends = np.arange(1, len(slots) + 1)
            _copy.nt_runs_summed(target, source, runs, ends, starts, sums, not loading)
        else:
            _copy.nt_runs(target, source, runs)
        return sums


def _pairs(records: Bytes) -> Sums:
    """The sums that a record of one layer says stand in the last pair of its header."""
    return records[: len(records) // 16 * 16].view(np.uint64).reshape(-1, 2)


def _said_at(slots: Sequence[Slot]) -> list[int]:
    """Which pair that is, of each."""
    return [(slot.offset + HEADER_NBYTES) // 16 - 1 for slot in slots]
