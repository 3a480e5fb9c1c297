"""What went wrong between client, proxy and workers elsewhere, played with real processes."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import pytest

from pdlink import Node
from pdlink.kv.groups import KVGroups
from pdlink.serve import health
from tests.e2e.deployment import Answer, Deployment, prompt_of, request, worker_settings
from tests.endpoint.conftest import layout
from tests.waiting import until

if TYPE_CHECKING:
    from pdlink.serve.worker import Worker

pytestmark = pytest.mark.e2e

PROMPT = prompt_of(60, seed=5)
SHARED = prompt_of(160, seed=6)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """The engine of decode takes longer prompts than that of prefill, so that only one of them refuses."""
    model = {"num_layers": 8}
    workers = {
        "prefill": worker_settings("prefill", model={**model, "max_tokens": 400}),
        "decode": worker_settings("decode", model={**model, "max_tokens": 2000}),
    }
    with Deployment.launch(workers) as deployment:
        deployment.complete(PROMPT)
        yield deployment


@pytest.fixture(autouse=True)
def nothing_is_held(deployment: Deployment) -> Iterator[None]:
    yield
    for label in ("prefill", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} holds nothing")  # type: ignore[misc]
        assert deployment.health(label)["status"] == "ok"


def body_of(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "pdlink-tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    ).encode()


def leg(deployment: Deployment, side: str, transfer_id: str, request_id: str, **fields: Any) -> Answer:
    params: dict[str, Any] = {"transfer_id": transfer_id, "leg": side, "seed": 1, "created": 1}
    if side == "decode":
        params["prefill"] = {"name": "prefill", "control": deployment.health("prefill")["control"]}
    body = body_of(kv_transfer_params=params, **fields)
    return request(deployment.url(side) + "/v1/completions", body, headers={"X-Request-Id": request_id})


def test_legs_match_by_transfer_id_whatever_their_requests_are_called(deployment: Deployment) -> None:
    """vllm#34415: the engine's request id was the key of a transfer, until engines began to decorate it."""
    alone = deployment.complete(PROMPT, at="decode", max_tokens=8).text
    landed = deployment.metric("prefill", "pdlink_layers_landed_total")
    with ThreadPoolExecutor(2) as threads:
        prefill = threads.submit(leg, deployment, "prefill", "xfer-same", "cmpl-a-1f3b", cache_salt="s")
        decode = threads.submit(leg, deployment, "decode", "xfer-same", "something else", cache_salt="s")
        assert (prefill.result().status, decode.result().text) == (200, alone)
    assert deployment.metric("prefill", "pdlink_layers_landed_total") == landed + 8


@pytest.mark.parametrize("moment", ["headers sent", "half a body sent", "body sent"])
@pytest.mark.parametrize("at", ["proxy", "prefill", "decode"])
def test_client_that_leaves_at_any_moment_leaves_nothing_behind(deployment: Deployment, at: str, moment: str) -> None:
    """vllm#50425: a client that left between the two legs pinned prefill's KV."""
    url = urlsplit(deployment.url(at))
    body = body_of(max_tokens=200)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    sent = {"headers sent": head, "half a body sent": head + body[:50], "body sent": head + body}[moment]
    with socket.create_connection((str(url.hostname), int(url.port or 0))) as client:
        client.sendall(sent)
    assert deployment.complete(PROMPT).status == 200


def test_prompt_that_only_prefill_refuses_is_a_4xx_and_decode_says_nothing(deployment: Deployment) -> None:
    """sglang#30233: decode went on with the KV of one token, or somebody else's."""
    before = deployment.metric("decode", 'pdlink_tokens_total{kind="completion"}')
    answer = deployment.complete(prompt_of(600, seed=9))
    assert answer.status == 400
    assert answer.body["error"]["code"] == "capacity_exceeded"
    assert deployment.metric("decode", 'pdlink_tokens_total{kind="completion"}') == before
    stream = request_text(deployment, body_of(prompt=prompt_of(600, seed=9), stream=True))
    assert "capacity_exceeded" in stream
    assert '"text"' not in stream


def request_text(deployment: Deployment, body: bytes) -> str:
    url = urlsplit(deployment.url("proxy"))
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_warm_requests_with_a_shared_prefix_use_no_more_blocks_each_time(deployment: Deployment) -> None:
    """lmcache#2933: 43 pages were lost with every warm request, until none was left after fourteen."""
    answers = {deployment.complete([*SHARED, 40 + number], max_tokens=2).status for number in range(20)}
    assert answers == {200}
    until(lambda: deployment.idle("decode"), "all its blocks are free")


def test_several_samples_of_one_request_are_refused_and_equal_requests_do_not_meet(deployment: Deployment) -> None:
    """sglang#26486: samples shared one transfer; ray#63741: requests without an id all shared one."""
    assert deployment.complete(PROMPT, n=4).status == 400
    answers = deployment.complete_all([PROMPT] * 6, max_tokens=8)
    assert len({answer.body["id"] for answer in answers}) == 6, "each has a transfer id of its own"
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("field", ["logprobs", "echo", "n", "best_of", "suffix"])
def test_fields_that_the_legs_would_understand_differently_are_refused(deployment: Deployment, field: str) -> None:
    """ascend#13363: prompt_logprobs crashed decode, min_tokens was an error on prefill only."""
    values: dict[str, Any] = {"logprobs": 3, "echo": True, "n": 2, "best_of": 2, "suffix": "x"}
    fields: dict[str, Any] = {field: values[field]}
    answer = deployment.complete(PROMPT, **fields)
    assert answer.status == 400
    assert field in answer.body["error"]["message"]


def test_usage_is_that_of_one_process(deployment: Deployment) -> None:
    """vllm-ascend#11630: cached tokens were reported as the whole prompt on decode."""
    usage = deployment.complete(PROMPT, max_tokens=8, cache_salt="usage").body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (60, 8, 68)


@pytest.mark.parametrize("part", ["engine", "endpoint", "loop"])
def test_health_is_bad_when_a_part_of_the_worker_is_dead(deployment: Deployment, part: str) -> None:
    """llmd-kv#457: /health said 200 while the engine was dead. The worker's own words about a part that is."""
    with Node("dead", KVGroups((layout(4),))) as node:
        report = node.report()._replace(
            failure="OSError: out of descriptors" if part == "endpoint" else "",
            stalled_s=1e9 if part == "loop" else 0.0,
        )
    dead = SimpleNamespace(
        node=SimpleNamespace(report=lambda: report, address="a"),
        engine_is_dead=part == "engine",
        draining=False,
        name="w",
        role="both",
        config=SimpleNamespace(
            timeouts=SimpleNamespace(peer_s=3.0), role="both", cache=SimpleNamespace(block_tokens=16)
        ),
        model=SimpleNamespace(name="m", revision=""),
        engine=SimpleNamespace(num_running=0, num_awaiting_kv=0, num_waiting=0),
        pool=SimpleNamespace(num_free=1, num_held=0, num_blocks=1),
        kv_events=None,
        source=None,
        peers=None,
    )
    body = health.health(cast("Worker", dead))
    assert body.status == "failed"
    assert body.reason
    assert deployment.health("prefill")["reason"] == ""
