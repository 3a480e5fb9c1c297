"""A proxy before a prefill and two decode servers of vLLM: where a text goes, and a stream whose server dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.waiting import until

pytest.importorskip("vllm")

from pdlink.config import ProxyConfig, VllmConfig
from pdlink.fleet import vllm
from pdlink.fleet.child import Child, start, stop
from pdlink.fleet.ports import free_ports
from pdlink.fleet.server import Server
from pdlink_bench import resting
from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.kv_events import KVEvents
from pdlink_proxy.table import WorkerState

from .deployment import Answer, request
from .readers import Reader
from .test_vllm_proxy import COMPLETIONS, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

READY_S = 400.0
NUM_TOKENS = 400
BLOCK_TOKENS = 32


@dataclass
class Fleet:
    servers: dict[str, Server]
    """By label."""
    proxy: str
    events: tuple[str, str]
    """Endpoints of prefill's KV events."""

    def ask(self, at: str, body: dict[str, Any]) -> Answer:
        return request(at + COMPLETIONS, {"model": "m", "temperature": 0, **body}, timeout_s=120)

    def counted(self, name: str, label: str) -> float:
        connection = http.client.HTTPConnection(self.proxy.removeprefix("http://"), timeout=30)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    from pdlink.serve.checkpoint import write_checkpoint

    folder = tmp_path_factory.mktemp("recovery")
    write_checkpoint(folder / "model")
    ports = free_ports(2)
    events = f"tcp://127.0.0.1:{ports}", f"tcp://127.0.0.1:{ports + 1}"
    listens = f"tcp://*:{ports}"  # of another host it dials
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": listens}
    config = VllmConfig(
        model_name="m",
        args=(
            *("--dtype", "float32", "--max-model-len", "8192", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
            *("--max-num-batched-tokens", "4096"),
        ),
        prefill_args=("--kv-events-config", json.dumps({**publisher, "replay_endpoint": events[1]})),
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **resting.environment(folder),
        },
        prefill_port=0,
        decode_port=0,
        control_port=0,
    )
    plans = vllm.plan(config, 1, 2, executable=vllm.find_executable(None), model=str(folder / "model"))
    children: list[Server | Child] = []
    try:
        servers = [Server(plan, folder) for plan in plans]
        children += servers
        for server in servers:
            server.wait_ready(READY_S)
        settings = ProxyConfig(listen="127.0.0.1:0", connect_timeout_s=10, tokenize_wait_s=5).model_dump(mode="json")
        told = {"kv_events": {plans[0].url: [",".join(events)]}}
        proxy = start("proxy", "proxy", {**settings, **vllm.proxy_settings(config, plans), **told})
        children.append(proxy)
        proxy.wait_ready(60)
        made = Fleet({server.label: server for server in servers}, str(proxy.facts["url"]), events)
        until(lambda: len(_well(made)) == 3, "the proxy sees its servers", 60)
        yield made
    finally:
        stop(children, 20)


def _well(fleet: Fleet) -> list[str]:
    body = request(fleet.proxy + "/health").body
    return [each["url"] for side in ("prefill", "decode") for each in body[side] if each["state"] == "ok"]


