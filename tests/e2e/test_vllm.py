"""Real vLLM servers, one of which computes prompts for the other: the same tokens as from one server, always.

Prefill computes in chunks of 256 tokens and 128-token blocks, decode has 32-token blocks, both cache prefixes.

Everything is compared in float32 and greedily, with a model whose every token depends on all KV before it. Run with
`make test-vllm`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_CONCURRENT, VLLM_LENGTHS, VLLM_TIGHT, Alone  # noqa: E402
from tests.e2e.engine_servers import NUM_LAYERS, place_of, post, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    place = place_of(vllm_folder, "chunks")
    pair = Pair.of(
        place,
        prefill_flags=["--enforce-eager", "--block-size", "128", "--max-num-batched-tokens", "256"],
        decode_flags=["--enforce-eager", "--block-size", "32"],
    )
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", VLLM_LENGTHS)
def test_tokens_equal_those_of_one_server(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    received = pair.transferred()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    got = pair.transferred() - received
    assert got == length - 1, "all but the last prompt token came from the prefill server"


def test_sixteen_at_once_do_not_mix(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(pair.tokens, prompts))
    assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0


def test_cached_prefixes_on_either_side_change_nothing(pair: Pair, alone: Alone) -> None:
    first = prompt_of(700, 1)
    for prompt in (first, first, first[:640], first[:513] + prompt_of(200, 2)):
        assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.decode.metric("vllm:prefix_cache_hits_total") > 0
    assert pair.prefill.metric("vllm:prefix_cache_hits_total") > 0


def test_what_prefill_has_cached_is_pushed_too(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(*VLLM_TIGHT[0])
    pair.prefill.complete(prompt)
    cached = pair.prefill.metric("vllm:prefix_cache_hits_total")
    received = pair.transferred()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    assert pair.prefill.metric("vllm:prefix_cache_hits_total") == cached + len(prompt) // 128 * 128
    assert pair.transferred() == received + len(prompt) - 1


def test_decode_asks_for_what_it_has_not_cached(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(*VLLM_TIGHT[1])
    pair.decode.complete(prompt[:300])
    received = pair.transferred()
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    got = pair.transferred() - received
    assert got == len(prompt) - 1 - 300 // 32 * 32


def test_a_list_of_prompts_makes_a_transfer_each(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, 9) for count in (200, 300, 200)]
    assert pair.tokens(prompts) == [alone[tuple(prompt)] for prompt in prompts]


def test_several_samples_of_one_prompt_are_all_answered(pair: Pair) -> None:
    prompt = prompt_of(650, 77)
    answers = pair.tokens(prompt, n=3, temperature=0.7)
    assert [len(tokens) for tokens in answers] == [12, 12, 12]
    until(pair.prefill.holds_nothing, "prefill holds nothing")


def test_a_request_may_end_with_its_first_token(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(513, 513)
    assert pair.tokens(prompt, max_tokens=1) == [alone[tuple(prompt)][:1]]


def test_servers_that_make_different_prompts_of_one_request_hear_it_at_once(pair: Pair, alone: Alone) -> None:
    """As with two chat templates: both waited for a lease, and nobody was told why."""
    prompt = prompt_of(*VLLM_TIGHT[5])
    with ThreadPoolExecutor(1) as threads:
        prefill = threads.submit(pair.prefill_leg, "xfer-unlike", prompt_of(300, 7))
        answer = pair.decode_leg("xfer-unlike", prompt)
        assert prefill.result().status == 200
    assert answer.tokens == [alone[tuple(prompt)]]
    assert answer.body["kv_transfer_params"]["pdlink_kv"] == "recomputed;reason=other_prompt"
    for server in (pair.prefill, pair.decode):
        until(
            lambda s=server: s.metric("vllm:pdlink_transfer_failures_total", 'reason="other_prompt"') == 1,
            "it is counted",
        )
        assert "the two servers make different tokens of one request" in server.log.read_text()


def test_requests_without_parameters_are_served_alone(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(255, 255)
    for server in (pair.prefill, pair.decode):
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]


def test_unusable_parameters_do_not_hurt_the_server(pair: Pair, alone: Alone) -> None:
    prompt = prompt_of(129, 129)
    for params in (
        {"leg": "decode"},
        {"transfer_id": "x", "leg": "decode", "prefill": {"control": "file:///etc/passwd"}},
        {"transfer_id": "y", "leg": "decode", "prefill": {"control": "tcp://192.0.2.1:1"}},
        {"transfer_id": 3, "leg": "prefill"},
        {"do_remote_prefill": True, "remote_host": "192.0.2.1"},
    ):
        for server in (pair.prefill, pair.decode):
            assert server.complete(prompt, kv_transfer_params=params).tokens == [alone[tuple(prompt)]]


def test_layers_land_before_prefill_has_ended(pair: Pair) -> None:
    written, landed = pair.landings(3000, "landing")
    assert written
    assert len(landed) >= NUM_LAYERS * (3000 // 256)
    assert sum(ts < max(written) for ts in landed) > len(landed) / 2


def test_aborts_on_either_side_leave_nothing_behind(pair: Pair) -> None:
    prompt = prompt_of(4000, 41)
    for impatient in (pair.prefill, pair.decode):
        attempt = f"abort-{impatient.name}"
        there = {"control": list(pair.control)}
        legs = {
            pair.prefill: {"transfer_id": attempt, "leg": "prefill"},
            pair.decode: {"transfer_id": attempt, "leg": "decode", "prefill": there},
        }

        def ask(server: Server, legs: Any = legs, impatient: Server = impatient) -> int:
            fields = {"prompt": prompt, "model": "sensitive", "kv_transfer_params": legs[server]}
            fields["max_tokens"] = 1 if server is pair.prefill else 4
            url = f"{server.url}/v1/completions"
            return post(url, fields, timeout_s=0.7 if server is impatient else 120.0).status

        threads = [threading.Thread(target=ask, args=(server,)) for server in (pair.prefill, pair.decode)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        until(pair.prefill.holds_nothing, "prefill holds nothing")
        until(pair.decode.holds_nothing, "decode holds nothing")
    assert pair.prefill.answers()
    assert pair.decode.answers()
