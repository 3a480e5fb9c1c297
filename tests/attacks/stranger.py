"""Somebody who speaks the control protocol well enough to abuse it: any frame, in any order, under any name."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq
from msgspec.structs import replace

from pdlink.kv.layout import KVLayout
from pdlink.memory.buffers import Buffer
from pdlink.protocol import messages
from pdlink.protocol.messages import VERSION, Envelope, Identity
from tests.endpoint.conftest import Node, Pair
from tests.loopback import LOOPBACK, LoopbackTransport
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pdlink.protocol.messages import Body


class Stranger:
    """A dialer of a node's control port. Its layout fits the victim's unless `identity` says otherwise."""

    def __init__(
        self, pair: Pair, victim: Node | None = None, *, name: str = "stranger", reads: bool = True, **identity: Any
    ) -> None:
        """reads: takes everything, so that it is never taken for one that does not."""
        self.victim = victim or pair.prefill
        self.name, self.epoch, self.session = name, os.urandom(8).hex(), 1
        self.num_said, self._heard = 0, deque[Any]()
        self.identity = replace(Identity(VERSION, "m", "main", 1, pair.decode.layout, "host"), **identity)
        self._transport = LoopbackTransport(pair.hub)
        self._buffer = Buffer(pair.decode.layout.extent(0))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.setsockopt(zmq.RCVHWM, 0 if reads else 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(self.victim.endpoint.address)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
        self._transport.close()
        self._buffer.close()

    def raw(self, frame: bytes) -> None:
        self.socket.send(frame)

    def say(self, body: Body, **envelope: Any) -> None:
        """One frame of this session, with any field of its envelope forged."""
        to = self.victim.endpoint.epoch
        honest = Envelope(VERSION, self.name, self.epoch, to, self.session, self.num_said, (body,))
        self.raw(messages.encode(replace(honest, **envelope)))
        self.num_said += not envelope  # a forged frame is none of this session

    def hear(self, kind: type[Any]) -> Any:
        """The next message of this kind; others are skipped. Fails after WAIT_S."""
        while True:
            while self._heard:
                body = self._heard.popleft()
                if isinstance(body, kind):
                    return body
            self._heard.extend(messages.decode(self.socket.recv()).bodies)

    def hello(self) -> None:
        """Begins a session, and with it the numbering."""
        self.say(messages.Hello(self.name, self.identity, (LOOPBACK,)), dst_epoch="", number=0)
        self.num_said = 1

    def join(self) -> Stranger:
        """The whole handshake, with memory of its own: from here on a peer like any other."""
        self._transport.open()
        self._transport.register(self._buffer)
        self.hello()
        self.hear(messages.Welcome)
        self.say(messages.Invite(self._transport.invite("victim")))
        return self


class FalsePrefill:
    """A listener that decode was sent to, and that answers whatever it likes."""

    def __init__(self, pair: Pair) -> None:
        self.layout: KVLayout = pair.prefill.layout
        self._pair = pair
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._route = b""
        self.heard: Envelope | None = None
        self.num_said, self._bodies = 0, deque[Any]()

    def __enter__(self) -> FalsePrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def hear(self, kind: type[Any]) -> Any:
        while True:
            while self._bodies:
                body = self._bodies.popleft()
                if isinstance(body, kind):
                    return body
            self._route, frame = self._socket.recv_multipart()
            self.heard = messages.decode(frame)
            self._bodies.extend(self.heard.bodies)

    def raw(self, frame: bytes) -> None:
        self._socket.send_multipart([self._route, frame])

    def say(self, body: Body, **envelope: Any) -> None:
        """An answer in the session that was heard last."""
        assert self.heard is not None
        to, session = self.heard.src_epoch, self.heard.session
        honest = Envelope(VERSION, "false", "f" * 16, to, session, self.num_said, (body,))
        self.raw(messages.encode(replace(honest, **envelope)))
        self.num_said += not envelope

    def welcome(self) -> None:
        """Let decode believe."""
        self.hear(messages.Hello)
        self.say(messages.Welcome("false", Identity(VERSION, "m", "main", 1, self.layout, "host"), LOOPBACK))
        self.hear(messages.Invite)
        self.say(messages.Ready())
