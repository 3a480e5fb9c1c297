"""Memory of an arena: it comes when it is asked for, from the begin on, in as many threads as ask."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from pdlink.store.arena import Arena
from tests.waiting import WAIT_S

STEP = 1 << 20


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def arena(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr("pdlink.store.arena._PIECE_NBYTES", STEP // 4)
    made = Arena(32 * STEP, step_nbytes=STEP, clock=clock)
    yield made
    made.close()


def test_memory_is_there_when_commit_returns_to_any_thread(arena: Arena) -> None:
    with ThreadPoolExecutor(8) as pool:
        ends = [(7 * number % 32 + 1) * STEP for number in range(32)]
        for end, committed in zip(ends, pool.map(arena.commit, ends), strict=True):
            assert committed >= end
    assert arena.committed_nbytes == arena.nbytes == arena.room_nbytes


def test_pieces_are_filled_by_several_threads_at_the_same_time(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    populate, meet = arena.buffer.populate, threading.Barrier(2)

    def together(begin: int, end: int, *, huge: bool) -> None:
        if begin < STEP + STEP // 2:
            meet.wait(WAIT_S)
        populate(begin, end, huge=huge)

    monkeypatch.setattr(arena.buffer, "populate", together)
    assert arena.commit(2 * STEP) == 2 * STEP


def test_who_needs_memory_fills_no_more_than_that_and_leaves_the_rest_of_a_step_to_others(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena._helpers, "put", lambda job: True)
    assert arena.commit(STEP + STEP // 8) == STEP + STEP // 4


def test_a_granted_range_is_filled_without_anybody_who_waits(arena: Arena) -> None:
    assert arena.begin(3 * STEP) == 3 * STEP
    with arena._changed:
        assert arena._changed.wait_for(lambda: arena.committed_nbytes == 3 * STEP, WAIT_S)


def test_what_is_being_filled_is_not_granted_twice(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.arena.available_nbytes", lambda: 3 * STEP)
    monkeypatch.setattr(arena._helpers, "put", lambda job: True)
    assert arena.begin(9 * STEP) == 4 * STEP
    assert arena.problem


def test_memory_that_does_not_come_is_not_granted_and_nobody_waits_for_it(
    arena: Arena, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took it after we looked."""
    populate = arena.buffer.populate

    def fail(begin: int, end: int, *, huge: bool) -> None:
        if begin >= 2 * STEP:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        populate(begin, end, huge=huge)

    with monkeypatch.context() as patch:
        patch.setattr(arena.buffer, "populate", fail)
        assert arena.commit(5 * STEP) == arena.room_nbytes == 2 * STEP
        assert "Cannot allocate" in arena.problem
        assert arena.commit(5 * STEP) == 2 * STEP, "it is not tried again for a while"
    clock.now_s += 11
    assert arena.commit(5 * STEP) == 5 * STEP
    assert arena.room_nbytes == arena.nbytes
    assert arena.problem == ""


def test_an_arena_that_may_grow_beyond_what_the_system_has_says_so_while_it_is_so(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, said in ((30 * STEP, True), (31 * STEP, False), (30 * STEP, True)):
        monkeypatch.setattr("pdlink.store.arena.available_nbytes", lambda more=more: more)
        assert bool(arena.shortage()) == said
    assert (arena.problem, arena.room_nbytes) == ("", arena.nbytes), "nothing was refused"


def test_memory_runs_ahead_of_what_is_used(arena: Arena) -> None:
    assert not arena.wants_more(STEP // 2)
    assert arena.wants_more(STEP)
    arena.run_ahead(STEP)
    assert arena.committed_nbytes == 2 * STEP
    assert not arena.wants_more(STEP)


def test_memory_takes_the_time_of_huge_pages_only_while_nothing_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    with closing(Arena(8 * STEP, step_nbytes=STEP, early_nbytes=2 * STEP)) as arena:
        monkeypatch.setattr(arena.buffer, "populate", lambda begin, end, *, huge: asked.append(huge))
        arena.run_ahead(0)
        assert set(asked) == {True}
        asked.clear()
        arena.run_ahead(2 * STEP)
        arena.commit(8 * STEP)
        assert set(asked) == {False}


def test_as_much_again_as_is_used_has_memory_a_step_at_a_time(arena: Arena) -> None:
    used = 3 * STEP
    assert arena.commit(used) == used < arena.nbytes
    steps = 0
    while arena.wants_more(used):
        arena.run_ahead(used)
        steps += 1
        assert arena.committed_nbytes == min(arena.nbytes, used + steps * STEP)
    assert arena.committed_nbytes == min(arena.nbytes, 2 * used)


def test_run_ahead_leaves_the_last_memory_to_others_and_a_commit_takes_it(
    arena: Arena, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.store.arena.available_nbytes", lambda: 15 * STEP)
    assert arena.wants_more(4 * STEP)
    arena.run_ahead(4 * STEP)
    assert (arena.committed_nbytes, arena.problem) == (STEP, "")
    assert not arena.wants_more(4 * STEP), "it is not tried again for a while"
    assert arena.commit(4 * STEP) == 4 * STEP, "what is needed is had"
    clock.now_s += 11
    assert arena.wants_more(4 * STEP)
