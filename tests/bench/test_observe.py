"""The verdict about what observing costs."""

from __future__ import annotations

import pytest

from pdlink_bench.observe import _rank, verdict


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([1.005] * 9 + [1.3], "observing costs 0.5% of the CPU of a request (0.5% to 0.5%"),
        ([1.0, 1.001, 1.002, 1.004, 1.01, 1.01, 1.012, 1.013, 1.014, 1.3], "at most 2%: met"),
        ([1.03] * 10, "at most 2%: not met"),
        ([1.0, 1.04] * 5, "at most 2%: undecided, more --rounds"),
        ([1.0] * 5, "undecided, 5 turns are too few"),
    ],
)
def test_verdict_says_what_the_turns_can_tell(ratios: list[float], words: str) -> None:
    assert words in verdict(ratios)


def test_rank_is_that_of_the_tables_of_the_sign_test() -> None:
    assert [_rank(count) for count in (5, 6, 8, 9, 10, 12, 15, 20)] == [None, 0, 0, 1, 1, 2, 3, 5]
