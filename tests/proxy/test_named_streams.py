"""/v1/responses and Anthropic's /v1/messages in two legs, before stand-ins that speak as vLLM 0.32 does."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink.api.errors import COUNT_TOKENS
from pdlink.api.openai import MESSAGES, RESPONSES, parse
from pdlink.api.sse import payloads
from pdlink_proxy.fleet import wanted
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import Proxy, proxy_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "m", "instructions": "be brief", "input": "hello", "max_output_tokens": 4},
    MESSAGES: {
        "model": "m",
        "system": "be brief",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "thinking": {"type": "enabled", "budget_tokens": 3},
    },
}
LAST = {RESPONSES: "response.completed", MESSAGES: "message_stop"}
EACH_PATH = pytest.mark.parametrize("path", BODIES)
CONTROL = "tcp://10.0.0.1:4100"


@asynccontextmanager
async def pair(dialect: str = "vllm", **more: Any) -> AsyncIterator[tuple[Proxy, list[FakeVllm]]]:
    """A proxy before a prefill and two decode servers."""
    connector = "nixl" if dialect == "vllm-nixl" else "pdlink"
    servers = [await FakeVllm(connector).start() for _ in range(3)]
    control = {servers[0].url: [CONTROL]} if dialect == "vllm" else {}
    async with proxy_of(servers[:1], servers[1:], dialect=dialect, control=control, **more) as proxy:
        yield proxy, servers
    for server in servers:
        assert server.strange == []
        await server.stop()


async def ask(proxy: Proxy, path: str, **more: Any) -> tuple[int, bytes]:
    async with proxy.client.post(proxy.url + path, json={**BODIES[path], **more}) as response:
        return response.status, await response.read()


def names(stream: bytes) -> list[str]:
    return [line[7:] for line in stream.decode().splitlines() if line.startswith("event: ")]


@EACH_PATH
@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_both_legs_are_asked_and_the_client_gets_decodes_answer(
    path: str, dialect: str, streaming: bool
) -> None:
    async with pair(dialect) as (proxy, (prefill, *decodes)):
        for _ in range(2):
            status, data = await ask(proxy, path, stream=streaming)
            assert status == 200, data
            assert b"0.0 " in data
            assert b"0.3 " in data
            assert b"P0" not in data, "that is prefill's"
            assert b"do_remote" not in data
            assert not streaming or names(data)[-1] == LAST[path]
        sent = prefill.received[0].body
        assert sent["max_output_tokens" if path == RESPONSES else "max_tokens"] == 1
        assert "stream" not in sent
        if dialect == "vllm":
            legs = [each.received[0].body["kv_transfer_params"] for each in (prefill, decodes[0])]
            assert legs[0]["transfer_id"] == legs[1]["transfer_id"]
        assert [len(each.received) for each in (prefill, *decodes)] == [2, 1, 1]
        assert all(each.received[0].body["kv_transfer_params"] for each in decodes)


@EACH_PATH
@pytest.mark.parametrize("streaming", [False, True])
async def test_the_client_is_told_what_prefill_had_cached_and_no_addresses(path: str, streaming: bool) -> None:
    async with pair() as (proxy, (prefill, *decodes)):
        prefill.cached_tokens = 2
        for each in decodes:
            each.cached_tokens, each.kv_path = 5, "transferred"  # decode calls all cached that it was sent
        _, data = await ask(proxy, path, stream=streaming)
    documents = [msgspec.json.decode(each) for each in (payloads(data) if streaming else [data]) if each]
    usages = [
        found
        for each in documents
        for part in (each, each.get("response", {}), each.get("message", {}))
        if (found := part.get("usage"))
    ]
    assert usages
    for usage in usages:
        if path == RESPONSES:
            assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (5, 2)
        else:
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 2)
    assert b"pdlink_kv" not in data
    record = proxy.router.services.records[-1]
    assert (record.prompt_tokens, record.estimated) == (5, False)


@EACH_PATH
async def test_a_stream_that_breaks_ends_with_a_named_error(path: str) -> None:
    async with pair() as (proxy, (_, *decodes)):
        for each in decodes:
            each.break_at = 2
        status, data = await ask(proxy, path, stream=True)
    assert status == 200
    assert names(data)[-1] == "error"
    *_, last = (each for each in payloads(data) if each)
    told = msgspec.json.decode(last)["error"]
    assert told["type"] == "api_error"
    assert told["message"].startswith("decode worker lost (reset)")
    assert b"[DONE]" not in data


@EACH_PATH
async def test_an_error_of_decode_ends_the_stream_and_counts_for_its_worker(path: str) -> None:
    async with pair() as (proxy, (_, *decodes)):
        for each in decodes:
            each.error_at = 2
        _, data = await ask(proxy, path, stream=True)
        assert names(data)[-1] == "error"
        assert proxy.counted("leg_failures_total", leg="decode", reason="error") == 1
        assert proxy.counted("requests_total", outcome="broken") == 1


@EACH_PATH
async def test_a_lost_decode_is_tried_again_before_the_first_event(path: str) -> None:
    async with pair() as (proxy, (prefill, *decodes)):
        decodes[0].resets = 1
        for _ in range(2):
            status, data = await ask(proxy, path, stream=True)
            assert (status, names(data)[-1]) == (200, LAST[path])
        assert len(prefill.received) == 3


@pytest.mark.parametrize(
    "more",
    [
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]},
        {"truncation": "auto"},
    ],
)
async def test_a_response_that_one_server_must_make_goes_to_decode_alone(more: dict[str, Any]) -> None:
    async with pair() as (proxy, (prefill, *decodes)):
        status, _ = await ask(proxy, RESPONSES, **more)
        assert status == 200
        assert not prefill.received
        (received,) = [each for decode in decodes for each in decode.received]
        assert "kv_transfer_params" not in received.body


@EACH_PATH
async def test_a_client_cannot_name_addresses(path: str) -> None:
    async with pair() as (proxy, (_, *decodes)):
        await ask(proxy, path, kv_transfer_params={"remote_host": "evil"})
        (received,) = [each for decode in decodes for each in decode.received]
        assert "remote_host" not in received.body["kv_transfer_params"]


async def test_errors_outside_of_streams_have_the_shape_of_their_api() -> None:
    """Anthropic's SDK looks for its own type and message; OpenAI's routes keep theirs."""
    found: list[tuple[int, str, str | int]] = []

    async def fails(proxy: Proxy, path: str, key: str = "k", **more: Any) -> dict[str, Any]:
        headers = {"x-api-key": key, "X-Request-Id": "one"}
        async with proxy.client.post(
            proxy.url + path, json={**BODIES.get(path, BODIES[MESSAGES]), **more}, headers=headers
        ) as response:
            said: dict[str, Any] = await response.json()
            assert response.headers["X-Request-Id"] == "one"
            assert response.content_type == "application/json"
        if path in (MESSAGES, COUNT_TOKENS):
            assert said.keys() == {"type", "error"}, said
            assert said["type"] == "error"
            assert said["error"]["message"]
            found.append((response.status, said["error"]["type"], said["error"]["code"]))
        return said

    async with pair(api_keys=["k", "greedy"], rate_limits={"greedy": {"tokens": 1}}) as (proxy, servers):
        prefill, *decodes = servers
        await fails(proxy, MESSAGES, key="wrong")
        await fails(proxy, MESSAGES, messages="no list")
        await fails(proxy, MESSAGES, model="another")
        async with proxy.client.post(proxy.url + MESSAGES, json=BODIES[MESSAGES], headers={"x-api-key": "greedy"}):
            pass
        await fails(proxy, MESSAGES, key="greedy")
        await fails(proxy, COUNT_TOKENS, model="another")
        assert (await fails(proxy, RESPONSES, model="another"))["error"]["code"] == "model_not_found"
        for each in decodes:
            each.fail_with = 500
        await fails(proxy, MESSAGES)
        for each in decodes:
            each.fail_with = 422
        await fails(proxy, MESSAGES)
        prefill.fail_with = 422
        await fails(proxy, MESSAGES)
    async with proxy_of([], [], dialect="vllm-nixl", no_worker_timeout_s=0.0) as proxy:
        await fails(proxy, MESSAGES)
        await fails(proxy, COUNT_TOKENS)
    assert found == [
        (401, "authentication_error", "invalid_api_key"),
        (400, "invalid_request_error", "invalid_request"),
        (404, "not_found_error", "model_not_found"),
        (429, "rate_limit_error", "rate_limited"),
        (404, "not_found_error", "model_not_found"),
        (500, "api_error", "internal_error"),
        (422, "invalid_request_error", 422),
        (422, "invalid_request_error", 422),
        (503, "overloaded_error", "no_worker"),
        (503, "overloaded_error", "no_worker"),
    ]


async def test_servers_without_these_routes_say_so() -> None:
    servers = [await FakeVllm("nixl", has_named=False).start() for _ in range(2)]
    async with proxy_of(servers[:1], servers[1:], dialect="vllm-nixl") as proxy:
        assert (await ask(proxy, RESPONSES))[0] == 404
    for server in servers:
        await server.stop()


@EACH_PATH
@pytest.mark.parametrize("streaming", [False, True])
async def test_sglangs_servers_meet_in_a_room(path: str, streaming: bool) -> None:
    prefill, decode = await FakeSglang("prefill").start(), await FakeSglang("decode").start()
    async with proxy_of([prefill], [decode], dialect="sglang") as proxy:
        status, data = await ask(proxy, path, stream=streaming)
        assert status == 200, data
        assert not streaming or names(data)[-1] == LAST[path]
        one, other = prefill.received[0].body, decode.received[0].body
        assert one["bootstrap_room"] == other["bootstrap_room"]
        assert other["bootstrap_port"] == prefill.bootstrap_port
        assert one.get("stream", False) is False
        if path == RESPONSES:
            assert one["request_id"] == other["request_id"]
            assert one["request_id"].startswith("resp_")
            assert one["store"] is False
    for server in (prefill, decode):
        assert server.strange == []
        await server.stop()


def test_what_is_placed_is_the_whole_prompt_and_its_longest_answer() -> None:
    for path, body in BODIES.items():
        request = wanted(parse(path, msgspec.json.encode(body)), None)
        assert request.prompt.startswith(b'"be brief"')
        assert b"hello" in request.prompt
        assert request.answer_tokens == 4
