"""The first event of a stream with data is found natively, and nothing but a token is taken for one."""

from __future__ import annotations

import json
import random
import re

import pytest

from pdlink._http import first_data_event
from pdlink.api.sse import problem_of
from tests.api.test_long_bodies import anything, spoiled

NAMES = ("choices", "error", "id", "meta_info", "finish_reason", "errors", "text")
NO_DATA = (b": a comment\n\n", b"event: ping\r\n\r\n", b"\n\n", b"id: 7\nretry: 1\n\n", b"data\n\n")
ENDS = (b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n")


def first(events: bytes) -> tuple[int, int] | None:
    begin = 0
    for boundary in re.finditer(rb"\n\r?\n", events):
        event = events[begin : boundary.end()]
        if re.search(rb"(^|\n)data:", event):
            return begin, boundary.end()
        begin = boundary.end()
    return None


@pytest.mark.parametrize("seed", range(3))
def test_the_first_event_with_data_is_found_and_no_problem_is_a_token(seed: int) -> None:
    rng, num_tokens, num_problems = random.Random(seed), 0, 0
    for number in range(5000):
        fields = {name: anything(rng, 3) for name in rng.sample(NAMES, rng.randrange(4))}
        data = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode()
        if rng.random() < 0.3:
            data = spoiled(rng, data).replace(b"\n", b" ")
        if rng.random() < 0.1:
            data = rng.choice([b"[DONE]", b"", b"[1]", b"7", b'"abort"'])
        events = b"".join(rng.choices(NO_DATA, k=rng.randrange(3)))
        events += rng.choice([b"", b"", b"event: x\n", b"id: 1\r\n"]) + rng.choice([b"data:", b"data: "]) + data
        events += rng.choice(ENDS) + rng.choice([b"", b"data: {}\n\n"])
        found = first_data_event(events)
        assert found is not None, (seed, number, events)
        begin, end, is_token = found
        assert (begin, end) == first(events), (seed, number, events)
        problem = problem_of(events[begin:end])
        assert not (is_token and problem), (seed, number, events)
        num_tokens, num_problems = num_tokens + is_token, num_problems + (problem is not None)
        if events.startswith(b"data:") and end == events.find(b"\n") + 2 and b"\\" not in data and not problem:
            assert is_token == (b'"error"' not in data), (seed, number, events)
    assert min(num_tokens, num_problems) > 200, (num_tokens, num_problems)


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        (b'data: {"choices":[{"text":"a"}]}\n\n', True),
        (b'data:{"choices":[{"text":"{\\"error\\": 1"}]} \n\n', True),
        (b'data: {"choices":[{"error":1}]}\n\n', True),
        (b'data: {"error":null,"choices":[]}\n\n', False),
        (b'data: {"err\\u006fr":{}}\n\n', False),
        (b'data: {"meta_info":{"finish_reason":{"type":"abort"}}}\n\n', False),
        (b'data: {"choices":[]}\r\n\r\n', False),
        (b"data: [DONE]\n\n", False),
        (b"data: {\n\n", False),
        (b"data:\n\n", False),
        (b"data: " + b"[" * 100_000 + b"\n\n", False),
    ],
)
def test_what_is_a_token_for_certain(event: bytes, wanted: bool) -> None:
    assert first_data_event(event) == (0, len(event), wanted)


def test_no_event_has_data() -> None:
    for events in (b"", b": a comment\n\n", b"data: {}\n", b"data: {}\r\n", b"xdata: {}\n\n", *NO_DATA):
        assert first_data_event(events) is None, events
