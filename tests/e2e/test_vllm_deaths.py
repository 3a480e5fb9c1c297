"""Real vLLM servers, one of which is killed while KV is on its way: the other goes on, and so does the restarted one.

Over sockets and without prefix caches. Run with `make test-vllm`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_LONG, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    plain = [
        "--enforce-eager",
        "--block-size",
        "128",
        "--no-enable-prefix-caching",
        "--max-num-batched-tokens",
        "512",
    ]
    pair = Pair.of(place_of(vllm_folder, "deaths"), prefill_flags=plain, decode_flags=plain, transport="tcp")
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [33, 128, 513, 4096])
def test_tokens_equal_those_of_one_server(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]


def _legs_in_flight(pair: Pair) -> tuple[threading.Thread, list[Any]]:
    """Both legs of a long prompt, of which some layers have landed already."""
    before = pair.prefill.metric("vllm:pdlink_layers_landed_total")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(pair.legs(prompt_of(VLLM_LONG, VLLM_LONG))))
    thread.start()
    until(lambda: pair.prefill.metric("vllm:pdlink_layers_landed_total") > before, "layers have landed")
    return thread, answers


def test_a_killed_decode_server_costs_prefill_nothing(pair: Pair, alone: Alone) -> None:
    thread, _ = _legs_in_flight(pair)
    pair.decode.kill()
    thread.join(120)
    prompt = prompt_of(257, 257)
    assert pair.prefill.complete(prompt).tokens == [alone[tuple(prompt)]]
    until(pair.prefill.holds_nothing, "prefill holds nothing")
    pair.decode.start().wait_ready()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]


def test_a_killed_prefill_server_costs_decode_nothing(pair: Pair, alone: Alone) -> None:
    thread, answers = _legs_in_flight(pair)
    pair.prefill.kill()
    thread.join(180)
    _, decode = answers
    assert decode.tokens == [alone[tuple(prompt_of(VLLM_LONG, VLLM_LONG))]], "computed by decode itself"
    until(pair.decode.holds_nothing, "decode holds nothing")
    pair.prefill.start().wait_ready()
    received = pair.decode.metric("vllm:pdlink_transfers_total", 'state="ready"')
    prompt = prompt_of(1024, 1024)
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.decode.metric("vllm:pdlink_transfers_total", 'state="ready"') == received + 1
