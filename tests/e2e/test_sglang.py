"""Real SGLang servers, one of which computes prompts for the other, behind pdlink's proxy and SGLang's own router.

The answers are those of one server: in float32, greedily, from a model whose every token depends on all KV before it.
Prompts are computed in chunks of 256 tokens. Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from pdlink.fleet.ports import free_ports  # noqa: E402
from tests.e2e.engine_servers import NUM_LAYERS, body_of, post, prompt_of, until  # noqa: E402
from tests.e2e.sglang_servers import (  # noqa: E402
    SglangPair,
    SglangServer,
    cached_of,
    native_body,
    save_checkpoint,
    tokens_of,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (64, 300, 1000, 4000)
CONCURRENT = tuple(40 + 23 * index for index in range(16))
PREFIXED = (prompt_of(300, 1), prompt_of(300, 1)[:200] + prompt_of(60, 2))
LONG = 3000
"""Twelve chunks, in which something can happen."""
Alone = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang")
    save_checkpoint(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """What one server answers."""
    prompts = [*(prompt_of(count, count) for count in (*LENGTHS, *CONCURRENT)), *PREFIXED]
    with SglangServer("alone", folder / "model", folder / "alone.log", []).serving() as server:
        return {tuple(prompt): tokens_of(server.complete(prompt)) for prompt in prompts}


@pytest.fixture(scope="module")
def pair(folder: Path, alone: Alone) -> Iterator[SglangPair]:
    pair = SglangPair.of(folder, ["--enable-pd-role-switch"])
    yield pair
    pair.stop()


def serves(pair: SglangPair, alone: Alone, length: int = 300) -> bool:
    prompt = prompt_of(length, length)
    return pair.tokens(prompt) == alone[tuple(prompt)]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_equal_those_of_one_server(pair: SglangPair, alone: Alone, length: int) -> None:
    assert serves(pair, alone, length)


def test_sixteen_at_once_do_not_mix(pair: SglangPair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in CONCURRENT]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(pair.tokens, prompts)) == [alone[tuple(prompt)] for prompt in prompts]


def test_a_prefix_that_prefill_has_cached_is_sent_too(pair: SglangPair, alone: Alone) -> None:
    for prompt in PREFIXED:
        assert pair.tokens(prompt) == alone[tuple(prompt)]
    prefill, decode = pair.legs(PREFIXED[0])
    assert cached_of(prefill) >= 272, "of 300 tokens, in pages of 16"
    assert tokens_of(decode) == alone[tuple(PREFIXED[0])]


def test_layers_land_before_the_forward_pass_ends(pair: SglangPair) -> None:
    pair.tokens(prompt_of(3008, 9))
    until(lambda: pair.transfers_of(3008), "its transfer has ended")
    (transfer,) = pair.transfers_of(3008)
    assert transfer.ended is not None
    assert transfer.ended.state == "DONE"
    ends = {each.end: each.at_s for each in transfer.written if each.layer == NUM_LAYERS - 1}
    assert len(ends) == 12, "chunks of 256 tokens, of each of which the last layer is written inside of its pass"
    before = [
        each for each in transfer.landed if each.at_s < min(at_s for end, at_s in ends.items() if end >= each.end)
    ]
    early = {each.layer for each in before}
    assert len(before) > len(transfer.landed) / 2, f"{len(before)} of {len(transfer.landed)}, layers {sorted(early)}"


def test_sglangs_own_router_may_be_in_front(pair: SglangPair, alone: Alone, folder: Path) -> None:
    if importlib.util.find_spec("sglang_router") is None:
        pytest.skip("needs sglang-router")
    port = free_ports(1)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prefill", pair.prefill.url, str(pair.prefill.bootstrap_port)]
    command += ["--decode", pair.decode.url, "--prometheus-port", str(free_ports(1))]
    with (folder / "router.log").open("ab") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | pair.prefill.settings())
    try:
        prompts = [prompt_of(count, count) for count in (64, 1000)]
        url = f"http://127.0.0.1:{port}/generate"
        until(lambda: post(url, native_body(prompts[0])).status == 200, "the router serves", 120)
        for prompt in prompts:
            assert tokens_of(post(url, native_body(prompt))) == alone[tuple(prompt)]
    finally:
        router.kill()
        router.wait(30)


def test_a_client_that_leaves_ends_both_legs(pair: SglangPair, alone: Alone) -> None:
    long, before = prompt_of(6000, 3), pair.prefill.num_prefill_passes()
    client = HTTPConnection(pair.url.removeprefix("http://"))
    client.request("POST", "/v1/completions", json.dumps(body_of(long)), {"Content-Type": "application/json"})
    until(lambda: pair.prefill.num_prefill_passes() >= before + 2, "the prompt is being computed", 120)
    client.close()
    assert serves(pair, alone)
    assert pair.prefill.num_prefill_passes() - before < len(long) // 256, "all of it was computed, for nobody"


@pytest.mark.parametrize("impatient", ["prefill", "decode"])
def test_an_abort_at_either_server_is_an_error_of_both_legs(pair: SglangPair, alone: Alone, impatient: str) -> None:
    server: SglangServer = getattr(pair, impatient)
    before = pair.prefill.num_prefill_passes()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(pair.legs, prompt_of(LONG, 5), f"rid-{impatient}")
        until(lambda: pair.prefill.num_prefill_passes() >= before + 2, "the prompt is being computed", 120)
        server.abort(f"rid-{impatient}")
        prefill, decode = asked.result()
    assert not (prefill.status == decode.status == 200), (prefill, decode)
    assert decode.status != 200, decode
    assert serves(pair, alone)
    assert pair.prefill.num_prefill_passes() - before < LONG // 256, "all of it was computed, for nobody"


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_server_that_stands_still_is_an_error_and_goes_on_afterwards(
    pair: SglangPair, alone: Alone, stopped: str
) -> None:
    server: SglangServer = getattr(pair, stopped)
    try:
        answer = pair.while_computing(prompt_of(LONG, 7), lambda: server.send_signal(signal.SIGSTOP))
    finally:
        server.send_signal(signal.SIGCONT)
    assert answer.status >= 500, answer
    pair.wait_routed()
    assert serves(pair, alone)


@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_a_killed_server_is_an_error_and_its_next_life_serves(pair: SglangPair, alone: Alone, killed: str) -> None:
    server: SglangServer = getattr(pair, killed)
    answer = pair.while_computing(prompt_of(LONG, 3), server.kill)
    assert answer.status >= 500, answer
    assert "error" in answer.body["text"], answer
    server.start().wait_ready()
    pair.wait_routed()
    assert serves(pair, alone)
    assert serves(pair, alone, 1000)


@pytest.fixture
def decode_caches(pair: SglangPair) -> Iterator[None]:
    """Decode is started again with a prefix cache of its own, and without one afterwards."""
    plain = list(pair.decode.flags)
    for flags in ([*plain, "--disaggregation-decode-enable-radix-cache"], plain):
        pair.decode.kill()
        pair.decode.flags[:] = flags
        pair.decode.start().wait_ready()
        pair.wait_routed()
        if flags is not plain:
            yield


@pytest.mark.usefixtures("decode_caches")
def test_what_decode_has_cached_does_not_travel(pair: SglangPair, alone: Alone) -> None:
    assert serves(pair, alone, 1000)
    before = len(pair.transfers_of(1008))
    assert serves(pair, alone, 1000)
    until(lambda: len(pair.transfers_of(1008)) > before, "its transfer has ended")
    sent = pair.transfers_of(1008)[-1]
    assert min(each.start for each in sent.landed) == 992, "of 1,000 tokens, in pages of 16"
    assert serves(pair, alone)


def test_servers_that_exchange_their_roles_serve_each_other(pair: SglangPair, alone: Alone) -> None:
    """pdlink's proxy is told of roles once: it serves again when the servers have their first roles back."""
    try:
        for server, role in ((pair.prefill, "decode"), (pair.decode, "prefill")):
            take_role(server, role)
        swapped = pair.swapped()
        for length in (64, 1000):
            prompt = prompt_of(length, length)
            _, decode = swapped.legs(prompt)
            assert tokens_of(decode) == alone[tuple(prompt)]
    finally:
        for server, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
            take_role(server, role)
    pair.wait_routed()
    assert serves(pair, alone, 1000)


def take_role(server: SglangServer, role: str) -> None:
    asked = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
    until(lambda: server.call("POST", "/pd_role_switch", asked) == 200, f"{server.name} takes {role}")
