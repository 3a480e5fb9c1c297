"""A socket at the data port of a tcp transport, and whatever it likes to say there."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, Protocol

import msgspec

from pdlink.transport import tcp
from tests.conformance.transports.side import PATIENCE_S

HELLO, HEADER, RUN, ANSWER = (struct.Struct(form) for form in ("<IHHQ16s", "<IIQQQQ", "<QII", "<IIQQ"))
HELLO_MAGIC, FRAME_MAGIC, ANSWER_MAGIC = 0x48744450, 0x46744450, 0x41744450
"""csrc/tcp/wire.h, written down a second time: a change of the wire form must change this file too."""
PLACED, MALFORMED, STALE, OUTSIDE = range(4)


class Attack(Protocol):
    def __call__(self, invitation: bytes) -> Attacker: ...


class Attacker:
    """A socket at an owner's data port, and what it says there."""

    def __init__(self, invitation: bytes) -> None:
        self.there = tcp._decode(invitation)
        self.socket = socket.create_connection((self.there.host, self.there.port), PATIENCE_S)

    def hello(self, **other: Any) -> Attacker:
        words: dict[str, Any] = {"magic": HELLO_MAGIC, "version": 1, "stream": 0, "session": self.there.session}
        words |= {"token": self.there.token, **other}
        self.socket.sendall(HELLO.pack(*words.values()))
        return self

    def frame(self, runs: list[tuple[int, int, int]], payload: bytes, **other: Any) -> Attacker:
        """runs: (region, offset, nbytes)"""
        words: dict[str, Any] = {"magic": FRAME_MAGIC, "num_runs": len(runs), "session": self.there.session}
        words |= {"sequence": 0, "ticket": 7, "nbytes": sum(run[2] for run in runs), **other}
        table = b"".join(RUN.pack(offset, region, nbytes) for region, offset, nbytes in runs)
        self.send(HEADER.pack(*words.values()) + table + payload)
        return self

    def send(self, data: bytes) -> Attacker:
        with contextlib.suppress(ConnectionError):  # sent away before it has said all
            self.socket.sendall(data)
        return self

    def heard(self) -> list[tuple[int, int, int]]:
        """(verdict, sequence, ticket) of every answer until the owner ends the connection."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while got := self.socket.recv(1 << 16):
                data += got
        self.socket.close()
        assert all(magic == ANSWER_MAGIC for magic, *_ in ANSWER.iter_unpack(data))
        return [(verdict, sequence, ticket) for _, verdict, sequence, ticket in ANSWER.iter_unpack(data)]

    def invitation(self) -> bytes:
        """The one it was made with."""
        return msgspec.msgpack.encode(self.there)

    def answer(self) -> tuple[int, int, int]:
        data = self.socket.recv(ANSWER.size, socket.MSG_WAITALL)
        _, verdict, sequence, ticket = ANSWER.unpack(data)
        return verdict, sequence, ticket
