"""Real vLLM servers in pipeline stages: one with two stages and one with all layers, each prefilling for the other.

vLLM's runner for CPUs lacks one step of those for GPUs (0.32): it makes no buffers for what a stage hands on.
A plugin of this test makes them.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, plugin_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PLUGIN = """
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

def run():
    gathered = GPUModelRunner.sync_and_gather_intermediate_tensors
    def sync_and_gather_intermediate_tensors(self, *arguments):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gathered(self, *arguments)
    GPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
"""

FLAGS = [*COMPUTES, "--max-model-len", "4096"]
STAGES = ["--pipeline-parallel-size", "2"]


@pytest.fixture(scope="module")
def servers(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    place = place_of(vllm_folder, "stages")
    plugin_of(place, "buffers", PLUGIN)
    pair = Pair.of(
        place,
        prefill_flags=["--block-size", "32", *STAGES, *FLAGS],
        decode_flags=["--block-size", "128", *FLAGS],
        stages=2,
        both=True,
        environment={"PYTHONPATH": str(place)},
    )
    yield pair
    pair.stop()


@pytest.fixture(params=["two stages prefill", "two stages decode"])
def pair(servers: Pair, request: pytest.FixtureRequest) -> Pair:
    return servers if request.param == "two stages prefill" else servers.swapped()


@pytest.mark.parametrize("length", [33, 128, 513, 2000])
def test_tokens_equal_those_of_one_server(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    received, failed = pair.transferred(), pair.decode.metric("vllm:pdlink_transfer_failures_total")
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.transferred() == received + length - 1
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == failed


def test_sixteen_at_once_do_not_mix(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(pair.tokens, prompts))
    assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    until(pair.prefill.holds_nothing, "prefill holds nothing")
    until(pair.decode.holds_nothing, "decode holds nothing")


def test_as_many_stages_on_both_servers_need_no_setting(vllm_folder: Path, alone: Alone) -> None:
    place = place_of(vllm_folder, "equal_stages")
    plugin_of(place, "buffers", PLUGIN)
    flags = [*STAGES, *FLAGS]
    pair = Pair.of(place, prefill_flags=flags, decode_flags=flags, ranks=2, environment={"PYTHONPATH": str(place)})
    try:
        for length in (128, 513):
            prompt = prompt_of(length, length)
            received = pair.transferred()
            assert pair.tokens(prompt) == [alone[tuple(prompt)]]
            assert pair.transferred() == received + length - 1
    finally:
        pair.stop()
