"""Connections that are read natively: what their owners hear does not depend on where the network cuts it."""

from __future__ import annotations

import gc
import random
import select
import socket
import weakref
from typing import Any

import httptools
import pytest

from pdlink._http import BAD, END, Exchange, Headers, Requests, SocketPoller

HEAD = b"HTTP/1.1 200 OK\r\ndate: Thu, 26 Nov 2026 18:35:13 GMT\r\nserver: uvicorn\r\n"
WHOLE = HEAD + b"content-length: 17\r\ncontent-type: application/json\r\n\r\n" + b'{"choices": [{}]}'
STREAM = (
    HEAD
    + b"transfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    + b"B\r\ndata: {1}\n\n\r\n0c;x=y\r\ndata: {22}\n\n\r\n00\r\nX-Trailer: 1\r\n\r\n"
)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
START = b"POST /v1/completions HTTP/1.1\r\n"
ASKED = START + b"Host: x\r\nX-Name: \t a b \r\nX-Empty:\r\nContent-length: 04\r\n\r\nbody"
PATHS = {START: "completions"}


class Heard:
    """A listener, and whoever a connection is freed for."""

    def __init__(self, most_nbytes: int = 1 << 20) -> None:
        self.most_nbytes = most_nbytes
        self.told: list[tuple[Any, ...]] = []
        self.body = b""
        self.status, self.headers = 0, Headers([])

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.told.append(("head", status, headers.get("Server")))

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self, data: bytes) -> None:
        self.body += data
        self.told.append(("end", self.body))

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.told.append(("whole", status, headers.get("Server"), body))

    def freed(self, exchange: Worker) -> None:
        assert exchange.listener is None
        self.told.append(("freed",))


class Worker(Exchange):
    """A connection, and what is seldom needed."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []
        self.rest = b""

    def abort(self) -> None:
        self.close()
        self.told.append(("abort",))

    def broke(self, error: int) -> None:
        self.told.append(("broke", error))

    def send_rest(self, data: bytes) -> None:
        self.rest += data

    def unusual(self, data: bytes) -> tuple[None, bytes, int]:
        self.told.append(("unusual", data))
        return None, data, END if data.endswith(b"end") else BAD

    def usual(self) -> None:
        self.told.append(("usual",))

    def bad(self, _most_nbytes: int) -> None:
        self.told.append(("bad",))
        self.end(0)

    def too_long(self, most_nbytes: int) -> None:
        self.told.append(("too long", most_nbytes))
        self.end(0)


class Client(Requests):
    """A client's connection, and what is taken of it."""

    def __init__(self, *, serves: bool = True, admits: bool = True) -> None:
        super().__init__(PATHS)
        self.serves, self.let_in = serves, admits
        self.taken: list[tuple[str, dict[str, str], bytes, bool]] = []
        self.handed = b""
        self.paused = 0

    def take(self, path: str, fields: dict[str, str], body: bytes, keep: bool) -> bool:
        assert self.busy
        self.taken.append((path, fields, body, keep))
        return self.serves

    def admits(self, _fields: dict[str, str]) -> bool:
        return self.let_in

    def hand_over(self, data: bytes) -> None:
        assert not self.busy
        self.handed += data

    def pause(self) -> None:
        self.paused += 1


def asked(most_nbytes: int = 1 << 20) -> tuple[Worker, Heard]:
    worker, heard = Worker(), Heard(most_nbytes)
    worker.ask(b"POST / HTTP/1.1\r\n", b"", b"{}", heard, heard)
    assert worker.rest == b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", "it has no socket"
    return worker, heard


def fed(answer: bytes, *cuts: int, most_nbytes: int = 1 << 20) -> tuple[Worker, Heard]:
    worker, heard = asked(most_nbytes)
    for start, end in zip((0, *cuts), (*cuts, len(answer)), strict=True):
        if start < end:
            worker.feed(answer[start:end])
    return worker, heard


def test_a_whole_answer_is_told_once_wherever_its_body_is_cut() -> None:
    head_nbytes = WHOLE.index(b"\r\n\r\n") + 4
    for first in range(head_nbytes, len(WHOLE) + 1):
        for second in range(first, len(WHOLE) + 1):
            worker, heard = fed(WHOLE, first, second)
            assert heard.told == [("freed",), ("whole", 200, "uvicorn", b'{"choices": [{}]}')]
            assert worker.keeps
            assert worker.told == []


