"""Two legs of a request give the client what one process gives, byte for byte."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdlink.engine.tiny import END_TOKEN_ID, SPECIAL_TOKENS
from tests.serve.pair import Reply, WorkerPair

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEVER = "\N{SNOWMAN}"
"""No generated answer has it."""


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPair]:
    with pytest.MonkeyPatch.context() as patch, WorkerPair(patch) as pair:
        yield pair


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
        "max_tokens": draw(st.one_of(st.just(1), st.just(2), st.just(len(answer)), st.integers(1, len(answer)))),
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
