"""Two real vLLM servers that are prefill and decode at once (`kv_both`): each sends to the other, also together.

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
from tests.e2e.vllm_servers import COMPUTES, Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    pair = Pair.of(
        place_of(vllm_folder, "both"),
        prefill_flags=[*COMPUTES, "--block-size", "32"],
        decode_flags=[*COMPUTES, "--block-size", "128"],
        both=True,
    )
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [33, 513, 2000])
@pytest.mark.parametrize("back", [False, True])
def test_either_server_prefills_for_the_other(pair: Pair, alone: Alone, back: bool, length: int) -> None:
    way = pair.swapped() if back else pair
    prompt = prompt_of(length, length)
    received = way.transferred()
    assert way.tokens(prompt) == [alone[tuple(prompt)]]
    assert way.transferred() == received + length - 1


def test_both_directions_at_once_do_not_mix(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    ways = [pair, pair.swapped()] * (len(prompts) // 2)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda way, prompt: way.tokens(prompt), ways, prompts))
    assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    for server in (pair.prefill, pair.decode):
        assert server.metric("vllm:pdlink_transfer_failures_total") == 0
        until(server.holds_nothing, f"{server.name} holds nothing")


def test_a_request_without_a_transfer_is_served_by_either(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(257, 257)
    for server in (pair.prefill, pair.decode):
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