def test_a_stream_is_told_in_parts_wherever_it_is_cut() -> None:
    head_nbytes = STREAM.index(b"\r\n\r\n") + 4
    body = b"data: {1}\n\ndata: {22}\n\n"
    for first in range(head_nbytes, len(STREAM) + 1):
        for second in range(first, len(STREAM) + 1):
            worker, heard = fed(STREAM, first, second, most_nbytes=0)
            assert heard.told == [("head", 200, "uvicorn"), ("freed",), ("end", body)], (first, second)
            assert worker.keeps
            _, told = fed(STREAM, first, second)
            assert told.told == [("freed",), ("whole", 200, "uvicorn", body)], (first, second)
        again = Heard()
        worker.ask(b"", b"", b"", again, again)
        worker.feed(WHOLE)
        assert again.told[1:] == [("whole", 200, "uvicorn", b'{"choices": [{}]}')], "the next answer"


def test_an_answer_without_a_body_is_over_with_its_head() -> None:
    worker, heard = fed(HEAD + b"Content-Length: 0\r\n\r\n", most_nbytes=0)
    assert heard.told == [("head", 200, "uvicorn"), ("freed",), ("end", b"")]
    assert worker.keeps


def test_a_connection_on_which_more_came_than_the_answer_is_not_used_again() -> None:
    for answer in (WHOLE, STREAM):
        worker, heard = fed(answer + b"more")
        assert heard.told[1][0] == "whole"
        assert not worker.keeps


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
def test_chunks_that_are_no_http_lose_the_answer(chunks: bytes) -> None:
    for cut in (0, len(chunks) // 2):
        worker, heard = fed(CHUNKED + chunks, len(CHUNKED), len(CHUNKED) + cut, most_nbytes=0)
        assert worker.told[0] == ("bad",)
        assert heard.told == [("head", 200, None), ("freed",)]


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
        (_, heard), other = fed(data, most_nbytes=0), Parsed()
        try:
            other.parser.feed_data(data)
        except httptools.HttpParserError:
            continue  # ours asks no more of an extension or a trailer than where it ends
        assert (heard.told[-1][0] == "end") == other.ended, (seed, number, data)
        assert heard.body == other.body, (seed, number, data)
        both += other.ended
    assert both > 1000


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b"200 OK", b"100 Continue"),
        PLAIN.replace(b"200 OK", b"204 No Content"),
        PLAIN.replace(b"200 OK", b"+20 OK"),
        PLAIN.replace(b"200 OK", b"2000 OK"),
        PLAIN.replace(b"200 OK", b"200"),
        PLAIN.replace(b"Content-Length: 2\r\n", b""),
        PLAIN.replace(b"Length: 2", b"Length: 2\r\nContent-Length: 2"),
        PLAIN.replace(b"Length: 2", b"Length: +2"),
        PLAIN.replace(b"Length: 2", b"Length: 0000000000002"),
        PLAIN.replace(b"Length: 2", b"Length: 2\r\nConnection: close"),
        PLAIN.replace(b"Length: 2", b"Length: 2\r\nTransfer-Encoding: chunked"),
        PLAIN.replace(b"Content-Length: 2", b"Transfer-Encoding: gzip, chunked"),
        PLAIN.replace(b"Length: 2", b"Length: 2\r\nUpgrade: h2c"),
        PLAIN.replace(b"Content-Type:", b"Content-Type :"),
        PLAIN.replace(b"json\r\n", b"json\n"),
        PLAIN.replace(b"json\r\n", b"json\r\n folded\r\n"),
        PLAIN.replace(b"json", b"js\xc3\xb6n"),
        b"HTTP/1.1 200 \r\n",
        b"HTTP/1.1 20",
    ],
)
def test_an_answer_that_is_not_plain_is_left_to_a_whole_parser(answer: bytes) -> None:
    worker, heard = fed(answer)
    assert worker.told[0] == ("unusual", answer)
    assert heard.told == [("freed",)]


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
        worker, heard = fed(data, most_nbytes=0)
        if worker.told or not worker.keeps or heard.told[-1][0] != "end":
            continue
        taken += 1
        other = Parsed()
        other.parser.feed_data(data)
        assert heard.status == other.parser.get_status_code(), (seed, number, data)
        first: dict[str, str] = {}
        for name, value in other.pairs:
            first.setdefault(name.lower(), value)
        assert dict(heard.headers) == {name: first[name.lower()] for name, _ in other.pairs}, (seed, number, data)
        assert heard.body == other.body, (seed, number, data)
        assert other.ended, (seed, number, data)
        assert other.keeps, (seed, number, data)
    assert taken > 100, f"seed {seed}"


