"""Real vLLM servers, of which prefill has a store: what it loads is pushed like what it computes.

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
from tests.e2e.test_vllm_store import CHUNK, loaded, tiers_of  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    place = place_of(vllm_folder, "store-pair")
    pair = Pair.of(
        place,
        prefill_flags=[*COMPUTES, "--block-size", "128"],
        decode_flags=["--enforce-eager", "--no-enable-prefix-caching", "--block-size", "32"],
        store=tiers_of(place),
    )
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [513, 2000])
def test_prefill_pushes_what_it_loads_like_what_it_computes(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    for expected in (0, (length - 1) // CHUNK * CHUNK):
        before, received = loaded(pair.prefill), pair.transferred()
        assert pair.tokens(prompt) == [alone[tuple(prompt)]]
        assert loaded(pair.prefill) == before + expected
        assert pair.transferred() == received + length - 1
        until(pair.prefill.holds_nothing, "prefill holds nothing")


def test_sixteen_at_once_do_not_mix(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(pair.tokens, prompts))
        assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    for server in (pair.prefill, pair.decode):
        assert server.metric("vllm:pdlink_transfer_failures_total") == 0
        until(server.holds_nothing, f"{server.name} holds nothing")
