"""Real vLLM servers with data parallel engines: decode has two behind one port, each with a connector of its own.

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

FLAGS = [
    "--enforce-eager",
    "--max-num-batched-tokens",
    "512",
    "--max-model-len",
    "4096",
    "--no-enable-prefix-caching",
]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path) -> Iterator[Pair]:
    pair = Pair.of(
        place_of(vllm_folder, "data-parallel"),
        prefill_flags=FLAGS,
        decode_flags=[*FLAGS, "--data-parallel-size", "2"],
    )
    yield pair
    pair.stop()


def test_both_engines_get_their_prompts_kv_and_answer_as_one_server(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(pair.tokens, prompts))
    assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    assert pair.transferred() == sum(len(prompt) - 1 for prompt in prompts)
    for engine in ("0", "1"):
        assert pair.decode.metric("vllm:generation_tokens_total", f'engine="{engine}"') > 0
    for server in (pair.prefill, pair.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")
