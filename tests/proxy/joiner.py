"""A worker's side of `register:`, by hand: beats when a test says so."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import zmq

from pdlink.api import presence
from pdlink.protocol.auth import AllowList, ControlAddress, Credentials, KeyPair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.proxy.fakes import FakeWorker


def made(name: str) -> KeyPair:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return KeyPair(name, public, secret)


def knows(keys: KeyPair, *others: KeyPair) -> Credentials:
    return Credentials(keys, AllowList({other.public: other.name for other in others}))


class Joiner:
    """One worker that has dialed a proxy."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: KeyPair | None = None) -> None:
        target = ControlAddress.parse(address)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if keys is not None:
            self.socket.setsockopt_string(zmq.CURVE_SERVERKEY, target.public_key)
            self.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(target.endpoint)

    def beat(self, worker: FakeWorker, *, beat_s: float = 60.0, age_s: float = 5.0, **more: Any) -> None:
        self.say(worker.url, worker.health(), beat_s=beat_s, age_s=age_s, **more)

    def say(self, url: str, health: dict[str, Any], *, beat_s: float = 60.0, age_s: float = 5.0, **more: Any) -> None:
        body = json.dumps(health).encode()
        frame = presence.encode(presence.Beat(presence.VERSION, url, body, beat_s, age_s, **more))
        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()


class Joiners:
    """All of one test."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._all: list[Joiner] = []
        self.address = ""

    def new(self, keys: KeyPair | None = None) -> Joiner:
        joiner = Joiner(self._context, self.address, keys)
        self._all.append(joiner)
        return joiner

    def close(self) -> None:
        for joiner in self._all:
            joiner.close()
        self._context.term()


@contextlib.contextmanager
def joiners() -> Iterator[Joiners]:
    made = Joiners()
    try:
        yield made
    finally:
        made.close()
