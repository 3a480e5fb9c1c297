"""What one request may take of a worker: length, stop strings, time in the event loop, bytes of its body."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.serve import app as serving
from tests.serve.pair import Script, WorkerPair
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_TOKENS = 1024


@pytest.fixture
def tokenized(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that decode's tokenizer was given."""
    texts = []
    model = pair.decode.model
    right: Callable[..., list[int]] = model.tokenizer.encode

    def encode(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return right(text, **options)

    monkeypatch.setattr(model.tokenizer, "encode", encode)
    return texts


def refusal(pair: WorkerPair, path: str, **fields: Any) -> tuple[int, str, str]:
    reply = pair.run(pair.post("decode", path, pair.body(0, **fields)))
    error = json.loads(reply.body)["error"]
    return reply.status, error["code"], error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "hello wor" * 100_000}),
        (COMPLETIONS, {"prompt": ["hello wor" * 100_000]}),
        (CHAT, {"messages": [{"role": "user", "content": "hello wor" * 100_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 20_000}),
    ],
    ids=range(4),
)
def test_text_that_is_too_long_whatever_its_tokens_is_refused_before_they_are_found_out(
    pair: WorkerPair, tokenized: list[str], path: str, fields: dict[str, Any]
) -> None:
    status, code, message = refusal(pair, path, **fields)
    assert (status, code) == (400, "capacity_exceeded")
    assert str(MAX_TOKENS) in message
    assert tokenized == []


def test_text_of_the_longest_tokens_is_not_refused_for_its_length(pair: WorkerPair) -> None:
    """Special tokens are the longest of this vocabulary, 13 characters."""
    seed = pair.number()
    pair.script.answers[seed] = [97]
    body = pair.body(seed, prompt="<|assistant|>" * (MAX_TOKENS - 1), max_tokens=1)
    reply = pair.run(pair.post("decode", COMPLETIONS, body))
    assert (reply.status, json.loads(reply.body)["usage"]["prompt_tokens"]) == (200, MAX_TOKENS - 1)


def test_others_are_served_while_a_long_prompt_is_tokenised(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = pair.number()
    pair.script.answers[seed] = [97]
    begun, go_on = threading.Event(), threading.Event()
    model = pair.decode.model
    right: Callable[..., list[int]] = model.tokenizer.encode

    def encode(text: str, **options: Any) -> list[int]:
        if text == "long":
            begun.set()
            assert go_on.wait(WAIT_S)
        return right(text, **options)

    monkeypatch.setattr(model.tokenizer, "encode", encode)

    async def ask() -> None:
        # The length of the body is what counts, so that a test need not wait for a long one.
        body = pair.body(seed, prompt="long", max_tokens=1, user="x" * serving._LONG_NBYTES)
        slow = asyncio.create_task(pair.post("decode", COMPLETIONS, body))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        async with pair.http["decode"].get("/health") as answer:
            assert answer.status == 200
        assert (await pair.post("decode", COMPLETIONS, pair.body(seed, prompt="short", max_tokens=1))).status == 200
        assert not slow.done()
        go_on.set()
        assert (await slow).status == 200

    pair.run(ask())


@pytest.mark.parametrize(
    ("field", "given", "limit"), [("stop", ["a"] * 5, 4), ("stop_token_ids", [1] * 1025, 1024)], ids=["stop", "ids"]
)
def test_more_stops_than_the_limit_are_refused_by_name_with_both_numbers(
    pair: WorkerPair, field: str, given: list[Any], limit: int
) -> None:
    status, code, message = refusal(pair, COMPLETIONS, prompt="x", **{field: given})
    assert (status, code) == (400, "invalid_request")
    assert message == f"{field}: Expected `array` of length <= {limit}"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": [65] * 10 + ["a"]}, "prompt[10]: Expected an integer from -2147483648 to 2147483647, got 'a'"),
        ({"prompt": ["a", "b"]}, "prompt: got several; expected 1; send one request for each"),
        ({"prompt": [[65], [66]]}, "prompt: got several; expected 1; send one request for each"),
        ({"prompt": 3}, "prompt: expected a string or a list of token ids"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens: Expected an integer from 1 to 2147483647, got -1"),
        ({"prompt": "x", "temperature": 3}, "temperature: Expected `float` <= 2.0, got 3"),
        ({"prompt": "x", "n": 2}, "n: the built-in engine does not do this, got '2'; leave it out"),
        ({"prompt": "x", "echo": True}, "echo: the built-in engine does not do this, got 'True'; leave it out"),
        ({"prompt": "x", "logprobs": 5}, "logprobs: the built-in engine does not do this, got '5'; leave it out"),
    ],
    ids=range(9),
)
def test_what_is_wrong_is_told_by_field_and_value(pair: WorkerPair, fields: dict[str, Any], told: str) -> None:
    assert refusal(pair, COMPLETIONS, **fields)[::2] == (400, told)


def test_word_about_a_transfer_is_not_read_beyond_its_limit(pair: WorkerPair) -> None:
    async def ask() -> tuple[int, str]:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 2048

        async with pair.http["decode"].post("/pdlink/transfers/x/stop", data=chunks()) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    status, message = pair.run(ask())
    assert (status, message) == (413, "the body: got more than 4096 bytes; send a shorter request")


def test_transfer_id_that_is_too_long_is_told_as_that(pair: WorkerPair) -> None:
    async def ask() -> tuple[int, str]:
        async with pair.http["decode"].post(f"/pdlink/transfers/{'x' * 129}/stop", json={}) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    assert pair.run(ask()) == (400, "transfer id: got 129 characters; expected 1 to 100")


def test_tokenize_says_what_a_prompt_is_computed_from(pair: WorkerPair, script: Script) -> None:
    model, messages = pair.decode.model, [{"role": "user", "content": "hello world"}]
    text = json.loads(pair.run(pair.post("decode", "/tokenize", {"model": model.name, "prompt": "hello world"})).body)
    tokens = list(model.tokenizer.encode("hello world"))
    assert text == {"tokens": tokens, "count": len(tokens), "max_model_len": MAX_TOKENS}
    chat = json.loads(pair.run(pair.post("decode", "/tokenize", {"model": model.name, "messages": messages})).body)
    seed = pair.number()
    script.answers[seed] = [97]
    body = {"model": model.name, "max_tokens": 1, "messages": messages, "seed": seed}
    answer = json.loads(pair.run(pair.post("decode", CHAT, body)).body)
    assert len(chat["tokens"]) == chat["count"] == answer["usage"]["prompt_tokens"] > len(tokens)
    refused = pair.run(pair.post("decode", "/tokenize", {"model": model.name}))
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (400, "invalid_request")
