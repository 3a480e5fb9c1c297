"""A prefill and a decode worker without sockets or threads of their own, joined by a real transport, and strangers.

A test turns the endpoints' loops itself and hands them frames, so that thousands of attacks fit into seconds, and an
exception that would have ended a loop ends the test. A `pdlink.Node` has a thread and sockets, so there is none here.
Keys are what the channel would have proven.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from pdlink.endpoint.channel import Channel, Received
from pdlink.endpoint.driver import Endpoint
from pdlink.endpoint.peer import PeerState
from pdlink.events import Event, HandlingFailed, listen
from pdlink.kv.groups import KVGroups
from pdlink.memory.buffers import Buffer
from pdlink.memory.checksums import Checksums
from pdlink.memory.host import host_id
from pdlink.protocol import messages
from pdlink.protocol.auth import AllowList, ControlAddress, Credentials, KeyPair
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.messages import VERSION, Envelope, Identity
from pdlink.reasons import Code, Reason
from pdlink.transport.base import Transport
from tests.endpoint.conftest import Handler, Receives, SenderLog, Sends, layout
from tests.waiting import WAIT_S, readable

TIMEOUTS = Deadlines(
    heartbeat_s=0.5, peer_s=4 * WAIT_S, connect_s=5 * WAIT_S, lease_s=5 * WAIT_S, request_s=6 * WAIT_S
)
SRC, DST, TOKENS = [3, 0, 9, 4], [5, 1], 13
STRANGERS = "stranger", "false"


class Line(Channel):
    """The channel of one endpoint: what it sends is kept by route."""

    def __init__(self, identity: str) -> None:
        super().__init__(identity)
        self.sent: dict[str, deque[bytes]] = defaultdict(deque)
        self.dialed: dict[str, str] = {}
        """Route to address."""

    def dial(self, address: str) -> str:
        route = f"dial-{len(self.dialed) + 1}"
        self.dialed[route] = address
        return route

    def send(self, route: str, frame: bytes) -> bool:
        self.sent[route].append(frame)
        return True

    def drop(self, route: str) -> None:
        """What was said last can still be read."""


class Node:
    def __init__(self, name: str, block_tokens: int, transport: Transport, credentials: Credentials | None) -> None:
        self.name = name
        self.layout = layout(block_tokens)
        self.buffer = Buffer(self.layout.extent(0))
        self.transport = transport
        transport.open()
        transport.register(self.buffer)
        self.line = Line(name)
        self.identity = Identity(VERSION, "m", "main", 1, self.layout, host_id())
        sums = Checksums(KVGroups((self.layout,)), [self.buffer])
        self.endpoint = Endpoint(
            name,
            self.identity,
            [transport],
            TIMEOUTS,
            batch_timeout_s=WAIT_S,
            checksums=sums,
            credentials=credentials,
            channel=lambda _: self.line,
        )
        self.sender, self.receiver = Sends(self.endpoint.sender), Receives(self.endpoint.receiver)
        self.endpoint.local.address = address_of(name, credentials.keys.public if credentials else "")

    def turn(self, *arrived: Received) -> None:
        self.endpoint.turn(arrived)

    def close(self) -> None:
        self.transport.close()
        self.buffer.close()


def address_of(name: str, key: str) -> str:
    return str(ControlAddress(name, 1, key))


class Bench:
    """`prefill` and `decode` have a session and keep it; `spare` is memory that strangers may invite prefill to."""

    def __init__(self, make: Callable[[], Transport], *, keyed: bool) -> None:
        self.keyed = keyed
        names = ("prefill", "decode", *STRANGERS)
        self.keys = {name: zmq.curve_keypair()[0].decode() if keyed else "" for name in names}
        allowed = AllowList({key: name for name, key in self.keys.items()})
        self.credentials = {
            name: Credentials(KeyPair(name, self.keys[name], ""), allowed) if keyed else None for name in names
        }
        self.prefill = Node("prefill", 4, make(), self.credentials["prefill"])
        self.decode = Node("decode", 8, make(), self.credentials["decode"])
        self.spare = Node("spare", 8, make(), None)
        random = np.random.default_rng(7)
        self.prefill.buffer.array[:] = random.integers(0, 256, self.prefill.buffer.nbytes, np.uint8)
        self.failures: list[HandlingFailed] = []
        self.num_strangers = self.num_transfers = self.num_checks = 0
        self._stop = listen(self._on_event)
        self.transfer()
        self.honest = (*self.prefill.endpoint.peers(), *self.decode.endpoint.peers())
        assert len(self.honest) == 2

    def _on_event(self, event: Event) -> None:
        if isinstance(event, HandlingFailed):
            self.failures.append(event)

    def close(self) -> None:
        self._stop()
        for node in (self.decode, self.prefill, self.spare):
            node.close()

    # -- the honest pair ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Both workers once round, and the frames between them."""
        for route, address in self.decode.line.dialed.items():
            if address == self.prefill.endpoint.address:
                back = f"decode/{route}".encode().hex()
                self._carry(self.decode.line.sent[route], self.prefill, back, self.keys["decode"])
                self._carry(self.prefill.line.sent[back], self.decode, route, self.keys["prefill"])
        for node in (self.prefill, self.decode):
            node.turn()

    @staticmethod
    def _carry(frames: deque[bytes], to: Node, route: str, key: str) -> None:
        while frames:
            to.turn(Received(route, frames.popleft(), key))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        fds = [node.transport.fileno() for node in (self.prefill, self.decode)]
        while not condition():
            assert time.monotonic() < deadline_s, f"timed out waiting until {what}"
            self.step()
            if not condition():
                readable(*fds, timeout_s=0.002)

    def transfer(self) -> None:
        """One transfer of the honest pair, all the way, with the right bytes."""
        self.num_transfers += 1
        name = f"honest-{self.num_transfers}"
        log, handler = SenderLog(), Handler()
        self.decode.buffer.array[:] = 0
        self.prefill.sender.announce(name, log.failed, log.end)
        self.decode.receiver.expect(name, self.prefill.endpoint.address, handler)
        self.decode.receiver.offer(name, DST, 0, TOKENS)
        self.compute(name)
        self.until(lambda: handler.changed.is_set() and log.ended.is_set(), "the honest transfer has ended")
        assert (handler.calls, log.calls) == (["ready 42", "released"], ["end"])
        for layer in range(3):
            for token in range(TOKENS):
                assert (self._row(self.decode, DST, token, layer) == self._row(self.prefill, SRC, token, layer)).all()

    @staticmethod
    def _row(node: Node, blocks: Sequence[int], token: int, layer: int) -> Any:
        place, kv = node.layout.layers[layer], node.layout
        at = blocks[token // kv.block_tokens] * place.block_stride + token % kv.block_tokens * place.token_stride
        return np.stack(
            [node.buffer.array[part.offset + at :][: kv.num_heads * kv.head_nbytes] for part in place.parts]
        )

    def compute(self, transfer_id: str) -> None:
        """What the engine says about a request. Nothing of a peer's may be raised at it."""
        sender = self.prefill.sender
        sender.publish(transfer_id, SRC, TOKENS, 0)
        for layer in range(3):
            sender.layer_ready(transfer_id, layer, 0, TOKENS)
        sender.finish(transfer_id, 42)

    def check(self) -> None:
        """Nobody's loop has met anything unexpected, and the honest session is the one it was and moves bytes."""
        self.num_checks += 1
        if self.num_checks % 25 == 0:
            self.transfer()
        assert self.failures == []
        for peer in self.honest:
            assert peer.state is PeerState.READY
            assert any(peer is live for node in (self.prefill, self.decode) for live in node.endpoint.peers())

    def send_away(self) -> None:
        """End all other sessions; nothing of them is left."""
        for node in (self.prefill, self.decode):
            for peer in node.endpoint.peers():
                if peer not in self.honest:
                    with node.endpoint.lock:
                        node.endpoint.sessions.lose(peer, Reason(Code.PEER_LOST, "the example is over"))
            node.endpoint.sessions.known.forget_refusals()
        self.step()
        self.until(
            lambda: not (self.prefill.endpoint.num_closing() + self.decode.endpoint.num_closing()), "all is fenced"
        )
        for counts in (self.prefill.endpoint.sender.states(), self.decode.endpoint.receiver.states()):
            assert not any(counts.values()), counts

    # -- strangers ---------------------------------------------------------------------------------------------------

    def stranger(self) -> Stranger:
        """Somebody who dials prefill."""
        self.num_strangers += 1
        return Stranger(self, self.prefill, f"stranger/{self.num_strangers}".encode().hex(), "stranger")

    def false_prefill(self) -> Stranger:
        """Somebody whom decode is made to dial, by a request that expects a transfer from it."""
        self.num_strangers += 1
        return Stranger(self, self.decode, "", "false")


class Stranger:
    """One connection to a victim, and the frames of its session."""

    def __init__(self, bench: Bench, victim: Node, route: str, name: str) -> None:
        self.bench, self.victim, self.route = bench, victim, route
        self.key = bench.keys[name]
        self.name = name if bench.keyed else f"{name}-{bench.num_strangers}"
        self.epoch, self.session, self.number = os.urandom(4).hex(), bench.num_strangers, 0
        self.dst_epoch = ""

    def expect(self, transfer_id: str, handler: Handler) -> None:
        """Let decode dial this one."""
        address = address_of(f"false-{self.session}", self.key)
        self.victim.receiver.expect(transfer_id, address, handler)
        self.victim.turn()
        self.route = next(route for route, to in self.victim.line.dialed.items() if to == address)
        peer = self.victim.endpoint.sessions.by_route[self.route]
        self.session, self.dst_epoch = peer.session, self.victim.endpoint.epoch

    def envelope(self, *bodies: messages.Body) -> Envelope:
        return Envelope(VERSION, self.name, self.epoch, self.dst_epoch, self.session, self.number, bodies)

    def say(self, envelope: Envelope) -> None:
        """Whatever it is, the victim gets it, as far as it fits into a frame."""
        frame = messages.encode(envelope)
        if len(frame) <= messages.MAX_FRAME_NBYTES:
            self.victim.turn(Received(self.route, frame, self.key))
        self.number += 1
