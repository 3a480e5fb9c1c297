"""KV of GPUs through pinned slots, between nodes on the test double of the driver: order, fences, back-pressure."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from pdlink.cuda.driver import CudaFailure, Device
from pdlink.errors import ProtocolError, TransferFailed, TransportFailure, TransportUnavailable
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part, RunList, paged_layout
from pdlink.kv.plan import bind, template
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import BatchDone, Occurrence, PeerClosed, Transport, TransportNote
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.staging import wire
from pdlink.transport.staging.dense import Pages, blocks_in, cut
from pdlink.transport.staging.slots import OwnersSlots
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport
from pdlink_bench.carried import Carried
from tests.conformance.transports.side import PATIENCE_S, Side, join
from tests.cuda.by_runs import AllOpen, ByRuns
from tests.cuda.double import DoubleNode, DoubleStaged
from tests.cuda.fake import COMPILER, IMAGE, Fake, fake
from tests.cuda.test_plans import POOL_NBYTES, STATES, _random_layout, _state
from tests.events import Gpu, Reached
from tests.kv.test_plan import dense, pick
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


def carried(below: Transport, **staging: Any) -> ByRuns:
    return ByRuns(DoubleStaged(below, **staging))


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
    double.hold()
    try:
        double.take_log()
        for number, slot in enumerate(slots):
            invited.say(filled(number, slot))
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
    """The owner looks at every slot before it places it, over mapped slots, too."""
    writer, owner = (Side(Carried(DoubleStaged(BELOW["mapped"]()))) for _ in range(2))
    kv = groups(4)
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(kv.extent(0), seed)
    owner.transport.guard(kv)
    join(writer, owner)
    owner.transport.open_blocks("writer", [[3]])
    shape = template(kv.layouts[0], kv.layouts[0])
    plan = bind(shape, [0], [3], 0, 4)
    assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(1, 2), PATIENCE_S)) == "ok"
    before = owner.snapshot()
    plan = bind(shape, [1, 2], [3, 4], 0, 8)
    ticket = writer.transport.submit_plan("owner", plan, range(1, 2), PATIENCE_S)
    assert writer.wait_batch(ticket) == "peer_failed"
    writer.wait_failed("owner")
    assert owner.snapshot() == before
    owner.close_peer("writer")
    owner.wait_closed("writer")
    assert owner.happened == [PeerClosed("writer")]
    for side in (writer, owner):
        side.close()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("block_tokens", [4, 3])
def test_a_push_that_cannot_be_counted_costs_itself_alone(block_tokens: int) -> None:
    """A source may repeat itself, so its pages have room in any buffer. The units of a push are 4 positions, or 1."""
    kv = groups(block_tokens)
    there = kv.layouts[0]
    place = LayerLayout((Part(0, 0), Part(0, 0)), 0, 0, 0)
    layers, num_blocks = (place,) * len(there.layers), 2**29 + 1
    pages = replace(there, block_tokens=4, num_blocks=num_blocks, layers=layers)
    few = replace(pages, num_blocks=1)
    writer, owner = (Side(Carried(DoubleStaged(TcpTransport()))) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(max(kv.extent(0), POOL_NBYTES), seed)
        side.transport.guard(kv)
    join(writer, owner)
    with closing(writer), closing(owner):
        owner.transport.open_blocks("writer", [[3]])
        refused = {
            "2147483652 positions": bind(template(pages, there), [num_blocks - 1], [3], 0, 3),
            "of a state": bind(template(_state(1), _state(1)), [1, 2], [3, 4], 0, 2),
        }
        for reason, plan in refused.items():
            with pytest.raises(ValueError, match=reason):
                writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)
        plan = bind(template(few, there), [0], [3], 0, 3)
        assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)) == "ok"


def test_pages_with_more_positions_than_can_be_counted_have_no_slot_placed(invited: Invited) -> None:
    invited.staged.open_blocks("stranger", [[3], [3]])
    slot = invited.granted()
    owner = cast("Any", invited.staged)._stager._owner
    owner._pages[0].layout = replace(owner._pages[0].layout, num_blocks=2**29)
    with pytest.raises(ProtocolError, match="2147483648 positions; expected fewer"):
        invited.say(filled(0, slot))


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
        pages = groups(4).layouts[0]
        state = LayerLayout((Part(0, pages.extent(0)),), 256, 0, 256)
        self.kv = KVGroups((pages, KVLayout("s", 1 << 17, 32, 1, 256, (state,), state=True)))
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


@pytest.fixture
def invited(double: Fake) -> Iterator[Invited]:
    one = Invited(slot_nbytes=1 << 20)
    yield one
    one.side.close()


def filled(number: int, slot: int, *blocks: int, **other: Any) -> wire.SlotFilled:
    """The first layer of these blocks of four tokens; of block 3 if none is said."""
    named = np.array(blocks or (3,), "<u4").tobytes()
    sound = wire.SlotFilled(number, slot, 0, 0, 1, 0, 4 * len(blocks or (3,)), 4, False, named)
    return msgspec.structs.replace(sound, **other)


A_STATE = {"group": 1, "start": 98, "end": 99, "unit_tokens": 1}
"""In block 3 of its group."""

LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a group that is not there": ({"group": 2}, "group 2; there are 2"),
    "layers that are not there": ({"num_layers": 99}, "layers 0 to 98"),
    "a layer beyond the last": ({"first_layer": 2**31 - 1}, "layers 2147483647"),
    "units that are no part of a block": ({"unit_tokens": 3}, "by 3 of blocks of 4"),
    "units larger than a block": ({"unit_tokens": 8}, "by 8 of blocks of 4"),
    "no positions": ({"end": 0}, r"\[0, 0\)"),
    "positions beyond all": ({"start": 2**63 - 5, "end": 2**63 - 1}, "of blocks of 4"),
    "more than the slot holds": ({"end": 2**40}, "1048576 bytes"),
    "more units than a launch": ({"unit_tokens": 1, "end": 40_000}, "40000 units"),
    "too few blocks": ({"end": 8}, "4 bytes of blocks"),
    "half a block": ({"blocks": b"\3\0\0\0\0"}, "5 bytes of blocks"),
    "a block that is not there": ({"blocks": b"\xff\xff\xff\xff"}, "block 4294967295 does not exist"),
    "a block twice": ({"end": 8, "blocks": b"\3\0\0\0" * 2}, "not distinct"),
    "more of a state than there is": (A_STATE | {"end": 100}, r"\[98, 100\) of a state; expected one position"),
    "a block that is not offered": ({"blocks": b"\4\0\0\0"}, "block 4 of group 0 is not offered"),
}


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES)
def test_a_note_that_lies_costs_its_peer_and_changes_nothing(
    invited: Invited, double: Fake, lie: dict[str, Any], reason: str
) -> None:
    invited.staged.open_blocks("stranger", [[3], [3]])
    slot = invited.granted()
    double.take_log()
    with pytest.raises(ProtocolError, match=reason):
        invited.say(filled(0, slot, **lie))
    assert invited.staged.poll() == []
    assert calls(double, "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2") == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_note_of_a_peer_changes_a_byte_outside_the_blocks_that_are_open_to_it(invited: Invited, seed: int) -> None:
    draw = np.random.default_rng(seed)
    invited.staged.open_blocks("stranger", [[3, 5], [3, 5]])
    before = invited.side.buffers[0].array.copy()
    granted = [invited.granted()]
    odd = [0, 1, 2, 3, 4, 5, 7, 8, 2**20, 2**31 - 1]
    refused = placed = 0
    for number in range(400):
        slot = granted[-1] if draw.random() < 0.9 else int(draw.integers(0, 9))
        note = filled(number, slot, *draw.permutation([3, 5])[: draw.integers(1, 3)].tolist())
        if draw.random() < 0.3:
            note = filled(number, slot, int(draw.choice([3, 5])), **A_STATE)
        note = msgspec.structs.replace(note, heads_first=bool(draw.random() < 0.5))
        if draw.random() < 0.7:
            field = str(draw.choice(["group", "first_layer", "num_layers", "start", "end", "unit_tokens", "blocks"]))
            value = int(draw.choice(odd))
            said = (
                np.array([value], "<u4").tobytes()
                if field == "blocks"
                else max(value, field in ("num_layers", "unit_tokens"))
            )
            note = msgspec.structs.replace(note, **{field: said})
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
    for place in (layer for layout in invited.kv.layouts for layer in layout.layers):
        for part in place.parts:
            for block in (3, 5):
                at = part.offset + block * place.block_stride
                after[at : at + place.block_stride] = before[at : at + place.block_stride]
    assert np.array_equal(after, before), f"seed {seed}"


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("image", [IMAGE, b""], ids=["kernels", "engine"])
@pytest.mark.parametrize("slot_nbytes", [4096, 1 << 18])
def test_plans_between_layouts_move_the_same_bytes_as_their_runs(slot_nbytes: int, image: bytes) -> None:
    """Block sizes, orders, head shares, K and V fused or apart, states; the owner knows its own layouts alone."""
    seeds = range(12)
    cases = []
    for seed in seeds:
        rng = random.Random(seed)
        heads, parts = rng.randint(1, 3), rng.choice([1, 2, 2, 3])
        cases.append((_random_layout(rng, heads, parts), _random_layout(rng, heads, parts), rng))
    cases += [(_state(of), _state(to), random.Random(of)) for of, to, *_ in STATES.values()]
    writer, owner = (
        Side(Carried(DoubleStaged(TcpTransport(), slot_nbytes=slot_nbytes, num_slots=4, image=image)))
        for _ in range(2)
    )
    for seed, side in enumerate((writer, owner)):
        for region in range(2):
            side.add_buffer(POOL_NBYTES, 2 * seed + region)
    for side in (writer, owner):
        cast("Any", side.transport).inner._open_blocks = AllOpen
    writer.transport.guard(KVGroups(tuple(src for src, _, _ in cases)))
    owner.transport.guard(KVGroups(tuple(dst for _, dst, _ in cases)))
    join(writer, owner)
    with closing(writer), closing(owner):
        for group, (src, dst, rng) in enumerate(cases):
            start = 99 if src.state else rng.randrange(40)
            end = 100 if src.state else rng.randint(start, 40)
            blocks = ([3], [5]) if src.state else (pick(rng, src, start, end), pick(rng, dst, start, end))
            plan = bind(template(src, dst, group), *blocks, start, end)
            expected = [buffer.array.copy() for buffer in owner.buffers]
            for one in plan.run_lists(0, len(src.layers)):
                for at, to, nbytes in (one.runs + (one.src_base, one.dst_base, 0)).tolist():
                    source = writer.buffers[one.src_region].array
                    expected[one.dst_region][to : to + nbytes] = source[at : at + nbytes]
            ticket = writer.transport.submit_plan("owner", plan, range(len(src.layers)), PATIENCE_S)
            assert writer.wait_batch(ticket) == "ok", f"group {group}: {writer.happened}"
            for region, buffer in enumerate(owner.buffers):
                assert np.array_equal(buffer.array, expected[region]), f"group {group}, region {region}: {plan}"
            assert writer.done(ticket)[0].nbytes == plan.nbytes


@pytest.mark.parametrize(
    ("of", "to", "gathers", "scatters"),
    [("T", "T", 128, 128), ("H", "H", 128, 128), ("H", "T", 128, 16384), ("T", "H", 128, 16384)],
)
def test_a_slot_lies_as_the_pages_of_the_writer(of: str, to: str, gathers: int, scatters: int) -> None:
    """The copy engine takes each run: blocks of 16 are 32 KiB, one head of a position 256 bytes."""
    src, dst = (
        paged_layout(
            dtype="bfloat16",
            itemsize=2,
            num_layers=1,
            num_blocks=64,
            block_tokens=16,
            num_heads=8,
            head_dim=128,
            order={"T": "LPBTH", "H": "LPBHT"}[inner],
        )
        for inner in (of, to)
    )
    plan = bind(template(src, dst), range(64)[::-1], range(64)[::-1], 0, 1024)
    [piece] = cut(plan, range(1), 4 << 20)
    assert piece.nbytes(src) == 4 << 20
    here, there = blocks_in(plan, piece)
    assert Pages(src).gather(piece, here).num_runs == gathers
    assert Pages(dst).scatter(piece, there).num_runs == scatters


def test_slots_carry_little_that_is_not_asked_for() -> None:
    """At most a quarter more, from large blocks, too; and each position once."""
    for seed in range(300):
        rng = random.Random(seed)
        src, dst = (
            dense(block_tokens=rng.choice([16, 64, 544, 1056]), num_blocks=150, num_layers=1) for _ in range(2)
        )
        start = rng.randrange(1000)
        end = start + rng.randint(1, 1200)
        plan = bind(template(src, dst), range(150), range(150), start, end)
        pieces = cut(plan, range(1), rng.choice([4096, 1 << 16]))
        sent = sum(piece.num_units * piece.unit_tokens for piece in pieces)
        assert 4 * sent <= 5 * (end - start), f"seed {seed}: {sent} of {end - start}"
        assert [pieces[0].start, *(piece.end for piece in pieces)] == [*(piece.start for piece in pieces), end]
        assert pieces[0].start == start


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("order", ["LPBTH", "LPBHT"])
def test_a_slot_that_is_sent_tells_nothing_of_what_it_held_before(order: str) -> None:
    """The first and the last unit of a range are sent whole."""
    layout = dense(order, num_heads=2)
    kv = KVGroups((layout,))
    writer, owner = (Side(Carried(DoubleStaged(TcpTransport(), num_slots=2, slot_nbytes=1 << 16))) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(kv.extent(0), seed)
        side.transport.guard(kv)
        side.buffers[0].array[:] |= 1
    join(writer, owner)
    owner.transport.open_blocks("writer", [[3, 4, 5]])
    shape = template(layout, layout)
    with closing(writer), closing(owner):
        for start, end in ((0, 12), (1, 11)):
            plan = bind(shape, [0, 1, 2], [3, 4, 5], start, end)
            assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)) == "ok"
        received = cast("Any", owner.transport).inner._received
        units = (3, 4, 2, layout.head_nbytes) if order == "LPBTH" else (3, 2, 4, layout.head_nbytes)
        sent = [received.buffer.array[at:][: np.prod(units)].reshape(units) for at in (0, received.nbytes)]
        if order == "LPBHT":
            sent = [one.swapaxes(1, 2) for one in sent]
        sent = [one.reshape(12, -1) for one in sent]
        assert any(not one[[0, 11]].any() and one[1:11].all() for one in sent)


def test_notes_that_the_role_of_a_peer_does_not_have_are_refused(invited: Invited) -> None:
    for note in (wire.Grant((0,)), wire.SlotPlaced(0)):
        with pytest.raises(ProtocolError, match="has not invited us"):
            invited.say(note)
    with pytest.raises(ProtocolError, match="not granted"):
        invited.say(filled(0, 0))
    with pytest.raises(ProtocolError, match="cannot be read"):
        invited.staged.heard("stranger", b"\xc1")
    invited.staged.heard("nobody", b"\xc1")


def test_blocks_are_not_closed_while_the_gpu_places_something_there(invited: Invited, double: Fake) -> None:
    """It does not wait: the caller ends the session, whose fence does."""
    invited.staged.open_blocks("stranger", [[3, 4]])
    slot = invited.granted()
    double.hold()
    try:
        invited.say(filled(0, slot))
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
