"""Marks and usage in events, streams that are kept packed, and the stages of a request."""

from __future__ import annotations

import random
import re

import pytest

from pdlink._http import (
    ABORT,
    ANYTHING,
    CACHED,
    DONE,
    ERROR,
    FAILED,
    FINISH,
    NAMED,
    PARAMS,
    Packed,
    marks_of,
    num_events,
    server_timing,
    usage_of,
)

ALL = ERROR | FINISH | CACHED | DONE | PARAMS | NAMED | ABORT | FAILED


def test_the_stages_of_a_request_are_written_in_ms_and_those_unknown_are_left_out() -> None:
    known = server_timing(0.0123, 0.00045678, 0.5, 0.25, 0.75, "total", 61.00004)
    assert known == (
        "queue;dur=12.3, placement;dur=0.457, prefill;dur=500.0, transfer;dur=250.0, decode;dur=750.0, "
        "total;dur=61000.0"
    )
    assert server_timing(0.0, 0.0, None, None, None, "ttft", -0.001) == (
        "queue;dur=0.0, placement;dur=0.000, ttft;dur=-1.0"
    )


@pytest.mark.parametrize("space", ["", " "])
def test_marks_are_fields_and_not_text(space: str) -> None:
    event = f'data: {{"choices":[{{"text":"word","finish_reason":{space}null}}]}}\n\n'
    found = {
        event: 0,
        event * 3: 0,
        event.replace("word", '\\"finish_reason\\":1 {\\"error\\": 1 [DONE]'): 0,
        event + event.replace("null", '"stop"') + event: FINISH,
        event + f'data: {{"error":{space}{{}}}}\n\n': ERROR,
        f'{{"prompt_tokens_details":{space}null}}': 0,
        f'{{"completion_tokens_details":{space}null,"prompt_tokens_details":{space}{{"cached_tokens":4}}}}': CACHED,
        f'{{"cache_read_input_tokens":{space}4}}': CACHED,
        event + "data: [DONE]\n\n": DONE,
        "data: [DONE]\n\n" + event: 0,
        "": 0,
        f'"finish_reason":{space}': FINISH,
        f'{{"kv_transfer_params":{space}null}}': 0,
        f'{{"kv_transfer_params":{space}{{"a":1}}}}': PARAMS,
        f"event:{space}response.created\ndata: {{}}\n\n": 0,
        "event: response.completed\ndata: {}\n\n": NAMED,
        event + "event: message_stop\r\ndata: {}\r\n\r\n": NAMED,
        "event: error.of.another.kind\n\n": 0,
        'data: {"text":"event: error"}\n\n': 0,
        f'{{"finish_reason":{space}{{"type":{space}"abort"}}}}': FINISH | ABORT,
    }
    for text, marks in found.items():
        assert marks_of(text.encode(), ALL) == marks, text
        assert marks_of(text.encode(), ANYTHING) == ANYTHING
        for mark in (ERROR, FINISH, CACHED, DONE, PARAMS, NAMED, ABORT):
            assert marks_of(text.encode(), mark) == marks & mark


def _has_marks(events: bytes) -> int:
    """As `marks_of` of ALL, written with regular expressions."""
    found = ERROR * (b'{"error"' in events) | ABORT * (b'"abort"' in events)
    found |= DONE * events[-16:].rstrip(b" \t\r\n").endswith(b"[DONE]")
    found |= FINISH * bool(re.search(rb'"finish_reason": ?(?!null)(?! null)', events))
    found |= FAILED * bool(re.search(rb'"finish_reason": ?"error"', events))
    found |= CACHED * bool(re.search(rb't_tokens_details": ?\{|"cache_read_input_tokens":', events))
    found |= PARAMS * bool(re.search(rb'"kv_transfer_params": ?\{', events))
    names = (
        rb"(?m)^event: (response\.completed|response\.incomplete|response\.failed|message_stop|error)(?=[\r\n]|\Z)"
    )
    return found | NAMED * bool(re.search(names, events))


@pytest.mark.parametrize("seed", range(4))
def test_marks_are_found_wherever_they_stand(seed: int) -> None:
    rng, seen = random.Random(seed), 0
    words = [
        b'"finish_reason":',
        b"null",
        b'{"error"',
        b'"abort"',
        b'"prompt_tokens_details":',
        b"{",
        b" ",
        b'"',
        b":",
    ]
    words += [b'"cache_read_input_tokens":', b'"kv_transfer_params":', b"[DONE]", b"event: error", b"\n", b"\\", b"x"]
    words += [b"event: message_stop", b"error", b"r", b"finish_reason", b"t_tokens_details", b'"error"', b",", b"}"]
    for number in range(20_000):
        events = b"".join(rng.choices(words, k=rng.randrange(9)))
        events = b"y" * rng.randrange(20) + events + rng.choice([b"", b"\n\n", b"z" * 30])
        assert marks_of(events, ALL) == _has_marks(events), (seed, number, events)
        wanted = rng.randrange(512)
        assert marks_of(events, wanted) == (_has_marks(events) & wanted) | (wanted & ANYTHING)
        seen |= marks_of(events, ALL)
    assert seen == ALL


@pytest.mark.parametrize("seed", range(2))
def test_last_usage_counts_wherever_it_stands(seed: int) -> None:
    rng = random.Random(seed)
    words = [
        b'"prompt_tokens":',
        b'"completion_tokens":',
        b" ",
        b"7",
        b"12",
        b"null",
        b"-1",
        b'"',
        b"{",
        b",",
        b"123456789",
    ]
    for _ in range(20_000):
        events = b"x" * rng.randrange(20) + b"".join(rng.choices(words, k=rng.randrange(12)))
        found = [
            re.findall(rb'"%b": ?(\d{1,12})(?!\d)' % name, events)
            for name in (b"prompt_tokens", b"completion_tokens")
        ]
        assert usage_of(events) == tuple(int(each[-1]) if each else 0 for each in found), events


EVENT = (
    b'data: {"id":"cmpl-8cb869b510438e72","object":"text_completion","created":1795647678,"model":"m","choices":['
    b'{"index":0,"text":" %b","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[%d]}]}\n\n'
)


@pytest.mark.parametrize("seed", range(4))
def test_packed_events_come_back_byte_for_byte_however_they_were_cut(seed: int) -> None:
    rng, packed = random.Random(seed), Packed()
    for number in range(300):
        events = [
            EVENT % (rng.choice([b"a", b'\\"', b"\\\\", b"long " * 99, b""]), rng.randrange(10**6)) for _ in range(9)
        ]
        events += [b": comment\n\n", b"data: [DONE]\n\n", b"\n\n\n", b'"', rng.randbytes(rng.randrange(300))]
        rng.shuffle(events)
        data = b"".join(events)
        cuts = sorted(rng.choices(range(len(data)), k=rng.randrange(6)))
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            packed.add(data[begin:end])
        assert packed.take() == data, (seed, number)
        assert packed.take() == b""
        assert num_events(data) == data.count(b"\n\n"), (seed, number)


def test_packed_event_takes_its_text_and_its_token_alone() -> None:
    rng, packed = random.Random(1), Packed()
    for _ in range(1000):
        packed.add(EVENT % (b"word"[: rng.randrange(5)], rng.randrange(100_000)))
    assert packed.nbytes < 40_000  # twice what is used: 20 bytes of 230
