"""An engine that sleeps by costs: passes take what they say, layers are told on the way, answers are complete."""

from __future__ import annotations

import time

import pytest
import torch

from pdlink.engine.forward import PagedCache, QuerySpan
from pdlink_bench.sleeping import Costs, SleepingModel
from tests.engine.small import BLOCK, NUM_LAYERS, small_model

COSTS = Costs(prompt_s=1e-3, token_s=1e-4, attention_s=1e-6, step_s=2e-3, sequence_s=1e-4, context_s=1e-6)


def test_a_pass_takes_what_the_curves_of_a_plan_say() -> None:
    model = SleepingModel.of(small_model(), COSTS)
    blocks = torch.arange(8)
    prompts = [QuerySpan(blocks, 0, 20), QuerySpan(blocks, 10, 30)]
    assert model.seconds(prompts) == pytest.approx(1e-3 + 40e-4 + 1e-6 * 20 * (10 + 10 + 10))
    answers = [QuerySpan(blocks, 9, 10), QuerySpan(blocks, 29, 30)]
    assert model.seconds(answers) == pytest.approx(2e-3 + 2e-4 + 40e-6)


def test_layers_are_told_in_order_and_no_sooner_than_they_would_be() -> None:
    costs = Costs(prompt_s=0.06)
    model = SleepingModel.of(small_model(), costs)
    cache = PagedCache(model, num_blocks=4, block_tokens=BLOCK)
    told: list[tuple[int, float]] = []
    began_s = time.monotonic()
    try:
        logits = model.logits(
            cache,
            torch.zeros(2 * BLOCK, dtype=torch.int64),
            [QuerySpan(torch.arange(2), 0, 2 * BLOCK)],
            [2 * BLOCK - 1],
            layer_written=lambda layer: told.append((layer, time.monotonic() - began_s)),
        )
    finally:
        cache.close()
    assert [layer for layer, _ in told] == list(range(NUM_LAYERS))
    assert all(at_s >= 0.06 * (layer + 1) / NUM_LAYERS - 1e-3 for layer, at_s in told)
    token = int(logits[0].argmax())
    assert token not in model.eos_token_ids
    assert model.tokenizer.decode([token]).strip()
