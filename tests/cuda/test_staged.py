"""KV of GPUs through pinned slots, between nodes on the test double of the driver: order, fences, back-pressure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, cast

import numpy as np
import pytest

from pdlink.cuda.driver import CudaFailure, Device
from pdlink.errors import ProtocolError, TransferFailed, TransportFailure, TransportUnavailable
from pdlink.kv.layout import RunList
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import BatchDone, Occurrence, PeerClosed, Transport, TransportNote
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.staging import wire
from pdlink.transport.staging.open_blocks import OpenBlocks
from pdlink.transport.staging.slots import OwnersSlots
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport
from pdlink_bench.carried import Carried
from tests.conformance.transports.side import Side, join, run_list
from tests.cuda.double import DoubleNode, DoubleStaged
from tests.cuda.fake import COMPILER, IMAGE, Fake, fake
from tests.events import Gpu, Reached
from tests.node.conftest import DST, LAYERS, SRC, TOKENS, groups
from tests.waiting import WAIT_S, until

BELOW: dict[str, Callable[[], Transport]] = {
    "mapped": lambda: MappedTransport(threads=1, within_process=True),
    "tcp": TcpTransport,
    "ucx": lambda: UcxTransport(tls="tcp", devices="lo"),
}
NO_UCX = pytest.mark.skipif(not UcxTransport(tls="tcp").probe().ok, reason="no UCX")


class GpuNode(DoubleNode):
    """Two of them are a pair."""

    def __init__(
        self, name: str, device: Device, block_tokens: int, below: str, *, make_event: Any = Reached, **staging: Any
    ) -> None:
        super().__init__(name, device, block_tokens, DoubleStaged(BELOW[below](), **staging), make_event)


def assert_same(prefill: GpuNode, decode: GpuNode, place: list[int] = DST) -> None:
    for layer in range(LAYERS):
        for part in range(2):
            assert np.array_equal(decode.rows(place, layer, part), prefill.rows(SRC, layer, part)), (layer, part)


@pytest.fixture
def pair(device: Device) -> Iterator[Callable[..., tuple[GpuNode, GpuNode]]]:
    with ExitStack() as made:

        def make(below: str = "tcp", **more: Any) -> tuple[GpuNode, GpuNode]:
            event = {"make_event": more.pop("make_event", Reached)}
            prefill = made.enter_context(closing(GpuNode("prefill", device, 4, below, **event, **more)))
            return prefill, made.enter_context(closing(GpuNode("decode", device, 8, below, **more)))

        yield make


def calls(double: Fake, *names: str) -> int:
    return sum(call in names for call, _ in double.take_log())


@pytest.mark.parametrize(
    ("below", "image"),
    [("mapped", IMAGE), ("tcp", b""), pytest.param("ucx", IMAGE, marks=NO_UCX)],
    ids=["mapped, kernels", "tcp, engine", "ucx, kernels"],
)
def test_kv_of_gpus_travels_through_slots_and_into_blocks_of_another_size(
    pair: Callable[..., tuple[GpuNode, GpuNode]], double: Fake, below: str, image: bytes
) -> None:
    """Without kernels the copy engine takes runs of 32 bytes, too."""
    prefill, decode = pair(below, image=image)
    outgoing = prefill.send("t", [SRC], TOKENS)
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    double.take_log()
    for layer in range(LAYERS):
        outgoing.layer_ready(layer)
    outgoing.finish(42)
    assert incoming.wait(WAIT_S) == 42
    assert_same(prefill, decode)
    kernels, engine = "cuLaunchKernel", "cuMemcpyBatchAsync_v2"
    log = [call for call, _ in double.take_log()]
    used, unused = (kernels, engine) if image else (engine, kernels)
    most = 2 * LAYERS * (2 if image else 1)  # the last block, which is not full, is a launch of its own
    assert 2 <= log.count(used) <= most, "a gather and a scatter for each layer, or for several"
    assert unused not in log
    lane = "tcp" if below == "ucx" else below  # how the bytes really travel: of UCX what it found
    assert [peer["lane"] for peer in prefill.report().peers] == [f"staged-{lane}"]


def test_nothing_is_gathered_before_the_layer_is_written(
    pair: Callable[..., tuple[GpuNode, GpuNode]], double: Fake
) -> None:
    """The event behind a layer stands for kernels that still run (sglang#33970)."""
    gpu = Gpu()
    prefill, decode = pair(make_event=gpu.make_event)
    outgoing = prefill.send("t", [SRC], TOKENS)
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    double.take_log()
    for layer in range(LAYERS):
        outgoing.layer_ready(layer)
    outgoing.finish(1)
    prefill.kv.array[:] += 1  # what the kernels write meanwhile
    assert calls(double, "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2") == 0
    gpu.reach()
    assert incoming.wait(WAIT_S) == 1
    assert_same(prefill, decode)


def test_offered_blocks_come_back_only_after_the_scatter_s_event(
    pair: Callable[..., tuple[GpuNode, GpuNode]], double: Fake
) -> None:
    """The receiver gives up while the GPU still writes into its blocks."""
    prefill, decode = pair()
    double.hold()
    try:
        outgoing = prefill.send("t", [SRC], TOKENS)
        incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
        assert outgoing.accepted.wait(WAIT_S)
        outgoing.layer_ready(0)
        launched = wait_for_launch(double)
        incoming.cancel()
        with pytest.raises(TransferFailed):
            incoming.wait(WAIT_S)
        assert launched
        assert not incoming.released.wait(0.1)
    finally:
        double.go_on()
    assert incoming.released.wait(WAIT_S)


def wait_for_launch(double: Fake) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not calls(double, "cuLaunchKernel"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return True


def test_many_transfers_share_few_slots(pair: Callable[..., tuple[GpuNode, GpuNode]]) -> None:
    """Two slots of 64 KiB at either end: whatever waits takes its turn, and all of it arrives."""
    prefill, decode = pair("mapped", num_slots=2, slot_nbytes=64 << 10)
    incoming = []
    places = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(10)]
    for index, place in enumerate(places):
        outgoing = prefill.send(f"t{index}", [SRC], TOKENS, TOKENS)
        incoming.append(decode.receive(f"t{index}", prefill.address, [place], range(TOKENS)))
        outgoing.finish(index)
    assert [one.wait(WAIT_S) for one in incoming] == list(range(10))
    for place in places:
        assert_same(prefill, decode, place)


def carried(below: Transport, **staging: Any) -> Carried:
    return Carried(DoubleStaged(below, **staging))


@pytest.fixture
def sides(double: Fake) -> Iterator[tuple[Side, Side]]:
    """Writer and owner, of two slots each."""
    made = [Side(carried(TcpTransport(), num_slots=2, slot_nbytes=64 << 10)) for _ in range(2)]
    for seed, side in enumerate(made):
        side.add_buffer(1 << 20, seed)
    join(made[0], made[1])
    yield made[0], made[1]
    for side in made:
        side.close()


def test_no_more_is_gathered_than_the_owner_has_slots_for(sides: tuple[Side, Side], double: Fake) -> None:
    """One of its two slots goes to one writer; as long as nothing is placed there is no second gather."""
    writer, owner = sides
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    double.hold()
    try:
        double.take_log()
        ticket = writer.submit_block("owner", 0, 1 << 20)
        wait_for_launches = time.monotonic() + 0.2
        seen = 0
        while time.monotonic() < wait_for_launches:
            seen += calls(double, "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2")
            time.sleep(0.005)
        assert seen <= 1
    finally:
        double.go_on()
    assert writer.wait_batch(ticket) == "ok"
    assert np.array_equal(owner.buffers[0].array, writer.buffers[0].array)


class Late(TcpTransport):
    """Its batches land, and are not reported until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[int] = []
        self._held: list[Occurrence] = []
        self.late = True

    def submit(self, peer: str, lists: Any, timeout_s: float) -> int:
        self.puts.append(super().submit(peer, lists, timeout_s))
        return self.puts[-1]

    def poll(self) -> list[Occurrence]:
        self._held += super().poll()
        ready = [one for one in self._held if not self.late or not isinstance(one, BatchDone)]
        self._held = [one for one in self._held if one not in ready]
        return ready


@pytest.mark.usefixtures("double")
def test_slots_are_gathered_while_others_are_on_the_wire() -> None:
    """As many as one writer is given: half of the owner's eight."""
    below = Late()
    writer, owner = (
        Side(carried(below, num_slots=8, slot_nbytes=64 << 10)),
        Side(carried(TcpTransport(), num_slots=8, slot_nbytes=64 << 10)),
    )
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(1 << 20, seed)
    join(writer, owner)
    ticket = writer.submit_block("owner", 0, 1 << 20)
    until(lambda: len(below.puts) == 4, "four are on the wire")
    assert not writer.done(ticket)
    below.late = False
    assert writer.wait_batch(ticket) == "ok"
    assert len(below.puts) == 16
    assert np.array_equal(owner.buffers[0].array, writer.buffers[0].array)
    for side in (writer, owner):
        side.close()


def test_a_slot_is_scattered_while_the_next_ones_arrive(invited: Invited, double: Fake) -> None:
    """Two are granted, and the second may come before the first is in its pages; so may a third, once it is."""
    invited.staged.open_blocks("stranger", [[3]])
    slots = [invited.granted(), invited.granted()]
    run = packed(invited.run_of(3))
    double.hold()
    try:
        double.take_log()
        for number, slot in enumerate(slots):
            invited.say(wire.SlotFilled(number, slot, ((0, run),)))
        assert invited.staged.poll() == []
        assert calls(double, "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2") == 2
    finally:
        double.go_on()
    assert invited.hear() == wire.SlotPlaced(0)


def test_a_long_batch_is_cut_at_the_slots_size_wherever_that_is(sides: tuple[Side, Side]) -> None:
    writer, owner = sides
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 30_000, 60)
    dst = np.cumsum(lengths) - lengths
    src = rng.integers(0, (1 << 20) - lengths)
    expected = owner.buffers[0].array.copy()
    for one, to, nbytes in zip(src, dst, lengths, strict=True):
        expected[to : to + nbytes] = writer.buffers[0].array[one : one + nbytes]
    runs = np.stack([src, dst, lengths], axis=1).astype(np.int64)
    assert writer.wait_batch(writer.submit("owner", RunList(0, 0, 0, 0, runs))) == "ok"
    assert np.array_equal(owner.buffers[0].array, expected)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_fault_of_the_gpu_fails_every_peer_and_frees_nothing_it_may_still_use() -> None:
    double = fake()
    writer, owner = (Side(carried(TcpTransport())) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(1 << 16, seed)
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    double.break_context(700)
    try:
        ticket = writer.submit_block("owner", 0, 4)
        assert writer.wait_batch(ticket) == "peer_failed"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in writer.wait_failed("owner")
        with pytest.raises(TransportFailure, match="the GPU has failed"):
            writer.submit_block("owner", 0, 4)
        writer.close()
    finally:
        double.break_context(0)
    owner.close_peer("writer")
    owner.wait_closed("writer")
    owner.close()
    assert double.counts().registrations > 0, "slots that the GPU may still use"


def test_slots_that_cannot_be_pinned_are_a_typed_error_and_can_be_tried_again(double: Fake) -> None:
    with closing(DoubleStaged(TcpTransport())) as staged:
        staged.open()
        with pytest.raises(TransportUnavailable, match="moves cuda memory only"):
            staged.register(PinnedLike())
        side = Side(staged)
        side.add_buffer(4096, 0)
        double.fail("cuMemHostRegister_v2", 2)
        with pytest.raises(TransportFailure, match="no slots: cuMemHostRegister_v2.*free pinned memory"):
            staged.invite("writer")
        staged.invite("writer")
        side.buffers[0].close()


class PinnedLike(Buffer):
    """Host memory that the double's transport does not lend."""

    device_ptr = 1

    def __init__(self) -> None:
        super().__init__(4096)


@pytest.mark.usefixtures("double")
def test_a_writer_is_held_to_the_blocks_that_it_is_offered() -> None:
    """The owner looks at every run before it places it, over mapped slots, too."""
    writer, owner = (Side(carried(BELOW["mapped"]())) for _ in range(2))
    kv = groups(4)
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(kv.extent(0), seed)
    owner.transport.guard(kv)
    join(writer, owner)
    owner.transport.open_blocks("writer", [[3]])
    place = kv.layouts[0].layers[1]
    inside = place.parts[0].offset + 3 * place.block_stride
    assert writer.wait_batch(writer.submit("owner", run_list([[0, inside, 8]]))) == "ok"
    before = owner.snapshot()
    ticket = writer.submit("owner", run_list([[0, inside, 8], [0, inside + place.block_stride, 8]]))
    assert writer.wait_batch(ticket) == "peer_failed"
    writer.wait_failed("owner")
    assert owner.snapshot() == before
    owner.close_peer("writer")
    owner.wait_closed("writer")
    assert owner.happened == [PeerClosed("writer")]
    for side in (writer, owner):
        side.close()


@pytest.fixture
def near(double: Fake) -> Iterator[tuple[Side, Side]]:
    """Writer and owner on one host."""
    made = [Side(carried(BELOW["mapped"](), slot_nbytes=64 << 10)) for _ in range(2)]
    for seed, side in enumerate(made):
        side.add_buffer(1 << 20, seed)
    yield made[0], made[1]
    for side in made:
        side.close()


def puts_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """To whom something is put over mapped memory, from now on."""
    puts: list[str] = []
    put = MappedTransport.submit

    def submit(self: MappedTransport, peer: str, lists: Any, timeout_s: float) -> int:
        puts.append(peer)
        return put(self, peer, lists, timeout_s)

    monkeypatch.setattr(MappedTransport, "submit", submit)
    return puts


def test_on_one_host_the_gpu_gathers_into_the_owner_s_slots_and_nothing_is_copied_again(
    near: tuple[Side, Side], double: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, owner = near
    puts, before = puts_of(monkeypatch), double.counts().registrations
    join(writer, owner)
    assert double.counts().registrations == before + 2, "the owner's slots, and the same as the writer has them"
    assert writer.wait_batch(writer.submit_block("owner", 0, 1 << 20)) == "ok"
    assert np.array_equal(owner.buffers[0].array, writer.buffers[0].array)
    assert not puts
    for side, peer in ((writer, "owner"), (owner, "writer")):
        side.close_peer(peer)
        side.wait_closed(peer)
    assert double.counts().registrations == before + 1


def test_slots_of_an_owner_that_cannot_be_pinned_here_are_written_by_the_cpu(
    near: tuple[Side, Side], double: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, owner = near
    puts, invitation = puts_of(monkeypatch), owner.transport.invite("writer")
    double.fail("cuMemHostRegister_v2", 2)
    writer.transport.connect("owner", invitation)
    assert "cannot be pinned here" in caplog.text
    assert writer.wait_batch(writer.submit_block("owner", 0, 1 << 20)) == "ok"
    assert np.array_equal(owner.buffers[0].array, writer.buffers[0].array)
    assert set(puts) == {"owner"}


def test_owner_s_fence_waits_for_the_writer_s_gpu_that_gathers_into_its_slots(
    near: tuple[Side, Side], double: Fake
) -> None:
    writer, owner = near
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    double.take_log()
    double.hold()
    try:
        writer.submit_block("owner", 0, 1 << 20)
        wait_for_launch(double)
        owner.close_peer("writer")
        assert not owner.closed_within("writer", 0.2)
    finally:
        double.go_on()
    owner.wait_closed("writer")
    at_the_end = owner.snapshot()
    writer.wait_failed("owner")
    assert owner.snapshot() == at_the_end


class Invited:
    """An owner that a stranger was invited by, who says what it likes."""

    def __init__(self, **staging: Any) -> None:
        self.kv = groups(4)
        self.staged = DoubleStaged(TcpTransport(), **staging)
        self.side = Side(self.staged)
        self.side.add_buffer(max(self.kv.extent(0), 1 << 17), 0)
        self.staged.guard(self.kv)
        self.staged.invite("stranger")

    def say(self, note: wire.Note) -> None:
        self.staged.heard("stranger", wire.encode(note))

    def hear(self) -> wire.Note:
        found: list[wire.Note] = []

        def heard() -> bool:
            found.extend(wire.decode(one.data) for one in self.staged.poll() if isinstance(one, TransportNote))
            return bool(found)

        until(heard, "it says something")
        return found[0]

    def granted(self) -> int:
        self.say(wire.Ask(1))
        grant = self.hear()
        assert isinstance(grant, wire.Grant)
        return grant.slots[0]

    def run_of(self, block: int) -> tuple[int, int]:
        place = self.kv.layouts[0].layers[0]
        return place.parts[0].offset + block * place.block_stride, 8


@pytest.fixture
def invited(double: Fake) -> Iterator[Invited]:
    one = Invited(slot_nbytes=1 << 20)
    yield one
    one.side.close()


def packed(*runs: tuple[int, int]) -> bytes:
    return np.array(runs, "<i8").tobytes()


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (np.repeat(np.array([[0, 64]], "<i8"), 60_000, 0), "60000 runs"),
        (np.repeat(np.array([[0, 1 << 16]], "<i8"), 100, 0), "larger than their slot"),
    ],
)
def test_runs_of_a_slot_are_counted_before_they_are_looked_up(
    invited: Invited, runs: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up takes microseconds a run, and memory by their bytes; the endpoint's loop stands still meanwhile."""
    looked_up: list[int] = []

    def require(_self: OpenBlocks, _peer: int, _region: int, offsets: Any, _nbytes: Any) -> Any:
        looked_up.append(len(offsets))
        return offsets * 0

    monkeypatch.setattr(OpenBlocks, "require", require)
    slot = invited.granted()
    with pytest.raises(ProtocolError, match=reason):
        invited.say(wire.SlotFilled(0, slot, ((0, runs.tobytes()),)))
    assert sum(looked_up) <= 16


def test_runs_of_a_slot_are_looked_up_once_a_region_however_they_are_listed(
    invited: Invited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,192 lists of one run each held the endpoint's loop for half a second, eight such notes for four."""
    looked_up: list[int] = []
    require = OpenBlocks.require

    def counted(self: OpenBlocks, peer: int, region: int, offsets: Any, nbytes: Any) -> Any:
        looked_up.append(len(offsets))
        return require(self, peer, region, offsets, nbytes)

    monkeypatch.setattr(OpenBlocks, "require", counted)
    invited.staged.open_blocks("stranger", [[3]])
    slot, one = invited.granted(), packed(invited.run_of(3))
    invited.say(wire.SlotFilled(0, slot, ((0, one),) * wire.MAX_RUNS))
    assert looked_up == [wire.MAX_RUNS]
    assert invited.hear() == wire.SlotPlaced(0)


@pytest.mark.parametrize("seed", range(5))
def test_no_note_of_a_peer_changes_a_byte_outside_the_blocks_that_are_open_to_it(invited: Invited, seed: int) -> None:
    random = np.random.default_rng(seed)
    start, _ = invited.run_of(3)
    nbytes = invited.kv.layouts[0].layers[0].block_stride
    invited.staged.open_blocks("stranger", [[3]])
    before = invited.side.buffers[0].array.copy()
    granted = [invited.granted()]
    odd = [0, 1, 7, 64, start, start + 8, start + nbytes - 8, 2**20, 2**31 - 1, 2**62, -1, -8, 2**63 - 1]
    refused = placed = 0
    for number in range(400):
        runs = random.choice(odd, (int(random.integers(0, 4)), 2)) if random.random() < 0.7 else [(start, 8)]
        slot = granted[-1] if random.random() < 0.8 else int(random.integers(0, 9))
        note = wire.SlotFilled(number, slot, ((int(random.random() < 0.05), np.array(runs, "<i8").tobytes()),))
        try:
            invited.say(note)
        except ProtocolError:
            refused += 1
            continue
        assert isinstance(invited.hear(), wire.SlotPlaced)
        placed += 1
        granted.append(invited.granted())
    assert refused > 10, f"seed {seed}"
    assert placed > 10, f"seed {seed}"
    after = invited.side.buffers[0].array.copy()
    for place in (invited.kv.layouts[0].layers[0],):
        for part in place.parts:
            at = part.offset + 3 * place.block_stride
            after[at : at + place.block_stride] = before[at : at + place.block_stride]
    assert np.array_equal(after, before), f"seed {seed}"


def test_notes_that_the_role_of_a_peer_does_not_have_are_refused(invited: Invited) -> None:
    for note in (wire.Grant((0,)), wire.SlotPlaced(0)):
        with pytest.raises(ProtocolError, match="has not invited us"):
            invited.say(note)
    with pytest.raises(ProtocolError, match="not granted"):
        invited.say(wire.SlotFilled(0, 0, ((0, packed((0, 8))),)))
    with pytest.raises(ProtocolError, match="cannot be read"):
        invited.staged.heard("stranger", b"\xc1")
    invited.staged.heard("nobody", b"\xc1")


def test_blocks_are_not_closed_while_the_gpu_places_something_there(invited: Invited, double: Fake) -> None:
    """It does not wait: the caller ends the session, whose fence does."""
    invited.staged.open_blocks("stranger", [[3, 4]])
    slot = invited.granted()
    double.hold()
    try:
        invited.say(wire.SlotFilled(0, slot, ((0, packed(invited.run_of(3))),)))
        assert invited.staged.poll() == []
        with pytest.raises(TransportFailure, match="copies into closed blocks"):
            invited.staged.close_blocks("stranger", [[3]])
        invited.staged.close_blocks("stranger", [[4]])
        invited.staged.close_peer("stranger")
        assert not invited.side.closed_within("stranger", 0.1)
    finally:
        double.go_on()
    invited.side.wait_closed("stranger")


@pytest.mark.usefixtures("double")
def test_connection_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, owner = (Side(DoubleStaged(TcpTransport())) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(4096, seed)
    invitations = [owner.transport.invite(f"writer#{number}") for number in range(6)]

    def reached(*_: object) -> Any:
        raise CudaFailure("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    monkeypatch.setattr(OwnersSlots, "reached", reached)
    counts = []
    for number, invitation in enumerate(invitations):
        with pytest.raises((TransportFailure, CudaFailure)):
            writer.transport.connect(f"owner#{number}", invitation)
        until(lambda: not writer.transport.poll() and not owner.transport.poll(), "all is told")
        counts.append(len(os.listdir("/proc/self/fd")))
    until(lambda: len(os.listdir("/proc/self/fd")) <= counts[0], "every descriptor is closed")
    for side in (writer, owner):
        side.close()


def test_lane_that_cannot_be_polled_ends_its_worker_and_tells_everybody(
    pair: Callable[..., tuple[GpuNode, GpuNode]], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair()
    outgoing = prefill.send("t", [SRC], TOKENS)
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    [lane] = prefill.endpoint.transports.values()
    broken = cast("DoubleStaged", lane)._stager
    assert broken is not None

    def expire() -> None:
        raise MemoryError("as if")

    broken._expire = expire  # type: ignore[method-assign]
    outgoing.layer_ready(0)
    for end in (outgoing, incoming):
        with pytest.raises(TransferFailed):
            end.wait(WAIT_S)
    until(lambda: "MemoryError" in prefill.endpoint.failure, "the worker has ended with its last transport")
    assert "is given up" in caplog.text
