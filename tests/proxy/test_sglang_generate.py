"""SGLang's own interface, /generate, through the proxy: two legs, batches, log-probabilities, aborts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink.api.openai import COMPLETIONS, GENERATE, parse
from pdlink.api.sse import payloads
from pdlink_proxy.dialects import DIALECTS
from tests.proxy.fake_sglang import TERMS, FakeSglang
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@dataclass
class Pair:
    prefill: FakeSglang
    decode: FakeSglang
    proxy: Proxy
    plain: FakeSglang | None = None

    async def ask(self, **body: Any) -> tuple[int, Any]:
        """The answer, or the events of a stream without [DONE]."""
        async with self.proxy.client.post(self.proxy.url + "/generate", json=body) as response:
            data = await response.read()
        if not body.get("stream") or response.status != 200:
            return response.status, msgspec.json.decode(data)
        *events, done = [found for found in payloads(data) if found]
        assert done == b"[DONE]"
        return response.status, [msgspec.json.decode(event) for event in events]


@contextlib.asynccontextmanager
async def pair_of(*, plain: bool = False, **more: Any) -> AsyncIterator[Pair]:
    servers = [FakeSglang("prefill"), FakeSglang("decode"), FakeSglang("null")]
    prefill, decode, both = [await each.start() for each in servers]
    listed: dict[str, Any] = {"both": [both.url]} if plain else {}
    try:
        async with proxy_of([prefill], [decode], dialect="sglang", **listed, **more) as proxy:
            yield Pair(prefill, decode, proxy, both)
    finally:
        for each in servers:
            await each.stop()
    assert prefill.strange == decode.strange == []
    assert set(both.strange) <= {"GET /version"}, "a plain server may be of any engine, which it is asked"


@pytest.mark.parametrize("prompt", [{"text": "hello"}, {"input_ids": [1, 2, 3]}], ids=["text", "ids"])
async def test_both_legs_get_the_same_body_and_the_client_decodes_answer(prompt: dict[str, Any]) -> None:
    async with pair_of() as pair:
        status, answer = await pair.ask(**prompt, sampling_params={"max_new_tokens": 2}, odd={"a": 1})
        assert (status, answer["text"], answer["output_ids"]) == (200, "0.0 0.1 ", [7, 7])
        (one,), (other,) = pair.prefill.received, pair.decode.received
        assert one.body == other.body
        assert one.path == other.path == "/generate"
        added = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
        assert one.body.keys() == {*prompt, "sampling_params", "odd", *added}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "own", [[], ["bootstrap_room"], ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"]]
)
@pytest.mark.parametrize("num_words", [1, 4096])
def test_a_client_names_neither_server_nor_room_nor_id(num_words: int, own: list[str], stream: bool) -> None:
    """Each name comes once: engines need not agree on which of two they read."""
    asked = {"model": "m", "prompt": "word" * num_words, "top_k": 3, "stream": stream} | dict.fromkeys(own, "theirs")
    legs = DIALECTS["sglang"].legs(parse(COMPLETIONS, json.dumps(asked).encode()), TERMS)
    for said in (json.loads(body, object_pairs_hook=list) for body in legs):
        fields = dict(said)
        assert len(fields) == len(said)
        assert (fields["bootstrap_host"], fields["bootstrap_port"], fields["rid"]) == ("127.0.0.1", 8998, "xfer-1")
        assert fields["bootstrap_room"] != "theirs"
        assert (fields["prompt"], fields["top_k"]) == (asked["prompt"], 3)
    prefill, decode = map(json.loads, legs)
    assert (prefill.get("stream", False), decode["stream"]) == (False, stream)


def test_token_ids_beside_a_text_that_is_null_are_a_batch() -> None:
    for body in DIALECTS["sglang"].legs(parse(GENERATE, b'{"text":null,"input_ids":[[1],[2]]}', "m"), TERMS):
        assert json.loads(body)["rid"] == ["xfer-1_0", "xfer-1_1"]


async def test_a_stream_is_decodes() -> None:
    async with pair_of() as pair:
        status, events = await pair.ask(text="hello", stream=True)
        assert status == 200
        assert [event["text"] for event in events] == ["0.0 ", "0.0 0.1 ", "0.0 0.1 0.2 "]
        assert "stream" not in pair.prefill.received[0].body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("texts", ["a", ["a"], ["a", "b", "c"]], ids=["one", "a batch of one", "three"])
async def test_log_probabilities_of_the_prompt_are_prefills_and_the_others_decodes(texts: Any, stream: bool) -> None:
    async with pair_of() as pair:
        pair.prefill.gate = asyncio.Event()  # it answers after decode has said all
        asked = asyncio.create_task(pair.ask(text=texts, return_logprob=True, logprob_start_len=0, stream=stream))
        await until(lambda: any(got.answered for got in pair.decode.received), "decode's answer")
        assert not asked.done()
        pair.prefill.gate.set()
        status, answers = await asked
        assert status == 200
        answers = answers if isinstance(answers, list) else [answers]
        num = len(texts)
        assert len(answers) == (3 * num if stream else num)
        for answer in answers:
            info = answer["meta_info"]
            assert info["input_token_logprobs"] == [[0.0, 0, None], [-1.0, 1, None], [-2.0, 2, None]]
            assert len(info["output_token_logprobs"]) == info["completion_tokens"]
            assert "P" not in answer["text"]


async def test_a_stream_that_comes_in_reads_before_prefills_answer_is_whole() -> None:
    async with pair_of() as pair:
        pair.prefill.gate, pair.decode.steps = asyncio.Event(), asyncio.Semaphore(0)
        asked = asyncio.create_task(pair.ask(text="a", return_logprob=True, stream=True))
        _, decode = pair.proxy.router.services.pools.all
        legs: Any = decode.legs
        read = 0
        for _ in range(2):
            pair.decode.steps.release()
            await until(lambda: any(leg.nbytes > read for leg in legs), "the next event")  # noqa: B023
            read = next(leg.nbytes for leg in legs)
        pair.decode.steps.release()
        await until(lambda: not legs, "the end")
        pair.prefill.gate.set()
        status, events = await asked
        assert status == 200
        assert [event["text"] for event in events] == ["0.0 ", "0.0 0.1 ", "0.0 0.1 0.2 "]


@pytest.mark.parametrize("code", [400, 503])
async def test_decodes_error_does_not_wait_for_prefill(code: int) -> None:
    async with pair_of(retries=0) as pair:
        pair.prefill.gate, pair.decode.fail_with = asyncio.Event(), code
        status, _ = await pair.ask(text="a", return_logprob=True)
        assert status == code
        legs = pair.proxy.router.services.records[-1].legs
        assert [(leg.leg, leg.end) for leg in legs] == [("prefill", "cancelled"), ("decode", str(code))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "said"), [("a", True), (["a", "b", "c"], False)], ids=["one", "a batch"])
async def test_the_usage_of_one_answer_of_a_batch_is_not_that_of_the_request(
    text: Any, said: bool, stream: bool, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with pair_of(decision_log=str(path)) as pair:
        status, _ = await pair.ask(text=text, stream=stream)
        assert status == 200
        record = pair.proxy.router.services.records[-1]
        assert record.estimated is not said
        assert (record.prompt_tokens == 3) is said
    line = json.loads(path.read_bytes())
    assert (line["input_length"], line["output_length"]) == ((3, 3) if said else (record.prompt_tokens, 0))


async def test_a_prefill_that_fails_leaves_no_answer_without_its_part() -> None:
    async with pair_of() as pair:
        pair.prefill.fail_with, pair.prefill.gate = 500, asyncio.Event()
        asked = asyncio.create_task(pair.ask(text="a", return_logprob=True, stream=True))
        await until(lambda: any(got.answered for got in pair.decode.received), "decode's answer")
        pair.prefill.gate.set()
        status, answer = await asked
        assert (status, answer["error"]["code"]) == (502, "peer_lost")  # after a second attempt


async def test_a_batch_has_a_room_and_an_id_for_each_prompt_and_each_is_aborted() -> None:
    async with pair_of() as pair:
        pair.prefill.gate = pair.decode.gate = asyncio.Event()
        asked = asyncio.create_task(pair.ask(text=["a", "b", "c"]))
        await until(lambda: bool(pair.prefill.received and pair.decode.received), "both legs")
        body = pair.decode.received[0].body
        assert len(set(body["bootstrap_room"])) == len(set(body["rid"])) == 3
        asked.cancel()
        for server in (pair.prefill, pair.decode):
            await until(lambda server=server: sorted(server.aborts) == body["rid"], "the aborts")  # type: ignore[misc]


async def test_a_leg_that_fails_aborts_the_other_at_once() -> None:
    async with pair_of() as pair:
        pair.decode.gate, pair.prefill.fail_with = asyncio.Event(), 400
        status, _ = await pair.ask(text="a")
        assert status == 400
        await until(lambda: pair.decode.aborts == [pair.decode.received[0].body["rid"]], "the abort")
        pair.decode.gate.set()


async def test_what_a_pair_cannot_serve_goes_to_a_plain_server() -> None:
    several = {"text": "a", "sampling_params": {"n": 2}}
    async with pair_of() as pair:
        status, answer = await pair.ask(**several)
        assert (status, "not possible over two legs" in answer["error"]["message"]) == (400, True)
    async with pair_of(plain=True) as pair:
        assert pair.plain is not None
        assert (await pair.ask(**several))[0] == 200
        assert pair.plain.received[0].body == several


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "text"), ({"text": None}, "text"), ({"text": 1}, "text"), ({"input_ids": "x"}, "input_ids"), ([], None)],
    ids=range(5),
)
async def test_a_body_without_a_prompt_is_refused(body: Any, param: str | None) -> None:
    async with (
        pair_of() as pair,
        pair.proxy.client.post(pair.proxy.url + "/generate", json=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
        assert pair.prefill.received == []


async def test_other_engines_have_no_such_route(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with (
        proxy_of([prefill], [decode]) as proxy,
        proxy.client.post(proxy.url + "/generate", json={"text": "a"}) as response,
    ):
        assert response.status == 404
