"""The curves that an engine measures of itself: what they are fitted to, and what they leave out."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pdlink.engine.pace import COLD_PASSES, MIN_PASSES, Curve, Pace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.engine.scheduler import PassWork


def work(start: int, end: int, num_prompt: int) -> PassWork:
    return cast("PassWork", SimpleNamespace(start=start, end=end, sequence=SimpleNamespace(num_prompt=num_prompt)))


def prefill_s(batch: Sequence[PassWork]) -> float:
    return 0.004 + sum(
        3e-5 * (each.end - each.start) + 2e-9 * (each.end - each.start) * (each.start + (each.end - each.start) / 2)
        for each in batch
    )


def decode_s(batch: Sequence[PassWork]) -> float:
    return 0.007 + 5e-4 * len(batch) + 1e-6 * sum(each.end for each in batch)


def test_curves_are_those_that_the_passes_follow_also_with_noise_and_passes_that_were_held_up() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, pace = random.Random(seed), Pace()
    for number in range(600):
        noise = dice.uniform(0.97, 1.03) * (40.0 if number > 100 and dice.random() < 0.02 else 1.0)
        start, size = dice.choice([0, 0, 2048]), dice.randrange(16, 4096)
        prompts = [work(start, start + size, start + size)]
        pace.passed(prompts, prefill_s(prompts) * noise)
        answers = [work(t, t + 1, 10) for t in (dice.randrange(20, 8000) for _ in range(dice.randrange(1, 32)))]
        pace.passed(answers, decode_s(answers) * noise)
        pace.passed([*prompts, *answers], 9.0)  # both at once: to no curve
    found = pace.curves()
    assert found is not None
    assert found["prefill"] == pytest.approx([0.004, 3e-5, 2e-9], rel=0.3)
    assert found["decode"] == pytest.approx([0.007, 5e-4, 1e-6], rel=0.2)
    assert pace.prefill_s > 600 * 9.0 > pace.decode_s > 0


def test_cold_passes_count_for_nothing_and_few_make_no_curve() -> None:
    curve = Curve()
    for _ in range(COLD_PASSES):
        curve.add(100, 100, 60.0)
    for number in range(MIN_PASSES):
        assert curve.get() is None
        curve.add(100 + number, number**2, 0.01 + 1e-4 * (100 + number))
    found = curve.get()
    assert found is not None
    assert found[0] + found[1] * 120 == pytest.approx(0.022, rel=0.05)


def test_passes_of_one_size_and_seconds_that_fall_make_no_term_negative() -> None:
    same, falling = Curve(), Curve()
    for number in range(100):
        same.add(64, 2048, 0.02)
        falling.add(number, number**2, 1.0 / (1 + number))
    for curve in (same, falling):
        found = curve.get()
        assert found is not None
        assert min(found) >= 0
    found = same.get()
    assert found is not None
    assert found[0] + found[1] * 64 + found[2] * 2048 == pytest.approx(0.02, rel=1e-6)
