"""KV of GPUs through pinned slots, between nodes on the test double of the driver: order, fences, back-pressure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

import pdlink
from pdlink.cuda.driver import Device
from pdlink.errors import TransferFailed, TransportFailure, TransportUnavailable
from pdlink.kv.groups import groups_of
from pdlink.kv.layout import Piece
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import PeerClosed, Transport
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport
from tests.conformance.transports.side import Side, join, piece
from tests.cuda.double import DoubleStaged, Kv, Reached
from tests.cuda.fake import COMPILER, IMAGE, Fake, fake
from tests.node.conftest import DST, LAYERS, SRC, TIMEOUTS, TOKENS, WAIT_S, layout

BELOW: dict[str, Callable[[], Transport]] = {
    "mapped": lambda: MappedTransport(threads=1, within_process=True),
    "tcp": TcpTransport,
    "ucx": lambda: UcxTransport(tls="tcp", devices="lo"),
}
NO_UCX = pytest.mark.skipif(not UcxTransport(tls="tcp").probe().ok, reason="no UCX")


class GpuNode(pdlink.Node):
    """Two of them are a pair; what is in a node's device memory is read as the host's."""

    def __init__(
        self, name: str, device: Device, block_tokens: int, below: str, *, make_event: Any = Reached, **staging: Any
    ) -> None:
        kv = layout(block_tokens)
        self.kv = Kv(device, kv.extent(0), block_tokens, make_event)
        staged = DoubleStaged(BELOW[below](), **staging)
        super().__init__(name, kv, [self.kv], transports=[staged], deadlines=TIMEOUTS)

    def rows(self, blocks: list[int], layer: int, part: int) -> Any:
        place, kv = self.groups.layouts[0].layers[layer], self.groups.layouts[0]
        shape = (kv.num_blocks, kv.block_tokens, kv.num_heads, kv.head_nbytes)
        strides = (place.block_stride, place.token_stride, place.head_stride, 1)
        pages = np.lib.stride_tricks.as_strided(self.kv.array[place.parts[part].offset :], shape, strides)
        return pages[blocks].reshape(len(blocks) * kv.block_tokens, -1)[:TOKENS]

    def close(self) -> None:
        super().close()
        self.kv.close()


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
    outgoing = prefill.send("t", SRC, TOKENS)
    incoming = decode.receive("t", prefill.address, DST, range(TOKENS))
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
    assert 2 <= log.count(used) <= 2 * LAYERS, "a gather and a scatter for each layer, or for several"
    assert unused not in log
    lane = "tcp" if below == "ucx" else below  # how the bytes really travel: of UCX what it found
    assert [peer["lane"] for peer in prefill.report().peers] == [f"staged-{lane}"]


def test_nothing_is_gathered_before_the_layer_is_written(
    pair: Callable[..., tuple[GpuNode, GpuNode]], double: Fake
) -> None:
    """The event behind a layer stands for kernels that still run (sglang#33970)."""
    written = threading.Event()

    class Held(Reached):
        def synchronize(self) -> None:
            assert written.wait(WAIT_S)

    prefill, decode = pair(make_event=Held)
    outgoing = prefill.send("t", SRC, TOKENS)
    incoming = decode.receive("t", prefill.address, DST, range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    double.take_log()
    for layer in range(LAYERS):
        outgoing.layer_ready(layer)
    outgoing.finish(1)
    prefill.kv.array[:] += 1  # what the kernels write meanwhile
    assert calls(double, "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2") == 0
    written.set()
    assert incoming.wait(WAIT_S) == 1
    assert_same(prefill, decode)


def test_offered_blocks_come_back_only_after_the_scatter_s_event(
    pair: Callable[..., tuple[GpuNode, GpuNode]], double: Fake
) -> None:
    """The receiver gives up while the GPU still writes into its blocks."""
    prefill, decode = pair()
    double.hold()
    try:
        outgoing = prefill.send("t", SRC, TOKENS)
        incoming = decode.receive("t", prefill.address, DST, range(TOKENS))
        assert outgoing.accepted.wait(WAIT_S)
        outgoing.layer_ready(0)
        launched = wait_for_launch(double)
        incoming.cancel("enough")
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
        outgoing = prefill.send(f"t{index}", SRC, TOKENS, TOKENS)
        incoming.append(decode.receive(f"t{index}", prefill.address, place, range(TOKENS)))
        outgoing.finish(index)
    assert [one.wait(WAIT_S) for one in incoming] == list(range(10))
    for place in places:
        assert_same(prefill, decode, place)


@pytest.fixture
def sides(double: Fake) -> Iterator[tuple[Side, Side]]:
    """Writer and owner, of two slots each."""
    made = [Side(DoubleStaged(TcpTransport(), num_slots=2, slot_nbytes=64 << 10)) for _ in range(2)]
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
    assert writer.wait_batch(writer.submit("owner", Piece(0, 0, 0, 0, runs))) == "ok"
    assert np.array_equal(owner.buffers[0].array, expected)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_fault_of_the_gpu_fails_every_peer_and_frees_nothing_it_may_still_use() -> None:
    double = fake()
    writer, owner = (Side(DoubleStaged(TcpTransport())) for _ in range(2))
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
    writer, owner = (Side(DoubleStaged(BELOW["mapped"]())) for _ in range(2))
    kv = layout(4)
    for seed, side in enumerate((writer, owner)):
        side.add_buffer(kv.extent(0), seed)
    owner.transport.guard(groups_of(kv))
    join(writer, owner)
    owner.transport.open_blocks("writer", [[3]])
    place = kv.layers[1]
    inside = place.parts[0].offset + 3 * place.block_stride
    assert writer.wait_batch(writer.submit("owner", piece([[0, inside, 8]]))) == "ok"
    before = owner.snapshot()
    ticket = writer.submit("owner", piece([[0, inside, 8], [0, inside + place.block_stride, 8]]))
    assert writer.wait_batch(ticket) == "peer_failed"
    writer.wait_failed("owner")
    assert owner.snapshot() == before
    owner.close_peer("writer")
    owner.wait_closed("writer")
    assert owner.happened == [PeerClosed("writer")]
    for side in (writer, owner):
        side.close()
