"""Real vLLM servers behind the real proxy: what a client gets is what one server would have said.

Pairs with PDLinkConnector and, where it is installed, with vLLM's own NixlConnector.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import until

pytest.importorskip("vllm")

from .deployment import request
from .proxied_vllm import Pair, proxied

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module", params=["pdlink", "nixl"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    connector = request.param
    if connector != "pdlink" and importlib.util.find_spec(connector) is None:
        pytest.skip(f"{connector} is not installed")
    with proxied(tmp_path_factory.mktemp(connector), connector) as made:
        yield made


def prompt(seed: int, length: int = 100) -> str:
    state = seed * 7919 + 13
    text = ""
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        text += chr(33 + (state >> 16) % 90)
    return text


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


GREEDY = {"temperature": 0, "max_tokens": 8}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (COMPLETIONS, {"prompt": prompt(1), **GREEDY}),
    "token ids": (COMPLETIONS, {"prompt": list(prompt(2, 700).encode()), **GREEDY, "return_token_ids": True}),
    "min_tokens and stop": (COMPLETIONS, {"prompt": prompt(3), **GREEDY, "min_tokens": 4, "stop": list("aeiu")}),
    "logprobs": (COMPLETIONS, {"prompt": prompt(4), **GREEDY, "logprobs": 2}),
    "echo": (COMPLETIONS, {"prompt": prompt(5), **GREEDY, "echo": True}),
    "log-probabilities of the prompt": (COMPLETIONS, {"prompt": prompt(6), **GREEDY, "echo": True, "logprobs": 1}),
    "several prompts": (COMPLETIONS, {"prompt": [prompt(7), prompt(8, 33), prompt(9, 64)], **GREEDY}),
    "seeded samples": (COMPLETIONS, {"prompt": prompt(10), "max_tokens": 8, "n": 3, "seed": 5, "temperature": 1.0}),
    "one token": (COMPLETIONS, {"prompt": prompt(11), "temperature": 0, "max_tokens": 1}),
    "chat": (CHAT, {"messages": user(prompt(12)), "temperature": 0, "max_tokens": 8}),
    "chat with logprobs": (
        CHAT,
        {"messages": user(prompt(13)), "temperature": 0, "max_completion_tokens": 6, "logprobs": True},
    ),
}  # fmt: skip


def told(value: Any) -> Any:
    """What an answer says about the model: without ids and times, numbers as far as two runs agree on them."""
    if isinstance(value, dict):
        skipped = ("id", "created", "prompt_tokens_details", "system_fingerprint", "bytes")
        return {key: told(item) for key, item in value.items() if key not in skipped}
    if isinstance(value, list):
        return [told(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_of_one_server(pair: Pair, name: str) -> None:
    path, body = REQUESTS[name]
    got, wanted = pair.ask("proxy", path, body), pair.ask("prefill", path, body)
    assert (got.status, wanted.status) == (200, 200), got.body
    assert told(got.body) == told(wanted.body)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_is_that_of_one_server(pair: Pair, name: str) -> None:
    """Joined by choice, since an engine may send two tokens in one event."""
    path, body = REQUESTS[name]

    def joined(events: list[Any]) -> tuple[dict[int, str], dict[int, str], Any]:
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        for event in events:
            for choice in event["choices"]:
                text = choice["delta"].get("content") if path == CHAT else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        return texts, reasons, told(events[-1]["usage"])

    got = pair.events("proxy", path, body)
    assert joined(got) == joined(pair.events("prefill", path, body))
    assert len({event["id"] for event in got}) == 1


def test_cached_tokens_are_those_nobody_computed(pair: Pair) -> None:
    """Not the tokens that decode was sent. Prefill knows; nothing is said if decode answered before it."""
    body = {"prompt": prompt(20, 128), **GREEDY}

    def answered() -> Any:
        return pair.ask("proxy", COMPLETIONS, body).body["usage"]["prompt_tokens_details"]

    def streamed() -> Any:
        return pair.events("proxy", COMPLETIONS, body)[-1]["usage"]["prompt_tokens_details"]

    first = answered()
    assert first is None or first["cached_tokens"] == 0
    for ask in (answered, streamed):
        heard: list[Any] = []
        while not heard or heard[-1] is None:
            assert len(heard) < 20, "decode is always first"
            heard.append(ask())
        assert heard[-1]["cached_tokens"] in (96, 127, 128), "all blocks but the last one's last token"


def test_a_seed_and_a_prompt_in_chunks_leave_prefills_engine_alive(pair: Pair) -> None:
    """Torch's generator for CPUs has no offset to set back after a chunk; vLLM 0.32 asks for it and dies."""
    body = {"prompt": prompt(60, 700), "max_tokens": 6, "seed": 5, "temperature": 1.0}
    answers = [pair.ask("proxy", COMPLETIONS, body) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200], answers[0].body
    assert answers[0].text == answers[1].text
    assert pair.ask("prefill", COMPLETIONS, {"prompt": "x", **GREEDY}).status == 200


