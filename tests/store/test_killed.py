"""A store is killed in the middle of what it does with its disk: the next one gives out whole records only."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.waiting import WAIT_S, until

from .dying_store import DyingStore, store_in
from .process import client
from .test_store import KEYS, fetch, put, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdlink.store.store import Store


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[Callable[[], DyingStore]]:
    made = []

    def make() -> DyingStore:
        made.append(DyingStore(tmp_path))
        return made[-1]

    yield make
    for store in made:
        store.end()


@contextmanager
def next_life(directory: Path) -> Iterator[Store]:
    store = store_in(directory)
    try:
        yield store
        store.check()
    finally:
        store.close()


def test_a_store_killed_while_it_writes_to_its_disk_has_what_was_written_before(
    dying: Callable[[], DyingStore], tmp_path: Path
) -> None:
    store = dying()
    with client(store.path) as mine:
        assert put(mine, KEYS[:3]) == 3
        assert mine.flush(WAIT_S)
        store.call("die_in_write", 1)
        assert put(mine, KEYS[3:]) == len(KEYS) - 3
        assert store.ended()
        until(lambda: not mine.connected, "the client sees it")
    with next_life(tmp_path) as again:
        assert 3 <= read(again, KEYS) < len(KEYS)
        put(again, KEYS)
        assert again.flush(WAIT_S)
    with next_life(tmp_path) as again:
        assert read(again, KEYS) == len(KEYS)


def test_a_store_killed_while_it_brings_records_from_its_disk_keeps_them_there_and_ends_the_fetch(
    dying: Callable[[], DyingStore], tmp_path: Path
) -> None:
    with next_life(tmp_path) as first:
        assert put(first, KEYS) == len(KEYS)
        assert first.flush(WAIT_S)
    store = dying()
    with client(store.path) as mine:
        until(lambda: mine.connected, "it connects")
        store.call("die_in_read", 1)
        begun = fetch(mine, KEYS)
        assert store.ended(), "it was not reading"
        assert begun.done.result(WAIT_S) == (), "half of a record is none"
        begun.close()
    with next_life(tmp_path) as again:
        assert read(again, KEYS) == len(KEYS)


def test_a_store_killed_before_its_disk_has_forgotten_what_was_cleared_never_finds_it_again(
    dying: Callable[[], DyingStore], tmp_path: Path
) -> None:
    store = dying()
    with client(store.path) as mine:
        assert put(mine, KEYS[:2]) == 2
        assert mine.flush(WAIT_S)
        store.call("die_before_removing")
        mine.clear(KEYS[:1])  # answered or not
        assert store.ended()
    with next_life(tmp_path) as again:
        assert read(again, KEYS[:1]) == 0
        assert read(again, KEYS[1:2]) == 1
        until(lambda: not again.state().places[1].forgets, "it is removed")
