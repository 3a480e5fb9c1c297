"""Slots never overlap, and what is given back can be taken again."""

from __future__ import annotations

import random

import pytest

from pdlink.store.extents import ALIGNMENT_NBYTES, Extents

PAGE = ALIGNMENT_NBYTES


def extents(pages: int) -> Extents:
    made = Extents()
    made.limit_nbytes = pages * PAGE
    return made


@pytest.mark.parametrize("seed", range(30))
def test_ranges_always_fill_the_arena_exactly(seed: int) -> None:
    rng = random.Random(seed)
    made = extents(50)
    taken: set[int] = set()
    for _ in range(400):
        if taken and rng.random() < 0.5:
            taken.remove(begin := rng.choice(sorted(taken)))
            made.give_back(begin)
        elif (got := made.take(rng.randint(1, 9 * PAGE))) is not None:
            assert got % PAGE == 0
            assert got < made.limit_nbytes
            taken.add(got)
        if rng.random() < 0.02:
            made.limit_nbytes = rng.randint(1, 60) * PAGE
        made.check()
    for begin in taken:
        made.give_back(begin)
    assert made.take(made.limit_nbytes) == 0


def test_records_of_one_length_leave_no_gap() -> None:
    made = extents(30)
    begins = [made.take(3 * PAGE - 5) for _ in range(10)]
    assert begins == [index * 3 * PAGE for index in range(10)]
    assert made.take(1) is None
    for begin in (9, 3, 4):
        made.give_back(begin * 3 * PAGE)
    assert [made.take(3 * PAGE), made.take(6 * PAGE)] == [27 * PAGE, 9 * PAGE]


def test_what_was_not_taken_cannot_be_given_back() -> None:
    made = extents(4)
    begin = made.take(PAGE)
    assert begin == 0
    made.give_back(begin)
    with pytest.raises(KeyError):
        made.give_back(begin)
    assert made.take(0) is None


def test_nothing_is_taken_beyond_a_limit_that_was_lowered_and_what_lies_there_stays() -> None:
    made = extents(8)
    assert [made.take(2 * PAGE) for _ in range(4)] == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]
    made.limit_nbytes = 4 * PAGE
    made.give_back(6 * PAGE)
    assert made.take(2 * PAGE) is None
    made.give_back(2 * PAGE)
    assert made.take(2 * PAGE) == 2 * PAGE
    made.limit_nbytes = 8 * PAGE
    assert made.take(2 * PAGE) == 6 * PAGE
    made.check()
