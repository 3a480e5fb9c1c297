"""A tier that fails or stalls is left alone for a growing while, and one call finds out that it is back."""

from __future__ import annotations

import math

from pdlink.breaker import Breaker
from pdlink.store.below import GuardedTier
from pdlink.store.cleared import Cleared
from pdlink.store.line import Line
from tests.store.stubs import StubTier


def fail(breaker: Breaker, now_s: float) -> None:
    assert breaker.allows(now_s)
    breaker.end(breaker.begin(now_s), now_s, failed=True)


def test_three_failures_in_a_row_keep_calls_away_and_a_success_between_does_not_count() -> None:
    breaker = Breaker(10.0)
    fail(breaker, 0)
    fail(breaker, 0)
    breaker.end(breaker.begin(0), 0, failed=False)
    for _ in range(3):
        fail(breaker, 0)
    assert not breaker.allows(0.9)


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_success() -> None:
    breaker, now_s = Breaker(10.0), 0.0
    for _ in range(3):
        fail(breaker, now_s)
    pauses = []
    for _ in range(8):
        began_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
        fail(breaker, now_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    now_s += 60
    breaker.end(breaker.begin(now_s), now_s, failed=False)
    for _ in range(3):
        fail(breaker, now_s)
    assert breaker.allows(now_s + 1)


def test_one_call_at_a_time_finds_out() -> None:
    breaker = Breaker(10.0)
    for _ in range(3):
        fail(breaker, 0)
    call = breaker.begin(2)
    assert not breaker.allows(2)
    assert breaker.keeps_away(2)
    breaker.end(call, 2, failed=False)
    assert breaker.allows(2)
    assert not breaker.keeps_away(2)


def test_calls_from_before_the_failures_do_not_keep_the_next_one_from_finding_out() -> None:
    """A stream of ten minutes kept a worker away that had recovered after a second."""
    breaker = Breaker(math.inf)
    stream = breaker.begin(0)
    for _ in range(3):
        fail(breaker, 0)
    assert not breaker.allows(0.9)
    probe = breaker.begin(1) if breaker.allows(1) else 0
    assert probe
    assert not breaker.allows(1), "one at a time"
    breaker.end(probe, 1, failed=True)
    assert not breaker.allows(2.9)
    assert breaker.allows(3)
    breaker.end(stream, 3, failed=False)
    assert not breaker.keeps_away(3)


def test_a_call_that_takes_longer_than_its_deadline_keeps_others_away_while_it_lasts_and_counts_as_failure() -> None:
    breaker = Breaker(10.0)
    for _ in range(3):
        assert breaker.allows(0)
        call = breaker.begin(0)
        assert breaker.allows(10)
        assert not breaker.keeps_away(10)
        assert not breaker.allows(10.5)
        assert breaker.keeps_away(10.5)
        breaker.end(call, 11, failed=False)
    assert not breaker.allows(11.5)
    assert breaker.allows(12)


def test_a_tier_that_finds_records_and_cannot_read_them_is_left_alone() -> None:
    def fails() -> None:
        raise OSError("no such luck")

    now_s = 0.0
    noting = Line("note")
    tier = GuardedTier(StubTier(), "half", cleared=Cleared(), noting=noting, deadline_s=1.0, clock=lambda: now_s)
    for _ in range(3):
        assert tier.call("contains", lambda: [True], [False]) == [True]
        assert tier.call("get", fails, None) is None
    assert not tier.answers
    assert tier.failure == "get failed: no such luck"
    assert tier.call("contains", lambda: [True], [False]) == [False]
    now_s = 2.0
    assert tier.call("contains", lambda: [True], [False]) == [True], "after a pause it may show that it is back"
    assert tier.failure, "it cannot be read yet"
    assert tier.call("get", lambda: 7, None) == 7
    assert tier.answers
    assert tier.failure == "", "if it stalls later, that is not why"
    noting.end()
