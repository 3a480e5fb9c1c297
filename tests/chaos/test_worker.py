"""The workers of `pdlink chaos`: their links have faults, and their layers are slow."""

from __future__ import annotations

import time

import pytest

from pdlink_bench.chaos.worker import SteppedModel
from tests.engine.small import NUM_LAYERS, prompt_of, rig, small_model


def test_slow_model_sleeps_in_each_layer_of_a_prompt_and_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    slow = SteppedModel.of(small_model(), after_layer=lambda _: time.sleep(0.25))
    answer = rig(model=slow, max_batched_tokens=8).generate(prompt_of(12), 5)
    assert sleeps == [0.25] * NUM_LAYERS * 2
    assert answer == rig().generate(prompt_of(12), 5)
