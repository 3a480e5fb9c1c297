"""The two ends of a link as processes, for `pdlink bench control`: real nodes and sockets, tiny blocks.

`SendingEnd` and `ReceivingEnd` move nothing worth mentioning: what takes time is the control plane. Both know the
names of the transfers from a prefix and a number, so nothing else is said between them. The floor is measured between
the same two processes: a bare DEALER and a bare ROUTER that wait for each other as endpoints do.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import zmq

from pdlink.errors import TransferFailed
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import paged_layout
from pdlink.node.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.node.node import Incoming
    from pdlink.transport.base import Probe, Transport

BLOCK_TOKENS, NUM_BLOCKS = 16, 1024
"""Transfers reuse blocks in turn. NUM_BLOCKS exceeds the live ones by far, so that no two of these share a block."""
PAYLOAD = b"x" * 128
"""About what an offer of one block takes."""
PAUSE_S = 0.0002
"""Before each round trip and transfer that is measured alone: what the one before has left to do is done."""
WAIT_S = 60.0


def tiny_groups(num_layers: int) -> KVGroups:
    """Blocks of 4 KiB per layer."""
    layout = paged_layout(
        dtype="bfloat16",
        itemsize=2,
        num_layers=num_layers,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        num_heads=1,
        head_dim=64,
    )
    return KVGroups((layout,))


class _End:
    def __init__(self, name: str, num_layers: int, make_transport: Callable[[], Transport]) -> None:
        self._name, self._num_layers = name, num_layers
        self.transport = make_transport()
        self._node: Node | None = None

    def probe(self) -> Probe:
        return self.transport.probe()

    def start(self) -> str:
        """Open everything; the control address."""
        self._node = Node(self._name, tiny_groups(self._num_layers), transports=[self.transport])
        return self._node.address

    @property
    def node(self) -> Node:
        if self._node is None:
            raise ValueError("start() first")
        return self._node

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        if self._node is not None:
            self._node.close()


class SendingEnd(_End):
    """A prefill worker that has computed before anybody asks."""

    def __init__(self, num_layers: int, make_transport: Callable[[], Transport]) -> None:
        super().__init__("bench-prefill", num_layers, make_transport)
        self._echo: _Echo | None = None

    def start_echo(self) -> str:
        """Its address."""
        self.stop_echo()
        self._echo = _Echo()
        return self._echo.address

    def stop_echo(self) -> None:
        if self._echo is not None:
            self._echo.close()
            self._echo = None

    def close(self) -> None:
        self.stop_echo()
        super().close()

    def lane(self) -> str:
        """How the bytes to the last receiver travel."""
        peers = self.node.report().peers
        return peers[-1]["lane"] if peers else ""

    def feed(self, prefix: str, count: int, window: int) -> None:
        """Have `window` computed transfers ready, and a new one for each that ends, until it was `count`. Returns."""
        fed = 0

        def next_one() -> None:
            nonlocal fed
            if fed < count:
                number, fed = fed, fed + 1
                self._compute(f"{prefix}-{number}", number, next_one)

        for _ in range(min(window, count)):
            next_one()

    def _compute(self, transfer_id: str, number: int, on_end: Callable[[], None]) -> None:
        outgoing = self.node.send(transfer_id, [[number % NUM_BLOCKS]], BLOCK_TOKENS)
        outgoing.released.then(on_end)
        for layer in range(self._num_layers):
            outgoing.layer_ready(layer)
        outgoing.finish(1)


class ReceivingEnd(_End):
    """A decode worker that offers one block for each transfer."""

    def __init__(self, num_layers: int, make_transport: Callable[[], Transport]) -> None:
        super().__init__("bench-decode", num_layers, make_transport)

    def expect(self, prefix: str, count: int, address: str) -> None:
        """Tell the sender at `address` that these transfers are wanted."""
        self._expected = [self.node.receive(f"{prefix}-{number}", address, by_layer=False) for number in range(count)]

    def one_by_one(self, echo: str) -> tuple[list[float], list[float]]:
        """Seconds of bare round trips with `echo`, and from offer to ready; the two take turns."""
        bare, seconds, asking = [], [], _Asking(echo)
        try:
            asking.round_trip()
            for number, incoming in enumerate(self._expected):
                time.sleep(PAUSE_S)
                bare.append(asking.round_trip())
                time.sleep(PAUSE_S)
                ready_s: list[float] = []
                incoming.done.then(partial(_note_time, ready_s))
                offered_s = time.perf_counter()
                incoming.offer([[number % NUM_BLOCKS]], range(BLOCK_TOKENS))
                incoming.wait(WAIT_S)
                incoming.released.wait(WAIT_S)
                seconds.append(ready_s[0] - offered_s)
        finally:
            asking.close()
        return bare, seconds

    def many(self, prefix: str, count: int, window: int, address: str) -> float:
        """Seconds for `count` transfers, expected and offered at once, `window` of them at a time."""
        counter = _Counter(count)

        def begin() -> None:
            number = counter.take()
            blocks = [[number % NUM_BLOCKS]]
            incoming = self.node.receive(f"{prefix}-{number}", address, blocks, range(BLOCK_TOKENS), by_layer=False)
            incoming.released.then(partial(end, incoming))

        def end(incoming: Incoming) -> None:
            if counter.end(incoming):
                begin()

        started_s = time.perf_counter()
        for _ in range(min(window, count)):
            begin()
        return counter.wait() - started_s


def _note_time(into: list[float]) -> None:
    into.append(time.perf_counter())


class _Counter:
    """How many transfers of a run have begun and ended. Used in one thread at a time, but for `wait`."""

    def __init__(self, count: int) -> None:
        self.count, self.begun, self.ended, self.problem = count, 0, 0, ""
        self._done, self._done_s = threading.Event(), 0.0

    def take(self) -> int:
        self.begun += 1
        return self.begun - 1

    def end(self, incoming: Incoming) -> bool:
        """One more has ended; whether another one is to begin."""
        self.ended += 1
        self.problem = self.problem or str(incoming.error or "")
        if self.ended == self.count or self.problem:
            self._done_s = time.perf_counter()
            self._done.set()
        return self.begun < self.count and not self.problem

    def wait(self) -> float:
        if not self._done.wait(WAIT_S) or self.problem:
            raise TransferFailed(self.problem or f"{self.ended} of {self.count} transfers ended within {WAIT_S} s")
        return self._done_s


class _Echo:
    """A bare ROUTER in a thread of its own, which sends back what it gets."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        while not self._stopping.is_set():
            if dict(poller.poll(100)):
                route, payload = self._router.recv_multipart(zmq.NOBLOCK)
                self._router.send_multipart([route, payload], zmq.NOBLOCK)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(2.0)
        self._context.destroy(linger=0)


class _Asking:
    """A bare DEALER that waits for every answer."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)

    def round_trip(self) -> float:
        asked_s = time.perf_counter()
        self._dealer.send(PAYLOAD, zmq.NOBLOCK)
        if not dict(self._poller.poll(int(WAIT_S * 1000))):
            raise TransferFailed(f"no echo within {WAIT_S} s")
        self._dealer.recv(zmq.NOBLOCK)
        return time.perf_counter() - asked_s

    def close(self) -> None:
        self._context.destroy(linger=0)
