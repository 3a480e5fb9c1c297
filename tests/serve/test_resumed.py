"""A stream that another worker began goes on behind the tokens that the client has, byte for byte."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.serve.test_legs import CHAT, COMPLETIONS, _hidden_names, _requests

if TYPE_CHECKING:
    from tests.serve.pair import WorkerPair


def _token_ids(event: bytes) -> list[int]:
    (choice,) = json.loads(event[6:])["choices"]
    ids: list[int] = choice.get("token_ids", [])
    return ids


@given(request=_requests(), cut=st.integers(1, 8))
@example(request=(COMPLETIONS, [*"€a".encode()], {"prompt": "x", "max_tokens": 4}), cut=2)
@example(request=(COMPLETIONS, [*b"xabc"], {"prompt": "x", "max_tokens": 4, "stop": ["bc"]}), cut=3)
@example(request=(CHAT, [*b"abc"], {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}), cut=3)
@settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
def test_a_continued_stream_ends_as_the_undisturbed_one(
    pair: WorkerPair, request: tuple[str, list[int], dict[str, Any]], cut: int
) -> None:
    """After any token: half a character, the middle of a stop string, the last of all. One worker, and two legs."""
    path, answer, fields = request
    seed = pair.number()
    pair.script.answers[seed] = answer

    def body(**more: Any) -> dict[str, Any]:
        options = {"include_usage": True}
        return pair.body(seed, stream=True, stream_options=options, return_token_ids=True, **fields, **more)

    async def ask() -> None:
        whole = await pair.post("decode", path, body())
        assert whole.status == 200, whole.body
        tokens = [event for event in whole.events if b'"token_ids"' in event]
        sent = tokens[:cut]
        rest = _hidden_names(b"".join(whole.events[len(sent) :]))
        ids = [token for event in sent for token in _token_ids(event)]
        assert ids == answer[: len(ids)]
        alone = await pair.post("decode", path, body(output_token_ids=ids))
        assert _hidden_names(alone.body) == rest
        if len(sent) < len(tokens):  # else decode has nothing to receive
            prefill, decode = await pair.both(path, body(output_token_ids=ids))
            assert _hidden_names(decode.body) == rest
            assert _hidden_names(prefill.body) == _hidden_names(whole.events[len(sent)])

    pair.run(ask())


def test_more_tokens_than_the_answer_may_have_are_refused(pair: WorkerPair) -> None:
    async def ask() -> None:
        for more in ({"stream": True}, {"max_tokens": 9}):
            body = {"prompt": "x", "max_tokens": 1, "output_token_ids": [65, 66], **more}
            reply = await pair.post("decode", COMPLETIONS, pair.body(1, **body))
            assert reply.status == 400
            assert json.loads(reply.body)["error"]["message"].startswith(
                "output_token_ids: got 2; expected at most max_tokens ="
            )

    pair.run(ask())
