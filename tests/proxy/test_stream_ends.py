"""A stream is an answer if it says why it ends. Any other end is a failure: of its worker, and for the client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdlink._http import ABORT, CACHED, ERROR, FINISH, NAMED, PARAMS, first_data_event, marks_of
from pdlink._http import DONE as DONE_MARK
from pdlink.api.sse import DONE, before_end, before_finish_error, fails, payloads
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import proxy_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.proxy.fakes import Proxy


def chunk(delta: dict[str, Any], end: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": end}
    return b"data: " + json.dumps({"id": "d", "choices": [choice]}).encode() + b"\n\n"


ALL = ERROR | FINISH | CACHED | DONE_MARK | PARAMS | NAMED | ABORT
ROLE, TOKEN = chunk({"role": "assistant", "content": ""}), chunk({"content": "Hel"})
BAD = {
    "only [DONE]": ([DONE], "malformed"),
    "a role": ([ROLE, DONE], "malformed"),
    "a role and [DONE] in one piece": ([ROLE + DONE], "malformed"),
    "a token": ([ROLE, TOKEN, DONE], "malformed"),
    "a token and [DONE] in one piece": ([ROLE, TOKEN + DONE], "malformed"),
    "a reason that does not exist": ([ROLE, TOKEN, chunk({}, "error"), DONE], "error"),
    "a token that came with it": ([ROLE, TOKEN + chunk({}, "error") + DONE], "error"),
}
BEFORE_A_BYTE = ("only [DONE]", "a role and [DONE] in one piece")
"""The client has got nothing yet, so the request may be tried again from its beginning."""


async def pair(dialect: str, num: int = 1) -> tuple[FakeVllm, list[FakeVllm]]:
    connector = "nixl" if dialect == "vllm-nixl" else "pdlink"
    prefill, *decodes = [await FakeVllm(connector).start() for _ in range(num + 1)]
    return prefill, decodes


async def running(dialect: str, num: int, **more: Any) -> AsyncIterator[tuple[Proxy, list[FakeVllm]]]:
    prefill, decodes = await pair(dialect, num)
    control: dict[str, Any] = {"control": {prefill.url: ["tcp://127.0.0.1:1"]}} if dialect == "vllm" else {}
    async with proxy_of([prefill], decodes, dialect=dialect, policy="round_robin", **control, **more) as proxy:
        yield proxy, decodes
    for each in (prefill, *decodes):
        await each.stop()


async def ask(proxy: Proxy, **more: Any) -> tuple[int, bytes]:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0, **more}
    async with proxy.post("/v1/chat/completions", **body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl"])
@pytest.mark.parametrize("kind", BAD)
async def test_a_stream_without_a_reason_for_its_end_is_a_failure(dialect: str, kind: str) -> None:
    events, reason = BAD[kind]
    async for proxy, (decode,) in running(dialect, 1, recover_streams=0, retries=0):
        decode.stream_override = events
        status, data = await ask(proxy)
        if kind in BEFORE_A_BYTE:
            assert status == 502
            assert json.loads(data)["error"]["type"] == "server_error"
        else:
            assert status == 200
            *_, error, done = [payload for payload in payloads(data) if payload]
            assert done == b"[DONE]"
            assert json.loads(error)["error"]["type"] == "stream_error"
            assert data.count(b"[DONE]") == 1
            assert (b"Hel" in data) == (b"Hel" in b"".join(events)), "tokens before it are the client's"
        assert b'"finish_reason": "error"' not in data
        assert proxy.counted("leg_failures_total", leg="decode", reason=reason) == 1
        assert proxy.counted("requests_total", outcome="ok") == 0
        assert proxy.router.services.pools.all[1].breaker.failures == 1


@pytest.mark.parametrize("kind", BAD)
async def test_another_worker_gives_the_whole_answer_where_one_ends_without_a_reason(kind: str) -> None:
    async for proxy, (bad, good) in running("vllm", 2):
        bad.stream_override, good.stream_override = (
            BAD[kind][0],
            [ROLE, TOKEN, chunk({"content": "lo"}, "stop"), DONE],
        )
        for _ in range(2):
            status, data = await ask(proxy)
            assert status == 200
            said = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
            texts = [each["choices"][0]["delta"].get("content") or "" for each in said]
            assert "".join(texts) == "Hello"
            assert [each["choices"][0]["finish_reason"] for each in said].count("stop") == 1
        assert bad.received
        assert proxy.counted("requests_total", outcome="ok") == 2


async def test_an_answer_in_one_piece_that_ended_in_an_error_is_a_failure() -> None:
    async for proxy, (decode,) in running("vllm", 1, retries=0):
        decode.answer_override = json.dumps(
            {"choices": [{"index": 0, "text": "", "finish_reason": "error"}]}
        ).encode()
        status, data = await ask(proxy, stream=False)
        assert status == 502
        assert json.loads(data)["error"]["type"] == "server_error"


SAID = {"finish_reason": "error"}
WELL = {
    "/v1/responses": {"object": "response", "output": [], "metadata": SAID, "tools": [{"parameters": SAID}]},
    "/v1/messages": {"type": "message", "content": [{"type": "tool_use", "name": "report", "input": SAID}]},
    "/v1/chat/completions": {"choices": [{"message": {"tool_calls": [SAID]}, "finish_reason": "stop"}], "more": SAID},
}
"""A client's metadata and tools, and a model's arguments of a call, are fields of these answers."""


@pytest.mark.parametrize("path", WELL)
async def test_an_answer_with_such_words_that_are_no_choices_reason_is_the_clients(path: str) -> None:
    body = {"input": "hi"} if "responses" in path else {"messages": [{"role": "user", "content": "hi"}]}
    async for proxy, (decode,) in running("vllm", 1, retries=0):
        decode.answer_override = json.dumps(WELL[path], separators=(",", ":")).encode()
        async with proxy.post(path, **body, max_tokens=9) as response:
            assert (response.status, await response.json()) == (200, WELL[path])
        assert proxy.counted("requests_total", outcome="ok") == 1


async def test_a_stream_with_such_words_that_are_no_choices_reason_goes_on() -> None:
    other = chunk({"content": "l", "more": SAID})
    async for proxy, (decode,) in running("vllm", 1, retries=0):
        decode.stream_override = [ROLE, TOKEN, other, chunk({"content": "o"}, "stop"), DONE]
        assert other in (await ask(proxy))[1]
        assert proxy.counted("requests_total", outcome="ok") == 1


def test_text_that_looks_like_a_reason_is_none() -> None:
    event = chunk({"content": '"finish_reason":"error" [DONE]'})
    assert not marks_of(event, ALL)
    assert not fails(event)
    assert marks_of(chunk({}, "stop"), ALL) == FINISH
    for space in (b"", b" "):
        assert not marks_of(b'data: {"finish_reason":' + space + b"null}\n\n", ALL)
        assert marks_of(b'data: {"finish_reason":' + space + b'{"type":"stop"}}\n\n', ALL) == FINISH
        assert fails(b'{"choices":[{"finish_reason":' + space + b'"error"}]}')
    assert not fails(b'{"choices":null,"finish_reason":"error"}')
    assert not fails(b'{"choices":[null,{}],"x":{"finish_reason":"error"}}')


@pytest.mark.parametrize("more", [b'],"x":' + b"[" * 3000 + b"]" * 3000, b",null]", b'],"logprob":NaN', b",7]"])
def test_a_reason_beside_what_cannot_be_read_counts(more: bytes) -> None:
    document = b'{"choices":[{"finish_reason":"error"}' + more + b"}"
    event = b"data: " + document + b"\n\n"
    assert fails(document)
    assert before_finish_error(TOKEN + event + DONE) == (TOKEN, event)


def test_events_are_cut_before_their_end() -> None:
    assert before_end(DONE) == b""
    assert before_end(ROLE + DONE) == ROLE
    assert before_end(ROLE.replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n") == ROLE.replace(b"\n", b"\r\n")
    assert before_end(ROLE + b"id: 7\ndata: [DONE]\n\n") == ROLE
    last = chunk({}, "error")
    assert before_finish_error(ROLE + TOKEN + last + DONE) == (ROLE + TOKEN, last)


@pytest.mark.parametrize("kind", ["at once", "each alone", "behind a comment", "a comment alone"])
async def test_usage_of_a_stream_is_found_whichever_read_its_event_comes_in(kind: str) -> None:
    """SGLang's /generate writes the log-probabilities of all tokens between its two numbers."""
    usage = {"prompt_tokens": 4321, "logprobs": [[-0.5, 17, None]] * 1000, "completion_tokens": 2}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    assert len(last) > 16_000
    end = b": ping\n\nid: 7\n" + DONE if "comment" in kind else DONE
    events = [ROLE, TOKEN, chunk({"content": "lo"}, "stop"), last, end]
    async for proxy, (decode,) in running("vllm", 1):
        decode.stream_override = events if "alone" in kind else [b"".join(events)]
        assert (await ask(proxy))[0] == 200
        record = proxy.router.services.records[-1]
        assert (record.prompt_tokens, record.estimated) == (4321, False)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_first_data_event_is_found_behind_comments_and_in_front_of_others(end: bytes) -> None:
    event, comment = b"data: {}" + end * 2, b": a comment" + end * 2
    named = b"event: ping" + end + event
    plain = end == b"\n"
    assert first_data_event(event + event) == (0, len(event), plain)
    assert first_data_event(comment + event + event) == (len(comment), len(comment + event), plain)
    assert first_data_event(named + event) == (0, len(named), False)
    assert first_data_event(event + b"data: {}\n\n") == (0, len(event), plain)
    assert first_data_event(comment) is None
    assert list(payloads(event + named + b"data: 1" + end + b"data: 2" + end * 2)) == [b"{}", b"{}", b"1 2", b""]
