"""Real vLLM servers with data parallel engines: one has two behind its port, each with a connector of its own. It
decodes for the other server, and prefills for it behind the proxy, which says which engine computes a prompt.

Run with `make test-vllm`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdlink.config import ProxyConfig  # noqa: E402
from pdlink.fleet.child import start, stop  # noqa: E402
from pdlink_proxy.engines import HEADER  # noqa: E402
from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import body_of, place_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = [
    "--enforce-eager",
    "--max-num-batched-tokens",
    "512",
    "--max-model-len",
    "4096",
    "--no-enable-prefix-caching",
]
ENGINES = ("0", "1")


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    """Prefill has two engines; either server takes both roles."""
    place = place_of(vllm_folder, "data-parallel")
    pair = Pair.of(place, prefill_flags=FLAGS, decode_flags=FLAGS, engines=2, both=True)
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def proxy(pair: Pair) -> Iterator[str]:
    """Its URL."""
    settings = ProxyConfig(
        listen="127.0.0.1:0",
        dialect="vllm",
        prefill=(pair.prefill.url,),
        decode=(pair.decode.url,),
        control={pair.prefill.url: pair.control},
        data_parallel={pair.prefill.url: 2},
        connect_timeout_s=10,
    )
    child = start("proxy", "proxy", settings.model_dump(mode="json"))
    try:
        child.wait_ready(60)
        url = str(child.facts["url"])
        until(lambda: len(asked(f"{url}/v1/models")[1]["data"]) == 1, "the proxy sees its servers")
        yield url
    finally:
        stop([child], 20)


def rests(server: Server) -> bool:
    """Whether it holds nothing, as of a step now: of several API servers (vLLM starts two here) one may have told an
    older state last, and an idle engine tells nothing."""
    for engine in ENGINES[: server.flags.count("--data-parallel-size") + 1]:
        assert asked(f"{server.url}/v1/completions", body_of([5, 6, 7], max_tokens=1), **{HEADER: engine})[0] == 200
    return server.holds_nothing()


def asked(url: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON and headers of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


def test_both_engines_get_their_prompts_kv_and_answer_as_one_server(pair: Pair, alone: Alone) -> None:
    way = pair.swapped()
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(way.tokens, prompts))
    assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    assert way.transferred() == sum(len(prompt) - 1 for prompt in prompts)
    for engine in ENGINES:
        assert way.decode.metric("vllm:generation_tokens_total", f'engine="{engine}"') > 0
    for server in (way.prefill, way.decode):
        until(lambda server=server: rests(server), f"{server.name} holds nothing")


def test_both_engines_behind_one_port_prefill_for_the_proxys_clients(pair: Pair, alone: Alone, proxy: str) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]

    def computed(engine: str) -> float:
        return pair.prefill.metric("vllm:prompt_tokens_total", f'engine="{engine}"')

    before, received = [computed(engine) for engine in ENGINES], pair.transferred()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: asked(f"{proxy}/v1/completions", body_of(prompt)), prompts))
    for prompt, (status, body, headers) in zip(prompts, answers, strict=True):
        assert status == 200, body
        assert body["choices"][0]["token_ids"] == alone[tuple(prompt)]
        assert headers["X-Pdlink-KV"] == "transferred"
    assert {headers["X-Pdlink-Prefill"] for _, _, headers in answers} == {"prefill-0", "prefill-1"}
    assert pair.transferred() - received == sum(len(prompt) - 1 for prompt in prompts)
    more = [computed(engine) - was for engine, was in zip(ENGINES, before, strict=True)]
    assert min(more) > 0, "one engine did it all"
    assert sum(more) == sum(len(prompt) for prompt in prompts)
    for server in (pair.prefill, pair.decode):
        until(lambda server=server: rests(server), f"{server.name} holds nothing")


@pytest.mark.parametrize("named", [True, False])
def test_a_leg_at_another_engine_than_decode_asks_moves_no_kv_and_the_log_says_why(
    pair: Pair, alone: Alone, named: bool
) -> None:
    """Who posts the legs without a proxy that names the engine: decode computes the prompt after `other_leg_s`."""
    prompt, attempt = prompt_of(VLLM_CONCURRENT[3], VLLM_CONCURRENT[3]), f"xfer-{uuid.uuid4().hex}"
    params = {"transfer_id": attempt, "leg": "prefill", "num_prompts": 1} | (
        {"data_parallel_rank": 0} if named else {}
    )
    there = {"name": "prefill", "control": pair.control[0]}
    received = pair.transferred()
    with ThreadPoolExecutor(2) as threads:
        decode = threads.submit(
            pair.decode.complete,
            prompt,
            kv_transfer_params={"transfer_id": attempt, "leg": "decode", "prefill": there},
        )
        status, _, _ = asked(
            f"{pair.prefill.url}/v1/completions",
            body_of(prompt, max_tokens=1, kv_transfer_params=params),
            **{HEADER: "1"},
        )
        assert status == 200, "prefill serves it alone"
        answer = decode.result()
    assert answer.tokens == [alone[tuple(prompt)]]
    assert answer.body["kv_transfer_params"]["pdlink_kv"] == "recomputed;reason=no_request"
    assert pair.transferred() == received + len(prompt) - 1, "vLLM counts what it hoped for"
    until(
        lambda: "data_parallel_rank: got 0 at data-parallel engine 1" in pair.prefill.output(), "the warning is there"
    )


def test_vllm_refuses_an_engine_that_it_does_not_have(pair: Pair) -> None:
    status, body, _ = asked(f"{pair.prefill.url}/v1/completions", body_of([5, 6, 7]), **{HEADER: "2"})
    assert status == 400
    assert "data_parallel_rank 2 is out of range [0, 2)" in json.dumps(body)
