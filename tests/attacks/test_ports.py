"""Bytes that make no sense, on every TCP port that the processes of a deployment listen on."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment

from .conftest import PROMPT
from .processes import connected, listening_ports, throw

pytestmark = pytest.mark.e2e

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1, mechanism NULL, 64 bytes (rfc.zeromq.org/spec/37)."""


def command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return b"\x04" + bytes([len(body)]) + body


READY = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")


def long_frame(announced_nbytes: int, body: bytes = b"x" * 100) -> bytes:
    return b"\x02" + struct.pack(">Q", announced_nbytes) + body


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, (self.path, "w"))


def every_port(deployment: Deployment) -> Iterator[tuple[str, int]]:
    for child in deployment.children.values():
        ports = listening_ports(child.process.pid)
        assert ports, f"{child.label} listens"
        for port, address in ports.items():
            yield address, port


def throw_at_all(deployment: Deployment, *pieces: bytes) -> None:
    for address, port in every_port(deployment):
        throw(address, port, *pieces)


def test_the_ports_are_those_we_know(victims: Deployment) -> None:
    """HTTP everywhere; control and UCX's sockets on workers. HTTP and control keep to the address they were given."""
    for label, child in victims.children.items():
        ports = listening_ports(child.process.pid)
        assert ports[int(str(child.facts["port"]))] == "127.0.0.1"
        if label == "proxy":
            assert len(ports) == 1
        else:
            assert ports[int(str(child.facts["control_port"]))] == "127.0.0.1"
            assert len(ports) > 2, "UCX listens, too"


def test_random_bytes(victims: Deployment) -> None:
    """Q1, vllm#17192: any bytes on any port."""
    random_ = random.Random(5)
    for nbytes in (1, 7, 8, 9, 64, 65, 1000, 60_000):
        throw_at_all(victims, random_.randbytes(nbytes))


@pytest.mark.parametrize(
    "pieces",
    [
        (b"\0" * 4096,),
        (b"\xff" * 4096,),
        (GREETING,),
        (GREETING, b"\x04\x00"),
        (GREETING, random.Random(6).randbytes(3000)),
        (GREETING, READY, b"\x00\x05trunc"),
        (GREETING, READY, b"\x01\x00\x00\x04abcd"),
        (GREETING, READY, b"\x01\x01" * 5000),
        (GREETING, command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xffDEALER")),
        (GREETING, command(b"READY", b"\xff" * 200)),
        (GREETING, command(b"ERROR", b"\xff" * 200)),
        (GREETING, READY, command(b"PING", b"\0" * 240)),
        (GREETING, READY, command(b"SUBSCRIBE", b"x")),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00" + b"\xca\xfe\xba\xbe\x12\x34\x56\x78" * 8,),
        (struct.pack("<Q", 0xCAFEBABE12345678),),  # what UCX 1.20 sends first over tcp (uct/tcp, tcp_cm.c)
        (struct.pack("<Q", 0xCAFEBABE12345678) + b"\xff\x7f\x00\x00",),
    ],
    ids=range(16),
)
def test_greetings_that_go_wrong(victims: Deployment, pieces: tuple[bytes, ...]) -> None:
    throw_at_all(victims, *pieces)


@pytest.mark.parametrize("announced_nbytes", [2**20, 2**30, 2**40, 2**62, 2**63 - 1, 2**64 - 1])
def test_announced_lengths_are_not_believed(victims: Deployment, announced_nbytes: int) -> None:
    """Q1: a gigabyte in a header costs nothing until it comes."""
    throw_at_all(victims, GREETING, READY, long_frame(announced_nbytes))
    http = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % announced_nbytes
    throw_at_all(victims, http)


def test_pickles_are_not_executed(victims: Deployment, tmp_path: Path) -> None:
    """lightllm#1213 (CVE-2026-26220): code from the cluster's network."""
    payload = pickle.dumps(Touch(str(tmp_path / "executed")))
    http = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload)
    throw_at_all(victims, payload)
    throw_at_all(victims, http, payload)
    throw_at_all(victims, GREETING, READY, b"\x00" + bytes([len(payload)]) + payload)
    throw_at_all(victims, GREETING, READY, b"\x01\x00\x00" + bytes([len(payload)]) + payload)
    assert not (tmp_path / "executed").exists()


def test_port_scans(victims: Deployment) -> None:
    """nccl#1808: a stray connection used to hang the service's thread."""
    for address, port in every_port(victims):
        for number in range(200):
            with contextlib.suppress(OSError), connected(address, port, reset=number % 2 == 0):
                pass


@pytest.fixture
def pooled(deployment: Deployment) -> None:
    """The proxy keeps as many connections to its workers as three requests at once take: these are nobody's leak."""
    deployment.complete_all([PROMPT] * 3)


@pytest.mark.usefixtures("pooled")  # before `victims` counts
@pytest.mark.parametrize(
    "half",
    [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", b"\xff\0\0", GREETING, GREETING + READY, b"\x78\x56"],
    ids=["nothing", "http", "zmtp", "greeting", "joined", "ucx"],
)
def test_half_open_connections_do_not_keep_others_waiting(
    victims: Deployment, right_answer: str, half: bytes
) -> None:
    """Slow loris on every port at once, while a client is served."""
    with contextlib.ExitStack() as stack:
        for address, port in every_port(victims):
            for _ in range(40):
                connection = stack.enter_context(connected(address, port))
                with contextlib.suppress(OSError):
                    connection.sendall(half)
        assert victims.complete(PROMPT).text == right_answer
        assert [answer.text for answer in victims.complete_all([PROMPT] * 3)] == [right_answer] * 3


def test_body_that_trickles_keeps_nobody_waiting(victims: Deployment, right_answer: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        slow: list[socket.socket] = []
        for child in victims.children.values():
            for _ in range(100):
                slow.append(stack.enter_context(connected("127.0.0.1", int(str(child.facts["port"])))))
                slow[-1].sendall(head + b"{")
        assert victims.complete(PROMPT).text == right_answer
        for connection in slow:
            connection.sendall(b'"')
        assert victims.complete(PROMPT).text == right_answer
