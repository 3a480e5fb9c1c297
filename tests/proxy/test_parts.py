"""The small pure parts: event boundaries, request and error shapes."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from pdlink import errors
from pdlink._http import CACHED, DONE, ERROR, FINISH, NAMED, PARAMS, first_data_event, marks_of
from pdlink.api.errors import error_code, stream_error
from pdlink.api.fields import BadField
from pdlink.api.legs import PrefillAddress
from pdlink.api.openai import CHAT, COMPLETIONS, parse
from pdlink.api.sse import EventBuffer, EventTooLong, is_done, problem_of
from pdlink_proxy.dialects import TransferTerms
from pdlink_proxy.dialects.own import PDLINK

ALL = ERROR | FINISH | CACHED | DONE | PARAMS | NAMED


@pytest.mark.parametrize("seed", range(20))
def test_events_come_out_whole_and_nothing_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    events = [b"data: %d" % i + rng.choice([b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\ndata: x\n\n"]) for i in range(20)]
    stream, out, buffer = b"".join(events), b"", EventBuffer()
    ends = {sum(map(len, events[:i])) for i in range(len(events) + 1)}
    while stream:
        cut = rng.randint(1, 12)
        buffer.feed(stream[:cut])
        stream = stream[cut:]
        out += buffer.take_whole_events()
        assert len(out) in ends
    assert out + buffer.take_rest() == b"".join(events)


def test_the_first_data_event_is_found_behind_comments() -> None:
    buffer = EventBuffer()
    assert first_data_event(buffer.pass_whole_events(b": hi\n\nevent: ping\n\n\n\nid: 1\nda")) is None
    events = buffer.pass_whole_events(b"ta: {}\n\ndata: 2\r\n\r\nrest")
    assert first_data_event(events) == (0, len(b"id: 1\ndata: {}\n\n"), False)
    assert first_data_event(b": hi\n\n" + events) == (6, 6 + len(b"id: 1\ndata: {}\n\n"), False)
    assert buffer.take_rest() == b"rest"


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.api.sse.MAX_EVENT_NBYTES", 10)
    buffer = EventBuffer()
    buffer.feed(b"data: " + b"x" * 10)
    with pytest.raises(EventTooLong):
        buffer.take_whole_events()


@pytest.mark.parametrize(
    ("event", "fine"),
    [
        (b'data: {"choices":[]}\n\n', True),
        (b'data:{"error":null,"choices":[]}\r\n\r\n', True),
        (b'id: 1\ndata: {"choices":[{"text":"{\\"error\\""}]}\n\n', True),
        (b'data: {"error":{"message":"m"}}\n\n', False),
        (b"data: [DONE]\n\n", False),
        (b"data: nonsense\n\n", False),
        (b"data: " + b"[" * 100_000 + b"\n\n", False),
    ],
)
def test_a_first_event_that_is_no_token_is_a_problem(event: bytes, fine: bool) -> None:
    assert (problem_of(event) is None) == fine
    begin, end, is_token = first_data_event(event) or (0, 0, True)
    assert (begin, end) == (0, len(event))
    assert is_token <= fine


def test_a_workers_error_in_place_of_a_token_is_passed_on_whole() -> None:
    document = b'{"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}'
    assert problem_of(b"data: " + document + b"\n\n") == ("the stream began with an error", document)


def test_marks_of_the_end_and_of_errors_are_not_found_in_text() -> None:
    text = b'data: {"text":"data: [DONE]\\n\\n {\\"error\\": 1}"}\n\n'
    assert not is_done(text)
    assert not marks_of(text, ALL)
    assert is_done(text + b"data: [DONE]\n\n")
    assert is_done(b"data:[DONE]\r\n\r\n")
    assert marks_of(text + stream_error("m", code="c"), ALL) == ERROR | DONE


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, b"", None),
        (COMPLETIONS, b"{", None),
        (COMPLETIONS, b"[1]", None),
        (COMPLETIONS, b'"text"', None),
        (COMPLETIONS, b'{"a":' * 50_000, None),
        (COMPLETIONS, b'{"prompt":"x"}', "model"),
        (COMPLETIONS, b'{"model":null,"prompt":"x"}', "model"),
        (COMPLETIONS, b'{"model":1,"prompt":"x"}', "model"),
        (COMPLETIONS, b'{"model":"m"}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":1}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":{}}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":"x","stream":"yes"}', "stream"),
        (COMPLETIONS, b'{"model":"m","prompt":"x","seed":"s"}', "seed"),
        (COMPLETIONS, b'{"model":"m","prompt":"x","n":[2]}', "n"),
        (COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":"x"}', "max_tokens"),
        (CHAT, b'{"model":"m","prompt":"x"}', "messages"),
        (CHAT, b'{"model":"m","messages":"x"}', "messages"),
    ],
)
def test_what_no_worker_could_serve_is_named(path: str, body: bytes, param: str | None) -> None:
    with pytest.raises(BadField) as raised:
        parse(path, body)
    assert raised.value.param == param
    assert raised.value.http_status == 400


@pytest.mark.parametrize("prompt", ['"text"', "[1, 2]", '["a", "b"]', "[[1], [2]]"])
def test_every_shape_of_prompt_is_accepted_and_untouched(prompt: str) -> None:
    body = f'{{ "model" : "m", "stream": null, "prompt" :  {prompt}, "x": 1.0000000000000000001 }}'.encode()
    call = parse(COMPLETIONS, body)
    assert (call.model, call.streaming, call.seed) == ("m", False, None)
    assert prompt.encode() in call.body
    assert b"1.0000000000000000001" in call.body, "numbers are not read and written again"


def test_leg_bodies_are_the_clients_body_and_the_parameters() -> None:
    call = parse(CHAT, b'{"model":"m","messages":[],"stream":true,"kv_transfer_params":{"a":1}}')
    attempt = TransferTerms(transfer_id="xfer-1", created=7, seed=9, prefill=PrefillAddress("tcp://h:1", "n"))
    bodies = [json.loads(body) for body in PDLINK.legs(call, attempt)]
    common = {"transfer_id": "xfer-1", "seed": 9, "created": 7}
    client = {"model": "m", "messages": [], "stream": True}
    assert bodies[0] == {**client, "kv_transfer_params": {**common, "leg": "prefill"}}
    decode = {**common, "leg": "decode", "prefill": {"name": "n", "control": "tcp://h:1"}}
    assert bodies[1] == {**client, "kv_transfer_params": decode}


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"error":"x"}', b'{"error":{"code":[1]}}', b"\xff"])
def test_any_error_document_has_a_code(body: bytes) -> None:
    assert error_code(body) == "internal_error"
    assert error_code(msgspec.json.encode({"error": {"code": "transfer_failed"}})) == "transfer_failed"


def test_codes_of_workers_that_stop_or_are_full_reach_the_client() -> None:
    for error in (errors.Draining, errors.Overloaded, errors.PoolExhausted):
        assert error_code(msgspec.json.encode({"error": {"code": error.code}})) == error.code


def test_searching_an_event_takes_time_for_its_length_and_not_for_its_pieces() -> None:
    """Searched from its beginning for every piece, 16 MB in pieces of 4 KB took seconds of every stream's time."""
    searched = 0

    class Counting(EventBuffer):
        def take(self) -> None:
            nonlocal searched
            searched += len(self._held) - self._searched
            assert not self.take_whole_events()

    buffer, piece, num_pieces = Counting(), b"x" * 4096, 1024
    for _ in range(num_pieces):
        buffer.feed(piece)
        buffer.take()
    assert searched < 2 * len(piece) * num_pieces


@pytest.mark.parametrize("boundary", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"])
def test_a_boundary_in_pieces_is_found(boundary: bytes) -> None:
    stream = b"data: 1" + boundary + b"data: 22" + boundary + b"da"
    for size in range(1, 8):
        buffer, out = EventBuffer(), b""
        for start in range(0, len(stream), size):
            out += buffer.pass_whole_events(stream[start : start + size])
        assert out + buffer.take_rest() == stream
        assert out == stream[:-2]
        assert first_data_event(out) == (0, len(b"data: 1" + boundary), False)
