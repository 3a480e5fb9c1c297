"""Real vLLM servers of unequal size: prefill on one rank, decode on two, both with hardly any room.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_TIGHT, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKS = 42
"""All ten prompts fit, with four blocks each, but only seven with an answer."""


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    tight = ["--enforce-eager", "--block-size", "128", "--num-gpu-blocks-override", str(BLOCKS)]
    tight += ["--max-model-len", "4096", "--no-enable-prefix-caching"]
    pair = Pair.of(
        place_of(vllm_folder, "ranks"),
        prefill_flags=tight,
        decode_flags=[*tight, "--tensor-parallel-size", "2"],
        shards=2,
    )
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [33, 128, 513, 2000])
def test_two_ranks_get_their_heads_from_one(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    received = pair.transferred()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.transferred() == received + length - 1
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0


def test_preempted_requests_answer_the_same(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, seed) for count, seed in VLLM_TIGHT]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: pair.tokens(prompt, max_tokens=200)[0], prompts))
    assert [tokens[:12] for tokens in answers] == [alone[tuple(prompt)] for prompt in prompts]
    assert pair.decode.metric("vllm:num_preemptions_total") > 0, "there was no room for all answers"
    until(pair.prefill.holds_nothing, "prefill holds nothing")
    until(pair.decode.holds_nothing, "decode holds nothing")
