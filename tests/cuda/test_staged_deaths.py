"""Nodes with KV on GPUs (the double's) in two processes, of which one is killed: the other is told, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from pdlink.cuda.driver import Device
from pdlink.errors import TransferFailed
from tests import other_process
from tests.cuda.fake import COMPILER, Fake, fake
from tests.cuda.test_staged import NO_UCX, GpuNode
from tests.node.conftest import DST, LAYERS, SRC, TOKENS
from tests.waiting import WAIT_S

LANES = ["mapped", "tcp", pytest.param("ucx", marks=NO_UCX)]


class Served:
    """A node of the other process."""

    def __init__(self, role: str, below: str) -> None:
        self.device = Device(0, fake().path)
        self.device.open()
        self.node = GpuNode(role, self.device, 4 if role == "prefill" else 8, below)

    def address(self) -> str:
        return self.node.address

    def send(self, transfer: str) -> None:
        self.outgoing = self.node.send(transfer, [SRC], TOKENS)
        assert self.outgoing.accepted.wait(WAIT_S)

    def layers(self, first: int, last: int) -> None:
        for layer in range(first, last):
            self.outgoing.layer_ready(layer)
        if last == LAYERS:
            self.outgoing.finish(42)

    def receive(self, transfer: str, peer: str) -> None:
        self.incoming = self.node.receive(transfer, peer, [DST], range(TOKENS))

    def arrived(self) -> int:
        return self.incoming.wait(WAIT_S)

    def hold(self) -> None:
        """Its GPU runs nothing any more."""
        holding = threading.Event()

        def forever() -> None:
            fake().hold()
            holding.set()
            threading.Event().wait()

        threading.Thread(target=forever, daemon=True).start()
        assert holding.wait(WAIT_S)

    def close(self) -> None:
        self.node.close()
        self.device.close()


def serve(arguments: list[str]) -> None:
    with closing(Served(*arguments)) as served:
        other_process.answer_calls(served)


@pytest.fixture
def others() -> Iterator[Any]:
    if COMPILER is None:
        pytest.skip("no C++ compiler for the test double of the driver")
    fake()  # built before a process needs it
    with ExitStack() as made:

        def start(role: str, below: str) -> other_process.OtherProcess:
            other = other_process.OtherProcess(__name__, role, below)
            made.callback(other.end)
            return other

        yield start


@pytest.mark.parametrize("below", LANES)
def test_a_sender_that_is_killed_costs_its_transfer_alone(
    device: Device, double: Fake, others: Any, below: str
) -> None:
    first = others("prefill", below)
    with closing(GpuNode("decode", device, 8, below)) as decode:
        incoming = decode.receive("t", first.call("address"), [DST], range(TOKENS))
        first.call("send", "t")
        first.call("layers", 0, 1)
        incoming.wait_layer(0, WAIT_S)
        first.kill()
        with pytest.raises(TransferFailed):
            incoming.wait(WAIT_S)
        assert incoming.released.wait(WAIT_S), "the fence: nobody writes into its blocks any more"
        second = others("prefill", below)
        again = decode.receive("again", second.call("address"), [DST], range(TOKENS))
        second.call("send", "again")
        second.call("layers", 0, LAYERS)
        assert again.wait(WAIT_S) == 42


@pytest.mark.parametrize("below", LANES)
def test_a_receiver_that_is_killed_before_it_has_placed_anything_frees_the_sender_s_blocks(
    device: Device, double: Fake, others: Any, below: str
) -> None:
    first = others("decode", below)
    with closing(GpuNode("prefill", device, 4, below)) as prefill:
        outgoing = prefill.send("t", [SRC], TOKENS)
        first.call("receive", "t", prefill.address)
        assert outgoing.accepted.wait(WAIT_S)
        first.call("hold")
        for layer in range(LAYERS):
            outgoing.layer_ready(layer)
        outgoing.finish(42)
        assert not outgoing.released.wait(0.2), "its parts are with the receiver, and not placed"
        first.kill()
        assert outgoing.released.wait(WAIT_S)
        with pytest.raises(TransferFailed):
            outgoing.wait(WAIT_S)
        second = others("decode", below)
        again = prefill.send("again", [SRC], TOKENS)
        second.call("receive", "again", prefill.address)
        assert again.accepted.wait(WAIT_S)
        for layer in range(LAYERS):
            again.layer_ready(layer)
        again.finish(7)
        assert second.call("arrived") == 7
