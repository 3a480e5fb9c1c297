"""What a client of the proxy sees: streams, usage, stops, errors, prefixes, and that KV moves during prefill."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdlink.cli import main
from tests.observe.traced import events_of, tracks_of
from tests.waiting import until

from .deployment import Deployment, prompt_of, request, worker_settings

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 128


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    ucx = {"kind": "ucx", "ucx": {"tls": "tcp"}}
    cache = {"num_blocks": NUM_BLOCKS}
    workers = {
        "prefill": worker_settings("prefill", transport=ucx, cache=cache),
        "decode": worker_settings("decode", transport=ucx, cache=cache, on_transfer_failure="fail"),
    }
    with Deployment.launch(workers, holdable=("prefill",)) as deployment:
        yield deployment


def stream(deployment: Deployment, path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Lines of `data:` as they come; closing the iterator closes the connection."""
    target = urlsplit(deployment.url("proxy"))
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()
    finally:
        connection.close()


def events(deployment: Deployment, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = list(stream(deployment, path, body))
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_layer_0_lands_before_the_last_layer_is_computed(deployment: Deployment) -> None:
    before = deployment.metric("prefill", "pdlink_layers_landed_total")
    deployment.hold("prefill", "layer 6")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(deployment.complete, prompt_of(100, seed=5))
        until(lambda: deployment.metric("prefill", "pdlink_layers_landed_total") == before + 7, "seven have landed")
        deployment.let_go()
        answer = running.result()
    transfer_id = answer.headers["X-Pdlink-Transfer"]
    transfers = request(deployment.url("prefill") + "/pdlink/events").body["transfers"]
    (ours,) = [each for each in transfers if each["transfer_id"] == transfer_id]
    written = {each["layer"]: each["at_s"] for each in ours["written"]}
    landed = {each["layer"]: each["at_s"] for each in ours["landed"] if each["start"] == 0}
    assert sorted(written) == sorted(landed) == list(range(8))
    assert all(written[layer] <= landed[layer] for layer in range(8))
    assert all(landed[layer] < written[7] for layer in range(7)), "they crossed during prefill"


def test_one_request_is_a_trace_over_the_proxy_and_both_its_workers(deployment: Deployment, tmp_path: Path) -> None:
    answers = [deployment.complete(prompt_of(60, seed=seed)) for seed in (41, 42)]
    one = answers[0].headers
    file = tmp_path / "one.pftrace"
    words = ["timeline", deployment.url("proxy"), "-o", str(file), "--request", one["X-Request-Id"]]
    assert main(words) == 0
    found = events_of(file.read_bytes())
    assert tracks_of(file.read_bytes()) == ["proxy", "prefill-0: prefill", "decode-0: decode"], "all share a clock"
    (request_,) = [each for each in found if each.name == one["X-Request-Id"]]
    sent, received = [each for each in found if each.name.startswith(f"{one['X-Pdlink-Transfer']} ")]
    assert (request_.sends, sent.sends) == (sent.takes, received.takes)
    assert request_.begin_s < sent.begin_s < received.end_s
    moved = [each for each in found if each.track.endswith("in flight")]
    assert {each.name for each in moved} == {f"layer {layer}" for layer in range(8)}
    assert not any(each.name == answers[1].headers["X-Request-Id"] for each in found)
    assert main([*words[:-1], "nobody"]) == 1
    assert main(["timeline", deployment.url("decode"), "-o", str(file)]) == 0
    assert tracks_of(file.read_bytes()) == ["decode"]


def test_stream_holds_the_same_text_as_the_whole_answer(deployment: Deployment) -> None:
    prompt = prompt_of(60, seed=6)
    whole = deployment.complete(prompt)
    body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
    chunks = events(deployment, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole.text
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert chunks[-1]["usage"]["prompt_tokens"] == 60
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_first_token_comes_from_prefill(deployment: Deployment) -> None:
    before = deployment.metric("proxy", "pdlink_proxy_time_to_first_token_seconds_count")
    deployment_body = {"model": "pdlink-tiny", "prompt": prompt_of(30, seed=7), "max_tokens": 4, "stream": True}
    events(deployment, "/v1/completions", deployment_body)
    assert deployment.metric("proxy", "pdlink_proxy_time_to_first_token_seconds_count") == before + 1


def test_chat_answers_whole_and_streamed(deployment: Deployment) -> None:
    body: dict[str, Any] = {
        "model": "pdlink-tiny",
        "messages": [{"role": "user", "content": "What crosses the link?"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = request(deployment.url("proxy") + "/v1/chat/completions", body)
    assert whole.status == 200, whole.body
    assert whole.body["object"] == "chat.completion"
    message = whole.body["choices"][0]["message"]
    assert message["role"] == "assistant"
    chunks = events(deployment, "/v1/chat/completions", body | {"stream": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == message["content"]


def test_answer_of_one_token_and_answer_stopped_by_its_first_token(deployment: Deployment) -> None:
    """vllm#46008: a request that is over with prefill's token must not leave decode waiting."""
    prompt = prompt_of(33, seed=8)
    one = deployment.complete(prompt, max_tokens=1)
    assert one.body["usage"]["completion_tokens"] == 1
    assert one.body["choices"][0]["finish_reason"] == "length"
    stopped = deployment.complete(prompt, stop=[one.text])
    assert stopped.body["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    by_id = deployment.complete(prompt, stop_token_ids=[33 + index for index in range(94)])
    assert by_id.body["choices"][0]["finish_reason"] == "stop"


def test_stop_string_over_several_tokens_ends_the_answer(deployment: Deployment) -> None:
    prompt = prompt_of(33, seed=9)
    text = deployment.complete(prompt).text
    answer = deployment.complete(prompt, stop=text[4:7])
    assert answer.text == text[: text.index(text[4:7])]
    assert answer.body["choices"][0]["finish_reason"] == "stop"


def test_prefix_that_decode_has_is_not_sent_again(deployment: Deployment) -> None:
    prompt = prompt_of(160, seed=10)
    first = deployment.complete(prompt)
    before = deployment.metric("prefill", "pdlink_transfer_bytes_total")
    again = deployment.complete(prompt)
    assert again.text == first.text
    assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
    assert deployment.metric("prefill", "pdlink_transfer_bytes_total") - before <= 16 * 16384


def test_prompt_longer_than_the_pool_is_refused_at_once_with_both_numbers(deployment: Deployment) -> None:
    """lmcache#4209: it waited for the whole timeout, and the error then spoke of something else."""
    answer = deployment.complete(prompt_of(NUM_BLOCKS * 16 + 1))
    assert answer.status == 400
    assert answer.body["error"]["code"] == "capacity_exceeded"
    assert str(NUM_BLOCKS) in answer.body["error"]["message"]
    assert answer.took_s < 30, "half of its timeout"
    assert deployment.complete(prompt_of(20)).status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 400),
        (b"[1, 2]", 400),
        ({"model": "pdlink-tiny"}, 400),
        ({"model": "nobody", "prompt": "x"}, 404),
        ({"model": "pdlink-tiny", "prompt": "x", "max_tokens": -1}, 400),
        ({"model": "pdlink-tiny", "prompt": "x", "max_tokens": "many"}, 400),
        ({"model": "pdlink-tiny", "prompt": "x", "temperature": "hot"}, 400),
        ({"model": "pdlink-tiny", "prompt": [1, 10**9]}, 400),
        ({"model": "pdlink-tiny", "prompt": ""}, 400),
        ({"model": "pdlink-tiny", "prompt": "x", "n": 3}, 400),
    ],
    ids=str,
)
def test_bad_request_gets_a_4xx_with_an_openai_error(deployment: Deployment, body: object, status: int) -> None:
    answer = request(deployment.url("proxy") + "/v1/completions", body)
    assert answer.status == status, answer.body
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}
    assert answer.body["error"]["message"]


def test_client_that_leaves_frees_both_workers(deployment: Deployment) -> None:
    body = {"model": "pdlink-tiny", "prompt": prompt_of(700, seed=11), "max_tokens": 1000, "stream": True}
    lines = stream(deployment, "/v1/completions", body)
    next(lines)
    assert not deployment.idle("decode")
    lines.close()  # type: ignore[attr-defined]
    for label in ("prefill", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]


def test_client_that_leaves_during_prefill_frees_both_workers(deployment: Deployment) -> None:
    target = urlsplit(deployment.url("proxy"))
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    body = {"model": "pdlink-tiny", "prompt": prompt_of(1500, seed=12), "max_tokens": 100}
    deployment.hold("prefill", "layer 2")
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    until(lambda: deployment.health("decode")["running"] == 1, "decode waits for the KV")
    connection.close()
    deployment.let_go()
    for label in ("prefill", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]


def test_more_requests_than_the_pool_holds_all_end_well(deployment: Deployment) -> None:
    """vllm#57104, lmcache#1030: reservations before transfers, and no waiting for each other."""
    prompts = [prompt_of(500, seed=200 + index) for index in range(12)]
    answers = deployment.complete_all(prompts, max_tokens=4)
    assert [answer.status for answer in answers] == [200] * 12
    for label in ("prefill", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]


def test_headers_and_fields_reach_the_engine_which_refuses_what_it_does_not_do(deployment: Deployment) -> None:
    body = {"model": "pdlink-tiny", "prompt": "x", "max_tokens": 1, "user": "somebody"}
    answer = request(deployment.url("proxy") + "/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert answer.status == 200
    assert answer.headers["X-Request-Id"] == "mine-1"
    answer = request(deployment.url("proxy") + "/v1/completions", {**body, "logit_bias": {"5": -100}})
    assert answer.status == 400
    assert answer.body["error"]["message"].startswith("logit_bias: the built-in engine does not do this")


def test_models_and_health_are_answered(deployment: Deployment) -> None:
    models = request(deployment.url("proxy") + "/v1/models").body
    assert [model["id"] for model in models["data"]] == ["pdlink-tiny"]
    assert request(deployment.url("decode") + "/v1/models").body["data"][0]["id"] == "pdlink-tiny"
