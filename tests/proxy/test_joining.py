"""Streams of the engines' own servers (`streams/record.py`), cut off anywhere and made again by another server, whose
events hold other pieces and have other names: the client reads one undisturbed answer."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.openai import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, parse
from pdlink_proxy.recovery import Diverged, Recovery
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fakes import DONE, Proxy, proxy_of
from tests.proxy.said import Said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

STREAMS = Path(__file__).parent / "streams"
_PATHS = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "generate": GENERATE,
}
_INPUTS = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input", GENERATE: "text", COMPLETIONS: "prompt"}
_NAMES = re.compile(rb'(?<=")(?:[a-z]+[-_])*[0-9a-f]{16,}(?=")')
_NUMBER = re.compile(rb'"sequence_number": ?\d+')
_CREATED = re.compile(rb'"created(_at)?": ?\d+')
RECORDED = sorted(path.stem for path in STREAMS.glob("*.txt"))
EACH = pytest.mark.parametrize("name", RECORDED)


def path_of(name: str) -> str:
    return _PATHS[name.split("-")[1]]


def events_of(name: str) -> list[bytes]:
    data = (STREAMS / f"{name}.txt").read_bytes().replace(b"\r\n", b"\n").rstrip() + b"\n\n"
    return [event + b"\n\n" for event in data.split(b"\n\n") if event.strip()]


def of_another(events: Sequence[bytes], life: int) -> list[bytes]:
    """The same answer under other names, made later."""
    names: dict[bytes, bytes] = {}

    def renamed(found: re.Match[bytes]) -> bytes:
        return names.setdefault(found[0], found[0] + b"%02d" % life)

    return [_CREATED.sub(rb'"created\1":%d' % (1795650000 + life), _NAMES.sub(renamed, event)) for event in events]


def in_other_pieces(events: Sequence[bytes], path: str, rng: random.Random) -> list[bytes]:
    """The same answer, of which some pieces come together and some in two."""
    out: list[bytes] = []
    for event in events:
        if path == GENERATE:
            if b'"finish_reason":null' not in event or rng.random() < 0.5:
                out.append(event)
        elif path in (RESPONSES, MESSAGES) and b"delta" in event.split(b"\n")[0] and b"message_delta" not in event:
            out += _halves(event, rng)
        else:
            out.append(event)
    numbers = itertools.count()
    return [_NUMBER.sub(lambda _: b'"sequence_number":%d' % next(numbers), event) for event in out]


def _halves(event: bytes, rng: random.Random) -> Iterator[bytes]:
    head, _, data = event.partition(b"data: ")
    said = json.loads(data)
    holder, field = (said["delta"], "text") if isinstance(said["delta"], dict) else (said, "delta")
    text = holder[field]
    cut = rng.randint(0, len(text))
    for half in (text[:cut], text[cut:]):
        holder[field] = half
        yield head + b"data: " + json.dumps(said).encode() + b"\n\n"


def recovery_of(name: str, limit: int = 3, **fields: Any) -> Recovery:
    path = path_of(name)
    asked = ["a", "b"] if "batch" in name else [] if _INPUTS[path] == "messages" else "a"
    body = {"model": "m", "stream": True, "temperature": 0, _INPUTS[path]: asked, **fields}
    if path == GENERATE:
        body["sampling_params"] = {"temperature": 0}
    resumes = DIALECTS["sglang" if name.startswith("sglang") else "vllm"].resumes
    assert resumes is not None
    return Recovery(parse(path, json.dumps(body).encode()), resumes, limit, 0)


def deliver(recovery: Recovery, events: Sequence[bytes], client: bytearray) -> None:
    """As the flow does."""
    for event in events:
        data = recovery.join(event) if recovery.joins else event
        if data:
            recovery.sent(data)
            client += data


@EACH
def test_a_stream_that_is_cut_off_anywhere_reads_as_one_undisturbed_answer(name: str) -> None:
    path, events = path_of(name), events_of(name)
    whole = Said.of(b"".join(events), path)
    assert whole.ends
    for cut in range(len(events)):
        rng = random.Random(f"{name} {cut}")
        client, recovery = bytearray(), recovery_of(name)
        deliver(recovery, events[:cut] if rng.random() < 0.5 else [b"".join(events[:cut])], client)
        assert recovery.go_on() == ""
        again = in_other_pieces(of_another(events, 1), path, rng)
        further = rng.randint(0, len(again)) if rng.random() < 0.5 else len(again)
        deliver(recovery, again[:further], client)
        if further < len(again):
            assert recovery.go_on() == ""
            deliver(recovery, in_other_pieces(of_another(events, 2), path, rng), client)
        said = Said.of(bytes(client), path)
        assert said == whole, cut
        assert len(said.names) <= len(whole.names)
        assert len({found[0] for found in _CREATED.finditer(client)}) <= 1
        if cut > 2:
            assert said.names & whole.names
        if cut > len(events) // 2:
            assert said.names == whole.names


@EACH
def test_what_the_client_has_is_neither_changed_nor_sent_again(name: str) -> None:
    events = events_of(name)
    for cut in (len(events) // 2, len(events) - 1):
        client, recovery = bytearray(), recovery_of(name)
        deliver(recovery, events[:cut], client)
        had = bytes(client)
        recovery.go_on()
        deliver(recovery, of_another(events[:cut], 1), client)
        assert client == had


def _texts_changed(event: bytes) -> bytes:
    """Another token in place of this one."""
    head, _, data = event.partition(b"data: ")
    said = json.loads(data)
    if isinstance(delta := said.get("delta"), str):
        said["delta"] = "other" + delta
    elif isinstance(delta, dict) and "text" in delta:
        delta["text"] = "other" + delta["text"]
    elif "meta_info" in said:
        said["text"], said["output_ids"] = "other" + said["text"], [1, *said["output_ids"][1:]]
    else:
        for choice in said.get("choices", ()):
            holder, field = (choice, "text") if "text" in choice else (choice["delta"], "content")
            if holder.get(field):
                holder[field] = "other" + holder[field]
    return head + b"data: " + json.dumps(said).encode() + b"\n\n"


@EACH
def test_a_server_that_answers_in_other_words_does_not_go_on(name: str) -> None:
    events = events_of(name)
    middle = len(events) // 2
    recovery = recovery_of(name)
    deliver(recovery, events[:middle], bytearray())
    recovery.go_on()
    changed = [_texts_changed(event) if b"[DONE]" not in event else event for event in of_another(events, 1)]
    with pytest.raises(Diverged, match="other words|other tokens"):
        deliver(recovery, changed, bytearray())


def test_other_tokens_of_the_same_text_do_not_go_on() -> None:
    events = events_of("sglang-generate")
    recovery = recovery_of("sglang-generate")
    deliver(recovery, events[:4], bytearray())
    recovery.go_on()
    said = json.loads(events[5].partition(b"data: ")[2])
    said["output_ids"][0] += 1
    with pytest.raises(Diverged, match="other tokens"):
        recovery.join(b"data: " + json.dumps(said).encode() + b"\n\n")


def _ends_early(name: str) -> list[bytes]:
    """The first third of an answer, and its end."""
    events = events_of(name)
    path = path_of(name)
    third = len(events) // 3
    if path == GENERATE:
        end = json.loads(events[third].partition(b"data: ")[2])
        end["meta_info"]["finish_reason"] = {"type": "length"}
        return [*events[:third], b"data: " + json.dumps(end).encode() + b"\n\n"]
    is_end: Callable[[bytes], bool] = {
        RESPONSES: lambda event: b".done" in event or b"response.incomplete" in event,
        MESSAGES: lambda event: b"stop" in event.split(b"\n")[0],
    }.get(path, lambda event: b'"finish_reason":"' in event)
    return [*events[:third], *(event for event in events[third:] if is_end(event))]


@pytest.mark.parametrize("name", [name for name in RECORDED if "logprobs" not in name and "batch" not in name])
def test_a_server_whose_answer_is_shorter_does_not_go_on(name: str) -> None:
    events = events_of(name)
    recovery = recovery_of(name)
    deliver(recovery, events[: len(events) * 2 // 3], bytearray())
    recovery.go_on()
    with pytest.raises(Diverged):
        deliver(recovery, of_another(_ends_early(name), 1), bytearray())


@pytest.mark.parametrize("name", [name for name in RECORDED if "completions" not in name and "generate" not in name])
def test_an_answer_of_which_nothing_was_said_goes_on_though_its_tokens_are_drawn(name: str) -> None:
    """Its first events only open it."""
    events = events_of(name)
    recovery = recovery_of(name, temperature=0.7)
    deliver(recovery, events[:1], bytearray())
    assert recovery.go_on() == ""
    deliver(recovery, of_another(events, 1), bytearray())
    assert "drawn at random" in recovery.go_on()


def _named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **fields}).encode() + b"\n\n"


def _message(tool: str, *, text: str = "I look.", words: Sequence[str] = ('{"city":', ' "Bern"}')) -> list[bytes]:
    """A text and a call of a tool, which this server calls `tool`."""

    def delta(index: int, kind: str, field: str, value: str) -> bytes:
        return _named("content_block_delta", index=index, delta={"type": kind, field: value})

    call = {"type": "tool_use", "id": tool, "name": "weather", "input": {}}
    return [
        _named("message_start", message={"id": f"msg_{tool}", "type": "message", "content": []}),
        _named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(delta(0, "text_delta", "text", letter) for letter in text),
        _named("content_block_stop", index=0),
        _named("content_block_start", index=1, content_block=call),
        *(delta(1, "input_json_delta", "partial_json", word) for word in words),
        _named("content_block_stop", index=1),
        _named("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 9}),
        _named("message_stop"),
    ]


def test_calls_of_tools_in_a_message_go_on_under_the_clients_names() -> None:
    events = _message("toolu_1")
    for cut in range(len(events)):
        client, recovery = bytearray(), recovery_of("sglang-messages")
        deliver(recovery, events[:cut], client)
        recovery.go_on()
        deliver(recovery, _message("toolu_2", words=['{"city": "B', 'ern"}']), client)
        assert client.count(b"toolu_") == 2, "of the message, and of the block"
        assert client.count(b"toolu_2") == (2 if cut == 0 else 1 if cut <= 10 else 0)
        found = [json.loads(line[6:]) for line in bytes(client).splitlines() if line.startswith(b"data: ")]
        deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "I look."
        assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"city": "Bern"}'


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"text": "I look up."}, "says more|other words"),
        ({"text": "I look. And"}, "says more"),
        ({"text": "I"}, "other events"),
        ({"text": ""}, "other events"),
        ({"words": ['{"town":', ' "Bern"}']}, "other words"),
    ],
)
def test_another_message_is_not_joined(other: dict[str, Any], why: str) -> None:
    recovery = recovery_of("vllm-messages")
    deliver(recovery, _message("toolu_1")[:12], bytearray())
    recovery.go_on()
    with pytest.raises(Diverged, match=why):
        deliver(recovery, _message("toolu_2", **other), bytearray())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_response_that_only_its_server_can_make_does_not_go_on(engine: str) -> None:
    name = f"{engine}-responses"
    recovery = recovery_of(name, previous_response_id="resp_1")
    deliver(recovery, events_of(name)[:6], bytearray())
    assert "its server alone" in recovery.go_on()


def test_draws_are_repeated_where_all_servers_say_that_they_are_deterministic() -> None:
    resumes = DIALECTS["sglang"].resumes
    assert resumes is not None
    asked: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "x", "seed": 3},
        GENERATE: {"text": "x", "sampling_params": {"temperature": 1}},
    }
    yes, no = {"deterministic": True}, {"deterministic": False}
    for path, fields in asked.items():
        call = parse(path, json.dumps({"model": "m", **fields}).encode())
        assert resumes.refusal(call, [yes, yes]) == ""
        for links in ([], [no], [yes, no], [yes, {}]):
            assert "--enable-deterministic-inference" in resumes.refusal(call, links)


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        ({"temperature": 0}, True),
        ([{"temperature": 0}, {"temperature": 0.0}], True),
        ([{"temperature": 0}, {"temperature": 1}], False),
        ([], False),
        ({}, False),
        ("x", False),
    ],
)
def test_generate_is_greedy_where_each_of_its_sampling_parameters_is(sampling: object, greedy: bool) -> None:
    resumes = DIALECTS["sglang"].resumes
    assert resumes is not None
    call = parse(GENERATE, json.dumps({"model": "m", "text": "x", "sampling_params": sampling}).encode())
    assert (resumes.refusal(call, []) == "") == greedy
    assert "increments" in resumes.refusal(call, [{"incremental": True}])


@contextlib.asynccontextmanager
async def sglangs(**more: Any) -> AsyncIterator[tuple[Proxy, list[FakeSglang]]]:
    """A proxy before a prefill and two decode servers, all of which answer in recorded streams of SGLang."""
    names = [name for name in RECORDED if name.startswith("sglang") and "logprobs" not in name]
    servers = []
    for life, mode in enumerate(("prefill", "decode", "decode")):
        servers.append(FakeSglang(mode))
        servers[-1].streams = {path_of(name): of_another(events_of(name), life) for name in names}
        servers[-1].more_info = more
        await servers[-1].start()
    async with proxy_of(servers[:1], servers[1:], dialect="sglang") as proxy:
        yield proxy, servers
    for server in servers:
        assert server.strange == []
        await server.stop()


async def ask(proxy: Proxy, path: str, *, drawn: bool = False) -> bytes:
    asked = [] if _INPUTS[path] == "messages" else ["a", "b"] if path == GENERATE else "x"
    temperature = {"temperature": 0.7 if drawn else 0}
    sampling = {"sampling_params": temperature} if path == GENERATE else temperature
    body = {"model": "m", "stream": True, _INPUTS[path]: asked, **sampling}
    async with proxy.client.post(proxy.url + path, json=body) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE])
async def test_streams_of_sglang_go_on_by_every_route(path: str, drawn: bool) -> None:
    async with sglangs(enable_deterministic_inference=drawn) as (proxy, (_, bad, good)):
        whole = Said.of(await ask(proxy, path, drawn=drawn), path)
        bad.break_at = len(bad.streams[path]) // 2
        for _ in range(2):
            assert Said.of(await ask(proxy, path, drawn=drawn), path) == whole
        assert good.received
        assert proxy.counted("fallbacks_total", kind="recovered") == 1
        assert proxy.counted("requests_total", outcome="ok") == 3


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
async def test_a_failure_that_sglang_tells_in_a_stream_is_one(path: str) -> None:
    """Another server goes on; without another one, the client is told."""
    told = {
        RESPONSES: b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"resp_1",'
        b'"status":"failed","error":{"code":"server_error","message":"Aborted"}},"sequence_number":7}\n\n',
        MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"Aborted"}}\n\n',
        GENERATE: b'data: {"text":"","output_ids":[],"meta_info":{"id":"a","finish_reason":{"type":"abort","message":'
        b'"Aborted","status_code":500,"err_type":null},"prompt_tokens":3},"index":0}\n\n',
    }[path]
    async with sglangs() as (proxy, (_, bad, good)):
        whole = Said.of(await ask(proxy, path), path)
        for server, at in ((bad, 6), (good, 0)):
            events = server.streams[path]
            server.streams = {**server.streams, path: [*events[:at], told, *events[-1:]]} if at else server.streams
        for _ in range(2):
            assert Said.of(await ask(proxy, path), path) == whole
        assert proxy.counted("leg_failures_total", leg="decode", reason="error") == 1
        good.streams = bad.streams
        data = await ask(proxy, path)
        assert b"stream cannot go on elsewhere" in data
        assert proxy.counted("requests_total", outcome="broken") == 1


async def test_an_abort_that_somebody_asked_for_is_the_end_of_an_answer() -> None:
    end = b'data: {"text":"a","output_ids":[1],"meta_info":{"id":"a","finish_reason":{"type":"abort","message":'
    end += b'"Aborted","status_code":null}},"index":0}\n\n'
    async with sglangs() as (proxy, (_, *decodes)):
        for server in decodes:
            server.streams = {GENERATE: [*server.streams[GENERATE][:2], end, DONE]}
        assert end in await ask(proxy, GENERATE)
        assert proxy.counted("requests_total", outcome="ok") == 1


async def test_a_generate_stream_that_begins_with_an_abort_is_tried_again() -> None:
    abort = b'data: {"text":"","output_ids":[],"meta_info":{"id":"a","finish_reason":{"type":"abort","message":'
    abort += b'"KVTransferError","status_code":500}},"index":0}\n\n'
    async with sglangs() as (proxy, (_, bad, _)):
        bad.streams = {GENERATE: [abort, DONE]}
        whole = Said.of(b"".join(events_of("sglang-generate-batch")), GENERATE)
        for _ in range(2):
            assert Said.of(await ask(proxy, GENERATE), GENERATE) == whole
        assert proxy.counted("fallbacks_total", kind="retry") >= 1


async def test_memory_of_a_long_generate_stream_is_that_of_its_newest_event() -> None:
    recovery = recovery_of("sglang-generate")
    event = b""
    for number in range(1, 3000):
        said = {"text": "a" * number, "output_ids": [7] * number, "meta_info": {"id": "x", "finish_reason": None}}
        before, event = event, b"data: " + json.dumps(said).encode() + b"\n\n"
        recovery.sent(event if number % 2 else before + event)
    assert len(recovery._had.take()) == len(event)
