"""The endpoint's clock, without an endpoint: `test_absence.py` holds what depends on it."""

from __future__ import annotations

from pdlink.endpoint.clock import AwakeClock


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