def test_a_prompt_that_decode_has_cached_is_no_failure(pair: Pair) -> None:
    """The client hears where its KV came from, and neither server logs or counts what is well."""
    if pair.connector != "pdlink":
        pytest.skip("vLLM's own connector does not say")
    failed = [pair.sum_of(role, "vllm:pdlink_transfer_failures_total") for role in ("prefill", "decode")]
    body = {"prompt": list(prompt(70, 129).encode()), **GREEDY}
    first, second = (pair.ask("proxy", COMPLETIONS, body) for _ in range(2))
    assert first.headers["X-Pdlink-KV"] == "transferred"
    assert second.headers["X-Pdlink-KV"] == "cached", "128 tokens are four blocks, the last one is always computed"
    assert first.text == second.text
    assert first.body["kv_transfer_params"] is second.body["kv_transfer_params"] is None
    ended = "vllm:pdlink_transfers_total"
    until(lambda: pair.sum_of("decode", ended, having='state="unneeded"') >= 1, "decode has counted it", 60)
    assert [pair.sum_of(role, "vllm:pdlink_transfer_failures_total") for role in ("prefill", "decode")] == failed
    until(lambda: pair.sum_of("prefill", ended, having='state="done"') >= 1, "prefill has counted it", 60)
    for server in pair.servers:
        assert "the KV of request" not in server.log_path.read_text(), "no transfer has failed"


def test_a_pair_is_probed_where_its_dialect_says_what_became_of_the_kv(pair: Pair) -> None:
    answer = request(pair.url("proxy") + "/pdlink/probe", {"prefill": "prefill-0", "decode": "decode-0"})
    if pair.connector == "pdlink":
        assert (answer.status, answer.body["kv"], answer.body["error"]) == (200, "transferred", "")
    else:
        assert answer.status == 400
        assert "expected pdlink or vllm" in answer.body["error"]["message"]


def test_what_vllm_rejects_is_a_400_and_hurts_nobody(pair: Pair) -> None:
    answer = pair.ask("proxy", COMPLETIONS, {"prompt": "x", "temperature": -1})
    assert answer.status == 400
    assert "temperature" in answer.body["error"]["message"]
    assert pair.ask("proxy", COMPLETIONS, {"prompt": prompt(30), **GREEDY}).status == 200


def test_a_client_that_leaves_ends_both_legs(pair: Pair) -> None:
    body = {"model": "m", "prompt": prompt(40, 2000), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for wait in (False, True):
        connection = http.client.HTTPConnection(pair.url("proxy").removeprefix("http://"), timeout=60)
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        if wait:
            assert connection.getresponse().readline().startswith(b"data: ")
        connection.close()
        until(lambda: pair.running("prefill") + pair.running("decode") == 0, "both servers are idle", 60)
    assert pair.ask("proxy", COMPLETIONS, {"prompt": prompt(41), **GREEDY}).status == 200


def test_without_its_prefill_server_decode_answers_alone(pair: Pair) -> None:
    """The last test: it ends the prefill server."""
    body = {"prompt": prompt(50), **GREEDY}
    wanted = pair.ask("prefill", COMPLETIONS, body)
    prefill = next(server for server in pair.servers if server.role == "prefill")
    os.killpg(prefill.process.pid, signal.SIGKILL)
    answers = [pair.ask("proxy", COMPLETIONS, body) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert {answer.text for answer in answers} == {wanted.text}
    assert "X-Pdlink-Prefill" not in answers[-1].headers
