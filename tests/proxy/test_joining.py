"""Streams of the engines' own servers (`streams/record.py`), cut off anywhere and made again by another server under
other names: the client of a completion or of a chat reads one undisturbed answer, that of another route an error."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.openai import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, parse
from pdlink.api.sse import payloads
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.recovery import Diverged, Recovery
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fakes import DONE, Proxy, proxy_of
from tests.proxy.said import Said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

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
_CREATED = re.compile(rb'"created(_at)?": ?\d+')
RECORDED = sorted(path.stem for path in STREAMS.glob("*.txt"))
JOINED = [name for name in RECORDED if name.split("-")[1] in ("completions", "chat")]
EACH = pytest.mark.parametrize("name", JOINED)


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


def recovery_of(name: str, limit: int = 3, **fields: Any) -> Recovery:
    path = path_of(name)
    asked: object = [] if _INPUTS[path] == "messages" else "a"
    body = {"model": "m", "stream": True, "temperature": 0, _INPUTS[path]: asked, **fields}
    resumes = DIALECTS["sglang" if name.startswith("sglang") else "vllm"].resumes
    assert resumes is not None
    return Recovery(parse(path, json.dumps(body).encode()), resumes, limit)


def deliver(recovery: Recovery, events: Sequence[bytes], client: bytearray) -> None:
    """As the flow does."""
    for event in events:
        data = recovery.join(event) if recovery.joins else event
        if data:
            recovery.sent.add(data)
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
        again = of_another(events, 1)
        further = rng.randint(0, len(again)) if rng.random() < 0.5 else len(again)
        deliver(recovery, again[:further], client)
        if further < len(again):
            assert recovery.go_on() == ""
            deliver(recovery, of_another(events, 2), client)
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
    for choice in said["choices"]:
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


def _ends_early(name: str) -> list[bytes]:
    """The first third of an answer, and its end."""
    events = events_of(name)
    third = len(events) // 3
    return [*events[:third], *(event for event in events[third:] if b'"finish_reason":"' in event)]


@pytest.mark.parametrize("name", [name for name in JOINED if "logprobs" not in name])
def test_a_server_whose_answer_is_shorter_does_not_go_on(name: str) -> None:
    events = events_of(name)
    recovery = recovery_of(name)
    deliver(recovery, events[: len(events) * 2 // 3], bytearray())
    recovery.go_on()
    with pytest.raises(Diverged):
        deliver(recovery, of_another(_ends_early(name), 1), bytearray())


@pytest.mark.parametrize("name", [name for name in JOINED if "chat" in name])
def test_an_answer_of_which_nothing_was_said_goes_on_though_its_tokens_are_drawn(name: str) -> None:
    """Its first events only open it."""
    events = events_of(name)
    recovery = recovery_of(name, temperature=0.7)
    deliver(recovery, events[:1], bytearray())
    assert recovery.go_on() == ""
    deliver(recovery, of_another(events, 1), bytearray())
    assert "drawn at random" in recovery.go_on()


def test_draws_are_repeated_where_all_servers_say_that_they_are_deterministic() -> None:
    resumes = DIALECTS["sglang"].resumes
    assert resumes is not None
    yes, no = {"deterministic": True}, {"deterministic": False}
    call = parse(COMPLETIONS, json.dumps({"model": "m", "prompt": "x", "seed": 3}).encode())
    assert resumes.refusal(call, [yes, yes]) == ""
    for links in ([], [no], [yes, no], [yes, {}]):
        assert "--enable-deterministic-inference" in resumes.refusal(call, links)


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
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_completions_and_chats_of_sglang_go_on(path: str, drawn: bool) -> None:
    async with sglangs(enable_deterministic_inference=drawn) as (proxy, (_, bad, good)):
        whole = Said.of(await ask(proxy, path, drawn=drawn), path)
        bad.break_at = len(bad.streams[path]) // 2
        for _ in range(2):
            assert Said.of(await ask(proxy, path, drawn=drawn), path) == whole
        assert good.received
        assert proxy.counted("fallbacks_total", kind="recovered") == 1
        assert proxy.counted("requests_total", outcome="ok") == 3


def _error_of(data: bytes) -> str:
    """Of the error event that ends a stream."""
    *_, last = (payload for payload in payloads(data) if payload not in (b"", b"[DONE]"))
    message = json.loads(last)["error"]["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
async def test_a_stream_of_another_route_ends_with_an_error_when_its_worker_dies(path: str) -> None:
    async with sglangs() as (proxy, (_, *decodes)):
        whole = events_of({RESPONSES: "sglang-responses", MESSAGES: "sglang-messages"}.get(path, "sglang-generate"))
        for server in decodes:
            server.streams = {path: whole}
            server.break_at = len(whole) // 2
        data = await ask(proxy, path)
        assert _error_of(data).startswith("decode worker lost (reset)")
        assert proxy.counted("requests_total", outcome="broken") == 1
        assert proxy.counted("fallbacks_total", kind="recovered") == 0
        assert sum(len(server.received) for server in decodes) == 1


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
async def test_a_failure_that_sglang_tells_in_a_stream_is_one(path: str) -> None:
    told = {
        RESPONSES: b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"resp_1",'
        b'"status":"failed","error":{"code":"server_error","message":"Aborted"}},"sequence_number":7}\n\n',
        MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"Aborted"}}\n\n',
        GENERATE: b'data: {"text":"","output_ids":[],"meta_info":{"id":"a","finish_reason":{"type":"abort","message":'
        b'"Aborted","status_code":500,"err_type":null},"prompt_tokens":3},"index":0}\n\n',
    }[path]
    async with sglangs() as (proxy, (_, bad, good)):
        for server in (bad, good):
            events = server.streams[path]
            server.streams = {path: [*events[:6], told, *events[-1:]]}
        data = await ask(proxy, path)
        assert told in data or _error_of(data).startswith("decode worker failed in the middle of its answer")
        assert proxy.counted("leg_failures_total", leg="decode", reason="error") == 1
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
