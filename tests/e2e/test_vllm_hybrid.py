"""Real vLLM servers with models whose layers do not all keep the same: windows, and recurrent states.

Decode's connector can spoil a block of what has arrived: the tokens compared here depend on every group.

Run with `make test-vllm`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_servers import prompt_of, until  # noqa: E402
from tests.e2e.hybrid_models import WINDOW, save_recurrent_model, save_window_model  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
LENGTHS = [1, 2, 16, WINDOW, WINDOW + 1, 128, 129, 130, 257, 513, 1200]
"""Of prompts: around a window, a block and a chunk."""
LAST_ALONE = [CHUNK * count + 1 for count in range(1, 6)]
"""One server computes the last token in a step of its own then, like decode. Otherwise kernels of recurrent layers
round in another order, and in bfloat16 some answers differ after a few tokens. So do one server's own answers where
others are computed beside them."""
STATE_BLOCK = 1152
"""Tokens of a block with states, where vLLM ends a step, too: of 1,281 tokens it computes the last 129 at once."""
LAST_ALONE_OF_STATES = [*LAST_ALONE[:4], STATE_BLOCK + CHUNK + 1]
BRANCH = prompt_of(513, 513)[:400] + prompt_of(113, 9)
"""Begins like the prompt of 513 tokens."""
SPOILING = {
    "kv_connector": "SpoilingConnector",
    "kv_connector_module_path": "tests.e2e.spoiling",
}
FLAGS = ["--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", str(CHUNK), "--block-size", "128"]


@dataclass
class Hybrid:
    """A pair, the answers of one server without any connector, and the way to spoil a group's blocks."""

    pair: Pair
    alone: dict[int, list[list[int]]]
    """By length of the prompt."""
    branched: list[list[int]]
    """Its answer to `BRANCH`."""
    spoil: Path
    lengths: list[int]
    crowd: list[int]
    num_groups: int


CROSSING = [900 + 30 * count for count in range(8)]
"""Of prompts whose answers of 300 tokens need one block of 1,152 more than they do."""
KINDS = {
    # name: model, flags of both, of decode, transport, lengths whose answers are compared, many at once, groups
    "windows": (save_window_model, [], ["--num-gpu-blocks-override", "60"], "auto", LENGTHS, LENGTHS[1:], 3),
    "windows in other blocks": (
        save_window_model,
        [],
        ["--block-size", "32", "--num-gpu-blocks-override", "220"],
        "tcp",
        LENGTHS,
        LENGTHS[1:],
        3,
    ),
    # With AMX blocks that only its kernel can read.
    "windows in bfloat16": (
        save_window_model,
        ["--dtype", "bfloat16"],
        ["--num-gpu-blocks-override", "60"],
        "auto",
        LAST_ALONE,
        LENGTHS[1:],
        3,
    ),
    "states": (
        save_recurrent_model,
        ["--dtype", "bfloat16"],
        ["--num-gpu-blocks-override", "16"],
        "tcp",
        LAST_ALONE_OF_STATES,
        CROSSING,
        2,
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        "windows",
        pytest.param("windows in other blocks", marks=pytest.mark.slow),
        pytest.param("windows in bfloat16", marks=pytest.mark.slow),
        pytest.param("states", marks=pytest.mark.slow),
    ],
)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    save, flags, more, transport, lengths, crowd, num_groups = KINDS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    save(place / "model")
    spoil = place / "spoil"
    spoil.write_text("")
    single = Server("alone", place / "model", place / "alone.log", [*FLAGS, *flags]).start()
    try:
        single.wait_ready()
        alone = {length: single.complete(prompt_of(length, length)).tokens for length in {*lengths, 513, 1200}}
        branched = single.complete(BRANCH).tokens
    finally:
        single.kill()
    pair = Pair.of(
        place,
        prefill_flags=[*FLAGS, *flags],
        decode_flags=[*FLAGS, *flags, *more],
        transport=transport,
        verify="all",
        environment={"PDLINK_TEST_SPOIL": str(spoil)},
        decode_connector=SPOILING,
    )
    yield Hybrid(pair, alone, branched, spoil, lengths, crowd, num_groups)
    pair.stop()


def test_vllm_keeps_its_hybrid_manager(hybrid: Hybrid) -> None:
    assert "Turning off hybrid kv cache manager" not in hybrid.pair.prefill.log.read_text()


def test_tokens_are_those_of_one_server(hybrid: Hybrid) -> None:
    for length in hybrid.lengths:
        received = hybrid.pair.transferred()
        assert hybrid.pair.tokens(prompt_of(length, length)) == hybrid.alone[length], length
        assert hybrid.pair.transferred() - received == length - 1


def test_a_prompt_that_both_have_cached_or_begun_is_answered_alike(hybrid: Hybrid) -> None:
    prompt = prompt_of(513, 513)
    assert hybrid.pair.tokens(prompt) == hybrid.pair.tokens(prompt) == hybrid.alone[513]
    assert hybrid.pair.tokens(BRANCH) == hybrid.branched


@pytest.mark.parametrize("group", [0, 1, 2])
def test_tokens_depend_on_every_group(hybrid: Hybrid, group: int) -> None:
    if group >= hybrid.num_groups:
        pytest.skip("no such group")
    prompts = [prompt_of(301 + 11 * index, 7000 + index) for index in range(3)]
    hybrid.spoil.write_text(str(group))
    spoiled = [hybrid.pair.tokens(prompt) for prompt in prompts]
    hybrid.spoil.write_text("")
    assert [hybrid.pair.tokens(prompt) for prompt in prompts] != spoiled


def test_many_at_once_are_all_transferred_and_nothing_stays_held(hybrid: Hybrid) -> None:
    """Decode is short of blocks, and preempts; on a busy machine requests may come too far apart for it at first."""
    pair, lengths = hybrid.pair, hybrid.crowd
    for seed in (500, 5000, 50000):
        received = pair.transferred()
        with ThreadPoolExecutor(len(lengths)) as threads:
            asked = {n: threads.submit(pair.tokens, prompt_of(n, n + seed), max_tokens=300) for n in lengths}
            assert all(len(answer.result()[0]) == 300 for answer in asked.values())
        assert pair.transferred() - received == sum(length - 1 for length in lengths)
        if pair.decode.metric("vllm:num_preemptions_total"):
            break
    else:
        pytest.fail("decode preempted nobody")
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0
    for server in (pair.prefill, pair.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")


def test_decode_computes_a_prompt_whose_prefill_server_was_killed(hybrid: Hybrid) -> None:
    """The last of the module: prefill does not come back."""
    pair = hybrid.pair
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pair.decode_leg, "killed", prompt_of(1200, 1200))
        until(lambda: pair.decode.metric("vllm:num_requests_waiting") > 0, "decode has offered its blocks")
        assert pair.prefill.process is not None
        os.killpg(pair.prefill.process.pid, signal.SIGKILL)
        assert answer.result().tokens == hybrid.alone[1200]
    until(pair.decode.holds_nothing, "decode holds nothing")
