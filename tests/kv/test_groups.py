"""What each group of a cache transfers of a range of tokens, and which blocks that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdlink.errors import InvalidRequest, LayoutMismatch
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout


def layout(block_tokens: int = 4, num_layers: int = 2) -> KVLayout:
    return paged_layout(
        dtype="u8",
        itemsize=1,
        num_layers=num_layers,
        num_blocks=9,
        block_tokens=block_tokens,
        num_heads=1,
        head_dim=3,
    )


def state(block_tokens: int = 1000) -> KVLayout:
    one = layout(block_tokens, 1)
    return replace(one, state=True, layers=tuple(replace(layer, token_stride=0) for layer in one.layers))


GROUPS = KVGroups((layout(), replace(layout(8), window=6, window_step=4), state()))


@pytest.mark.parametrize(
    ("start", "end", "window", "last"),
    [
        (0, 22, (16, 22), (21, 22)),
        (0, 21, (16, 21), (20, 21)),
        (0, 20, (12, 20), (19, 20)),
        (0, 3, (0, 3), (2, 3)),
        (20, 22, (20, 22), (21, 22)),
        (0, 1, (0, 1), (0, 1)),
        (22, 22, (22, 22), (22, 22)),
    ],
)
def test_a_window_needs_its_last_tokens_and_a_state_the_last_one(
    start: int, end: int, window: tuple[int, int], last: tuple[int, int]
) -> None:
    """The window is that of the token after the range, in whole steps, because whole blocks are shared later."""
    assert GROUPS.needed(start, end) == ((start, end), window, last)
    nbytes = [one.token_nbytes for one in GROUPS.layouts]
    ranges = ((start, end), window, last)
    assert GROUPS.nbytes_of(GROUPS.needed(start, end)) == sum(
        each * (stop - first) for each, (first, stop) in zip(nbytes, ranges, strict=True)
    )


@pytest.mark.parametrize(
    ("start", "end", "full", "window"),
    [
        (0, 22, (0, 6), (4, 6)),
        (0, 21, (0, 6), (4, 6)),
        (8, 20, (2, 5), (3, 5)),
        (7, 8, (1, 2), (1, 2)),
        (9, 9, (3, 3), (3, 3)),
    ],
)
def test_positions_of_several_tokens_are_needed_whole(
    start: int, end: int, full: tuple[int, int], window: tuple[int, int]
) -> None:
    """The last one may have some of its tokens only."""
    fours = replace(layout(), position_tokens=4)
    both = KVGroups((fours, replace(fours, window=6, window_step=4)))
    assert both.needed(start, end) == (full, window)
    assert both.nbytes_of(both.needed(start, end)) == (full[1] - full[0] + window[1] - window[0]) * fours.token_nbytes


def test_every_group_gives_the_blocks_of_what_it_needs() -> None:
    tables = ((1, 2, 3, 4, 5, 6), (1, 2, 3), (8,))
    part = GROUPS.part(tables, 5, 22)
    assert part == ((2, 3, 4, 5, 6), (3,), (8,))
    assert GROUPS.problem(part, 5, 22) == ""
    assert "of 1 blocks of group 1; tokens [12, 20) take 2" in GROUPS.problem(((1, 2, 3, 4, 5), (3,), (8,)), 0, 20)
    assert GROUPS.part(tables, 22, 22) == ((), (), ())


def test_each_group_is_given_a_list() -> None:
    one = KVGroups((layout(),))
    assert one.by_group([[3, 1]]) == ((3, 1),)
    assert (one.num_layers, one.group_of, one.keeps_all) == (2, (0, 0), True)
    with pytest.raises(InvalidRequest, match="got 2 lists; expected 1"):
        one.by_group(([3], [1]))
    flat: Any = [3, 1]
    with pytest.raises(InvalidRequest, match="not iterable; pass one list of integers for each group"):
        one.by_group(flat)


def test_block_ids_of_numpy_become_those_of_python() -> None:
    """Others cannot be encoded: an offer with one ended the session, and all of its transfers."""
    one = KVGroups((layout(),))
    ids: Any = np.array([3, 1])
    for tables in (one.by_group([ids]), one.by_group([[*ids]])):
        assert tables == ((3, 1),)
        assert {type(block) for block in tables[0]} == {int}
    assert GROUPS.by_group([ids[1:], [2], ()]) == ((1,), (2,), ())
    wrong: Any
    for wrong in (1.0, None, "1"):
        with pytest.raises(InvalidRequest, match=r"blocks: .* one list of integers"):
            GROUPS.by_group([[1], [wrong], [1]])


def test_layers_are_counted_through_all_groups() -> None:
    assert GROUPS.group_of == (0, 0, 1, 1, 2)
    assert GROUPS.index_of == (0, 1, 0, 1, 0)
    assert not GROUPS.keeps_all


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (KVGroups(()), "a group has no layers"),
        (KVGroups((layout(), replace(layout(), layers=()))), "a group has no layers"),
        (KVGroups((replace(layout(), window=-1),)), "window -1"),
        (KVGroups((replace(layout(), window_step=0),)), "in steps of 0"),
        (KVGroups((replace(state(), window=5),)), "window 5 in steps of 1, state True"),
        (KVGroups((replace(layout(), state=True),)), "a state with a step between tokens"),
        (KVGroups((replace(layout(), position_tokens=0),)), "position_tokens is 0"),
        (KVGroups((replace(state(), position_tokens=2),)), "a state of 2 tokens to a position"),
    ],
)
def test_a_malformed_group_is_refused(groups: KVGroups, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        groups.check("own")


def moved(one: KVLayout, offset: int) -> KVLayout:
    layers = tuple(
        replace(layer, parts=tuple(replace(part, offset=part.offset + offset) for part in layer.parts))
        for layer in one.layers
    )
    return replace(one, layers=layers)


def test_a_block_is_offered_in_one_of_two_groups_that_share_memory() -> None:
    """vLLM lays groups over each other: a block that two lists name would be written twice."""
    over_each_other = KVGroups((layout(), layout()))
    assert over_each_other.overlaid == ((0, 1),)
    assert over_each_other.problem(((1, 2), (3, 4)), 0, 8) == ""
    assert "names block 2 in groups 0 and 1, which share memory" in over_each_other.problem(((1, 2), (2, 4)), 0, 8)
    apart = KVGroups((layout(), moved(layout(), layout().extent(0))))
    assert apart.overlaid == ()
    assert apart.problem(((1, 2), (1, 2)), 0, 8) == "", "each has memory of its own"


def test_groups_side_by_side_within_blocks_do_not_share_memory() -> None:
    """Where a block has all layers, those of two groups have places of their own in it."""
    both = paged_layout(
        dtype="u8",
        itemsize=1,
        num_layers=4,
        num_blocks=5,
        block_tokens=4,
        num_heads=2,
        head_dim=3,
        order="BLPTH",
    )
    side_by_side = KVGroups((replace(both, layers=both.layers[:2]), replace(both, layers=both.layers[2:])))
    assert side_by_side.overlaid == ()
    crossed = KVGroups((replace(both, layers=both.layers[:3]), replace(both, layers=both.layers[2:]), layout()))
    assert crossed.overlaid == ((0, 1),)


@pytest.mark.parametrize(
    ("start", "end", "blocks", "problem"),
    [
        (0, 8, (0, 1), ""),
        (4, 4, (), ""),
        (8, 4, (), "of tokens [8, 4)"),
        (-1, 4, (0,), "of tokens [-1, 4)"),
        (0, 8, (0,), "of 1 blocks; tokens [0, 8) take 2"),
        (0, 8, (0, 4), "names a block outside 0..3"),
        (0, 8, (1, 1), "names a block twice"),
    ],
)
def test_offer_of_what_a_pool_cannot_have_is_named(
    start: int, end: int, blocks: tuple[int, ...], problem: str
) -> None:
    assert KVGroups((replace(layout(), num_blocks=4),)).problem((blocks,), start, end) == problem
