"""Real vLLM servers with a model that has multi-head latent attention, two ranks each.

vLLM's attention of this kind for CPUs answers differently when other prompts are in the batch, and for a prompt than
for its tokens one by one, far beyond rounding (0.32, a server without a connector). So answers are compared with
those of another transfer only, and what has arrived with what was sent, by the checksums of its blocks.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402

from tests.e2e.engine_servers import prompt_of, save_latent_model, until  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    place = tmp_path_factory.mktemp("latent")
    save_latent_model(place / "model")
    flags = ["--enforce-eager", "--max-model-len", "4096", "--tensor-parallel-size", "2"]
    if torch.cpu._is_amx_tile_supported():
        # Another kernel of vLLM's takes no other type. Answers of one server change there with what it has cached.
        flags += ["--dtype", "bfloat16", "--no-enable-prefix-caching"]
    pair = Pair.of(place, prefill_flags=flags, decode_flags=flags, shards=2, verify="all", on_failure="fail")
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [16, 17, 33, 513, 2000])
def test_all_but_the_last_token_arrives_as_it_was_sent(pair: Pair, length: int) -> None:
    received = pair.transferred()
    first, again = (pair.tokens(prompt_of(length, length)) for _ in range(2))
    assert first == again
    assert pair.transferred() == received + 2 * (length - 1)
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0


def test_eight_at_once_all_arrive(pair: Pair) -> None:
    prompts = [prompt_of(33 + 61 * index, index) for index in range(8)]
    received = pair.transferred()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(pair.tokens, prompts))
    assert [len(tokens) for (tokens,) in answers] == [12] * 8
    got = pair.transferred() - received
    assert got == sum(len(prompt) - 1 for prompt in prompts)
    until(pair.prefill.holds_nothing, "prefill holds nothing")
