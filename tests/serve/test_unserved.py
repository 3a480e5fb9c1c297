"""No answer is given for what was not done: every field of OpenAI's and vLLM's requests is served or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdlink.engine import engine
from pdlink.engine.answer import choose
from pdlink.errors import InvalidRequest
from pdlink.serve.openai import ChatRequest, CompletionRequest, parse
from tests.serve.pair import WorkerPair

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

ASKS: dict[str, list[Any]] = {
    "frequency_penalty": [2, -0.5],
    "presence_penalty": [2.0],
    "repetition_penalty": [1.9, 0],
    "length_penalty": [2],
    "logit_bias": [{"5": -100}],
    "min_p": [0.5],
    "top_k": [1, 40],
    "min_tokens": [30],
    "bad_words": [["a"]],
    "allowed_token_ids": [[1]],
    "top_logprobs": [1],
    "prompt_logprobs": [0, 1],
    "use_beam_search": [True],
    "early_stopping": [True],
    "truncate_prompt_tokens": [2, -1],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "detokenize": [False],
    "return_tokens_as_token_ids": [True],
    "response_format": [{"type": "json_object"}, {}],
    "structured_outputs": [{"regex": "[0-9]+"}, {}],
    "guided_json": [{}, "{}"],
    "guided_regex": ["a"],
    "guided_choice": [["a"]],
    "guided_grammar": ["a"],
    "guided_decoding_backend": ["xgrammar"],
    "guided_whitespace_pattern": [" "],
    "structural_tag": ["{}"],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "documents": [[{"text": "a"}]],
    "mm_processor_kwargs": [{"a": 1}],
    "media_io_kwargs": [{"a": {}}],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "a", "format": "wav"}],
    "prediction": [{"type": "content", "content": "a"}],
    "web_search_options": [{}],
    "reasoning_effort": ["high"],
    "thinking_token_budget": [5],
    "verbosity": ["low"],
    "store": [True],
    "prompt_embeds": ["AAAA"],
    "logits_processors": [["a"]],
    "vllm_xargs": [{"a": 1}],
}
"""Fields that this engine does not do, with values that ask for it."""

SAYS_NOTHING: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0],
    "repetition_penalty": [1, 1.0],
    "length_penalty": [1.0],
    "logit_bias": [{}],
    "min_p": [0.0],
    "top_k": [0, -1],
    "min_tokens": [0],
    "bad_words": [[]],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "skip_special_tokens": [True],
    "user": ["somebody"],
    "metadata": [{"a": "b"}],
    "service_tier": ["auto"],
    "parallel_tool_calls": [True, False],
    "store": [False],
    "stream_options": [{"include_usage": False, "include_obfuscation": False}],
    "n": [1],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "logprobs": [False],
}
OF_COMPLETIONS = {"best_of", "suffix", "prompt_embeds"}


def read(path: str, **fields: Any) -> CompletionRequest | ChatRequest:
    body = {"model": "m", **prompt(path), **fields}
    return parse(CompletionRequest if path == COMPLETIONS else ChatRequest, json.dumps(body).encode(), "m")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ASKS.items() for value in values])
def test_what_the_engine_does_not_do_is_refused_by_its_name(path: str, name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: the built-in engine does not do this.*; leave it out$"):
        read(path, **{name: value})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", [*ASKS, *SAYS_NOTHING])
def test_what_changes_nothing_is_accepted(path: str, name: str) -> None:
    for value in SAYS_NOTHING.get(name, []):
        if path == COMPLETIONS or name not in OF_COMPLETIONS:
            read(path, **{name: value})
    if name in ASKS:
        read(path, **{name: None})


def test_what_a_greedy_request_cannot_feel_is_accepted() -> None:
    read(COMPLETIONS, temperature=0, top_k=1, min_p=0.5)
    read(CHAT, temperature=0.0, top_k=40)


@pytest.mark.parametrize(
    ("typo", "right"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("frequency_penality", "frequency_penalty"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("Model", "model"),
    ],
)
def test_a_typo_is_told_with_the_nearest_name(typo: str, right: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{typo}: unknown field; did you mean '{right}'\\?$"):
        read(COMPLETIONS, **{typo: 2})


def test_a_field_that_nobody_knows_is_refused_also_below_the_top() -> None:
    with pytest.raises(InvalidRequest, match=r"^zzzz: unknown field; leave it out$"):
        read(CHAT, zzzz=None)
    with pytest.raises(InvalidRequest, match=r"stream_options: .*unknown field `usage`"):
        read(CHAT, stream_options={"usage": True})
    with pytest.raises(InvalidRequest, match=r"kv_retention: .*unknown field `priorty`"):
        read(CHAT, kv_retention={"priorty": 3})


def test_parts_of_text_are_one_text_and_other_parts_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = read(CHAT, messages=[{"role": "user", "content": parts}])
    assert isinstance(request, ChatRequest)
    image = {"type": "image_url", "image_url": {"url": "http://a"}}
    for content in ([image], [parts[0], image], [{"type": "text"}], ["a"], {"type": "text"}, 3):
        with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content"):
            read(CHAT, messages=[{"role": "user", "content": content}])


NUMBERS = [-(10**30), -(2**63) - 1, -1, 0, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 1e308]
INTEGERS = [
    *("max_tokens", "max_completion_tokens", "seed", "n", "best_of", "logprobs", "priority", "top_k", "min_tokens"),
    *("stop_token_ids", "output_token_ids", "prompt", "kv_retention", "kv_transfer_params", "temperature", "top_p"),
]


def bodies(name: str, number: float) -> list[dict[str, Any]]:
    listed = {"stop_token_ids", "output_token_ids", "prompt"}
    nested = {
        "kv_retention": ("priority", "duration_s", "ttl_s"),
        "kv_transfer_params": ("seed", "created"),
    }
    if name in listed:
        return [{name: [number]}]
    if name == "kv_transfer_params":
        whole = {"transfer_id": "t", "leg": "prefill", "seed": 1, "created": 1}
        return [{name: {**whole, part: number}} for part in nested[name]]
    return [{name: {part: number}} for part in nested[name]] if name in nested else [{name: number}]


def prompt(path: str) -> dict[str, Any]:
    return {"prompt": "hi"} if path == COMPLETIONS else {"messages": MESSAGES}


def send(pair: WorkerPair, method: str, path: str, text: str | None = None) -> tuple[int, bytes]:
    async def sent() -> tuple[int, bytes]:
        data = None if text is None else text.encode()
        async with pair.http["decode"].request(method, path, data=data) as response:
            return response.status, await response.read()

    return pair.run(sent())


@pytest.mark.parametrize("name", INTEGERS)
def test_numbers_at_every_edge_are_served_or_refused_and_the_next_request_is_served(
    name: str, pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "choose", choose)
    path = CHAT if name == "max_completion_tokens" else COMPLETIONS
    for number in NUMBERS:
        for body in bodies(name, number):
            reply = pair.run(pair.post("decode", path, pair.body(0) | prompt(path) | {"max_tokens": 1} | body))
            assert reply.status in (200, 400), (body, reply.body)
    huge = json.dumps(pair.body(7, prompt="hi")).replace("7", "7" + "0" * 5000)
    assert send(pair, "POST", COMPLETIONS, huge)[0] == 400
    assert pair.run(pair.post("decode", COMPLETIONS, pair.body(0, prompt="hi", max_tokens=1))).status == 200


def test_text_in_parts_gives_the_answer_of_the_whole_text(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "choose", choose)

    def answer(content: object) -> Any:
        body = {"model": pair.decode.model.name, "max_tokens": 4, "temperature": 0, "tools": None}
        reply = pair.run(pair.post("decode", CHAT, {**body, "messages": [{"role": "user", "content": content}]}))
        assert reply.status == 200, reply.body
        return json.loads(reply.body)["choices"]

    assert answer([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == answer("a\nb")


def test_a_model_has_a_card_and_another_one_has_none(pair: WorkerPair) -> None:
    name = pair.decode.model.name
    status, body = send(pair, "GET", f"/v1/models/{name}")
    assert (status, json.loads(body)["id"]) == (200, name)
    assert send(pair, "GET", "/v1/models/another/one")[0] == 404
