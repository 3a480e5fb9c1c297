"""Events that pass from a worker's connection to a client's: as they are, and all else is heard as ever."""

from __future__ import annotations

import random
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdlink._http import (
    ANYTHING,
    CACHED,
    DONE,
    ERROR,
    FINISH,
    PARAMS,
    Exchange,
    Headers,
    Requests,
    SocketPoller,
    marks_of,
)
from tests.native.test_exchange import CHUNKED

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKS = ERROR | FINISH | CACHED | DONE
EVENT = b'data: {"choices": [{"text": "word"}]}\n\n'
PARAMS_EVENT = b'data: {"choices": [], "kv_transfer_params":{"pdlink_kv":"transferred"}}\n\n'
FINISH_EVENT = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
TELL_NBYTES = 8192


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Client(Requests):
    """Whose answer a stream is."""

    def __init__(self, number: int) -> None:
        super().__init__({})
        self.open_to_write(number)
        self.rest = b""

    def send_rest(self, data: bytes) -> None:
        self.rest += data
        self.clogged = True


class Stream(Exchange):
    """A stream that passes, and its listener."""

    most_nbytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.to_client, self.from_proxy = socket.socketpair()
        self.from_proxy.setblocking(False)
        self.client = Client(self.to_client.fileno())
        self.told: list[tuple[Any, ...]] = []
        self.ask(b"POST / HTTP/1.1\r\n", b"", b"", self, self)
        self.feed(CHUNKED)
        self.told.clear()

    def send_rest(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass

    def freed(self, _exchange: Exchange) -> None:
        self.told.append(("freed",))

    def on_head(self, _status: int, _headers: Headers) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        self.told.append(("data", data))

    def on_passed(self, data: bytes, at_s: float, finished: bool) -> None:
        assert at_s > 0
        assert finished is (marks_of(data, FINISH) != 0)
        self.told.append(("passed", data))

    def on_end(self, data: bytes) -> None:
        self.told.append(("end", data))

    def bad(self, _most_nbytes: int) -> None:
        self.told.append(("bad",))
        self.end(0)

    def got(self) -> bytes:
        """What the client was sent since."""
        try:
            return self.from_proxy.recv(1 << 20)
        except BlockingIOError:
            return b""

    def shut(self) -> None:
        self.client.close()
        self.to_client.close()
        self.from_proxy.close()


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    made.pass_to(made.client, MARKS)
    yield made
    made.shut()


def test_events_pass_as_they_are(stream: Stream) -> None:
    assert stream.passed_s == 0
    began_s = time.monotonic()
    for events in (EVENT, EVENT * 2):
        stream.feed(chunk(events))
        assert stream.got() == chunk(events)
    assert stream.told == []
    assert began_s < stream.passed_s < time.monotonic()
    stream.pass_no_more()
    assert stream.told == [("passed", EVENT * 3)]
    stream.pass_no_more()
    assert len(stream.told) == 1


@pytest.mark.parametrize(
    ("last", "heard"),
    [
        (b"0\r\n\r\n", [("freed",), ("end", b"")]),
        (chunk(b"data: [DONE]\n\n"), [("data", b"data: [DONE]\n\n")]),
        (chunk(b'data: {"a": [{"finish_reason": "stop"}]}\n\n'), None),
        (chunk(b'data: {"a":[{"finish_reason":null},{"finish_reason":"stop"}]}\n\n'), None),
        (chunk(b'data: {"error": {"message": "no"}}\n\n'), None),
        (chunk(b'data: {"usage":{"prompt_tokens_details": {"cached_tokens": 4}}}\n\n'), None),
        (chunk(EVENT[:-1]), [("data", EVENT[:-1])]),
        (b"not a chunk", [("bad",), ("freed",)]),
        (chunk(EVENT) + chunk(b'data: {"error": {}}\n\n'), [("data", EVENT + b'data: {"error": {}}\n\n')]),
        (chunk(EVENT) + b"0\r\n\r\n", [("freed",), ("end", EVENT)]),
    ],
)
def test_what_needs_a_look_is_heard_after_all_that_passed(
    stream: Stream, last: bytes, heard: list[tuple[Any, ...]] | None
) -> None:
    stream.feed(chunk(EVENT))
    stream.feed(last)
    assert stream.got() == chunk(EVENT)
    assert stream.told == [("passed", EVENT), *(heard or [("data", last.split(b"\r\n", 1)[1][:-2])])]
    if stream.listener is not None:
        stream.feed(chunk(EVENT))
        assert stream.told[-1] == ("data", EVENT), "nothing passes until it is said again"


@pytest.mark.parametrize(
    ("marks", "event", "passes"),
    [
        (MARKS, PARAMS_EVENT, True),
        (MARKS | PARAMS, PARAMS_EVENT, False),
        (MARKS | PARAMS, EVENT, True),
        (MARKS | ANYTHING, EVENT, False),
        (DONE, FINISH_EVENT, True),
        (0, b"data: [DONE]\n\n", True),
    ],
)
def test_events_with_the_marks_that_somebody_looks_for_do_not_pass(
    stream: Stream, marks: int, event: bytes, passes: bool
) -> None:
    stream.pass_to(stream.client, marks)
    stream.feed(chunk(event))
    assert stream.told == ([] if passes else [("data", event)])
    assert stream.got() == (chunk(event) if passes else b"")
    stream.pass_no_more()
    assert stream.told == [("passed" if passes else "data", event)]


def test_no_cut_of_the_bytes_changes_what_the_client_gets(stream: Stream) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(100):
        events = [EVENT * chance.randint(1, 3) + b": %b\n\n" % (b"x" * chance.randint(0, 300)) for _ in range(8)]
        said, at = b"".join(map(chunk, events)), 0
        stream.told.clear()
        while at < len(said):
            step = chance.choice([1, 2, 7, 50, 400, 5000])
            stream.feed(said[at : at + step])
            at += step
            if chance.random() < 0.5 and b"".join(told[1] for told in stream.told).endswith(b"\n\n"):
                stream.pass_to(stream.client, MARKS)
        stream.pass_no_more()
        assert b"".join(told[1] for told in stream.told) == b"".join(events)
        frames, passed = stream.got(), b""
        while frames:
            size, _, rest = frames.partition(b"\r\n")
            passed += rest[: int(size, 16)]
            frames = rest[int(size, 16) + 2 :]
        assert passed == b"".join(told[1] for told in stream.told if told[0] == "passed")


def test_a_client_that_does_not_read_gets_the_rest_by_its_owner_and_then_nothing_passes(stream: Stream) -> None:
    stream.to_client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    big, sent = EVENT[:-2] + b"x" * 8000 + b"\n\n", b""
    while not stream.client.rest:
        stream.feed(chunk(big))
        sent += chunk(big)
    assert b"".join(told[1] for told in stream.told) == big * sent.count(b"data:"), "its listener knows at once"
    stream.feed(chunk(EVENT))
    assert stream.told[-1] == ("data", EVENT)
    assert b"".join(iter(stream.got, b"")) + stream.client.rest == sent


def test_a_client_whose_connection_is_closed_gets_nothing(stream: Stream) -> None:
    """The number of its socket may be that of another client's."""
    stream.client.close()
    stream.feed(chunk(EVENT))
    assert stream.told == [("data", EVENT)]
    assert stream.got() == b""


def test_events_are_told_now_and_then(stream: Stream) -> None:
    for number in range(1, 301):
        stream.feed(chunk(EVENT))
        stream.got()
        told = sum(len(told[1]) for told in stream.told)
        assert len(EVENT) * number - TELL_NBYTES < told <= len(EVENT) * number
    assert len(stream.told) <= 300 * len(EVENT) // TELL_NBYTES


@contextmanager
def polled(stream: Stream) -> Iterator[tuple[SocketPoller, socket.socket]]:
    """A poller that reads the stream, and the other end of its socket."""
    poller = SocketPoller()
    worker, theirs = socket.socketpair()
    with worker, theirs:
        stream.open(poller, theirs.fileno())
        yield poller, worker
        stream.close()


def test_events_pass_within_one_turn_and_do_not_end_it(stream: Stream) -> None:
    """The turn ends with what Python hears of."""
    with polled(stream) as (poller, worker):
        worker.sendall(chunk(EVENT))
        assert poller.turn(0.05) is False
        assert (stream.told, stream.got()) == ([], chunk(EVENT))
        worker.sendall(chunk(b"data: [DONE]\n\n"))
        poller.turn(None)
        assert stream.told == [("passed", EVENT), ("data", b"data: [DONE]\n\n")]


def until_it_rests(stream: Stream, poller: SocketPoller, worker: socket.socket) -> None:
    """Events pass one by one until one does not: those before it came within 2 ms."""
    for _ in range(10_000):
        worker.sendall(chunk(EVENT))
        assert poller.turn(0.0) is False
        if not (got := stream.got()):
            return
        assert got == chunk(EVENT)
    pytest.fail("never rests")


def test_events_of_a_burst_pass_together_and_the_first_of_them_at_once(stream: Stream) -> None:
    with polled(stream) as (poller, worker):
        until_it_rests(stream, poller, worker)
        worker.sendall(chunk(EVENT))
        assert poller.turn(0.05) is False
        assert stream.got() == chunk(EVENT + EVENT)
        worker.sendall(chunk(EVENT))  # 50 ms later
        assert poller.turn(0.0) is False
        assert stream.got() == chunk(EVENT)


class Begins(Stream):
    """Passes once its first events are heard."""

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        self.pass_to(self.client, MARKS)


def test_what_follows_the_first_events_of_each_stream_passes_together() -> None:
    stream = Begins()
    with polled(stream) as (poller, worker):
        for number in range(1000):
            worker.sendall(chunk(EVENT))
            poller.turn(None)
            assert stream.told == [("data", EVENT)]
            worker.sendall(chunk(EVENT))
            poller.turn(0.0)
            rests = not (got := stream.got())  # else the thread was interrupted for longer than the rest
            worker.sendall(chunk(EVENT))
            while len(got) < 2 * len(EVENT):
                poller.turn(0.05)
                got += stream.got()
            if rests:
                assert got == chunk(EVENT + EVENT)
                if number > 0:  # a second stream on one connection, too
                    break
            worker.sendall(b"0\r\n\r\n")
            while stream.listener is not None:
                poller.turn(0.05)
            stream.ask(b"POST / HTTP/1.1\r\n", b"", b"", stream, stream)
            stream.feed(CHUNKED)
            stream.told.clear()
        else:
            pytest.fail("never rests")
    stream.shut()


def test_nothing_rests_behind_a_finish_reason() -> None:
    """The first read of a stream has the one token that it is of."""
    stream = Begins()
    with polled(stream) as (poller, worker):
        worker.sendall(chunk(FINISH_EVENT))
        poller.turn(None)
        assert stream.told == [("data", FINISH_EVENT)]
        worker.sendall(chunk(b"data: [DONE]\n\n"))
        poller.turn(0.0)
        assert stream.told[-1] == ("data", b"data: [DONE]\n\n")
    stream.shut()


class Ends(Stream):
    """Whose worker sends more while its last event is heard."""

    worker: socket.socket

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        if len(self.told) == 1:
            self.worker.sendall(chunk(EVENT))


def test_a_turn_reads_a_stream_that_passes_no_more_once() -> None:
    stream, last = Ends(), b"data: [DONE]\n\n"
    stream.pass_to(stream.client, MARKS)
    with polled(stream) as (poller, stream.worker):
        stream.worker.sendall(chunk(last))
        poller.turn(None)
        assert stream.told == [("data", last)]
        poller.turn(None)
        assert stream.told == [("data", last), ("data", EVENT)]
    stream.shut()


def test_a_stream_that_rests_is_held_and_goes_on_as_another_one(stream: Stream) -> None:
    with polled(stream) as (poller, worker):
        until_it_rests(stream, poller, worker)
        stream.hold()
        poller.turn(0.01)
        assert stream.got() == b""
        stream.go_on()
        poller.turn(0.01)
        assert stream.got() == chunk(EVENT)
        until_it_rests(stream, poller, worker)
        stream.close()
        poller.turn(0.01)
        assert stream.got() == b""


class Whole(Stream):
    """An answer that its listener hears whole."""

    most_nbytes = 16

    def too_long(self, _most_nbytes: int) -> None:
        self.told.append(("too long",))
        self.end(0)


def test_a_turn_ends_with_an_answer_that_is_too_long_before_its_end(stream: Stream) -> None:
    """Its owner wants the loop to do something, which would wait for whatever came next."""
    poller = SocketPoller()
    worker, theirs = socket.socketpair()
    other, others = socket.socketpair()
    long = Whole()
    with worker, theirs, other, others:
        stream.open(poller, theirs.fileno())
        long.open(poller, others.fileno())
        long.freed = lambda _exchange: worker.sendall(chunk(EVENT))  # type: ignore[method-assign]
        other.sendall(b"11\r\n" + b"x" * 17)
        assert poller.turn(0.5) is False
        assert (long.told, stream.got()) == ([("too long",)], b"")
        assert poller.turn(0.0) is False
        assert stream.got() == chunk(EVENT)
        long.close()
        long.shut()
        stream.close()


def test_a_turn_ends_when_the_loop_has_something_of_its_own() -> None:
    outer = SocketPoller()
    assert outer.turn(0.0) is False
    one, other = socket.socketpair()
    inner = SocketPoller()
    with one, other:
        reader = Stream()
        reader.open(inner, other.fileno())
        poller = SocketPoller(inner.fd)
        assert poller.turn(0.0) is False
        one.sendall(b"x")
        assert poller.turn(None) is True
        reader.close()
        reader.shut()


def test_a_turn_without_a_wait_does_not_wait() -> None:
    poller = SocketPoller()
    for _ in range(20_000):  # in some of them the thread is interrupted between two looks at the clock
        assert poller.turn(0.0) is False


class Talks(Requests):
    """A client whose next bytes are there when those before them are read."""

    def __init__(self, poller: SocketPoller) -> None:
        super().__init__({})
        self.theirs, self.ours = socket.socketpair()
        self.open(poller, self.ours.fileno())
        self.theirs.sendall(b"\0")
        self.num_read = 0

    def hand_over(self, _data: bytes) -> None:
        self.num_read += 1
        self.theirs.sendall(b"\0")


def test_no_socket_that_always_has_something_keeps_others_from_being_read() -> None:
    poller = SocketPoller()
    clients = [Talks(poller) for _ in range(9)]
    for _ in range(20):
        before = [each.num_read for each in clients]
        poller.turn(0.0)
        poller.turn(0.0)
        assert all(each.num_read > num for each, num in zip(clients, before, strict=True))
    for each in clients:
        each.close()
        each.theirs.close()
        each.ours.close()