class Parsed:
    """An answer as llhttp reads it."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []
        self.body = b""
        self.ended = self.keeps = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.decode(), value.decode().rstrip(" \t")))

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended, self.keeps = True, self.parser.should_keep_alive()


def test_an_answer_that_is_longer_than_its_listener_takes_is_lost() -> None:
    for cut in range(WHOLE.index(b"\r\n\r\n") + 4, len(WHOLE)):
        worker, heard = fed(WHOLE, cut, most_nbytes=16)
        assert worker.told[0] == ("too long", 16)
        assert heard.told == [("freed",)]


def test_what_is_not_plain_is_read_by_the_subclass_until_it_is_over() -> None:
    worker, heard = fed(HEAD[:20] + b"end", 20)
    assert worker.told == [("unusual", HEAD[:20]), ("bad",)] or worker.told[0] == ("unusual", HEAD[:20])
    worker, heard = asked(0)
    worker.feed(b"SSH-2.0 end")
    assert worker.told == [("unusual", b"SSH-2.0 end"), ("usual",)]
    assert heard.told == [("freed",), ("end", b"SSH-2.0 end")]


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    worker = Worker()
    worker.feed(WHOLE)
    assert worker.told == [("abort",)]
    assert not worker.keeps


def test_a_connection_and_its_listener_are_found_by_the_collector() -> None:
    worker, heard = asked()
    heard.worker = worker  # type: ignore[attr-defined]
    found = weakref.ref(heard)
    del worker, heard
    gc.collect()
    assert found() is None


def turned(poller: SocketPoller) -> None:
    """A turn, once there is something."""
    assert select.select([poller.fd], [], [], 10)[0], "nothing comes"
    poller.turn()


def test_sockets_are_read_in_one_turn_and_one_that_fails_holds_up_no_other() -> None:
    poller = SocketPoller()
    workers = []
    for _ in range(3):
        theirs, ours = socket.socketpair()
        worker, heard = Worker(), Heard()
        worker.open(poller, ours.fileno())
        worker.ask(b"GET / HTTP/1.1\r\n", b"", b"", heard, heard)
        assert theirs.recv(100) == b"GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
        theirs.sendall(WHOLE)
        workers.append((worker, heard, theirs, ours))

    def fail(*_: object) -> None:
        raise RuntimeError("of our own")

    workers[0][1].on_whole = fail  # type: ignore[method-assign, assignment]
    raised = 0
    while sum(len(heard.told) == 2 for _, heard, *_ in workers) < 2:
        try:
            turned(poller)
        except RuntimeError:
            raised += 1
    assert raised == 1
    assert [worker.told for worker, *_ in workers] == [[("abort",)], [], []]
    worker, _, theirs, _ = workers[1]
    theirs.close()
    turned(poller)
    assert worker.told == [("broke", 0)]
    assert not select.select([poller.fd], [], [], 0)[0], "its end is told once"
    for worker, _, theirs, ours in workers:
        worker.close()
        theirs.close()
        ours.close()


def test_a_socket_that_is_held_is_not_read() -> None:
    poller, worker, heard = SocketPoller(), Worker(), Heard()
    theirs, ours = socket.socketpair()
    with theirs, ours:
        worker.open(poller, ours.fileno())
        worker.ask(b"GET / HTTP/1.1\r\n", b"", b"", heard, heard)
        worker.hold()
        theirs.sendall(WHOLE)
        assert not select.select([poller.fd], [], [], 0)[0]
        worker.go_on()
        turned(poller)
        assert len(heard.told) == 2
        worker.close()


def test_what_a_socket_does_not_take_goes_to_the_subclass_in_order() -> None:
    poller, worker, heard = SocketPoller(), Worker(), Heard()
    theirs, ours = socket.socketpair()
    with theirs, ours:
        worker.open(poller, ours.fileno())
        body = bytes(range(256)) * 40_000
        worker.ask(b"POST / HTTP/1.1\r\n", b"X: 1\r\n", body, heard, heard)
        assert worker.rest
        sent = b"POST / HTTP/1.1\r\nX: 1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        got = b""
        while len(got) < len(sent) - len(worker.rest):
            got += theirs.recv(1 << 20)
        assert got + worker.rest == sent
        worker.close()


def test_a_request_is_taken_wherever_it_is_cut() -> None:
    for cut in range(1, len(ASKED) + 1):
        client = Client()
        client.feed(ASKED[:cut])
        assert client.has_held == (cut < len(ASKED))
        if cut < len(ASKED):
            client.feed(ASKED[cut:])
        said = {"host": "x", "x-name": "a b", "x-empty": "", "content-length": "04"}
        assert client.taken == [("completions", said, b"body", True)], cut
        assert client.handed == b""


def test_requests_that_came_together_are_taken_one_after_the_other() -> None:
    client = Client()
    client.feed(ASKED + ASKED[:30])
    assert len(client.taken) == 1
    assert client.busy
    client.feed(ASKED[30:])
    assert client.paused == 1
    client.done()
    client.read_on()
    assert len(client.taken) == 2
    assert client.busy
    assert not client.has_held


@pytest.mark.parametrize(
    "said",
    [
        ASKED.replace(b"completions", b"embeddings"),
        ASKED.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost"),
        ASKED.replace(b"HTTP/1.1", b"HTTP/2.0"),
        ASKED.replace(b"X-Empty", b"hoST"),
        ASKED.replace(b"Host: x\r\n", b""),
        *(ASKED.replace(b"04", length) for length in (b"", b"-1", b"+4", b"0x1", b"1 1", b"1" * 13)),
        b"SSH-2.0-OpenSSH\r\n",
        b"A" * 20_000,
    ],
)
def test_what_is_unusual_is_handed_over_as_it_came(said: bytes) -> None:
    client = Client()
    client.feed(said)
    assert client.handed == said
    assert client.taken == []


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
def test_a_request_with_a_field_that_changes_how_it_is_read_is_handed_over(line: bytes, keep: bool | None) -> None:
    client = Client()
    client.feed(ASKED.replace(b"X-Empty:", line))
    assert [taken[-1] for taken in client.taken] == ([] if keep is None else [keep])
    assert bool(client.handed) == (keep is None)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_are_taken_read_as_llhttp_reads_them(seed: int) -> None:
    rng, accepted = random.Random(seed), 0
    lines = [b"Host: x", b"Content-Length: 12", b"Connection: close", b"X-A:b", b"X-A: b", b"Accept: */*\t "]
    lines += [b"A b: c", b"X-Odd: \x01", b"X-Empty:", b" folded", b"x-long: " + b"v" * 300, b"Te: trailers"]
    lines += [b"Host:", b": none"]
    for number in range(3000):
        head = b"\r\n".join(rng.sample(lines, rng.randrange(2, 6))) + b"\r\n\r\n"
        if rng.random() < 0.3:
            at = rng.randrange(len(head) - 4)
            head = head[:at] + bytes([rng.randrange(256)]) + head[at + 1 :]
        client = Client()
        client.feed(START + head + b"twelve bytes")
        if not client.taken:
            continue
        accepted += 1
        ((_, fields, body, keep),) = client.taken
        pairs: list[tuple[str, str]] = []

        class Told:
            def on_header(self, name: bytes, value: bytes) -> None:
                pairs.append((name.decode().lower(), value.decode().rstrip()))  # noqa: B023

        httptools.HttpRequestParser(Told()).feed_data(START + head)
        assert dict(pairs) == fields, (seed, number, head)
        assert len(pairs) == len(fields), (seed, number, head)
        assert body == b"twelve bytes"[: int(fields["content-length"])], (seed, number, head)
        assert keep == (fields.get("connection") != "close"), (seed, number, head)
    assert accepted > 20


def test_a_request_that_is_refused_is_handed_over_as_it_came() -> None:
    client = Client(serves=False)
    client.feed(ASKED + b"more")
    assert client.handed == ASKED + b"more"
    assert not client.has_held
    client = Client(admits=False)
    client.feed(ASKED[:-1])
    assert client.handed == ASKED[:-1], "its body is not waited for"
    assert not client.has_held


def test_headers_are_found_in_any_case_the_first_of_a_name() -> None:
    headers = Headers([(b"X-One", b"1"), (b"x-one", b"2"), (b"Odd", b"\xff"), (b"content-Type", b"Text/Plain ; a=b")])
    assert (headers["x-ONE"], headers.get("odd"), headers.get("none"), headers.get("none", "x")) == (
        *("1", "\udcff"),
        *(None, "x"),
    )
    assert headers.content_type == "text/plain"
    assert list(headers) == ["X-One", "x-one", "Odd", "content-Type"]
    assert len(headers) == 4
    assert dict(headers)["X-One"] == "1"
    assert "ODD" in headers
    with pytest.raises(KeyError):
        headers["none"]
    assert Headers([]).content_type == ""


@pytest.mark.parametrize(
    ("lines", "content_type"),
    [
        ([b"application/json"], "application/json"),
        ([b"application/json; charset=utf-8"], "application/json"),
        ([b" Application/JSON\t"], "application/json"),
        ([b"text/html", b"application/json"], "text/html"),
    ],
)
def test_the_type_of_an_answer_is_that_of_its_first_line(lines: list[bytes], content_type: str) -> None:
    assert Headers([(b"content-TYPE", line) for line in lines]).content_type == content_type


def test_headers_are_asked_for_any_text() -> None:
    headers = Headers([(b"odd-\xff", b"1"), (b"a", b"2")])
    assert [headers[name] for name in headers] == ["1", "2"]
    for name in ("\ud800", "odd-\udcfe", "a\0", "\udcff" * 9):
        assert headers.get(name) is None
        assert name not in headers
        with pytest.raises(KeyError) as caught:
            headers[name]
        assert caught.value.args == (name,)
