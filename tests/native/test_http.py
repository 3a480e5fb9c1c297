"""Plain heads: what is read natively is what llhttp reads, and what llhttp refuses is never taken."""

from __future__ import annotations

import random
import re

import httptools
import pytest

from pdlink._http import (
    ABORT,
    ANYTHING,
    BAD,
    BETWEEN,
    CACHED,
    DONE,
    END,
    ERROR,
    FAILED,
    FINISH,
    MORE,
    NAMED,
    PARAMS,
    Answers,
    Packed,
    marks_of,
    num_events,
    plain_request,
    server_timing,
    usage_of,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


ALL = ERROR | FINISH | CACHED | DONE | PARAMS | NAMED | ABORT | FAILED
HEAD = (200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"2")], True)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"3\r\nabc\r\n0A;x=y\r\n0123456789\r\n00\r\nX-Trailer: 1\r\n\r\n"


def test_a_whole_answer_is_read_in_one_call_or_in_two() -> None:
    answers = Answers()
    assert answers.feed(OK) == (HEAD, b"{}", END)
    assert answers.feed(OK[:-2]) == (HEAD, b"", 0)
    assert answers.feed(b"{}") == (None, b"{}", END)
    assert answers.feed(OK + b"more") == (HEAD, b"{}", END | MORE)
    found = answers.feed(OK[:-2].replace(b"Length: 2", b"Length: 0"))
    assert found is not None
    assert found[1:] == (b"", END)


def test_an_answer_in_chunks_is_read_wherever_it_is_cut() -> None:
    whole = CHUNKED + CHUNKS
    for at in range(len(CHUNKED), len(whole)):
        for then in range(at, len(whole)):
            answers, body, ends = Answers(), b"", []
            for piece in (whole[:at], whole[at:then], whole[then:]):
                found = answers.feed(piece) if piece else (None, b"", 0)
                assert found is not None
                body += found[1]
                ends.append(found[2] & (END | BAD | MORE))
            assert body == b"abc0123456789"
            assert ends == [0, 0, END]
            assert answers.feed(OK) == (HEAD, b"{}", END), "the next answer on this connection"


def test_the_place_between_two_chunks_is_told() -> None:
    answers = Answers()
    assert answers.feed(CHUNKED + b"3\r\nabc\r\n") == ((200, [(b"Transfer-Encoding", b"chunked")], False), b"abc", 2)
    assert BETWEEN == 2
    assert answers.feed(b"3\r\nabc\r\n3") == (None, b"abc", 0)
    assert answers.feed(b"\r\nab") == (None, b"ab", 0)
    assert answers.feed(b"c\r") == (None, b"c", 0)
    assert answers.feed(b"\n") == (None, b"", BETWEEN)


@pytest.mark.parametrize(
    "chunks",
    [
        b"xyz\r\n",
        b"3 \r\nabc\r\n",
        b"3\nabc",
        b"3\r\nabcd",
        b"\r\n",
        b"-1\r\n",
        b"1000000000000000\r\n",
        b"1;" + b"x" * 20_000,
        b"0\r\n" + b"x" * 20_000,
        b"0\r\n\rX",
    ],
)
def test_chunks_that_are_no_http_end_the_connection(chunks: bytes) -> None:
    for split in (0, len(chunks) // 2):
        answers = Answers()
        found = [answers.feed(CHUNKED), answers.feed(chunks[:split]) if split else None, answers.feed(chunks[split:])]
        assert any(each is not None and each[2] & BAD for each in found)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_read_as_llhttp_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    both = 0
    for number in range(3000):
        data = CHUNKED + b"".join(
            b"%x%b\r\n%b\r\n" % (size, rng.choice([b"", b"", b";x=y"]), b"d" * size)
            for size in (rng.randrange(1, 40) for _ in range(rng.randrange(4)))
        )
        data += b"0\r\n" + rng.choice([b"", b"", b"X: y\r\n"]) + b"\r\n"
        if rng.random() < 0.5:
            at = rng.randrange(len(CHUNKED), len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        found, heard = Answers().feed(data), _Heard()
        assert found is not None
        try:
            heard.parser.feed_data(data)
        except httptools.HttpParserError:
            continue  # ours asks no more of an extension or a trailer than where it ends
        assert found[2] & END == heard.ended * END, (seed, number, data)
        assert b"".join(heard.parts) == found[1], (seed, number, data)
        both += heard.ended
    assert both > 1000


@pytest.mark.parametrize(
    "answer",
    [
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
        OK.replace(b"Content-Length: 2", b"Transfer-Encoding: gzip, chunked"),
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
    assert Answers().feed(answer) is None


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
    found = Answers().feed(OK.replace(b"Content-Type: application/json", line))
    assert found is not None
    assert found[0] is not None
    assert found[0][2] is is_json


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
        found = Answers().feed(data)
        if found is None or found[0] is None or found[2] != END:
            continue
        taken += 1
        heard = _Heard()
        heard.parser.feed_data(data)
        told = (heard.parser.get_status_code(), [(name, value.rstrip(b" \t")) for name, value in heard.pairs])
        assert told == found[0][:2], (seed, number, data)
        assert b"".join(heard.parts) == found[1], (seed, number, data)
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
    found = ERROR * (b'{"error"' in events) | ABORT * (b'"abort"' in events) | DONE * (b"[DONE]" in events[-16:])
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
        events = b"y" * rng.randrange(20) + events + b"z" * rng.choice([0, 0, 30])
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
            re.findall(rb'"%b": ?(\d{1,12})' % name, events) for name in (b"prompt_tokens", b"completion_tokens")
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
