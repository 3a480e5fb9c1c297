"""Two legs of a request give the client what one process gives, byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdlink.api import kv_path
from pdlink.config import ModelConfig, TimeoutConfig
from pdlink.engine.tiny import END_TOKEN_ID, SPECIAL_TOKENS
from pdlink.errors import TransferFailed
from pdlink.kv.groups import KVGroups
from pdlink.node.node import Node
from pdlink.node.port import EnginePort
from pdlink.reasons import Reason
from pdlink.serve.stream import PrefillLeg, Stream
from tests.endpoint.conftest import layout
from tests.serve.pair import Reply, Script, WorkerPair
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.engine.engine import Engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEVER = "\N{SNOWMAN}"
"""No generated answer has it."""


@st.composite
def _answers(draw: st.DrawFn) -> list[int]:
    """Token ids: characters of one to four bytes, halves of such, and special tokens."""
    byte = st.sampled_from([*range(97, 101), 0x80, 0xA9, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF])
    special = st.integers(256, 255 + len(SPECIAL_TOKENS))
    parts = draw(
        st.lists(
            st.one_of(
                st.sampled_from("abc)'é€🙂").map(lambda character: list(character.encode())),
                byte.map(lambda token: [token]),
                special.map(lambda token: [token]),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return [token for part in parts for token in part]


@st.composite
def _stops(draw: st.DrawFn, answer: list[int]) -> list[str]:
    """Stop strings out of the answer: whole parts of it, and beginnings of it that go on in another way."""
    text = bytes(token for token in answer if token < 256).decode(errors="replace") or "a"
    stops = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.one_of(st.just(0), st.integers(0, len(text) - 1)))
        end = draw(st.integers(start + 1, len(text)))
        stops.append(text[start:end] + draw(st.sampled_from(["", "", NEVER, text[0]])))
    return stops


@st.composite
def _requests(draw: st.DrawFn) -> tuple[str, list[int], dict[str, Any]]:
    """(path, answer, the request's fields)."""
    answer = draw(_answers())
    path = draw(st.sampled_from([COMPLETIONS, CHAT]))
    prompt = draw(st.sampled_from(["hi", "grüße 🙂", "中", "<|user|>a<|end|>"]))
    fields: dict[str, Any] = {
        "max_tokens": draw(st.sampled_from([1, min(2, len(answer)), len(answer)])),
        "stop": draw(_stops(answer)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.lists(st.sampled_from(answer), max_size=1)),
    }
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": prompt}]
    else:
        fields["prompt"] = draw(st.one_of(st.just(prompt), st.just([*prompt.encode()][:-1] or [65])))
    return path, answer, fields


def _hidden_names(body: bytes) -> bytes:
    """Without what names a request: its id, and when it was made."""
    return re.sub(rb'"id":"[^"]*"(,"object":"[^"]*","created":)[0-9]+', rb'"id":""\g<1>0', body)


def _hidden(reply: Reply) -> bytes:
    return _hidden_names(reply.body)


EURO = [*"€a".encode()]


@given(request=_requests())
@example(request=(COMPLETIONS, [*b"')v3"], {"prompt": "x", "max_tokens": 4, "stop": ["')x"]}))
@example(request=(COMPLETIONS, [*"été".encode()], {"prompt": "x", "max_tokens": 5}))
@example(request=(COMPLETIONS, EURO, {"prompt": "x", "max_tokens": 1}))
@example(request=(COMPLETIONS, EURO, {"prompt": "x", "max_tokens": 4, "stop": ["€"]}))
@example(request=(CHAT, [*b"ab"], {"messages": [{"role": "user", "content": "é"}], "stop": ["ab"], "max_tokens": 2}))
@example(request=(COMPLETIONS, [END_TOKEN_ID, 97], {"prompt": "x", "max_tokens": 2, "ignore_eos": True}))
@settings(max_examples=100, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
def test_an_answer_of_two_legs_is_that_of_one_process_byte_for_byte(
    pair: WorkerPair, request: tuple[str, list[int], dict[str, Any]]
) -> None:
    """Whichever leg gives the first event of a stream; text, finish reason and usage."""
    path, answer, fields = request
    seed = pair.number()
    pair.script.answers[seed] = answer

    def body(*, stream: bool) -> dict[str, Any]:
        return pair.body(seed, stream=stream, stream_options={"include_usage": True}, **fields)

    async def ask() -> None:
        alone = await pair.post("decode", path, body(stream=False))
        assert alone.status == 200, alone.body
        _, decode = await pair.both(path, body(stream=False))
        assert _hidden(decode) == _hidden(alone)

        alone = await pair.post("decode", path, body(stream=True))
        assert alone.status == 200, alone.body
        prefill, decode = await pair.both(path, body(stream=True))
        assert _hidden(decode) == _hidden(alone)
        assert len(prefill.events) == 1
        assert _hidden_names(prefill.events[0] + b"".join(decode.events[1:])) == _hidden(alone)

    pair.run(ask())


def test_events_of_a_scripted_answer_are_what_the_script_says(pair: WorkerPair) -> None:
    """Without this the test above could compare nothing with nothing."""
    seed = pair.number()
    pair.script.answers[seed] = [*"é!".encode()]
    _, decode = pair.run(pair.both(COMPLETIONS, pair.body(seed, prompt="x", max_tokens=3, stream=True)))
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in decode.events[:-1]]
    assert texts == ["", "é", "!", ""]


@pytest.fixture(scope="module")
def patient(script: Script) -> Iterator[WorkerPair]:
    """Nothing ends by its lease."""
    with WorkerPair(script, timeouts=TimeoutConfig(peer_s=2 * WAIT_S)) as pair:
        yield pair


@pytest.fixture(scope="module")
def unlike(script: Script) -> Iterator[WorkerPair]:
    """Decode has other weights, so their handshake is refused."""
    timeouts = TimeoutConfig(other_leg_s=1.0)
    decode = {"model": ModelConfig(num_layers=1, seed=1, max_tokens=1024)}
    with WorkerPair(script, timeouts=timeouts, decode=decode) as pair:
        yield pair


async def _computed(pair: WorkerPair, seed: int) -> None:
    """The engine of prefill has chosen the token and is through with it, and its HTTP has gone round since."""
    await asyncio.to_thread(pair.script.chosen[seed].wait, WAIT_S)
    await asyncio.to_thread(until, lambda: pair.prefill.num_requests == 0, "prefill's engine is through")
    async with pair.http["prefill"].get("/health") as answer:
        assert answer.status == 200


def _seed_of(pair: WorkerPair, answer: bytes) -> int:
    """A new seed for this answer."""
    seed = pair.number()
    pair.script.answers[seed] = [*answer]
    pair.script.chosen[seed] = threading.Event()
    return seed


@pytest.mark.parametrize("stream", [True, False])
def test_prefills_token_waits_until_decode_has_spoken(patient: WorkerPair, stream: bool) -> None:
    seed = _seed_of(patient, b"ab")
    body = patient.body(seed, prompt="x", max_tokens=2, stream=stream)
    transfer_id = f"waits-{stream}"

    async def ask() -> None:
        prefill = asyncio.create_task(patient.post("prefill", COMPLETIONS, patient.leg("prefill", transfer_id, body)))
        await _computed(patient, seed)
        assert not prefill.done(), "nobody has shown that it wants the KV, or that it fits"
        decode = await patient.post("decode", COMPLETIONS, patient.leg("decode", transfer_id, body))
        assert (decode.status, (await prefill).status) == (200, 200)

    patient.run(ask())


def test_prefill_with_other_weights_gives_no_token_to_the_client(unlike: WorkerPair) -> None:
    seed = _seed_of(unlike, b"ab")
    body = unlike.body(seed, prompt="x", max_tokens=2, stream=True)
    prefill, decode = unlike.run(unlike.both(COMPLETIONS, body))
    assert prefill.status == 502
    assert json.loads(prefill.body)["error"]["code"] == "transfer_failed"
    assert decode.status == 200
    assert b'"text":"a"' in decode.events[0]


def test_prefill_that_waits_for_decode_hears_that_it_will_not_come(patient: WorkerPair) -> None:
    seed = _seed_of(patient, b"ab")
    body = patient.leg("prefill", "told", patient.body(seed, prompt="x", max_tokens=2, stream=True))

    async def ask() -> None:
        prefill = asyncio.create_task(patient.post("prefill", COMPLETIONS, body))
        await _computed(patient, seed)
        async with patient.http["prefill"].post("/pdlink/transfers/told/stop", json={"reason": "gone"}) as answer:
            assert answer.status == 202
        reply = await prefill
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (502, "transfer_failed")
        assert "gone" in json.loads(reply.body)["error"]["message"]

    patient.run(ask())


def test_prefill_whose_transfer_failed_before_its_engine_had_the_request_is_aborted() -> None:
    """The engine ignores an abort of a request that it does not know yet."""
    aborted: list[str] = []
    engine = cast("Engine", SimpleNamespace(abort=aborted.append, wake=lambda: None))

    async def failure() -> TransferFailed | None:
        stream = Stream("r", 3, WAIT_S, held=True)
        with Node("prefill", KVGroups((layout(4),))) as node:
            leg = PrefillLeg(stream, "t", engine, EnginePort(node))
            node.other_side_failed("t", "gone")
            assert await asyncio.to_thread(leg.outgoing.released.wait, WAIT_S)
            assert not aborted
            leg.submitted()
            stream.put(None)
        assert aborted == ["r"]
        with pytest.raises(TransferFailed, match="gone"):
            _ = [token async for token in stream]
        return stream.failure

    assert asyncio.run(failure()) is not None


def test_client_that_leaves_while_prefills_token_waits_frees_its_blocks(patient: WorkerPair) -> None:
    seed = _seed_of(patient, b"ab")
    body = patient.leg("prefill", "left", patient.body(seed, prompt="x", max_tokens=2, stream=True))

    async def ask() -> None:
        prefill = asyncio.create_task(patient.post("prefill", COMPLETIONS, body))
        await _computed(patient, seed)
        assert patient.prefill.pool.num_held > 0
        prefill.cancel()
        await asyncio.to_thread(until, lambda: patient.prefill.pool.num_held == 0, "prefill holds nothing")

    patient.run(ask())


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_decode_that_has_the_whole_prompt_lets_prefills_token_through(patient: WorkerPair, max_tokens: int) -> None:
    seed = _seed_of(patient, b"abc")
    body = patient.body(seed, prompt="x" * 64, max_tokens=max_tokens, stream=True)
    first = patient.run(patient.both(COMPLETIONS, body))
    again = patient.run(patient.both(COMPLETIONS, body))
    for prefill, decode in (first, again):
        assert (prefill.status, decode.status) == (200, 200)
    assert [_hidden(reply) for reply in first] == [_hidden(reply) for reply in again]


def test_a_second_request_of_one_id_leaves_the_first_alone(patient: WorkerPair) -> None:
    seed = _seed_of(patient, b"ab")
    patient.script.allowed[seed] = threading.Event()
    body = patient.leg("decode", "twice", patient.body(seed, prompt="x", max_tokens=2))

    async def ask() -> None:
        async with patient.http["decode"].post("/pdlink/transfers/twice/stop", json={"reason": "gone"}) as answer:
            assert answer.status == 202
        first = asyncio.create_task(patient.post("decode", COMPLETIONS, body))
        await asyncio.to_thread(until, lambda: patient.decode.num_requests == 1, "the first request is in the engine")
        second = await patient.post("decode", COMPLETIONS, body)
        assert (second.status, json.loads(second.body)["error"]["code"]) == (400, "invalid_request")
        patient.script.allowed[seed].set()
        assert (await first).status == 200

    patient.run(ask())


@pytest.mark.parametrize("stream", [True, False])
def test_decodes_answer_says_how_its_kv_came(pair: WorkerPair, stream: bool) -> None:
    seed = _seed_of(pair, b"ab")
    body = pair.body(seed, prompt="x", max_tokens=2, stream=stream)
    prefill, decode = pair.run(pair.both(COMPLETIONS, body))
    assert decode.headers["X-Pdlink-KV"] == "transferred"
    assert "X-Pdlink-KV" not in prefill.headers
    alone = pair.run(pair.post("decode", COMPLETIONS, body))
    assert "X-Pdlink-KV" not in alone.headers, "only the proxy knows why"


@pytest.mark.parametrize("stream", [True, False])
def test_decodes_answer_says_that_prefill_failed(patient: WorkerPair, stream: bool) -> None:
    seed = _seed_of(patient, b"ab")
    paths = []

    async def ask() -> None:
        for number, told_first in enumerate((True, False)):
            name = f"failed-{stream}-{number}"
            body = patient.leg("decode", name, patient.body(seed, prompt="x", max_tokens=2, stream=stream))
            told = patient.http["decode"].post(f"/pdlink/transfers/{name}/stop", json={"reason": "it\nis away"})
            if told_first:
                assert (await told).status == 202
                decode = asyncio.create_task(patient.post("decode", COMPLETIONS, body))
            else:
                decode = asyncio.create_task(patient.post("decode", COMPLETIONS, body))
                await asyncio.to_thread(until, lambda: patient.decode.engine.num_awaiting_kv == 1, "decode waits")
                assert (await told).status == 202
            paths.append((await decode).headers["X-Pdlink-KV"])

    patient.run(ask())
    assert paths == ["recomputed;reason=request_failed"] * 2


def test_decodes_answer_names_the_factor_of_a_refused_handshake(unlike: WorkerPair) -> None:
    paths = set()
    for _ in range(2):  # the second is refused out of memory
        seed = _seed_of(unlike, b"ab")
        _, decode = unlike.run(unlike.both(COMPLETIONS, unlike.body(seed, prompt="x", max_tokens=2)))
        paths.add(decode.headers["X-Pdlink-KV"])
    assert paths <= {"recomputed;reason=refused:revision", "recomputed;reason=refused:content"}


def test_decodes_answer_names_a_peer_that_is_not_there(patient: WorkerPair) -> None:
    seed = _seed_of(patient, b"ab")
    body = patient.leg("decode", "nobody", patient.body(seed, prompt="x", max_tokens=2), "tcp://127.0.0.1:1")
    decode = patient.run(patient.post("decode", COMPLETIONS, body))
    assert decode.headers["X-Pdlink-KV"] == "recomputed;reason=not_connected"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("peer_lost: closed by x: \r\nSet-Cookie: a=b", "peer_lost"),
        ("refused:a\r\nX=y: differs: local", "refused:a_x_y"),
        ("\r\n", "other"),
        ("x" * 100, "other"),
    ],
)
def test_a_reason_in_a_header_is_one_word_whatever_a_peer_says(said: str, code: str) -> None:
    assert kv_path.recomputed(Reason.of(said).label) == f"recomputed;reason={code}"
