"""A message whose parts never end: libzmq would keep them until there is no memory left."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlink.endpoint import inflow
from pdlink.endpoint.inflow import Inflow
from pdlink.events import MessageDropped, PeerChanged
from tests.endpoint.conftest import Pair
from tests.waiting import WAIT_S, until

from .test_ports import GREETING, READY

SRC, DST, TOKENS = [3, 0, 9, 4], [5, 1], 13
PART = b"\x03" + struct.pack(">Q", 2**20) + bytes(2**20)
"""A part of 1 MiB, and more to come."""
MOST_NBYTES = 2 * 2**30
"""What it would send if nobody stopped it."""
GROWTH_NBYTES = 2**30
"""What comes on loopback between two looks on a loaded machine; 16 MiB are allowed."""


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_message_that_never_ends_costs_its_connection_and_no_memory(pair: Pair) -> None:
    """One raw socket without a session took a worker from 112 to 3000 MiB in 9 s."""
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    before, most = resident_nbytes(), 0
    for _ in range(5):  # what is freed stays with the allocator, for the next one
        sent = 0
        with socket.create_connection(("127.0.0.1", pair.prefill.port), WAIT_S) as endless:
            endless.settimeout(WAIT_S)
            endless.sendall(GREETING + READY)
            with contextlib.suppress(ConnectionError):
                while sent < MOST_NBYTES:
                    endless.sendall(PART)
                    sent += len(PART)
                    most = max(most, resident_nbytes())
        assert sent < MOST_NBYTES, "nobody has ended it"
        assert most - before < GROWTH_NBYTES, f"{sent} bytes were sent"
    assert pair.transfer("after", SRC, DST, TOKENS) == ["ready 42", "released"]
    print(f"{(most - before) >> 20} MiB at most")
    assert not [event for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


def test_whole_frames_that_nobody_reads_are_few(pair: Pair) -> None:
    """32 of 4 MiB were 126 MiB for one peer, while the loop was busy with another one."""
    frame = b"\x02" + struct.pack(">Q", 4 * 2**20) + bytes(4 * 2**20)
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    with socket.create_connection(("127.0.0.1", pair.prefill.port), WAIT_S) as flood:
        flood.sendall(GREETING + READY)
        flood.settimeout(1.0)
        before = resident_nbytes()
        with pair.prefill.endpoint.lock, pytest.raises(TimeoutError):
            flood.sendall(frame * 32)
        grown = resident_nbytes() - before
    assert grown < 80 * 2**20, f"{grown >> 20} MiB"
    assert pair.transfer("after", SRC, DST, TOKENS) == ["ready 42", "released"]


def test_peer_that_speaks_the_oldest_zeromq_disturbs_nobody(pair: Pair) -> None:
    """ZMTP 1.0 has no greeting but the length of a name: libzmq takes it, and knows nothing about its connection."""
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    with socket.create_connection(("127.0.0.1", pair.prefill.port), WAIT_S) as old:
        old.sendall(b"\x01\x00" + b"\x05\x00ouch")
        until(lambda: any(isinstance(event, MessageDropped) for event in pair.events), "it has been read")
        assert pair.transfer("after", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert pair.prefill.endpoint.failure == ""


def test_connections_are_forgotten_when_they_end(pair: Pair) -> None:
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    watched = pair.prefill.endpoint._channel._inflow
    until(lambda: len(watched) == 1, "the session's is known")
    strangers = [socket.create_connection(("127.0.0.1", pair.prefill.port)) for _ in range(20)]
    until(lambda: len(watched) == 21, "all are known")
    for stranger in strangers:
        stranger.close()
    until(lambda: len(watched) == 1, "closed connections are not")


# -- the rule by itself, on a pair of sockets ------------------------------------------------------------------------


class Wire:
    """One TCP connection; we are where it was accepted, and read nothing."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            self.near, _ = server.accept()

    def receive(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= self.far.send(bytes(min(nbytes, 4096)))
            self.near.recv(4096)

    @property
    def is_open(self) -> bool:
        self.far.settimeout(0.0)
        try:
            return self.far.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self.far.close()
        self.near.close()


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Wire]]:
    monkeypatch.setattr(inflow, "MAX_HELD_NBYTES", 10_000)
    monkeypatch.setattr(inflow, "MAX_ALL_HELD_NBYTES", 30_000)
    wires = [Wire() for _ in range(5)]
    yield wires
    for wire in wires:
        wire.close()


def test_connection_is_ended_at_the_second_look_at_too_much(wires: list[Wire]) -> None:
    """One look may come before whole messages that wait have been read."""
    watched, wire = Inflow(), wires[0]
    watched.begun(wire.near.fileno())
    wire.receive(11_000)
    assert watched.look() == 0
    assert wire.is_open
    assert watched.look() == 1
    assert not wire.is_open
    assert len(watched) == 0


def test_whole_messages_let_a_connection_go_on_for_ever(wires: list[Wire]) -> None:
    watched, wire = Inflow(), wires[0]
    watched.begun(wire.near.fileno())
    for _ in range(20):
        wire.receive(9_000)
        assert watched.look() == 0
        wire.receive(9_000)
        watched.delivered.add(wire.near.fileno())
        assert watched.look() == 0
    assert wire.is_open


def test_connection_that_once_sent_a_whole_message_is_ended_all_the_same(wires: list[Wire]) -> None:
    watched, wire = Inflow(), wires[0]
    watched.begun(wire.near.fileno())
    wire.receive(100)
    watched.delivered.add(wire.near.fileno())
    assert watched.look() == 0
    wire.receive(11_000)
    assert [watched.look(), watched.look()] == [0, 1]
    assert not wire.is_open


def test_of_many_connections_that_hold_a_little_the_worst_is_ended(wires: list[Wire]) -> None:
    watched = Inflow()
    for number, wire in enumerate(wires):
        watched.begun(wire.near.fileno())
        wire.receive(6_000 + number)
    assert watched.look() == 1
    assert [wire.is_open for wire in wires] == [True] * 4 + [False]


def test_descriptor_that_is_somebody_elses_now_is_left_alone(wires: list[Wire]) -> None:
    watched, (old, new, *_) = Inflow(), wires
    fd = old.near.fileno()
    watched.begun(fd)
    new.receive(20_000)
    os.dup2(new.near.fileno(), fd)
    assert watched.look() == watched.look() == 0
    assert new.is_open
    assert len(watched) == 0
