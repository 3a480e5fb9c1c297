"""Batches of mapped-cuda whose sources are not written yet: what waits for them on the GPU, and what does not.

On a test double of the driver, whose streams stand when a test says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

import pdlink
from pdlink.cuda.bells import Bells
from pdlink.cuda.driver import CudaEvent, CudaStream, Device
from pdlink.cuda.launches import NUM_SLOTS
from pdlink.endpoint.sharing import Sharing
from pdlink.errors import TransferFailed
from pdlink.events import LayerLanded, listen
from pdlink.transport.mapped_cuda import NUM_STREAMS
from tests.conformance.transports.side import Side, join
from tests.cuda.double import DoubleNode, DoubleTransport, DriverEvent, block_plan
from tests.cuda.fake import COMPILER, Fake, fake
from tests.cuda.test_mapped_cuda import calls_until
from tests.node.conftest import DST, LAYERS, SRC, TOKENS, groups
from tests.waiting import WAIT_S, until

POOL_NBYTES = 1 << 20
LAYER_NBYTES = TOKENS * groups(4).layer_nbytes[0]


class Work:
    """A stream of the engine, and an event behind what it was given. Held until `run`."""

    def __init__(self, double: Fake, device: Device) -> None:
        self._double, self.stream, self.event = double, CudaStream(device), CudaEvent(device)
        self._is_held = True
        double.hold_stream(self.stream.handle)

    def mark(self) -> tuple[int, int]:
        self.event.record(self.stream)
        return self.event.handle, self.stream.handle

    def run(self) -> None:
        if self._is_held:
            self._is_held = False
            self._double.go_on_stream(self.stream.handle)

    def close(self) -> None:
        self.run()
        self.event.close()
        self.stream.close()


Make = Callable[[], Work]


@pytest.fixture
def pair(double: Fake, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    writer, owner = (Side(DoubleTransport(getattr(request, "param", 1 << 20))) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(POOL_NBYTES, seed)
    join(writer, owner)
    yield writer, owner
    for side in (writer, owner):
        side.close()


@pytest.fixture
def held(pair: tuple[Side, Side], double: Fake, device: Device) -> Iterator[Make]:
    with ExitStack() as made:
        yield lambda: made.enter_context(closing(Work(double, device)))


def submit_after(
    side: Side, offset: int, nbytes: int, *marks: tuple[int, int], timeout_s: float = WAIT_S, block_nbytes: int = 64
) -> int:
    blocks = range(offset // block_nbytes, (offset + nbytes) // block_nbytes)
    plan = block_plan(POOL_NBYTES, block_nbytes, blocks, blocks)
    return side.transport.submit_plan("owner", plan, range(1), timeout_s, marks)


def test_bytes_are_read_behind_what_writes_them(
    pair: tuple[Side, Side], double: Fake, device: Device, held: Make
) -> None:
    """The double notes a read that nothing puts behind the write."""
    writer, owner = pair
    work, before = held(), owner.snapshot()
    device.copy(writer.buffers[0].ptr, writer.buffers[0].ptr + 4096, 4096, work.stream.handle)
    ticket = submit_after(writer, 0, 4096, work.mark())
    calls_until(double, "cuLaunchKernel")
    assert owner.snapshot() == before
    work.run()
    assert writer.wait_batch(ticket) == "ok"
    assert (owner.buffers[0].array[:4096] == writer.buffers[0].array[4096:8192]).all()


@pytest.mark.parametrize("num_late", [1, NUM_STREAMS + 2])
def test_late_streams_hold_back_nobody(pair: tuple[Side, Side], held: Make, num_late: int) -> None:
    """Neither what waits for nothing, nor what waits for another stream, however many are late."""
    writer, _ = pair
    works = [held() for _ in range(num_late)]
    late = [submit_after(writer, 4096 * number, 64, work.mark()) for number, work in enumerate(works)]
    assert writer.wait_batch(writer.submit_block("owner", 65536, 64)) == "ok"
    another = held()
    ticket = submit_after(writer, 65536, 64, another.mark())
    another.run()
    assert writer.wait_batch(ticket) == "ok"
    for number in reversed(range(num_late)):
        assert not writer.done(late[number])
        works[number].run()
        assert writer.wait_batch(late[number]) == "ok"


def test_a_late_forward_pass_leaves_slots_for_others(pair: tuple[Side, Side], held: Make) -> None:
    """Twice as many layers as there are slots are launched before the first is written."""
    writer, owner = pair
    work, other = held(), held()
    late = [submit_after(writer, 64 * layer, 64, work.mark()) for layer in range(2 * NUM_SLOTS)]
    assert [writer.wait_batch(writer.submit_block("owner", 65536, 64)) for _ in range(NUM_SLOTS)] == [
        "ok"
    ] * NUM_SLOTS
    ticket = submit_after(writer, 65536, 64, other.mark())
    other.run()
    assert writer.wait_batch(ticket) == "ok"
    work.run()
    assert [writer.wait_batch(one) for one in late] == ["ok"] * len(late)
    assert (owner.buffers[0].array[: 64 * len(late)] == writer.buffers[0].array[: 64 * len(late)]).all()


@pytest.mark.parametrize("pair", [POOL_NBYTES // 2 // (2 * NUM_SLOTS)], indirect=True)
def test_a_late_batch_of_many_launches_leaves_slots_for_others(pair: tuple[Side, Side], held: Make) -> None:
    """Each part has a list, and a list a slot."""
    writer, _ = pair
    work = held()
    late = submit_after(writer, 0, POOL_NBYTES // 2, work.mark())
    for _ in range(NUM_SLOTS):
        assert writer.wait_batch(writer.submit_block("owner", POOL_NBYTES // 2, 64)) == "ok"
    assert not writer.done(late)
    work.run()
    assert writer.wait_batch(late) == "ok"
    mine, theirs = (side.buffers[0].array[: POOL_NBYTES // 2] for side in pair)
    assert np.array_equal(mine, theirs)


def test_a_batch_after_several_streams_waits_for_all(pair: tuple[Side, Side], double: Fake, held: Make) -> None:
    writer, owner = pair
    first, last, before = held(), held(), owner.snapshot()
    ticket = submit_after(writer, 0, 4096, first.mark(), last.mark())
    calls = calls_until(double, "cuLaunchKernel")
    assert calls.count("cuStreamWaitEvent") >= 2
    last.run()
    assert owner.snapshot() == before
    assert not writer.done(ticket)
    first.run()
    assert writer.wait_batch(ticket) == "ok"


@pytest.mark.parametrize("pair", [POOL_NBYTES // 8], indirect=True)
def test_a_batch_larger_than_a_launch_is_done_with_its_last_part(
    pair: tuple[Side, Side], double: Fake, held: Make
) -> None:
    writer, owner = pair
    work = held()
    double.take_log()
    ticket = submit_after(writer, 0, POOL_NBYTES - 4096, work.mark())
    calls_until(double, "cuLaunchKernel", 8)
    work.run()
    assert writer.wait_batch(ticket) == "ok"
    mine, theirs = (side.buffers[0].array[:-4096] for side in pair)
    assert np.array_equal(mine, theirs)
    assert owner.snapshot() != writer.snapshot()


def test_time_counts_from_the_mark(pair: tuple[Side, Side], double: Fake, held: Make) -> None:
    writer, _ = pair
    work = held()
    ticket = submit_after(writer, 0, 64, work.mark(), timeout_s=0.05)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        writer.poll()
        assert not writer.happened
        time.sleep(0.02)
    double.hold()
    try:
        work.run()
        assert writer.wait_batch(ticket) == "timeout"
    finally:
        double.go_on()


def test_the_owner_s_fence_follows_a_batch_that_waits(pair: tuple[Side, Side], double: Fake, held: Make) -> None:
    """It was launched, and cannot be called off."""
    writer, owner = pair
    work = held()
    ticket = submit_after(writer, 0, POOL_NBYTES, work.mark())
    calls_until(double, "cuLaunchKernel")
    owner.close_peer("writer")
    assert not owner.closed_within("writer", 0.2)
    work.run()
    owner.wait_closed("writer")
    at_the_end = owner.snapshot()
    assert at_the_end == writer.snapshot()
    assert writer.wait_batch(ticket) == "ok"
    assert writer.wait_batch(submit_after(writer, 0, 64, work.mark())) == "cancelled"
    assert owner.snapshot() == at_the_end


def test_who_closes_a_peer_waits_for_what_waits(pair: tuple[Side, Side], double: Fake, held: Make) -> None:
    """What has no stream yet is cancelled at once."""
    writer, owner = pair
    works = [held() for _ in range(NUM_STREAMS)]
    tickets = [submit_after(writer, 64 * number, 64, work.mark()) for number, work in enumerate(works)]
    calls_until(double, "cuLaunchKernel", NUM_STREAMS - 1)
    writer.close_peer("owner")
    assert writer.wait_batch(tickets[-1]) == "cancelled"
    assert not writer.closed_within("owner", 0.2)
    before = owner.buffers[0].array[64 * (NUM_STREAMS - 1) : 64 * NUM_STREAMS].tobytes()
    for work in works:
        work.run()
    writer.wait_closed("owner")
    assert [writer.wait_batch(ticket) for ticket in tickets[:-1]] == ["ok"] * (NUM_STREAMS - 1)
    assert owner.buffers[0].array[64 * (NUM_STREAMS - 1) : 64 * NUM_STREAMS].tobytes() == before


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_an_event_that_never_comes_keeps_the_owner_s_memory_in_quarantine() -> None:
    """The writer goes all the same, and leaves what its GPU may still use."""
    double = fake()
    device = Device(0, double.path)
    device.open()
    writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
    for side in (writer, owner):
        side.add_buffer(4096, seed=0)
    join(writer, owner)
    work = Work(double, device)
    try:
        ticket = submit_after(writer, 0, 64, work.mark())
        calls_until(double, "cuLaunchKernel")
        owner.close_peer("writer")
        writer.close()
        assert not writer.done(ticket)
        assert not owner.closed_within("writer", 0.1)
    finally:
        work.close()
        device.synchronize()
        owner.close()
        device.close()


def test_an_event_of_a_gpu_that_has_failed_fails_the_peer(pair: tuple[Side, Side], double: Fake, held: Make) -> None:
    writer, owner = pair
    work = held()
    mark = work.mark()
    double.fail("cuEventQuery", 700)
    ticket = submit_after(writer, 0, 64, mark)
    assert writer.wait_batch(ticket) == "peer_failed"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in writer.wait_failed("owner")
    owner.close_peer("writer")
    owner.wait_closed("writer")
    writer.close_peer("owner")
    writer.wait_closed("owner")


def test_bells_ring_for_each_stream_by_itself_and_streams_are_used_again(double: Fake, device: Device) -> None:
    works = [Work(double, device) for _ in range(3)]
    events = [DriverEvent(device, lambda work=work: work.stream.handle) for work in works]  # type: ignore[misc]
    with closing(Bells(device)) as bells:

        def rings() -> bool:
            with contextlib.suppress(BlockingIOError):
                return bool(os.eventfd_read(bells.fileno()))
            return False

        before = double.counts().streams
        for event in events:
            event.record()
            bells.ring_after(event)
        assert double.counts().streams == before + 3
        assert not rings()
        works[2].run()
        until(rings, "the last one rings before the others")
        until(lambda: events[2].reached(), "it is reached")
        events[2].record()
        until(lambda: any(stream.is_idle() for stream in bells._streams), "its stream is free")
        bells.ring_after(events[2])
        until(rings, "it rings again")
        assert double.counts().streams == before + 3
        for work in works:
            work.run()
        until(lambda: all(stream.is_idle() for stream in bells._streams), "all have rung")
    for event in events:
        event.close()
    for work in works:
        work.close()


class GpuNode(DoubleNode):
    def __init__(
        self, name: str, device: Device, block_tokens: int, stream: Callable[[], int], made: ExitStack
    ) -> None:
        def make_event() -> Any:
            event = DriverEvent(device, stream)
            made.callback(event.close)
            return event

        super().__init__(name, device, block_tokens, DoubleTransport(), make_event, lambda: Bells(device))


class Nodes:
    """A sender that computes on `stream`, and a receiver on the default one."""

    def __init__(self, device: Device, made: ExitStack) -> None:
        self.stream = 0
        self.prefill = made.enter_context(closing(GpuNode("prefill", device, 4, lambda: self.stream, made)))
        self.decode = made.enter_context(closing(GpuNode("decode", device, 8, lambda: 0, made)))

    def begin(self, name: str, place: list[int] = DST) -> tuple[pdlink.Outgoing, pdlink.Incoming]:
        outgoing = self.prefill.send(name, [SRC], TOKENS)
        incoming = self.decode.receive(name, self.prefill.address, [place], range(TOKENS))
        until(lambda: outgoing.machine.offered is not None, "blocks are offered")
        return outgoing, incoming

    def compute(self, outgoing: pdlink.Outgoing) -> None:
        for layer in range(LAYERS):
            outgoing.layer_ready(layer)
        outgoing.finish(42)


@pytest.fixture
def nodes(double: Fake, device: Device) -> Iterator[Nodes]:
    with ExitStack() as made:
        yield Nodes(device, made)


def test_layers_are_launched_before_they_are_written_and_land_after(
    nodes: Nodes, double: Fake, device: Device
) -> None:
    with closing(Work(double, device)) as work:
        outgoing, incoming = nodes.begin("t")
        nodes.stream = work.stream.handle
        double.take_log()
        nodes.compute(outgoing)
        calls_until(double, "cuLaunchKernel", LAYERS)
        nodes.prefill.kv.array[:] += 1  # what its kernels write meanwhile
        assert not incoming.done.is_set()
        assert nodes.prefill.report().push_nbytes["in_flight"] > 0
        work.run()
        assert incoming.wait(WAIT_S) == 42
    for layer in range(LAYERS):
        for part in range(2):
            assert np.array_equal(nodes.decode.rows(DST, layer, part), nodes.prefill.rows(SRC, layer, part))


def test_a_push_that_is_held_waits_for_its_link_from_when_it_is_written(
    nodes: Nodes, double: Fake, device: Device
) -> None:
    """Or the wait for prefill would be told as that of a link which is behind."""
    landed: list[LayerLanded] = []
    with ExitStack() as made:
        made.callback(listen(lambda event: landed.append(event) if isinstance(event, LayerLanded) else None))
        work = made.enter_context(closing(Work(double, device)))
        outgoing = nodes.prefill.send("t", [SRC], TOKENS)
        nodes.stream = work.stream.handle
        nodes.compute(outgoing)
        incoming = nodes.decode.receive("t", nodes.prefill.address, [DST], range(TOKENS))
        until(lambda: outgoing.machine.offered is not None, "blocks are offered")
        written_s = time.monotonic()
        work.run()
        assert incoming.wait(WAIT_S) == 42
    assert [event.layer for event in landed] == list(range(LAYERS))
    assert all(written_s <= event.asked_s <= event.submitted_s <= event.at_s for event in landed)


def test_what_was_written_before_its_offer_takes_turns(nodes: Nodes, double: Fake) -> None:
    """A whole prompt is not handed over at once: it goes as the windows allow, and shorter ones before it."""
    sender = nodes.prefill.endpoint.sender
    sender.cut_at_nbytes = LAYER_NBYTES
    sender.data_path._sharing = Sharing(LAYER_NBYTES, LAYER_NBYTES, LAYER_NBYTES)
    outgoing = nodes.prefill.send("t", [SRC], TOKENS)
    nodes.compute(outgoing)
    double.hold()
    try:
        incoming = nodes.decode.receive("t", nodes.prefill.address, [DST], range(TOKENS))
        wanted = {"waiting": (LAYERS - 1) * LAYER_NBYTES, "in_flight": LAYER_NBYTES}
        until(lambda: sender.push_nbytes() == wanted, "a layer is handed over, and the others wait")
    finally:
        double.go_on()
    assert incoming.wait(WAIT_S) == 42


def test_what_is_launched_before_its_offer_lands_after_it_is_written(
    nodes: Nodes, double: Fake, device: Device
) -> None:
    with closing(Work(double, device)) as work:
        outgoing = nodes.prefill.send("t", [SRC], TOKENS)
        nodes.stream = work.stream.handle
        nodes.compute(outgoing)
        incoming = nodes.decode.receive("t", nodes.prefill.address, [DST], range(TOKENS))
        until(lambda: outgoing.machine.offered is not None, "blocks are offered")
        nodes.prefill.kv.array[:] += 1  # what its kernels write meanwhile
        assert not incoming.done.wait(0.1)
        work.run()
        assert incoming.wait(WAIT_S) == 42
    for layer in range(LAYERS):
        assert np.array_equal(nodes.decode.rows(DST, layer, 0), nodes.prefill.rows(SRC, layer, 0))


def test_a_late_chunk_holds_back_no_other_transfer(nodes: Nodes, double: Fake, device: Device) -> None:
    with closing(Work(double, device)) as work:
        (late, late_incoming), (outgoing, incoming) = nodes.begin("late"), nodes.begin("t", [4, 8, 1])
        nodes.stream = work.stream.handle
        nodes.compute(late)
        nodes.stream = 0
        nodes.compute(outgoing)
        assert incoming.wait(WAIT_S) == 42
        assert not late_incoming.has_layer(0)
        work.run()
        assert late_incoming.wait(WAIT_S) == 42


def test_a_cancelled_transfer_holds_its_blocks_until_its_event_has_come(
    nodes: Nodes, double: Fake, device: Device
) -> None:
    """A kernel that was launched reads and writes them then."""
    with closing(Work(double, device)) as work:
        outgoing, incoming = nodes.begin("t")
        nodes.stream = work.stream.handle
        outgoing.layer_ready(0)
        incoming.cancel()
        with pytest.raises(TransferFailed):
            outgoing.wait(WAIT_S)
        assert not incoming.released.wait(0.2)
        assert not outgoing.released.is_set()
        work.run()
        assert incoming.released.wait(WAIT_S)
        assert outgoing.released.wait(WAIT_S)


def test_a_launch_that_stands_holds_up_no_other_call(nodes: Nodes, double: Fake) -> None:
    """Of the endpoint, from any thread: its lock is free while the driver is called."""
    outgoing, incoming = nodes.begin("t")
    for call in ("cuLaunchKernel", "cuEventQuery"):
        double.stall(call)
        outgoing.layer_ready(0 if call == "cuLaunchKernel" else 1)
        double.wait_stalled()
        other = nodes.prefill.send(f"other {call}")
        nodes.prefill.report()
        other.cancel()
        outgoing.layer_ready(2) if call == "cuEventQuery" else None
        assert other.released.wait(WAIT_S)
        assert double.let_go(), "it stood all the while"
    outgoing.finish(42)
    assert incoming.wait(WAIT_S) == 42
