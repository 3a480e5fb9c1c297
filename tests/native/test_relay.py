"""The native relay (`csrc/relay`): chunks of whole events pass as they are, and all else comes back unread."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING

import pytest

from pdlink._http import ANYTHING, CACHED, DONE, ERROR, FINISH, PARAMS
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

relay = pytest.importorskip("pdlink._relay", reason="the native relay is built where there is epoll")

MARKS = ERROR | FINISH | CACHED | DONE
EVENT = b'data: {"choices": [{"text": "word"}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stream:
    """A worker's connection and a client's, with a relay between them."""

    def __init__(self) -> None:
        self.worker, self.from_worker = socket.socketpair()
        self.to_client, self.client = socket.socketpair()
        self.client.setblocking(False)
        self.relay = relay.Relay()

    def lend(self, first: bytes = b"", marks: int = MARKS) -> int:
        key, unsent = self.relay.lend(self.from_worker.fileno(), self.to_client.fileno(), first, marks)
        assert unsent == b""
        return int(key)

    def turn(self) -> list[tuple[int, bytes, bool, bytes, bytes]]:
        """Reports, once the relay has passed what it was sent, or has given the stream back."""
        self.settle()
        return list(self.relay.reports())

    def settle(self) -> None:
        """Wait until the relay has passed what it was sent, or has given the stream back."""
        end_s = time.monotonic() + WAIT_S
        while len(self.relay) and self._num_unread():
            assert time.monotonic() < end_s, "the relay reads nothing"
            time.sleep(0.0005)
        len(self.relay)  # waits until what it has read is passed

    def back(self) -> list[tuple[int, bytes, bool, bytes, bytes]]:
        """The next reports."""
        assert self._told(WAIT_S), "the relay tells nothing"
        return list(self.relay.reports())

    def _told(self, wait_s: float) -> bool:
        return bool(select.select([self.relay.fd], [], [], wait_s)[0])

    def _num_unread(self) -> int:
        found: int = struct.unpack("i", fcntl.ioctl(self.from_worker, termios.FIONREAD, bytes(4)))[0]
        return found

    def read(self) -> bytes:
        try:
            return self.client.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for each in (self.worker, self.from_worker, self.to_client, self.client):
            each.close()


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.close()


def test_events_pass_as_they_are(stream: Stream) -> None:
    stream.lend(chunk(EVENT))
    stream.worker.sendall(chunk(EVENT) + chunk(EVENT * 2))
    assert stream.turn() == []
    assert stream.read() == chunk(EVENT) * 2 + chunk(EVENT * 2)


@pytest.mark.parametrize(
    "last",
    [
        b"0\r\n\r\n",
        chunk(b"data: [DONE]\n\n"),
        chunk(b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'),
        chunk(b'data: {"choices":[{"finish_reason":null},{"finish_reason":"stop"}]}\n\n'),
        chunk(b'data: {"error": {"message": "no"}}\n\n'),
        chunk(b'data: {"choices":[],"usage":{"prompt_tokens_details": {"cached_tokens": 4}}}\n\n'),
        chunk(EVENT[:-1]),
        b"5;name=value\r\nabcde\r\n",
        b"not a chunk",
        b"-1\r\n",
        b"fffffffff\r\n",
        b"2\r\n\n\nXY",
        b"\r\n",
    ],
)
def test_what_needs_a_look_comes_back_unread(stream: Stream, last: bytes) -> None:
    key = stream.lend()
    stream.worker.sendall(chunk(EVENT))
    assert stream.turn() == []
    stream.worker.sendall(last)
    assert stream.turn() == [(key, EVENT, True, b"", last)]
    assert stream.read() == chunk(EVENT)
    assert len(stream.relay) == 0
    stream.worker.sendall(chunk(EVENT))
    assert stream.turn() == []
    assert stream.from_worker.recv(1000) == chunk(EVENT), "the relay reads a stream that it gave back"


PARAMS_EVENT = b'data: {"choices": [], "kv_transfer_params":{"pdlink_kv":"transferred"}}\n\n'


@pytest.mark.parametrize(
    ("marks", "event", "passes"),
    [
        (MARKS, PARAMS_EVENT, True),
        (MARKS | PARAMS, PARAMS_EVENT, False),
        (MARKS | PARAMS, EVENT, True),
        (MARKS | ANYTHING, EVENT, False),
        (0, b"data: [DONE]\n\n", True),
    ],
)
def test_a_stream_comes_back_for_the_marks_that_its_owner_looks_for(
    stream: Stream, marks: int, event: bytes, passes: bool
) -> None:
    key = stream.lend(marks=marks)
    stream.worker.sendall(chunk(event))
    assert stream.turn() == ([] if passes else [(key, b"", True, b"", chunk(event))])
    assert stream.read() == (chunk(event) if passes else b"")


def test_all_that_came_with_an_error_comes_back_with_it(stream: Stream) -> None:
    key = stream.lend()
    said = chunk(EVENT) + chunk(b'data: {"error": {}}\n\n')
    stream.worker.sendall(said)
    assert stream.turn() == [(key, b"", True, b"", said)]
    assert stream.read() == b""


def test_no_split_of_the_bytes_changes_what_is_sent() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(100):
        stream = Stream()
        key = stream.lend()
        events = [EVENT * chance.randint(1, 3) + b": %b\n\n" % (b"x" * chance.randint(0, 300)) for _ in range(8)]
        said, end = b"".join(map(chunk, events)), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        passed, unread, got, at = b"", b"", b"", 0
        whole = said + end
        while at < len(whole):
            step = chance.choice([1, 2, 7, 50, 400, 5000])
            stream.worker.sendall(whole[at : at + step])
            at += step
            for found, told, over, unsent, rest in stream.turn():
                assert (found, unsent) == (key, b"")
                passed += told
                if over:
                    unread = rest
            got += stream.read()
        stream.from_worker.setblocking(False)
        left = b""
        if len(unread) < len(whole):
            try:
                left = stream.from_worker.recv(1 << 20)
            except BlockingIOError:
                left = b""
        assert got + unread + left == whole
        assert b"".join(map(chunk, [passed])) == chunk(passed)
        assert got.replace(b"\r\n", b"\n").count(b"data:") == passed.count(b"data:")
        assert b"".join(events).startswith(passed)
        stream.close()


def test_a_client_that_does_not_read_gets_the_rest_from_its_owner(stream: Stream) -> None:
    stream.to_client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    key, sent, passed = stream.lend(), b"", b""
    big = EVENT[:-2] + b"x" * 8000 + b"\n\n"
    for _ in range(1000):
        stream.worker.sendall(chunk(big))
        sent += chunk(big)
        reports = stream.turn()
        passed += b"".join(report[1] for report in reports)
        if any(report[2] for report in reports):
            break
    ((found, _, over, unsent, unread),) = reports
    assert (found, over, unread) == (key, True, b"")
    assert unsent
    assert b"".join(iter(stream.read, b"")) + unsent == sent
    assert passed == big * sent.count(b"data:")


def test_a_worker_that_leaves_brings_the_stream_back(stream: Stream) -> None:
    key = stream.lend()
    stream.worker.sendall(chunk(EVENT)[:10])
    stream.worker.close()
    assert stream.back() == [(key, b"", True, b"", chunk(EVENT)[:10])]


def test_a_stream_can_be_taken_back_within_a_chunk(stream: Stream) -> None:
    key = stream.lend()
    stream.worker.sendall(chunk(EVENT) + chunk(EVENT)[:10])
    assert stream.turn() == []
    assert stream.relay.heard_s(key) > 0
    assert stream.relay.take(key) == (key, EVENT, True, b"", chunk(EVENT)[:10])
    with pytest.raises(IndexError):
        stream.relay.take(key)
    assert stream.relay.heard_s(key) == 0


def test_a_number_that_is_used_again_gets_nothing_of_anothers_stream(stream: Stream) -> None:
    stream.lend()
    number = stream.to_client.detach()
    os.close(number)
    one, other = socket.socketpair()
    with one, other:
        assert number in (one.fileno(), other.fileno())
        stream.worker.sendall(chunk(EVENT))
        stream.turn()
        for each in (one, other):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
    assert stream.read() == chunk(EVENT)


def test_events_are_told_now_and_then(stream: Stream) -> None:
    key, told = stream.lend(), b""
    for _ in range(300):
        stream.worker.sendall(chunk(EVENT))
        for found, passed, over, _, _ in stream.turn():
            assert (found, over) == (key, False)
            told += passed
        stream.read()
    assert len(EVENT) * 300 - 4096 < len(told)
    assert told + stream.relay.take(key)[1] == EVENT * 300


def test_a_stream_that_is_taken_back_brings_all_that_nobody_was_told(stream: Stream) -> None:
    key = stream.lend()
    for _ in range(300):  # for three reports
        stream.worker.sendall(chunk(EVENT))
    stream.settle()
    assert stream.relay.take(key) == (key, EVENT * 300, True, b"", b"")
    assert stream.relay.reports() == []


def test_a_stream_that_came_back_can_be_taken_until_somebody_was_told(stream: Stream) -> None:
    key = stream.lend()
    stream.worker.sendall(chunk(EVENT))
    stream.settle()
    stream.worker.sendall(b"not a chunk")
    stream.settle()
    assert len(stream.relay) == 0
    assert stream.relay.take(key) == (key, EVENT, True, b"", b"not a chunk")
    assert stream.relay.reports() == []
    with pytest.raises(IndexError):
        stream.relay.take(key)


def test_an_event_passes_while_python_works_on_something_else(stream: Stream) -> None:
    stream.lend()
    holds = ctypes.PyDLL(None)  # keeps the interpreter during its calls
    waits = struct.pack("ihh", stream.client.fileno(), select.POLLIN, 0)
    stream.worker.sendall(chunk(EVENT))
    assert holds.poll(waits, 1, int(WAIT_S * 1000)) == 1
    assert stream.read() == chunk(EVENT)
