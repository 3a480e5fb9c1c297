"""Connections that are read natively: what their owners hear does not depend on where the network cuts it."""

from __future__ import annotations

import gc
import select
import socket
import weakref
from typing import Any

import pytest

from pdlink._http import BAD, END, Exchange, Headers, Requests, SocketPoller

HEAD = b"HTTP/1.1 200 OK\r\ndate: Thu, 26 Nov 2026 18:35:13 GMT\r\nserver: uvicorn\r\n"
WHOLE = HEAD + b"content-length: 17\r\ncontent-type: application/json\r\n\r\n" + b'{"choices": [{}]}'
STREAM = (
    HEAD
    + b"transfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (b"data: {1}\n\n", b"data: {22}\n\n"))
    + b"0\r\n\r\n"
)
ASKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Name: a b \r\nContent-Length: 4\r\n\r\nbody"
PATHS = {b"POST /v1/completions HTTP/1.1\r\n": "completions"}


class Heard:
    """A listener, and whoever a connection is freed for."""

    def __init__(self, most_nbytes: int = 1 << 20) -> None:
        self.most_nbytes = most_nbytes
        self.told: list[tuple[Any, ...]] = []
        self.body = b""

    def on_head(self, status: int, headers: Headers) -> None:
        self.told.append(("head", status, headers["Server"]))

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.told.append(("end", self.body))

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.told.append(("whole", status, headers["Server"], body))

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
    for cut in range(head_nbytes, len(STREAM) + 1):
        worker, heard = fed(STREAM, cut, most_nbytes=0)
        body = b"data: {1}\n\ndata: {22}\n\n"
        assert heard.told == [("head", 200, "uvicorn"), ("freed",), ("end", body)], cut
        assert worker.keeps
        whole, told = fed(STREAM, cut)
        assert told.told == [("freed",), ("whole", 200, "uvicorn", body)], cut


def test_an_answer_that_is_longer_than_its_listener_takes_is_lost() -> None:
    for cut in range(WHOLE.index(b"\r\n\r\n") + 4, len(WHOLE)):
        worker, heard = fed(WHOLE, cut, most_nbytes=16)
        assert worker.told[0] == ("too long", 16)
        assert heard.told == [("freed",)]


def test_what_is_not_plain_is_read_by_the_heir_until_it_is_over() -> None:
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


def test_what_a_socket_does_not_take_goes_to_the_heir_in_order() -> None:
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
        said = {"host": "x", "x-name": "a b", "content-length": "4"}
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
        ASKED.replace(b"Length: 4", b"Length: +4"),
        b"SSH-2.0-OpenSSH\r\n",
        b"A" * 20_000,
    ],
)
def test_what_is_unusual_is_handed_over_as_it_came(said: bytes) -> None:
    client = Client()
    client.feed(said)
    assert client.handed == said
    assert client.taken == []


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


def test_headers_are_asked_for_any_text() -> None:
    headers = Headers([(b"odd-\xff", b"1"), (b"a", b"2")])
    assert [headers[name] for name in headers] == ["1", "2"]
    for name in ("\ud800", "odd-\udcfe", "a\0", "\udcff" * 9):
        assert headers.get(name) is None
        assert name not in headers
        with pytest.raises(KeyError) as caught:
            headers[name]
        assert caught.value.args == (name,)
