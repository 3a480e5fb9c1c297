"""Real vLLM servers that compile their model and schedule a step ahead; what cannot be sent is an error here.

vLLM's build for CPUs compiles the model as one graph, in which attention stays a call, and turns asynchronous
scheduling off because it gains nothing there (0.32). The latter is turned on again by a plugin of this test.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pdlink.fleet.ports import free_ports  # noqa: E402
from tests.e2e.conftest import VLLM_CONCURRENT, VLLM_TIGHT, Alone  # noqa: E402
from tests.e2e.engine_servers import NUM_LAYERS, place_of, plugin_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PLUGIN = """
from vllm.platforms import current_platform
from vllm.v1.engine import core

def run():
    platform = type(current_platform)
    checked = platform.check_and_update_config.__func__
    def check_and_update_config(cls, config):
        checked(cls, config)
        config.scheduler_config.async_scheduling = True
    platform.check_and_update_config = classmethod(check_and_update_config)

    stepped = core.EngineCore.step_with_batch_queue
    def step_with_batch_queue(self):
        if self.scheduler.__class__.__name__ == "AsyncScheduler" and not hasattr(self, "said"):
            self.said = print("a step ahead with", self.batch_queue_size, flush=True)
        return stepped(self)
    core.EngineCore.step_with_batch_queue = step_with_batch_queue
"""


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    place = place_of(vllm_folder, "compiled")
    plugin_of(place, "ahead", PLUGIN)
    chunks = ["--max-num-batched-tokens", "512", "--max-model-len", "4096"]
    pair = Pair.of(
        place,
        prefill_flags=["--block-size", "32", *chunks],
        decode_flags=["--block-size", "128", *chunks],
        on_failure="fail",
        environment={"PYTHONPATH": str(place)},
    )
    yield pair
    pair.stop()


def test_the_servers_are_what_this_test_is_about(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        text = server.log.read_text(errors="replace")
        assert "Cannot" not in text
        assert "'mode': <CompilationMode.DYNAMO_TRACE_ONCE" in text
    for leg in pair.legs(prompt_of(40, 40)):
        assert leg.status == 200
    for server in (pair.prefill, pair.decode):
        assert "a step ahead with 2" in server.log.read_text(errors="replace")


@pytest.mark.parametrize("length", [33, 128, 513, 2000])
def test_tokens_equal_those_of_one_server(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    received = pair.transferred()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.transferred() == received + length - 1


def test_sixteen_at_once_do_not_mix(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(pair.tokens, prompts))
    assert answers == [[alone[tuple(prompt)]] for prompt in prompts]


def test_layers_land_before_prefill_has_ended(pair: Pair) -> None:
    written, landed = pair.landings(3000, "landing")
    assert written
    assert len(landed) >= NUM_LAYERS * (3000 // 512)
    assert sum(ts < max(written) for ts in landed) > len(landed) / 2


def test_kv_that_does_not_come_is_an_error_and_hurts_nobody(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(*VLLM_TIGHT[0])
    there = {"control": f"tcp://127.0.0.1:{free_ports(1)}"}
    answer = pair.decode.complete(prompt, kv_transfer_params={"transfer_id": "x", "leg": "decode", "prefill": there})
    assert answer.status == 500, answer.body
    until(pair.decode.holds_nothing, "decode holds nothing")
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
