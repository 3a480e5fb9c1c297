"""Plain heads: what is read natively is what llhttp reads, and what llhttp refuses is never taken."""

from __future__ import annotations

import random

import httptools
import pytest

from pdlink._http import fields, whole_answer

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_a_whole_answer_is_read_in_one_call() -> None:
    assert whole_answer(OK) == (200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"2")], b"{}")


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


def test_fields_are_named_in_lower_case_and_come_once() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nAccept:  a b \t\r\n\r\nbody"
    start, end = head.index(b"\r\n") + 2, head.index(b"\r\n\r\n") + 4
    assert fields(head, start, end) == {"host": "x", "x-empty": "", "accept": "a b"}
    assert fields(head.replace(b"X-Empty", b"hoST"), start, end - 3) is None
    assert fields(head, start, end - 1) is None
    with pytest.raises(IndexError):
        fields(head, 0, len(head) + 1)
