"""Slots never overlap, and what is given back can be taken again."""

from __future__ import annotations

import random

import pytest

from pdlink.store.extents import ALIGNMENT_NBYTES, Extents

PAGE = ALIGNMENT_NBYTES


def extents(pages: int) -> Extents:
    made = Extents()
    made.grow(pages * PAGE)
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
            taken.add(got)
        if rng.random() < 0.02:
            made.grow(made.limit_nbytes + rng.randint(0, 5) * PAGE)
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
    with pytest.raises(ValueError, match="shrink"):
        made.grow(PAGE)
    assert made.take(0) is None
