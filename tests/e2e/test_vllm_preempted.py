"""Real vLLM servers: prefill, on two ranks, has no room for the prompts that it has begun; decode has one rank.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    plain = ["--enforce-eager", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    # Many prompts at a time in chunks of 64 tokens, begun before there is room for the whole of each (0.32).
    tight = ["--block-size", "32", "--num-gpu-blocks-override", "72", "--no-scheduler-reserve-full-isl"]
    tight += ["--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "64"]
    pair = Pair.of(
        place_of(vllm_folder, "preempted"),
        prefill_flags=[*plain, *tight, "--tensor-parallel-size", "2"],
        decode_flags=[*plain, "--block-size", "128"],
        shards=2,
    )
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [33, 128, 513, 2000])
def test_one_rank_gets_its_heads_from_two(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    received = pair.transferred()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.transferred() == received + length - 1


def test_preempted_prompts_arrive_whole(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    for _ in range(3):  # on a crowded machine they may come one after the other
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(pair.tokens, prompts))
        assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
        if pair.prefill.metric("vllm:num_preemptions_total"):
            break
    assert pair.prefill.metric("vllm:num_preemptions_total") > 0, "there was room for all prompts"
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0
    until(pair.prefill.holds_nothing, "prefill holds nothing")
    until(pair.decode.holds_nothing, "decode holds nothing")
