"""How peers of a staged lane begin and end where something goes wrong just then, on the test double of the driver."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import msgspec
import pytest

from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.memory.buffers import AnyBuffer
from pdlink.transport.base import Occurrence, PeerFailed
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.staged import StagedTransport
from pdlink.transport.staging.slots import Slots
from pdlink.transport.staging.wire import Invitation
from pdlink.transport.tcp import TcpTransport
from tests.conformance.transports.side import Side, join
from tests.cuda.by_runs import ByRuns
from tests.cuda.double import DoubleStaged
from tests.cuda.fake import COMPILER, Fake, fake
from tests.waiting import until


class Unwilling(TcpTransport):
    """Registers no memory until it is told to."""

    willing = False

    def register(self, buffer: AnyBuffer) -> int:
        if not self.willing:
            raise TransportUnavailable("no memory can be registered")
        return super().register(buffer)


@pytest.mark.usefixtures("double")
def test_slots_that_the_lane_below_does_not_take_are_made_again_for_the_next_peer() -> None:
    below, owner = Unwilling(), Side(DoubleStaged(TcpTransport()))
    side = Side(DoubleStaged(below))
    for one in (side, owner):
        one.add_buffer(4096, 0)
    with pytest.raises(TransportUnavailable, match="no memory can be registered"):
        side.transport.invite("writer")
    with pytest.raises(TransportUnavailable, match="no memory can be registered"):
        side.transport.connect("owner", owner.transport.invite("side"))
    below.willing = True
    side.transport.invite("writer2")
    side.transport.connect("owner2", owner.transport.invite("side2"))
    for one in (side, owner):
        one.transport.close()


def test_peer_that_the_lane_below_loses_while_slots_are_made_is_refused(
    double: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint polls meanwhile: it calls connect aside."""
    writer, owner = (Side(DoubleStaged(TcpTransport())) for _ in range(2))
    for side in (writer, owner):
        side.add_buffer(4096, 0)
    there = msgspec.msgpack.decode(owner.transport.invite("writer"), type=Invitation)
    below = msgspec.msgpack.decode(there.below)
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        below["port"] = gone.getsockname()[1]
    make, poll, lost = StagedTransport._make, TcpTransport.poll, threading.Event()

    def make_late(self: StagedTransport, slots: Slots) -> None:
        until(lambda: self.poll() == [] and lost.is_set(), "the lane below has lost the peer")
        make(self, slots)

    def watched(self: TcpTransport) -> list[Occurrence]:
        found = poll(self)
        if any(isinstance(one, PeerFailed) for one in found):
            lost.set()
        return found

    monkeypatch.setattr(StagedTransport, "_make", make_late)
    monkeypatch.setattr(TcpTransport, "poll", watched)
    nowhere = msgspec.structs.replace(there, below=msgspec.msgpack.encode(below))
    with pytest.raises(TransportFailure, match="refused"):
        writer.transport.connect("owner", msgspec.msgpack.encode(nowhere))
    for side in (writer, owner):
        side.transport.close()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_gather_that_cannot_be_launched_does_not_shut_its_owner_in() -> None:
    """Nothing is on its way to the owner's slot."""
    double = fake()
    writer, owner = (Side(ByRuns(DoubleStaged(MappedTransport(threads=1, within_process=True)))) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(1 << 16, seed)
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    double.fail("cuLaunchKernel", 700)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "peer_failed"
    owner.close_peer("writer")
    assert owner.closed_within("writer", 10.0)
    for side in (writer, owner):
        side.close()
