"""The part of the arena that goes into huge pages next."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from pdlink.store import gathering as gathering_module
from pdlink.store.eviction import Lru
from pdlink.store.gathering import AGE_S, STEP_NBYTES, Gathering
from pdlink.store.store import Store
from tests.waiting import WAIT_S


def steps(gathering: Gathering, committed_nbytes: int, *answers: bool | None) -> list[int | None]:
    """What is tried with these answers, and what would be next, when that memory has been there for a while."""
    tried = []
    gathering.next(committed_nbytes, 0.0)
    for answer in answers:
        begin = gathering.next(committed_nbytes, AGE_S)
        assert begin is not None
        gathering.tried(begin, answer)
        tried.append(begin)
    return [*tried, gathering.next(committed_nbytes, AGE_S)]


def test_only_memory_that_is_there_is_gathered_and_once() -> None:
    gathering = Gathering()
    assert steps(gathering, STEP_NBYTES - 1) == [None]
    assert steps(gathering, 2 * STEP_NBYTES, True, True) == [0, STEP_NBYTES, None]
    assert steps(gathering, 3 * STEP_NBYTES, True) == [2 * STEP_NBYTES, None]


def test_a_step_that_somebody_held_is_tried_again_after_the_others_and_not_for_ever() -> None:
    gathering = Gathering()
    assert steps(gathering, 2 * STEP_NBYTES, False, True, False, False) == [0, STEP_NBYTES, 0, 0, None]
    assert steps(gathering, 3 * STEP_NBYTES, False, True) == [2 * STEP_NBYTES, 2 * STEP_NBYTES, None]


def test_nothing_more_is_tried_on_a_kernel_that_cannot() -> None:
    assert steps(Gathering(), 2 * STEP_NBYTES, None) == [0, None]


def test_what_is_tried_no_more_has_settled() -> None:
    """So far from the begin: pinning it keeps no step from a huge page."""
    gathering, committed = Gathering(), 3 * STEP_NBYTES + 4096
    assert gathering.settled_nbytes(committed) == 0
    steps(gathering, committed, True, False)
    assert gathering.settled_nbytes(committed) == STEP_NBYTES
    steps(gathering, committed, True, False, False)
    assert gathering.settled_nbytes(committed) == 3 * STEP_NBYTES
    gathering.tried(3 * STEP_NBYTES, None)
    assert gathering.settled_nbytes(committed + STEP_NBYTES) == 4 * STEP_NBYTES


def test_memory_that_has_just_come_is_left_to_who_fills_it() -> None:
    gathering = Gathering()
    assert gathering.next(STEP_NBYTES, 10.0) is None
    assert gathering.next(2 * STEP_NBYTES, 11.0) is None
    assert gathering.next(2 * STEP_NBYTES, 10.0 + AGE_S) == 0
    gathering.tried(0, True)
    assert gathering.next(2 * STEP_NBYTES, 10.0 + AGE_S) is None
    assert gathering.next(2 * STEP_NBYTES, 11.0 + AGE_S) == STEP_NBYTES


def test_a_store_tells_how_much_of_its_memory_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this kernel makes of huge pages."""
    monkeypatch.setattr(gathering_module, "AGE_S", 0.0)
    told: SimpleQueue[int] = SimpleQueue()
    store = Store(3 * STEP_NBYTES, Lru())
    store.memory_settled = told.put
    store.open()
    try:
        nbytes = told.get(timeout=WAIT_S)
        while nbytes < 3 * STEP_NBYTES:
            before, nbytes = nbytes, told.get(timeout=WAIT_S)
            assert nbytes > before
        assert nbytes == 3 * STEP_NBYTES
    finally:
        store.close()