def test_the_tokens_of_a_text_are_those_whose_blocks_vllm_publishes(fleet: Fleet) -> None:
    """The proxy asks for them; that it finds them there is looked up as it does, since with one prefill server it has
    no choice to look up anything for."""
    body = {"prompt": prompt(1, 2500), "max_tokens": 1}
    assert fleet.ask(fleet.proxy, body).status == 200
    until(lambda: _known(fleet) >= 2500 // BLOCK_TOKENS, "events")
    answer = fleet.ask(fleet.proxy, body)
    assert answer.status == 200
    assert fleet.counted("pdlink_proxy_tokenized_total", 'how="asked"') == 1
    url = fleet.servers["prefill-0"].facts["url"]
    told = request(f"{url}/tokenize", {"model": "m", "prompt": body["prompt"]}).body
    num_tokens = answer.body["usage"]["prompt_tokens"]
    assert told["count"] == num_tokens

    async def held() -> int:
        asked, events = PlacementRequest("m", num_tokens, known_ids=np.array(told["tokens"], np.uint32)), KVEvents()
        events.heard(url, WorkerState("prefill"), "m", [",".join(fleet.events)])
        async with asyncio.timeout(60):
            while not (found := events.held(asked, "m")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        events.close()
        return found.most

    assert asyncio.run(held()) == num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _known(fleet: Fleet) -> float:
    connection = http.client.HTTPConnection(fleet.proxy.removeprefix("http://"), timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next(float(line.split()[1]) for line in lines if line.startswith("pdlink_proxy_kv_index_blocks "))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_a_stream_whose_decode_server_is_killed_goes_on_at_the_other_one(
    fleet: Fleet, sampling: dict[str, float]
) -> None:
    """It ends a server, and starts it again. The client sees a pause, and the tokens of one server."""
    body = {
        "prompt": prompt(2, 100),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **sampling,
    }
    before = fleet.counted("pdlink_proxy_fallbacks_total", 'kind="recovered"')
    wanted = fleet.ask(fleet.servers["prefill-0"].facts["url"], body).body["choices"][0]
    asked = {"model": "m", "stream": True, **body}
    connection = http.client.HTTPConnection(fleet.proxy.removeprefix("http://"), timeout=300)
    connection.request("POST", COMPLETIONS, json.dumps(asked), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    victim = fleet.servers[answer.headers["X-Pdlink-Decode"]]
    choices: list[dict[str, Any]] = []
    last_s, pause_s, done = time.monotonic(), 0.0, False
    while line := answer.readline():
        if not line.startswith(b"data: "):
            continue
        if done := line == b"data: [DONE]\n":
            break
        event = json.loads(line[6:])
        assert "error" not in event, event
        choices += event["choices"]
        pause_s, last_s = max(pause_s, time.monotonic() - last_s), time.monotonic()
        if len(choices) == 40:
            victim.kill()
    connection.close()
    print(f"the longest pause was {pause_s:.2f} s")
    assert done
    assert "".join(choice["text"] for choice in choices) == wanted["text"]
    assert [token for choice in choices for token in choice["token_ids"] or ()] == wanted["token_ids"]
    assert len(wanted["token_ids"]) == NUM_TOKENS
    assert fleet.counted("pdlink_proxy_fallbacks_total", 'kind="recovered"') == before + 1
    found = request(f"{fleet.proxy}/decisions?request={answer.headers['X-Request-Id']}").body["decisions"]
    places = [each["decode"] for each in found if each["verdict"] == "placed"]
    assert places == [victim.label, *({"decode-0", "decode-1"} - {victim.label})]
    victim.again()
    victim.wait_ready(READY_S)
    until(lambda: len(_well(fleet)) == 3, "the proxy sees its servers", 60)


MANY_EVENTS = 12
"""Of a stream that is in its middle."""


def test_chats_go_on_at_the_other_server_and_responses_and_messages_end_with_an_error(fleet: Fleet) -> None:
    """The last test: it ends a server. By these routes an answer may end early, so long ones are looked for."""
    routes = {
        "/v1/chat/completions": ("messages", {"max_tokens": NUM_TOKENS}),
        "/v1/responses": ("input", {"max_output_tokens": NUM_TOKENS}),
        "/v1/messages": ("messages", {"max_tokens": NUM_TOKENS}),
    }
    bodies, wanted = {}, {}
    for path, (name, fields) in routes.items():
        for number in range(40):
            asked: Any = f"tell me {number}"
            asked = asked if name == "input" else [{"role": "user", "content": asked}]
            bodies[path] = {"model": "m", "temperature": 0, name: asked, **fields}
            reader = Reader(fleet.proxy, path, bodies[path])
            wanted[path] = reader.said()
            if reader.num_events() > 10 * MANY_EVENTS:
                break
        else:
            raise AssertionError(f"no long answer of {path}")
    before = fleet.counted("pdlink_proxy_fallbacks_total", 'kind="recovered"')
    readers = [Reader(fleet.proxy, path, bodies[path]).placed() for path in routes for _ in range(2)]

    def at_victim() -> list[Reader]:
        return [each for each in readers if each.decode == "decode-0" and each.num_events() >= MANY_EVENTS]

    until(lambda: len(at_victim()) == len(routes), "one of each is in its middle there", 120)
    lost = at_victim()
    fleet.servers["decode-0"].kill()
    assert all(reader.thread.is_alive() for reader in lost), "one had ended before"
    for reader in readers:
        if reader in lost and reader.path != "/v1/chat/completions":
            assert b"decode worker lost" in reader.whole()
            continue
        said = reader.said()
        assert said == wanted[reader.path], (reader.path, reader.decode)
        assert len(said.names) == len(wanted[reader.path].names)
    assert {reader.path for reader in lost} == routes.keys()
    assert fleet.counted("pdlink_proxy_fallbacks_total", 'kind="recovered"') == before + 1
