"""Plain heads: what is read natively is what llhttp reads, and what llhttp refuses is never taken."""

from __future__ import annotations

import random

import httptools
import pytest

from pdlink._http import CACHED, DONE, ERROR, FINISH, marks_of, plain_request, server_timing, whole_answer

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_a_whole_answer_is_read_in_one_call() -> None:
    assert whole_answer(OK) == (200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"2")], b"{}", True)


@pytest.mark.parametrize(
    "answer",
    [
        OK[:-1],
        OK + b"H",
        OK + OK,
        OK.replace(b"1.1", b"1.0"),
        OK.replace(b"200 OK", b"100 Continue"),
        OK.replace(b"200 OK", b"204 No Content"),
        OK.replace(b"200 OK", b"+20 OK"),
        OK.replace(b"200 OK", b"2000 OK"),
        OK.replace(b"200 OK", b"200"),
        OK.replace(b"Content-Length: 2\r\n", b""),
        OK.replace(b"Length: 2", b"Length: 2\r\nContent-Length: 2"),
        OK.replace(b"Length: 2", b"Length: +2"),
        OK.replace(b"Length: 2", b"Length: 0000000000002"),
        OK.replace(b"Length: 2", b"Length: 2\r\nConnection: close"),
        OK.replace(b"Length: 2", b"Length: 2\r\nTransfer-Encoding: chunked"),
        OK.replace(b"Length: 2", b"Length: 2\r\nUpgrade: h2c"),
        OK.replace(b"Content-Type:", b"Content-Type :"),
        OK.replace(b"json\r\n", b"json\n"),
        OK.replace(b"json\r\n", b"json\r\n folded\r\n"),
        OK.replace(b"json", b"js\xc3\xb6n"),
        b"",
        b"HTTP/1.1 200 \r\n",
        b"HTTP/1.1 20",
    ],
)
def test_what_is_not_plain_is_left_to_a_whole_parser(answer: bytes) -> None:
    assert whole_answer(answer) is None


@pytest.mark.parametrize(
    ("line", "is_json"),
    [
        (b"content-TYPE:application/json", True),
        (b"Content-Type: application/json; charset=utf-8", False),
        (b"Content-Type: Application/JSON", False),
        (b"Content-Type: text/html\r\nContent-Type: application/json", False),
        (b"X-Type: application/json", False),
    ],
)
def test_an_answer_is_json_if_its_first_type_says_just_that(line: bytes, is_json: bool) -> None:
    found = whole_answer(OK.replace(b"Content-Type: application/json", line))
    assert found is not None
    assert found[3] is is_json


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_are_taken_read_as_llhttp_reads_them(seed: int) -> None:
    rng, taken = random.Random(seed), 0
    lines = [b"Content-Length: 3", b"content-length:3 ", b"Content-Length: 4", b"Connection: Keep-Alive", b"X-A:b"]
    lines += [b"X-A: b", b"X-Odd: \x01", b"X-Empty:", b" folded", b"Connection: close", b"Transfer-Encoding: chunked"]
    for number in range(5000):
        status = rng.choice([b"200 OK", b"200 ", b"502 Bad", b"404 ", b"304 Not", b"99 x", b"1000 x"])
        head = b"\r\n".join([b"HTTP/1.1 " + status, *rng.sample(lines, rng.randrange(1, 5))])
        data = head + b"\r\n\r\n" + b"abc"[: rng.choice([3, 3, 3, 2])]
        if rng.random() < 0.3:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        found = whole_answer(data)
        if found is None:
            continue
        taken += 1
        heard = _Heard()
        heard.parser.feed_data(data)
        told = (heard.parser.get_status_code(), [(name, value.rstrip(b" \t")) for name, value in heard.pairs])
        assert told == found[:2], (seed, number, data)
        assert b"".join(heard.parts) == found[2], (seed, number, data)
        assert heard.ended, (seed, number, data)
        assert heard.keeps, (seed, number, data)
    assert taken > 100, f"seed {seed}"


class _Heard:
    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.ended = self.keeps = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name, value))

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.ended, self.keeps = True, self.parser.should_keep_alive()


def test_a_plain_request_has_each_field_once_in_lower_case() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nAccept:  a b \t\r\nContent-length: 04\r\n\r\nbody"
    start, end = head.index(b"\r\n") + 2, head.index(b"\r\n\r\n") + 4
    found = {"host": "x", "x-empty": "", "accept": "a b", "content-length": "04"}
    assert plain_request(head, start, end) == (found, 4, True)
    assert plain_request(head.replace(b"X-Empty", b"hoST"), start, end - 3) is None
    assert plain_request(head, start, end - 1) is None
    with pytest.raises(IndexError):
        plain_request(head, 0, len(head) + 1)


@pytest.mark.parametrize(
    ("line", "keep"),
    [
        (b"X-A: b", True),
        (b"Connection: Keep-Alive", True),
        (b"Connection: close", False),
        (b"Connection: upgrade", None),
        (b"Transfer-Encoding: chunked", None),
        (b"Content-Encoding: gzip", None),
        (b"Expect: 100-continue", None),
        (b"Upgrade: h2c", None),
        (b"TE: trailers", None),
        (b"Trailer: x", None),
        (b"Content-Length: 4", None),
        (b"X-Long: " + b"v" * 16384, None),
    ],
)
def test_what_changes_how_a_request_is_read_is_left_to_a_whole_parser(line: bytes, keep: bool | None) -> None:
    head = b"Host: x\r\nContent-Length: 4\r\n%b\r\n\r\n" % line
    found = plain_request(head, 0, len(head))
    assert (None if found is None else found[2]) == keep


@pytest.mark.parametrize("length", [b"", b"-1", b"+1", b"0x1", b"1 1", b"1" * 13])
def test_a_length_that_is_no_number_is_left_to_a_whole_parser(length: bytes) -> None:
    head = b"Host: x\r\nContent-Length: %b\r\n\r\n" % length
    assert plain_request(head, 0, len(head)) is None
    assert plain_request(b"Content-Length: 1\r\n\r\n", 0, 21) is None, "no host"


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
    }
    for text, marks in found.items():
        assert marks_of(text.encode()) == marks, text
