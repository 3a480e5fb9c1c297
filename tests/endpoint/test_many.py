"""A decode worker has a session with every prefill worker of a large deployment."""

from __future__ import annotations

import resource
import threading

import pytest
import zmq

from pdlink.endpoint import sessions
from pdlink.endpoint.peer import PeerState
from pdlink.errors import TransferFailed
from pdlink.protocol import messages
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.messages import VERSION, Envelope, Identity
from tests.loopback import LOOPBACK
from tests.waiting import WAIT_S, until

from .conftest import Handler, Node, Pair, layout

NUM_PEERS = 2_000
PATIENT = Deadlines(
    heartbeat_s=5.0, peer_s=5 * WAIT_S, connect_s=4 * WAIT_S, lease_s=6 * WAIT_S, request_s=7 * WAIT_S
)


class Crowd:
    """Very many prefill workers behind one port: each has its own address of 127.0.0.0/8, and says welcome."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.BACKLOG, 1000)
        self._port = self._socket.bind_to_random_port("tcp://0.0.0.0")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._welcome)
        self._thread.start()

    def address(self, number: int) -> str:
        return f"tcp://127.0.{1 + number // 250}.{1 + number % 250}:{self._port}"

    def _welcome(self) -> None:
        identity = Identity(VERSION, "m", "main", 1, layout(4), "host")
        while not self._stop.is_set():
            if not self._socket.poll(50):
                continue
            route, frame = self._socket.recv_multipart()
            heard = messages.decode(frame)
            body: messages.Body
            match heard.bodies[0]:
                case messages.Hello():
                    number, body = 0, messages.Welcome(f"prefill-{heard.session}", identity, LOOPBACK)
                case messages.Invite():
                    number, body = 1, messages.Ready()
                case _:
                    continue
            name = f"prefill-{heard.session}"
            answer = Envelope(VERSION, name, "e" * 16, heard.src_epoch, heard.session, number, (body,))
            self._socket.send_multipart([route, messages.encode(answer)])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.mark.slow
def test_worker_has_two_thousand_sessions_that_it_dialed() -> None:
    """libzmq's default of 1,023 sockets was enough for 341."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 8 * NUM_PEERS:
        pytest.skip(f"needs {8 * NUM_PEERS} descriptors in this process")
    crowd, pair = Crowd(), Pair(PATIENT)
    node = Node(pair.hub, "decode-of-many", layout(8), PATIENT).open()
    endpoint = node.endpoint

    def connecting() -> int:
        return sum(peer.state is PeerState.CONNECTING for peer in endpoint.peers())

    try:
        for number in range(NUM_PEERS):
            if number % 100 == 0:
                until(lambda: connecting() <= 200, "most have answered")
            node.receiver.expect(f"t-{number}", crowd.address(number), Handler())
        until(lambda: connecting() == 0, "all have answered")
        assert len(endpoint.peers()) == NUM_PEERS
        assert endpoint.failure == ""
        for number in range(20):  # and goes on to turn around as quickly as before
            handler = Handler()
            node.receiver.expect(f"real-{number}", pair.prefill.endpoint.address, handler)
            until(lambda n=number: pair.prefill.endpoint.sender._early.get(f"real-{n}") is not None, "heard of")  # type: ignore[misc]
            node.receiver.cancel(f"real-{number}", "enough")
            assert handler.wait() == ["failed aborted: enough", "released"]
    finally:
        node.close()
        pair.close()
        crowd.close()


def test_workers_that_do_not_answer_are_dialed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request names the worker to dial: a thousand of them must not take all sockets."""
    monkeypatch.setattr(sessions, "MAX_DIALS", 10)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deaf = context.socket(zmq.ROUTER)  # accepts, and never says a word
    port = deaf.bind_to_random_port("tcp://0.0.0.0")
    pair = Pair(PATIENT)
    receiver = pair.decode.receiver
    try:
        for number in range(10):
            receiver.expect(f"t-{number}", f"tcp://127.0.0.{1 + number}:{port}", Handler())
        with pytest.raises(TransferFailed, match="10 dialed workers have not answered yet"):
            receiver.expect("one-more", f"tcp://127.0.1.1:{port}", Handler())
        receiver.expect("the-same", f"tcp://127.0.0.1:{port}", Handler())
    finally:
        pair.close()
        context.destroy(linger=0)
