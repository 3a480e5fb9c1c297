"""A stream whose decode worker dies goes on at another one, and the client sees nothing but a pause."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.openai import CHAT, COMPLETIONS, parse
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.records import phases
from pdlink_proxy.recovery import Diverged, Recovery
from pdlink_proxy.retries import RetryBudget

from .fake_sglang import FakeSglang
from .fake_vllm import FakeVllm
from .fakes import DONE, FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKENS = [f"t{index} " for index in range(8)]


def chunks(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(DONE)
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]


def text_of(data: bytes) -> str:
    return "".join(choice["text"] for chunk in chunks(data) for choice in chunk.get("choices", ()))


@pytest.fixture
async def decodes() -> AsyncIterator[list[FakeWorker]]:
    async with AsyncExitStack() as stack:
        workers = []
        for _ in range(3):
            workers.append(await FakeWorker("decode", tokens=TOKENS, resumes=True).start())
            stack.push_async_callback(workers[-1].stop)
        yield workers


@pytest.fixture
async def prefill() -> AsyncIterator[FakeWorker]:
    worker = await FakeWorker("prefill", tokens=TOKENS, resumes=True).start()
    yield worker
    await worker.stop()


@pytest.mark.parametrize("lost_after", range(1, 9))
async def test_a_stream_goes_on_behind_what_the_client_has(
    prefill: FakeWorker, decodes: list[FakeWorker], lost_after: int
) -> None:
    first, other, _ = decodes
    first.break_after = lost_after
    async with proxy_of([prefill], [first, other]) as proxy:
        data = await proxy.stream()
        ids = [
            token for chunk in chunks(data) for choice in chunk["choices"] for token in choice.get("token_ids", ())
        ]
        assert ids == list(range(8))
        assert text_of(data) == "".join(TOKENS)
        assert len({chunk["id"] for chunk in chunks(data)}) == 1
        if first.received:
            (again,) = other.received
            told = again.body["output_token_ids"]
            assert told == list(range(len(told)))
            assert 1 <= len(told) <= lost_after  # what was on its way when the connection broke is lost
            assert again.body["seed"] == first.received[0].body["seed"]
            assert again.transfer_id != first.received[0].transfer_id
            before, after = (each.tokens for each in proxy.router.services.decisions_of() if each.verdict == "placed")
            assert after == before + len(told), "what is computed again counts as prompt"
            assert proxy.counted("fallbacks_total", kind="recovered") == 1
        assert proxy.counted("requests_total", outcome="ok") == 1


async def test_a_worker_that_ends_a_stream_with_an_error_is_replaced(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    bad, good, _ = decodes
    body = {"return_token_ids": True}
    error = b'data: {"error":{"message":"x","code":"engine_failure"}}\n\n'
    bad.stream_override = b"".join(bad._events(body)[:3]) + error + DONE
    async with proxy_of([prefill], [bad, good]) as proxy:
        for _ in range(2):
            assert text_of(await proxy.stream()) == "".join(TOKENS)
        assert bad.received
        assert proxy.counted("leg_failures_total", leg="decode", reason="error") >= 1


async def test_times_of_a_rescued_stream_are_those_of_each_attempt_and_add_up(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    bad, *good = decodes
    bad.break_after = 3
    async with proxy_of([prefill], [bad, *good]) as proxy:
        for _ in range(3):
            await proxy.stream()
        await until(lambda: len(proxy.router.services.records) == 3, "their records")
        rescued = next(each for each in proxy.router.services.records if each.attempts == 2)
        assert len(rescued.tries) == 2
        assert rescued.ttft_s is not None
        assert rescued.prefill_s is not None
        assert 0 <= rescued.queued_s <= rescued.prefill_s <= rescued.tries[1].wanted_s, "of the first attempt"
        assert rescued.lost_s == 0
        parts = phases(rescued.tries, rescued.total_s, well=True)
        assert {each.attempt for each in parts} == {1, 2}
        assert [each.name for each in parts if each.attempt == 1][-1] == "lost"
        assert sum(each.end_s - each.begin_s for each in parts) == pytest.approx(rescued.total_s)


async def test_a_second_death_is_survived_and_one_too_many_is_said(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    decodes[0].break_after, decodes[1].break_after, decodes[2].break_after = 2, 3, None
    async with proxy_of([prefill], decodes, recover_streams=2) as proxy:
        for _ in range(3):  # whichever gets it first
            assert text_of(await proxy.stream()) == "".join(TOKENS)
    for worker in decodes:
        worker.break_after = 1
    async with proxy_of([prefill], decodes, recover_streams=2) as proxy:
        data = await proxy.stream()
        assert text_of(data) == "".join(TOKENS[:3])
        *_, last = chunks(data)
        assert last["error"]["type"] == "stream_error"
        assert "recover_streams" in last["error"]["message"]
        assert proxy.counted("requests_total", outcome="broken") == 1


async def test_no_stream_goes_on_where_the_setting_is_0(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    decodes[0].break_after = 2
    async with proxy_of([prefill], decodes[:1], recover_streams=0) as proxy:
        data = await proxy.stream()
        assert "return_token_ids" not in decodes[0].received[0].body
        assert chunks(data)[-1]["error"]["type"] == "stream_error"


async def test_prefills_token_reaches_the_client_although_decode_died_at_once(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    """Prefill's bytes wait for decode's headers; giving up the attempt must not drop them."""
    first, other, _ = decodes
    first.kv = ""
    first.break_after, first.gate = 0, None
    async with proxy_of([prefill], [first, other], kv_header_grace_s=0.3, retries=0) as proxy:
        for _ in range(4):
            assert text_of(await proxy.stream()) == "".join(TOKENS)


@pytest.fixture
async def vllms() -> AsyncIterator[list[FakeVllm]]:
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(3):
            servers.append(await FakeVllm().start())
            stack.push_async_callback(servers[-1].stop)
        yield servers


def _vllm(servers: list[FakeVllm], **more: Any) -> dict[str, Any]:
    control = {server.url: "tcp://127.0.0.1:1" for server in servers[:1]}
    return {"dialect": "vllm", "control": control, **more}


@pytest.mark.parametrize("lost_at", [1, 3])
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("repeatable", [{"temperature": 0}, {"temperature": 0.5, "seed": 7}])
async def test_a_stream_of_vllm_that_can_be_repeated_is_made_again_and_what_was_sent_is_dropped(
    vllms: list[FakeVllm], lost_at: int, error: bool, repeatable: dict[str, Any]
) -> None:
    prefill, bad, good = vllms
    async with proxy_of([prefill], [bad, good], **_vllm(vllms)) as proxy:
        for path, more in ((COMPLETIONS, {}), (CHAT, {}), (COMPLETIONS, {"n": 2, "logprobs": 1})):
            fields = {"stream": True, **repeatable, "max_tokens": 5, "stream_options": {"include_usage": True}}
            said = []
            for _ in range(4):
                async with proxy.post(path, **fields, **more) as response:
                    data = await response.read()
                said.append(chunks(data))
                bad.break_at, bad.error_at = (None, lost_at) if error else (lost_at, None)
            bad.break_at = bad.error_at = None
            plain = [_texts(chunk) for chunk in said[:1]]
            assert all([_texts(chunk)] == plain for chunk in said), said
            assert all(each[-1]["usage"] == said[0][-1]["usage"] for each in said)
        assert proxy.counted("fallbacks_total", kind="recovered") >= 3


def _texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ended = f"[{choice['finish_reason']}]" if choice.get("finish_reason") else ""
            found[choice["index"]] = found.get(choice["index"], "") + text + ended
    return found


@pytest.mark.parametrize("drawn", [{"temperature": 0.5}, {"temperature": 0.5, "seed": -1}, {"seed": None}])
async def test_a_stream_of_vllm_with_drawn_tokens_ends_with_an_error_that_says_why(
    vllms: list[FakeVllm], drawn: dict[str, Any]
) -> None:
    prefill, bad, _ = vllms
    bad.break_at = 2
    async with proxy_of([prefill], [bad], **_vllm(vllms)) as proxy:
        async with proxy.post(stream=True, max_tokens=5, **drawn) as response:
            data = await response.read()
        last = chunks(data)[-1]
        assert last["error"]["type"] == "stream_error"
        assert "drawn at random" in last["error"]["message"]
        await until(
            lambda: any("drawn at random" in each.reason for each in proxy.router.services.decisions_of()),
            "the decision",
        )


def test_an_answer_in_other_words_is_not_joined() -> None:
    call = parse(COMPLETIONS, b'{"model":"m","prompt":"x","stream":true,"temperature":0}')
    resumes = DIALECTS["vllm"].resumes
    assert resumes is not None
    recovery = Recovery(call, resumes, 1)
    recovery.sent.add(b'data: {"id":"a","choices":[{"index":0,"text":"abc"}]}\n\n')
    assert recovery.go_on() == ""
    assert recovery.join(b'data: {"id":"b","choices":[{"index":0,"text":"ab"}]}\n\n') == b""
    rest = recovery.join(b'data: {"id":"b","choices":[{"index":0,"text":"cd"}]}\n\n')
    assert json.loads(rest[6:]) == {"id": "a", "choices": [{"index": 0, "text": "d"}]}
    recovery = Recovery(call, resumes, 1)
    recovery.sent.add(b'data: {"id":"a","choices":[{"index":0,"text":"abc"}]}\n\n')
    recovery.go_on()
    with pytest.raises(Diverged):
        recovery.join(b'data: {"id":"b","choices":[{"index":0,"text":"ax"}]}\n\n')


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_greedy_stream_of_sglang_is_made_again_in_another_room(path: str) -> None:
    prefill, bad, good = [await FakeSglang(mode).start() for mode in ("prefill", "decode", "decode")]
    fields: dict[str, Any] = {"stream": True, "temperature": 0, "max_tokens": 5}
    async with proxy_of([prefill], [bad, good], dialect="sglang") as proxy:
        said = []
        for lost_at in (None, 1, 3, 4):
            bad.break_at = lost_at
            for _ in range(2):
                async with proxy.post(path, **fields) as response:
                    said.append(_texts(chunks(await response.read())))
        assert said == [{0: "0.0 0.1 0.2 0.3 0.4 [length]"}] * 8
        recovered = proxy.counted("fallbacks_total", kind="recovered")
        assert recovered >= 1
        rooms = [each.body["bootstrap_room"] for each in prefill.received]
        assert len(set(rooms)) == len(rooms) == 8 + recovered
        bad.break_at, good.break_at = 2, 2
        async with proxy.post(path, **{**fields, "temperature": 0.5, "seed": 1}) as response:
            assert "drawn at random" in chunks(await response.read())[-1]["error"]["message"]
    for server in (prefill, bad, good):
        assert server.strange == []
        await server.stop()


async def test_words_that_differ_from_those_of_a_dead_worker_blame_nobody(vllms: list[FakeVllm]) -> None:
    """Either of the two may be right."""
    prefill, bad, other = vllms
    bad.break_at, other.words = 3, "!"
    async with proxy_of([prefill], [bad, other], **_vllm(vllms, recover_streams=1)) as proxy:
        for _ in range(8):
            async with proxy.post(stream=True, temperature=0, max_tokens=5) as response:
                data = await response.read()
            if b"error" in data:
                break
        assert "another worker answers in other words" in chunks(data)[-1]["error"]["message"]
        assert proxy.counted("leg_failures_total", leg="decode", reason="diverged") >= 1
        state = next(worker for worker in proxy.router.services.pools.all if worker.url == other.url)
        assert (state.breaker.failures, state.outlier.failed) == (0, 0)


async def test_tokens_that_came_with_an_error_are_sent_before_the_stream_ends(
    prefill: FakeWorker, decodes: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream cannot go on because too many requests are tried again, which is known at once."""
    monkeypatch.setattr(RetryBudget, "spend", lambda *_: False)
    worker, *_ = decodes
    error = b'data: {"error":{"message":"x","code":"engine_failure"}}\n\n'
    worker.stream_override = b"".join(worker._events({"return_token_ids": True})[:3]) + error + DONE
    async with proxy_of([prefill], [worker], retries=0) as proxy:
        data = await proxy.stream()
        *_, last = chunks(data)
        assert last["error"]["type"] == "stream_error"
        assert "".join(choice["text"] for chunk in chunks(data)[:-1] for choice in chunk["choices"]) == "t0 t1 t2 "
        assert data.count(DONE) == 1


async def test_a_client_that_continues_an_answer_itself_keeps_its_tokens(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    first, other, _ = decodes
    first.break_after = 3
    async with proxy_of([prefill], [first, other]) as proxy:
        for _ in range(2):
            assert text_of(await proxy.stream(output_token_ids=[0, 1])) == "".join(TOKENS[2:])
        assert proxy.counted("fallbacks_total", kind="recovered") >= 1
