"""Where a prefix ends of which every group of layers has what it needs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.store.reach import chunks_of, part_of, reach

FULL = KVLayout("uint8", 4, 8, 1, 64, (LayerLayout((Part(0, 0),), 256, 64, 64),))
WINDOW = replace(FULL, window=9, window_step=4)
STATE = replace(FULL, block_tokens=8, state=True)
CHUNK = 8


def longest(layouts: list[KVLayout], known: list[list[bool]], begin: int, limit: int, goes_on: int | None) -> int:
    """By trying every token on every boundary."""
    best = 0
    for count in range(1, min(map(len, known)) + 1):
        end = min(count * CHUNK, limit)
        if count * CHUNK <= begin:
            continue
        whole = True
        for layout, has in zip(layouts, known, strict=True):
            for token in range(end):
                first, last = layout.needed(begin, end if goes_on is None else goes_on)
                wanted = layout.keeps_all or (first <= token < last and token >= begin)
                whole = whole and (has[token // CHUNK] or not wanted)
        best = end if whole else best
    return best


def test_no_boundary_is_further_where_every_group_has_what_it_needs() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    choose = random.Random(seed)
    ends = set()
    for _ in range(3000):
        layouts = choose.sample([FULL, WINDOW, STATE], choose.randint(1, 3))
        count = choose.randint(0, 6)
        known = [[choose.random() < 0.7 for _ in range(count)] for _ in layouts]
        begin = choose.choice([0, 0, 3, 8, 20])
        limit = count * CHUNK + (choose.randint(0, 9) if STATE in layouts else choose.choice([-1, -1, 0, 5]))
        goes_on = choose.choice([None, None, limit + choose.randint(0, 20)])
        found = reach(layouts, known, CHUNK, begin, limit, goes_on)
        assert found == longest(layouts, known, begin, limit, goes_on), (layouts, known, begin, limit, goes_on)
        ends.add(found)
    assert len(ends) == 13, "each boundary, and one token before each but 0"


def test_a_window_needs_its_last_chunks_and_a_state_the_one_of_the_boundary() -> None:
    has = [True] * 4
    assert reach([FULL, WINDOW], [has, [False, True, True, True]], CHUNK, 0, 32) == 32
    assert reach([FULL, WINDOW], [has, [False, False, True, False]], CHUNK, 0, 32) == 24
    assert reach([FULL, STATE], [has, [False, True, False, False]], CHUNK, 0, 32) == 16
    assert reach([FULL, WINDOW], [[False, *has[1:]], has], CHUNK, 8, 32) == 0, "full attention needs all of it"


def test_a_prefix_that_is_the_whole_prompt_ends_before_its_last_token() -> None:
    """Then a window begins a token earlier, perhaps in a chunk more."""
    has, wide = [True] * 4, replace(WINDOW, window=18, window_step=1)
    assert reach([FULL], [has], CHUNK, 0, 31) == 31
    assert reach([wide], [[False, True, True, True]], CHUNK, 0, 32) == 32
    assert reach([wide], [[False, True, True, True]], CHUNK, 0, 31) == 31
    assert reach([replace(wide, window=17)], [[False, False, True, True]], CHUNK, 0, 32) == 32
    assert reach([replace(wide, window=17)], [[False, False, True, True]], CHUNK, 0, 31) == 0
    assert reach([FULL], [[True] * 3], CHUNK, 0, 31) == 24, "the last chunk is not there"


def test_what_another_server_sends_is_not_needed_of_a_store() -> None:
    """It computes all but the last token of 61, so a state and the end of the window come from there."""
    assert reach([FULL, WINDOW, STATE], [[True] * 4, [False] * 4, [False] * 4], CHUNK, 0, 60, goes_on=60) == 32
    assert reach([FULL, WINDOW], [[True] * 7, [False] * 6 + [True]], CHUNK, 0, 60, goes_on=60) == 56
    assert part_of(STATE, 0, 56, 60) == (56, 56)
    assert list(chunks_of(56, 56, CHUNK)) == []


@pytest.mark.parametrize(("begin", "end", "chunks"), [(0, 8, [0]), (7, 9, [0, 1]), (8, 8, [])])
def test_tokens_are_in_the_chunks_that_hold_them(begin: int, end: int, chunks: list[int]) -> None:
    assert list(chunks_of(begin, end, CHUNK)) == chunks
