"""Marks and usage in events, streams that are kept packed, and the stages of a request."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

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


def _tokens(document: Any) -> tuple[int, int] | None:
    """As `usage_in`, of what `json` has read."""
    if not isinstance(document, dict):
        return None
    found = document.get("usage")
    if not isinstance(found, dict):
        found = None if "index" in document else document.get("meta_info")
    if not isinstance(found, dict):
        return None
    one, other = (
        number if isinstance(number, int) and 0 <= number < 10**12 else 0
        for number in (found.get("prompt_tokens"), found.get("completion_tokens"))
    )
    return one, other


def _document(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """With a usage here and there."""
    found: dict[str, Any] = {}
    for name in rng.sample(["usage", "meta_info", "index", "x", "choices", "prompt_tokens"], rng.randrange(5)):
        kind = rng.randrange(5 if depth < 3 else 3)
        found[name] = rng.choice([None, 7, -1, 10**12, 1.5, "a", '"usage":{"prompt_tokens":3}\n', "\\", [], {}])
        if kind == 1 and name in ("usage", "meta_info"):
            found[name] = {"prompt_tokens": rng.choice([1, 2, 10**12 - 1]), "completion_tokens": rng.randrange(3)}
        elif kind == 3:
            found[name] = _document(rng, depth + 1)
        elif kind == 4:
            found[name] = [_document(rng, depth + 1), 1]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_last_usage_that_is_an_answers_or_an_events_own_counts(seed: int) -> None:
    rng, counts = random.Random(seed), [0, 0, 0]
    for number in range(5000):
        separators = rng.choice([(",", ":"), (", ", ": ")])
        documents = [_document(rng) for _ in range(rng.randrange(1, 5))]
        texts = [json.dumps(each, separators=separators) for each in documents]
        kind = rng.randrange(3)
        if kind == 0:
            data, wanted = rng.choice(["", "\r\n "]) + texts[0] + rng.choice(["", "\n"]), _tokens(documents[0])
        elif kind == 1:
            data, wanted = f"[{','.join(texts)}]", None
        else:
            end = rng.choice(["\n", "\r\n"])
            lines = [f"data:{rng.choice(['', ' '])}{text}{end * 2}" for text in texts]
            lines += rng.choice(
                [[], [f"data: [DONE]{end * 2}"], [f": ping{end * 2}", f"event: x{end}data: {{}}{end * 2}"]]
            )
            data = "".join(lines)
            wanted = next((found for each in reversed(documents) if (found := _tokens(each)) is not None), None)
        assert usage_of(data.encode()) == (wanted or (0, 0)), (seed, number, data)
        counts[kind] += wanted is not None and wanted != (0, 0)
    assert min(counts[0], counts[2]) > 100, counts


@pytest.mark.parametrize("space", ["", " "])
def test_usage_is_found_by_either_pair_of_names(space: str) -> None:
    def said(document: str) -> tuple[int, int]:
        data = document.replace(":", ":" + space)
        found = usage_of(data.encode())
        assert found == usage_of(f"event: x\ndata: {data}\n\nevent: y\ndata: {{}}\n\n".encode())
        return found

    usage = '"usage":{"input_tokens":5,"x":{"input_tokens":9},"output_tokens":7}'
    assert said("{" + usage + "}") == said('{"type":"message_delta","delta":{"usage":{}},' + usage + "}") == (5, 7)
    assert said('{"response":{"id":"a",' + usage + ',"x":1},"sequence_number":3}') == (5, 7)
    assert said('{"sequence_number":3,"response":{' + usage + "}}") == (5, 7)
    assert said('{"x":{' + usage + "}}") == said('{"response":{"x":{' + usage + "}}}") == (0, 0)
    assert said('{"usage":{"input_tokens":3,"cache_read_input_tokens":2,"output_tokens":7}}') == (5, 7)
    assert said('{"usage":{"cache_creation_input_tokens":9,"input_tokens":3,"output_tokens":7}}') == (12, 7)
    assert said('{"usage":{"prompt_tokens":3,"cache_read_input_tokens":2,"completion_tokens":7}}') == (3, 7)


def test_the_last_usage_of_an_object_counts_and_no_name_that_ends_so() -> None:
    assert usage_of(b'{"usage":{"prompt_tokens":5},"usage":null}') == (0, 0)
    assert usage_of(b'{"usage":{"prompt_tokens":5},"usage":{"prompt_tokens":6}}') == (6, 0)
    assert usage_of(b'{"choices":[],"x\\"usage":{"prompt_tokens":5}}') == (0, 0)


@pytest.mark.parametrize("name", ["usage", "meta_info"])
def test_what_has_no_usage_of_its_own_is_gone_through_once(name: str) -> None:
    """A model's arguments of a call are fields of an answer of /v1/messages."""
    inner = ",".join([f'"{name}":{{"prompt_tokens":1}}'] * 20_000)
    for document in (f'{{"input":{{{inner}}}}}', f'{{"input":{{{inner}}}, "usage":{{"prompt_tokens":7}},"x":1}}'):
        begin_s = time.process_time()
        wanted = 7 if ',"x"' in document else 0
        assert usage_of(document.encode()) == usage_of(f"data: {document}\n\n".encode()) == (wanted, 0)
        assert time.process_time() - begin_s < 1  # some ms; a second and more if each were gone through
    assert usage_of(b"{" + b'"a":{' * 100_000) == usage_of(b'"usage":{') == usage_of(b'data:"usage":{') == (0, 0)


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
