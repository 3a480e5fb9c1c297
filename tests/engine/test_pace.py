"""The pace that an engine measures of itself: what it follows, and what it leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pdlink.engine.pace import COLD_PASSES, Pace

if TYPE_CHECKING:
    from pdlink.engine.scheduler import PassWork


def work(start: int, end: int, num_prompt: int) -> PassWork:
    return cast("PassWork", SimpleNamespace(start=start, end=end, sequence=SimpleNamespace(num_prompt=num_prompt)))


def test_it_is_that_of_passes_over_prompts_alone_without_the_first_ones() -> None:
    pace, prompt, answer = Pace(), work(0, 100, 200), work(250, 251, 200)
    for _ in range(COLD_PASSES):
        pace.passed([prompt], 60.0)
    assert pace.prefill_of(1000) == 0.0
    for _ in range(100):
        pace.passed([prompt, prompt], 0.02)
        pace.passed([answer], 9.0)
        pace.passed([prompt, answer], 9.0)
    assert pace.prefill_of(1000) == pytest.approx(0.1)


def test_it_follows_a_machine_that_has_become_slower() -> None:
    pace = Pace()
    for seconds in (0.01, 0.05):
        for _ in range(COLD_PASSES + 1000):
            pace.passed([work(0, 100, 100)], seconds)
    assert pace.prefill_of(100) == pytest.approx(0.05, rel=0.01)
