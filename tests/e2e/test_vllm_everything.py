"""All at once in two real vLLM servers that prefill for each other (`kv_both`): prefix caching, chunked prefill,
preemption, transfers, and one `pdlink store` for both, which keeps answers, too. Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of  # noqa: E402
from tests.e2e.test_vllm_store_decode import rest, tokens  # noqa: E402
from tests.e2e.test_vllm_store_shared import store_of  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    """Blocks for the prompts, not for their answers."""
    place = place_of(vllm_folder, "everything")
    store = store_of(place)
    tiers = {
        "store": f"ipc://{place}/socket/store",
        "store_timeout_s": 20.0,
        "chunk_size": 64,
        "save_decode_cache": True,
        "load_if_faster": False,
    }
    tight = ["--enforce-eager", "--enable-prefix-caching", "--max-num-batched-tokens", "256", "--block-size", "32"]
    tight += ["--max-model-len", "2048", "--num-gpu-blocks-override", "72", "--no-scheduler-reserve-full-isl"]
    tight += ["--long-prefill-token-threshold", "64"]
    try:
        pair = Pair.of(place, prefill_flags=tight, decode_flags=tight, both=True, store=tiers, decode_store=tiers)
        yield pair
        pair.stop()
    finally:
        store.kill()
        store.wait(30)


def test_whatever_happens_together_the_tokens_are_those_of_one_server(pair: Pair, alone: Alone) -> None:
    ask_in_all_ways(pair, alone)


def ask_in_all_ways(pair: Pair, alone: Alone) -> None:
    """Requests in both directions and some without a transfer, four times, so that they are warm in the end."""
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    ways = [pair.tokens, pair.swapped().tokens, lambda prompt: pair.decode.complete(prompt).tokens]
    for turn in range(4):
        mine = [ways[(index + turn) % len(ways)] for index in range(len(prompts))]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda way, prompt: way(prompt), mine, prompts))
        assert answers == [[alone[tuple(prompt)]] for prompt in prompts], f"turn {turn}"
    rest(pair)
    both = (pair.prefill, pair.decode)
    assert sum(server.metric("vllm:num_preemptions_total") for server in both) > 0, "there was room for all prompts"
    for source in ("device", "host", "prefill", "computed"):
        assert sum(tokens(server, source) for server in both) > 0, f"no token came from {source}"
