"""Rows of an engine's memory as records."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pdlink.store.eviction import Lru
from pdlink.store.record import HEADER_NBYTES
from pdlink.store.rows import RecordRows, row_shape
from pdlink.store.store import Store
from pdlink.store.tiers.disk import Disk

ROW_NBYTES, COUNT, WAIT_S = 8192, 6, 30.0
SHAPE = row_shape(ROW_NBYTES)


def test_rows_come_back_from_memory_and_disk_and_a_changed_one_is_named(tmp_path: Path) -> None:
    memory = np.random.default_rng(0).integers(0, 255, (2 * COUNT, ROW_NBYTES), np.uint8)
    rows = RecordRows(memory.reshape(-1), ROW_NBYTES)
    keys = [os.urandom(32) for _ in range(COUNT)]

    def opened() -> Store:
        store = Store(COUNT * SHAPE.nbytes, Lru(), [Disk(tmp_path / "kv", "rows", 1 << 24)])
        store.open()
        return store

    def loaded(store: Store) -> tuple[list[int], list[int]]:
        """Which rows have come, and which were named as wrong, in an order that is not that of the records."""
        memory[COUNT:] = 0
        fetch = store.fetch(store.lookup(keys, WAIT_S), SHAPE, "r", checks=True)
        slots = fetch.done.result(WAIT_S)
        into = list(range(2 * COUNT - 1, COUNT - 1, -1))[: len(slots)]
        wrong = [keys.index(slot.key) for slot in rows.load(store, slots, into, fetch.unchecked)]
        fetch.close()
        return [row for row in range(COUNT) if np.array_equal(memory[2 * COUNT - 1 - row], memory[row])], wrong

    store = opened()
    slots = store.reserve(keys, SHAPE)
    summed = rows.save(store, slots, [keys.index(slot.key) for slot in slots])
    store.commit(slots, SHAPE, summed=summed)
    assert loaded(store) == (list(range(COUNT)), [])
    assert store.flush(WAIT_S)
    store.close()
    store = opened()
    assert loaded(store) == (list(range(COUNT)), [])
    fetch = store.fetch(store.lookup(keys, WAIT_S), SHAPE, "r", checks=True)
    slot = fetch.done.result(WAIT_S)[2]
    store.array[slot.offset + HEADER_NBYTES + 5] ^= 1
    fetch.close()
    assert loaded(store) == ([0, 1, 3, 4, 5], [2])
    store.close()


def test_no_rows_are_no_call() -> None:
    rows = RecordRows(np.zeros(0, np.uint8), ROW_NBYTES)
    store = Store(COUNT * SHAPE.nbytes, Lru())
    store.open()
    rows.save(store, (), ())
    assert rows.load(store, (), (), ()) == []
    store.close()
