"""A token depends on (logits, seed, index) and nothing else, and follows the distribution."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from pdlink.engine.answer import choose, uniform
from pdlink.engine.request import SamplingParams
from pdlink.errors import InvalidRequest
from tests.engine.small import prompt_of, rig


def _params(**options: float | int) -> SamplingParams:
    return SamplingParams(max_tokens=1, **options)  # type: ignore[arg-type]


def test_frequencies_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5])
    num_draws = 4000
    counts = Counter(choose(logits, _params(temperature=0.7, seed=5), index) for index in range(num_draws))
    expected = (logits / 0.7).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / num_draws - probability) < 0.03, token
    assert counts[3] == 0


def test_top_p_leaves_the_fewest_likeliest_tokens() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    for top_p, kept in ((0.01, {1}), (0.39, {1}), (0.41, {1, 2}), (0.71, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        drawn = {choose(logits, _params(temperature=1.0, top_p=top_p), index) for index in range(300)}
        assert drawn == kept, top_p


def test_a_last_bit_of_the_logits_does_not_change_the_answer() -> None:
    """Prefill and decode compute in other batches. In order of probability, near-equal tokens would swap places."""
    logits = torch.zeros(200)
    nearly = (
        logits + torch.linspace(1e-6, -1e-6, 200)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    )
    params = _params(temperature=1.0, top_p=1.0)
    assert sum(choose(logits, params, i) != choose(nearly, params, i) for i in range(200)) <= 1


def test_uniform_is_equal_in_another_process() -> None:
    code = "from pdlink.engine.answer import uniform; print(uniform(7, 3))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert float(out.stdout) == uniform(7, 3)


def test_uniform_differs_for_each_seed_and_index() -> None:
    assert len({uniform(seed, index) for seed in (-1, 0, 1, 2**70) for index in range(50)}) == 200


def test_answer_is_the_same_whether_decode_starts_from_given_kv_or_one_process_does_all() -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    prompt = prompt_of(21)
    whole = rig().generate(prompt, 12, **options)
    assert whole != rig().generate(prompt, 12, **{**options, "seed": 12})
    prefill = rig()
    first = prefill.generate(prompt, 1, **options)
    decode = rig()
    decode.submit("r", prompt, 12, external=len(prompt), **options)
    decode.run()
    for layer in range(3):
        for mine, theirs in zip(decode.cache.views(layer), prefill.cache.views(layer), strict=True):
            mine[list(decode.heard.tables["r"][:3])] = theirs[list(prefill.heard.tables["r"][:3])]
    decode.engine.kv_arrived("r", len(prompt), first[0])
    decode.run()
    assert decode.heard.tokens("r") == whole


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"stop": ("a", "")},
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        SamplingParams(**{"max_tokens": 1, **options})  # type: ignore[arg-type]
