"""What a rank measures, so that it can tell whether loading pays."""

from __future__ import annotations

import pytest

from pdlink.integrations.vllm_parts.pace import VllmPace


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_steps_with_tokens_of_prompts_are_measured_and_others_are_not() -> None:
    clock = Clock()
    pace = VllmPace(clock=clock)
    pace.begin(0)
    clock.now_s += 5.0
    pace.end()
    assert not pace.computing.known
    pace.begin(256)
    clock.now_s += 2.0
    pace.end()
    pace.end()
    assert pace.computing.takes_s(512, clock.now_s) == pytest.approx(4.0)
    assert not pace.receiving.known


def test_what_another_server_sends_is_measured_if_it_comes() -> None:
    clock = Clock()
    pace = VllmPace(clock=clock)
    pace.offered("a", 160)
    pace.offered("b", 160)
    clock.now_s += 1.0
    pace.received({"a", "b", "stranger"}, failed={"b"})
    clock.now_s += 7.0
    pace.received({"a"}, failed=set())
    assert pace.receiving.takes_s(160, clock.now_s) == pytest.approx(1.0)
    assert not pace.computing.known
