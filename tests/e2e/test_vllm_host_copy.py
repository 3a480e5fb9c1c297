"""Real vLLM servers whose cache goes through memory of the host, as one on a device that no transport reads.

A plugin of the test makes the connector take the CPU's cache for such a one: what is not copied out of it and into it
is not there. Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import NUM_LAYERS, place_of, plugin_of, prompt_of, until  # noqa: E402
from tests.e2e.test_vllm_everything import ask_in_all_ways  # noqa: E402
from tests.e2e.test_vllm_hybrid import FLAGS, KINDS  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PLUGIN = """
from pdlink.integrations.vllm_parts import host_copy

def run():
    host_copy.is_needed = lambda tensors, buffer_device: True
"""


def pair_of(place: Path, **more: Any) -> Pair:
    plugin_of(place, "elsewhere", PLUGIN)
    pair = Pair.of(place, environment={"PYTHONPATH": str(place)}, **more)
    for server in (pair.prefill, pair.decode):
        assert "the KV cache on cpu goes through a mirror" in server.output()
    return pair


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    """Each prefills for the other and keeps prompts and answers, with blocks for the prompts alone."""
    tight = ["--enforce-eager", "--enable-prefix-caching", "--max-num-batched-tokens", "256", "--block-size", "32"]
    tight += ["--max-model-len", "2048", "--num-gpu-blocks-override", "72", "--no-scheduler-reserve-full-isl"]
    tight += ["--long-prefill-token-threshold", "64"]
    tiers = {"chunk_size": 64, "load_if_faster": False, "max_local_cpu_size": 0.2, "save_decode_cache": True}
    pair = pair_of(
        place_of(vllm_folder, "host-copy"),
        prefill_flags=tight,
        decode_flags=tight,
        both=True,
        store=tiers,
        decode_store=tiers,
    )
    yield pair
    pair.stop()


def test_layers_land_while_the_prompt_is_computed(pair: Pair) -> None:
    written, landed = pair.landings(1500, "xfer-landing")
    assert len(landed) >= NUM_LAYERS
    assert min(landed) < max(written)


def test_chunks_preemption_prefixes_and_stores_leave_the_tokens_of_one_server(pair: Pair, alone: Alone) -> None:
    ask_in_all_ways(pair, alone)


def test_a_prompt_whose_prefill_dies_is_computed(pair: Pair, alone: Alone) -> None:
    """The last of this pair."""
    prompt = prompt_of(VLLM_CONCURRENT[-1], VLLM_CONCURRENT[-1])
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pair.decode_leg, "killed", [*prompt, 5, 6, 7])
        until(lambda: pair.decode.metric("vllm:num_requests_waiting") > 0, "decode has offered its blocks")
        pair.prefill.kill()
        assert answer.result().status == 200
    assert pair.decode.complete(prompt).tokens == [alone[tuple(prompt)]]


@pytest.mark.parametrize("kind", ["windows in other blocks", "windows in bfloat16", "states"])
def test_groups_of_layers_cross_each_in_its_way(tmp_path: Path, kind: str) -> None:
    """Decode is short of blocks for the answers of requests that come together."""
    save, flags, more, transport, lengths, crowd, _ = KINDS[kind]
    save(tmp_path / "model")
    with Server("alone", tmp_path / "model", tmp_path / "alone.log", [*FLAGS, *flags]).serving() as single:
        alone = {length: single.complete(prompt_of(length, length)).tokens for length in lengths}
    pair = pair_of(
        tmp_path,
        prefill_flags=[*FLAGS, *flags],
        decode_flags=[*FLAGS, *flags, *more],
        transport=transport,
        verify="all",
    )
    try:
        for length in lengths:
            assert pair.tokens(prompt_of(length, length)) == alone[length], length
        with ThreadPoolExecutor(len(crowd)) as threads:
            asked = [threads.submit(pair.tokens, prompt_of(n, n + 500), max_tokens=300) for n in crowd]
            assert all(len(answer.result()[0]) == 300 for answer in asked)
        for length in lengths:
            assert pair.tokens(prompt_of(length, length)) == alone[length], length
        assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0
        for server in (pair.prefill, pair.decode):
            until(server.holds_nothing, f"{server.name} holds nothing")
    finally:
        pair.stop()
