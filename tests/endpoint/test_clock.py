"""The endpoint's clock, without an endpoint: `test_absence.py` holds what depends on it."""

from __future__ import annotations

from pdlink.endpoint.clock import AwakeClock, RecentMaximum


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_awake_time_goes_on_between_turns() -> None:
    time = Time()
    clock = AwakeClock(1.0, time)
    began_s = clock.awake_s()
    for _ in range(20):
        time.now_s += 0.25
        assert clock.awake_s() - began_s == time.now_s - 1000.0
        clock.turn()
    assert clock.awake_s() - began_s == 5.0


def test_absence_counts_as_the_longest_gap_and_only_once() -> None:
    time = Time()
    clock = AwakeClock(1.0, time)
    began_s = clock.awake_s()
    time.now_s += 3600.0
    assert clock.awake_s() - began_s == 1.0, "before the turn that ends it"
    clock.turn()
    assert clock.awake_s() - began_s == 1.0, "and in that turn"
    time.now_s += 0.5
    assert clock.awake_s() - began_s == 1.5
    assert clock.now_s() == 4600.5, "the time that passes has no gaps"


def test_peak_is_seen_by_all_who_ask_within_a_period_and_gone_after_two() -> None:
    peaks = RecentMaximum(60.0)
    assert peaks.read(1000.0) == 0.0
    for now_s, value in ((1000.0, 0.1), (1030.0, 3.0), (1031.0, 0.2)):
        peaks.add(now_s, value)
    assert [peaks.read(now_s) for now_s in (1031.0, 1031.0, 1090.0)] == [3.0, 3.0, 3.0]
    peaks.add(1061.0, 0.3)
    assert peaks.read(1090.0) == 3.0, "of the period before"
    peaks.add(1121.0, 0.4)
    assert peaks.read(1121.0) == 0.4
    assert peaks.read(1300.0) == 0.0, "a loop that says nothing was not away lately, as far as it knows"


def test_peak_before_a_long_silence_is_not_taken_for_one_of_the_last_period() -> None:
    peaks = RecentMaximum(60.0)
    peaks.add(1000.0, 3.0)
    peaks.add(1200.0, 0.1)
    assert peaks.read(1200.0) == 0.1
