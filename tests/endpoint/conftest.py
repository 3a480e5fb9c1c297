"""Two endpoints in this process, joined by real sockets on loopback and a transport that does as it is told."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import numpy as np
import pytest

import pdlink
from pdlink.config import TransportConfig
from pdlink.config.listen import LinkListen
from pdlink.endpoint.channel import Channel
from pdlink.endpoint.data_path import Outgoing
from pdlink.endpoint.receiver import Incoming
from pdlink.endpoint.sharing import Sharing
from pdlink.events import Event, listen
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.kv.plan import warm_up
from pdlink.memory.buffers import Buffer
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.handshake import ModelId
from pdlink.reasons import Code, Reason
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.endpoint.receiver import Receiver
    from pdlink.endpoint.sender import Sender
    from pdlink.protocol.auth import Credentials
    from pdlink.protocol.messages import Verify
    from pdlink.transport.base import Transport

Rows = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
TIMEOUTS = Deadlines(heartbeat_s=0.05, peer_s=5.0, connect_s=6.0, lease_s=7.0, request_s=60.0)


def layout(block_tokens: int, *, num_layers: int = 3, dtype: str = "float32") -> KVLayout:
    return paged_layout(
        dtype=dtype,
        itemsize=4,
        num_layers=num_layers,
        num_blocks=32,
        block_tokens=block_tokens,
        num_heads=2,
        head_dim=4,
    )


@dataclass
class Handler:
    """Remembers what the receiver was told."""

    calls: list[str] = field(default_factory=list)
    changed: threading.Event = field(default_factory=threading.Event)

    def ready(self, first_token: int) -> None:
        self.calls.append(f"ready {first_token}")

    def failed(self, reason: str) -> None:
        self.calls.append(f"failed {reason}")

    def released(self) -> None:
        self.calls.append("released")
        self.changed.set()

    def wait(self) -> list[str]:
        assert self.changed.wait(WAIT_S), f"the transfer did not end, heard {self.calls}"
        return self.calls


class Sends:
    """The sending half of an endpoint, with the verbs of its transfers by id."""

    def __init__(self, half: Sender) -> None:
        self._half, self._transfers = half, dict[str, Outgoing]()

    def announce(self, transfer_id: str, failed: Callable[[str], None], end: Callable[[], None]) -> Outgoing:
        outgoing = self._transfers[transfer_id] = Outgoing(self._half, transfer_id)
        outgoing.done.then(lambda: failed(str(outgoing.error.reason)) if outgoing.error else None)
        outgoing.released.then(end)
        return outgoing

    def publish(self, transfer_id: str, blocks: Sequence[int], num_tokens: int, num_cached_tokens: int) -> None:
        self._transfers[transfer_id].publish([blocks], num_tokens, num_cached_tokens)

    def extend(self, transfer_id: str, blocks: Sequence[int]) -> None:
        self._transfers[transfer_id].extend([blocks])

    def layer_ready(self, transfer_id: str, layer: int, start: int, end: int) -> None:
        self._transfers[transfer_id].layer_ready(layer, start, end)

    def finish(self, transfer_id: str, first_token: int) -> None:
        self._transfers[transfer_id].finish(first_token)

    def withdraw(self, transfer_id: str, timeout_s: float) -> None:
        self._transfers[transfer_id].withdraw(timeout_s)

    def cancel(self, transfer_id: str, words: str) -> None:
        self._half.cancel(transfer_id, Reason(Code.ABORTED, words))


class Receives:
    """The receiving half of an endpoint, with the verbs of its transfers by id."""

    def __init__(self, half: Receiver) -> None:
        self._half, self._transfers = half, dict[str, Incoming]()

    def expect(self, transfer_id: str, address: str, handler: Any) -> None:
        """handler: a `Handler`, or what has its methods."""
        incoming = self._transfers[transfer_id] = Incoming(self._half, transfer_id, address)

        def done() -> None:
            if incoming.error is not None:
                handler.failed(str(incoming.error.reason))
            else:
                handler.ready(incoming.first_token)

        incoming.done.then(done)
        incoming.released.then(handler.released)

    def offer(
        self,
        transfer_id: str,
        blocks: Sequence[int],
        start: int,
        end: int,
        *,
        on_landed: Callable[[int, int, int | None], None] | None = None,
        verify: Verify = "off",
    ) -> None:
        """Also of blocks that `Incoming.offer` would refuse."""
        incoming = self._transfers[transfer_id]
        if on_landed is not None:
            incoming.on_landed = on_landed  # type: ignore[method-assign, assignment]
        with self._half.lock:
            per_layer = on_landed is not None
            self._half.act(
                incoming, incoming.machine.offer((tuple(blocks),), start, end, per_layer=per_layer, verify=verify)
            )

    def cancel(self, transfer_id: str, words: str) -> None:
        self._half.cancel(transfer_id, Reason(Code.ABORTED, words))


@dataclass
class SenderLog:
    """Remembers what the sending worker was told."""

    calls: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def failed(self, reason: str) -> None:
        self.calls.append(f"failed {reason}")

    def end(self) -> None:
        self.calls.append("end")
        self.ended.set()

    def wait(self) -> list[str]:
        assert self.ended.wait(WAIT_S), f"the transfer did not end, heard {self.calls}"
        return self.calls


class Node:
    """One worker over its own buffer; `open` makes its `pdlink.Node`."""

    transport: Any
    """A `LoopbackTransport`, as a rule."""

    def __init__(
        self,
        hub: LoopbackHub,
        name: str,
        kv: KVLayout,
        timeouts: Deadlines,
        model: str = "m",
        channel: Callable[[str], Channel] = Channel,
        sharing: Sharing | None = None,
        transports: Sequence[Transport] = (),
        credentials: Credentials | None = None,
        require_lane: str | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """transports: instead of one of the hub."""
        self.layout = kv
        self.buffer = Buffer(kv.extent(0))
        self.transport = transports[0] if transports else LoopbackTransport(hub)
        self.short_of_blocks = False
        self._sharing = Sharing() if sharing is None else sharing
        self._make = partial(
            pdlink.Node,
            name,
            KVGroups((kv,)),
            [self.buffer],
            model=ModelId(model, "main"),
            transport=TransportConfig(batch_timeout_s=5.0, require=require_lane),
            transports=transports or [self.transport],
            deadlines=timeouts,
            credentials=credentials,
            channel=channel,
            on_death=on_death,
        )

    def open(self, port: int = 0) -> Self:
        with patch("pdlink.endpoint.driver.Sharing", lambda: self._sharing):
            self.node = self._make(listen=LinkListen(address=f"127.0.0.1:{port}"))
        self.node.short_of_blocks = lambda: self.short_of_blocks
        self.endpoint = self.node.endpoint
        self.sender, self.receiver = Sends(self.endpoint.sender), Receives(self.endpoint.receiver)
        return self

    @property
    def port(self) -> int:
        return int(self.endpoint.address.rsplit(":", 1)[1])

    def close(self) -> None:
        self.node.close()
        self.buffer.close()

    def rows(self, blocks: list[int], num_tokens: int, layer: int) -> Rows:
        """[part, token, bytes] of a sequence that lies in `blocks`, gathered the slow way."""
        kv = self.layout
        size = kv.num_heads * kv.head_nbytes
        out = np.empty((2, num_tokens, size), np.uint8)
        for part in range(2):
            for token in range(num_tokens):
                block = blocks[token // kv.block_tokens]
                place = kv.layers[layer]
                at = place.parts[part].offset + block * place.block_stride
                at += (token % kv.block_tokens) * place.token_stride
                out[part, token] = self.buffer.array[at : at + size]
        return out


class Pair:
    """A prefill node, a decode node, and the moves of a transfer."""

    def __init__(
        self,
        timeouts: Deadlines = TIMEOUTS,
        block_tokens: tuple[int, int] = (4, 8),
        channel: Callable[[str], Channel] = Channel,
        sharing: Sharing | None = None,
        num_layers: int = 3,
    ) -> None:
        warm_up()  # not with the first push, under the endpoint's lock: seconds on a loaded machine
        self.hub = LoopbackHub()
        self.timeouts = timeouts
        src, dst = (layout(tokens, num_layers=num_layers) for tokens in block_tokens)
        self.prefill = Node(self.hub, "prefill", src, timeouts, channel=channel, sharing=sharing).open()
        self.decode = Node(self.hub, "decode", dst, timeouts, channel=channel).open()
        random = np.random.default_rng(7)
        self.prefill.buffer.array[:] = random.integers(0, 256, self.prefill.buffer.nbytes, np.uint8)
        self.events: list[Event] = []
        self._stop = listen(self.events.append)

    def close(self) -> None:
        self.hub.hold = False
        self.hub.deliver_all()
        self.decode.close()
        self.prefill.close()
        self._stop()

    def announce(self, transfer_id: str) -> SenderLog:
        log = SenderLog()
        self.prefill.sender.announce(transfer_id, log.failed, log.end)
        return log

    def expect(self, transfer_id: str) -> Handler:
        handler = Handler()
        self.decode.receiver.expect(transfer_id, self.prefill.endpoint.address, handler)
        return handler

    def compute(self, transfer_id: str, blocks: list[int], num_tokens: int, first_token: int = 42) -> None:
        sender = self.prefill.sender
        sender.publish(transfer_id, blocks, num_tokens, 0)
        for layer in range(len(self.prefill.layout.layers)):
            sender.layer_ready(transfer_id, layer, 0, num_tokens)
        sender.finish(transfer_id, first_token)

    def begin(self, transfer_id: str, dst: list[int], num_tokens: int) -> tuple[SenderLog, Handler]:
        """A transfer whose offer is here, and of which nothing is computed."""
        log, handler = self.announce(transfer_id), self.expect(transfer_id)
        self.decode.receiver.offer(transfer_id, dst, 0, num_tokens)
        until(lambda: self.sender_state("writing") == 1, "the offer is there")
        return log, handler

    def fly(self, transfer_id: str, src: list[int], dst: list[int], num_tokens: int) -> tuple[SenderLog, Handler]:
        """A transfer whose layers are all in flight, and do not arrive."""
        self.hub.hold = True
        both = self.begin(transfer_id, dst, num_tokens)
        self.compute(transfer_id, src, num_tokens)
        num_layers = len(self.prefill.layout.layers)
        until(lambda: len(self.hub.open_batches) == num_layers, "every layer is in flight")
        return both

    def transfer(self, transfer_id: str, src: list[int], dst: list[int], num_tokens: int) -> list[str]:
        """One transfer from its announcement to its end: what the receiver's handler was told."""
        self.announce(transfer_id)
        handler = self.expect(transfer_id)
        self.decode.receiver.offer(transfer_id, dst, 0, num_tokens)
        self.compute(transfer_id, src, num_tokens)
        return handler.wait()

    def sender_state(self, state: str) -> int:
        return self.prefill.endpoint.sender.states()[state]

    def receiver_state(self, state: str) -> int:
        return self.decode.endpoint.receiver.states()[state]

    def idle(self) -> bool:
        """Nothing is held anywhere."""
        counts = [*self.prefill.endpoint.sender.states().values(), *self.decode.endpoint.receiver.states().values()]
        return not any(counts)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
