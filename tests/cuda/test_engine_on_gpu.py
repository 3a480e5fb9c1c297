"""Prefill and decode of the built-in engine on one GPU: real processes, and the answer of one that has no link."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.deployment import Deployment, prompt_of, worker_settings
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ENGINE = {"device": "cuda", "max_batched_tokens": 256}
LENGTHS = [1, 15, 17, 400, 1200]
LANES: dict[str, dict[str, Any]] = {
    "mapped-cuda": {"kind": "mapped", "require": "mapped-cuda"},
    "staged-tcp": {"kind": "tcp", "require": "staged-tcp"},
    "ucx": {"kind": "ucx", "ucx": {"tls": "cuda_ipc,cuda_copy,tcp"}},
}


def on_gpu(role: str, block_tokens: int, transport: dict[str, Any]) -> dict[str, Any]:
    """The two share the GPU, and its memory by shares."""
    cache = {"block_tokens": block_tokens, "memory_fraction": 0.02, "share_prefixes": False}
    return worker_settings(role, transport=transport, cache=cache, engine=ENGINE, on_transfer_failure="fail")


def test_a_prompt_seen_before_comes_back_from_the_tiers_of_a_gpu() -> None:
    """Nothing of it is in the pool any more: prefixes are not shared there."""
    tiers = {"chunk_size": 64, "load_if_faster": False}
    loaded = 'pdlink_prompt_tokens_total{source="host"}'
    with Deployment.launch({"alone": on_gpu("both", 16, {}) | {"tiers": tiers}}, routed=False) as alone:
        for length in LENGTHS:
            prompt = prompt_of(length, seed=length)
            first, before = alone.complete(prompt, at="alone").text, alone.metric("alone", loaded)
            assert alone.complete(prompt, at="alone").text == first, length
            assert alone.metric("alone", loaded) - before == min(length - 1, length // 64 * 64)
        until(lambda: alone.idle("alone"), "it holds nothing")


@pytest.mark.parametrize("transport", LANES)
def test_greedy_tokens_are_those_of_one_process_on_the_gpu(transport: str) -> None:
    """The steps of both are the same, so that the same kernels round alike; layers are pushed as they are written."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    with Deployment.launch({"alone": on_gpu("both", 16, {})}, routed=False) as alone:
        expected = [alone.complete(prompt, at="alone").text for prompt in prompts]
    workers = {role: on_gpu(role, size, LANES[transport]) for role, size in (("prefill", 16), ("decode", 24))}
    with Deployment.launch(workers) as deployment:
        assert [deployment.complete(prompt).text for prompt in prompts] == expected
        assert deployment.metric("prefill", "pdlink_transfer_bytes_total") > 0
        for label in workers:
            until(lambda label=label: deployment.idle(label), f"{label} holds nothing")  # type: ignore[misc]
