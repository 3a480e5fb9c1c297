"""What the mapped-cuda transport adds to the conformance suite: launches, gates in flight, faults, leaks.

On a test double of the driver: its order of calls and its fences are tested, no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pdlink import _cuda
from pdlink.config import TransportConfig
from pdlink.cuda import driver
from pdlink.cuda.buffers import DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import Device
from pdlink.cuda.launches import NUM_SLOTS, SLOT_NBYTES
from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.kv.plan import Plan
from pdlink.transport.base import Site
from pdlink.transport.mapped_cuda import MappedCudaTransport
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import PATIENCE_S, Side, join, run_list
from tests.cuda.double import DoubleTransport, block_plan
from tests.cuda.fake import COMPILER, IMAGE, Fake, fake
from tests.waiting import readable

POOL_NBYTES = 1 << 20


@pytest.fixture
def pair(double: Fake) -> Iterator[tuple[Side, Side]]:
    writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
    writer.add_buffer(POOL_NBYTES, seed=0)
    owner.add_buffer(POOL_NBYTES, seed=1)
    join(writer, owner)
    yield writer, owner
    for side in (writer, owner):
        side.close()


def scattered(num_runs: int, nbytes: int) -> list[list[int]]:
    places = np.random.default_rng(num_runs).permutation(POOL_NBYTES // nbytes)[:num_runs] * nbytes
    return [[int(place), int(place), nbytes] for place in places]


def calls_until(double: Fake, name: str, count: int = 1) -> list[str]:
    """The calls of the driver since the log was last taken, until there are so many of this name."""
    calls: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while calls.count(name) < count:
        assert time.monotonic() < deadline, f"{count - calls.count(name)} calls of {name} are missing"
        time.sleep(0.001)
        calls += [call for call, _ in double.take_log()]
    return calls


def scattered_plan(num_blocks: int, nbytes: int) -> Plan:
    """Between blocks of the same numbers."""
    blocks = np.random.default_rng(num_blocks).permutation(POOL_NBYTES // nbytes)[:num_blocks]
    return block_plan(POOL_NBYTES, nbytes, blocks.tolist(), blocks.tolist())


def test_a_layer_of_scattered_pages_is_one_launch(pair: tuple[Side, Side], double: Fake) -> None:
    """Its pairs are in the argument of the kernel."""
    writer, owner = pair
    double.hold()
    try:
        double.take_log()
        ticket = writer.transport.submit_plan("owner", scattered_plan(128, 4096), range(1), PATIENCE_S)
        calls = calls_until(double, "cuLaunchHostFunc")
    finally:
        double.go_on()
    assert writer.wait_batch(ticket) == "ok"
    assert calls.count("cuLaunchKernel") == 1
    assert "cuMemcpyAsync" not in calls
    assert calls.index("cuLaunchKernel") < calls.index("cuEventRecord") < calls.index("cuLaunchHostFunc")
    assert np.array_equal(owner.buffers[0].array, writer.buffers[0].array) is False


@pytest.mark.parametrize(("lengths", "launches"), [((4096, 512), 2), ((4096, 8192), 1), ((8192, 8192), 1)])
def test_runs_of_one_length_are_one_launch(
    pair: tuple[Side, Side], double: Fake, lengths: tuple[int, int], launches: int
) -> None:
    """Or of several that are multiples of a long one."""
    writer, owner = pair
    expected = owner.buffers[0].array.copy()
    runs = [[9008 * place, 9104 * place, lengths[place % 2]] for place in range(100)]
    for src, dst, nbytes in runs:
        expected[dst : dst + nbytes] = writer.buffers[0].array[src : src + nbytes]
    double.take_log()
    assert writer.wait_batch(writer.submit("owner", run_list(runs))) == "ok"
    assert [call for call, _ in double.take_log()].count("cuLaunchKernel") == launches
    assert np.array_equal(owner.buffers[0].array, expected)


def test_a_list_longer_than_a_slot_takes_more_launches(pair: tuple[Side, Side], double: Fake) -> None:
    writer, owner = pair
    double.take_log()
    runs = scattered(POOL_NBYTES // 32, 32)
    assert writer.wait_batch(writer.submit("owner", run_list(runs))) == "ok"
    assert np.array_equal(owner.buffers[0].array, writer.buffers[0].array)
    launches = [call for call, _ in double.take_log()].count("cuLaunchKernel")
    assert launches >= POOL_NBYTES // 32 // (SLOT_NBYTES // 16)


@pytest.mark.parametrize(("num_pairs", "copies"), [(400, 0), (401, 1)])
def test_a_long_list_is_copied_to_the_gpu_before_the_kernel_reads_it(
    pair: tuple[Side, Side], double: Fake, num_pairs: int, copies: int
) -> None:
    """A kernel reads host memory 32 bytes at a time, and its argument for nothing."""
    writer, owner = pair
    expected, plan = owner.buffers[0].array.copy(), scattered_plan(num_pairs, 512)
    for block in plan.src_blocks.tolist():
        expected[block * 512 :][:512] = writer.buffers[0].array[block * 512 :][:512]
    double.take_log()
    assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)) == "ok"
    calls = [call for call, _ in double.take_log() if call in ("cuMemcpyAsync", "cuLaunchKernel")]
    assert calls == ["cuMemcpyAsync"] * copies + ["cuLaunchKernel"]
    assert np.array_equal(owner.buffers[0].array, expected)


def test_no_list_is_rewritten_while_a_kernel_may_read_it(pair: tuple[Side, Side], double: Fake) -> None:
    """More long lists than there are slots, none of which has run when the last slot is taken."""
    writer, owner = pair
    block, each, num = 16, 512, 2 * NUM_SLOTS
    blocks = np.random.default_rng(7).permutation(POOL_NBYTES // block)[: each * num]
    double.hold()
    try:
        double.take_log()
        tickets = [
            writer.transport.submit_plan("owner", block_plan(POOL_NBYTES, block, some, some), range(1), PATIENCE_S)
            for some in np.split(blocks, num)
        ]
        assert calls_until(double, "cuLaunchKernel", NUM_SLOTS).count("cuLaunchKernel") == NUM_SLOTS
    finally:
        double.go_on()
    assert [writer.wait_batch(ticket) for ticket in tickets] == ["ok"] * num
    mine, theirs = (side.buffers[0].array.reshape(-1, block)[blocks] for side in pair)
    assert np.array_equal(mine, theirs)


def test_lists_stay_in_host_memory_where_the_gpu_has_none_left(double: Fake) -> None:
    writer, owner = Side(DoubleTransport()), DoubleTransport()
    double.fail("cuMemAlloc_v2", 2)
    with closing(writer), closing(Side(owner)) as other:
        writer.add_buffer(POOL_NBYTES, seed=0)
        other.add_buffer(POOL_NBYTES, seed=1)
        other.connect("writer", writer.invite("owner"))
        double.take_log()
        plan = scattered_plan(1024, 512)
        assert other.wait_batch(other.transport.submit_plan("writer", plan, range(1), PATIENCE_S)) == "ok"
        assert "cuMemcpyAsync" not in [call for call, _ in double.take_log()]


def test_a_push_of_many_layers_takes_fewer_bells_than_launches(pair: tuple[Side, Side], double: Fake) -> None:
    """They take longer than the bytes."""
    writer, _ = pair
    double.hold()
    try:
        double.take_log()
        tickets = [writer.submit_block("owner", 0, 4096) for _ in range(NUM_SLOTS)]
        calls = calls_until(double, "cuLaunchKernel", NUM_SLOTS)
        assert calls.count("cuLaunchHostFunc") <= 2
    finally:
        double.go_on()
    assert [writer.wait_batch(ticket) for ticket in tickets] == ["ok"] * NUM_SLOTS


def test_the_owner_is_told_only_after_the_kernel_in_flight_has_ended(pair: tuple[Side, Side], double: Fake) -> None:
    """A launch has returned long before its stores are there: the gate must stay entered."""
    writer, owner = pair
    before = owner.snapshot()
    double.hold()
    try:
        ticket = writer.submit_block("owner", 0, POOL_NBYTES)
        calls_until(double, "cuLaunchKernel", 1)
        owner.close_peer("writer")
        assert not owner.closed_within("writer", 0.2)
        assert owner.snapshot() == before
    finally:
        double.go_on()
    owner.wait_closed("writer")
    at_the_end = owner.snapshot()
    assert at_the_end == writer.snapshot()
    assert writer.wait_batch(ticket) == "ok"
    assert writer.wait_batch(writer.submit_block("owner", 0, 16)) == "cancelled"
    assert owner.snapshot() == at_the_end


def test_a_writer_that_closes_waits_for_its_own_kernel(pair: tuple[Side, Side], double: Fake) -> None:
    writer, owner = pair
    double.hold()
    try:
        tickets = [writer.submit_block("owner", 0, POOL_NBYTES) for _ in range(NUM_SLOTS + 2)]
        calls_until(double, "cuLaunchKernel", NUM_SLOTS)
        writer.close_peer("owner")
        assert not writer.closed_within("owner", 0.2)
    finally:
        double.go_on()
    writer.wait_closed("owner")
    assert [writer.wait_batch(ticket) for ticket in tickets] == ["ok"] * NUM_SLOTS + ["cancelled"] * 2


def test_a_deadline_is_ours_although_a_kernel_cannot_be_called_off(pair: tuple[Side, Side], double: Fake) -> None:
    writer, owner = pair
    double.hold()
    try:
        ticket = writer.submit_block("owner", 0, POOL_NBYTES, timeout_s=0.1)
        assert writer.wait_batch(ticket) == "timeout"
        writer.close_peer("owner")
        assert not writer.closed_within("owner", 0.1)
        assert double.counts().mappings == 0
    finally:
        double.go_on()
    writer.wait_closed("owner")


def test_a_launch_that_fails_fails_every_peer_and_shuts_nobody_in(pair: tuple[Side, Side], double: Fake) -> None:
    writer, owner = pair
    double.fail("cuLaunchKernel", 700)
    ticket = writer.submit_block("owner", 0, 16)
    assert writer.wait_batch(ticket) == "peer_failed"
    assert "cuLaunchKernel failed with CUDA_ERROR_ILLEGAL_ADDRESS" in writer.wait_failed("owner")
    with pytest.raises(TransportFailure, match="the GPU has failed"):
        writer.submit_block("owner", 0, 16)
    owner.close_peer("writer")
    owner.wait_closed("writer")
    writer.close_peer("owner")
    writer.wait_closed("owner")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_fault_in_a_kernel_keeps_the_owner_s_memory_in_quarantine() -> None:
    """Nobody can say whether the stores of a kernel that faulted have ended, so nobody says it, or frees anything."""
    double = fake()
    double.take_log()
    writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
    writer.add_buffer(POOL_NBYTES, seed=0)
    owner.add_buffer(POOL_NBYTES, seed=1)
    join(writer, owner)
    double.hold()
    try:
        ticket = writer.submit_block("owner", 0, 16)
        calls_until(double, "cuLaunchHostFunc", 1)
        double.break_context(700)
        assert writer.wait_batch(ticket) == "peer_failed"
        owner.close_peer("writer")
        writer.close_peer("owner")
        assert not owner.closed_within("writer", 0.1)
        assert not writer.closed_within("owner", 0.1)
    finally:
        double.break_context(0)
        double.go_on()
    for side in (writer, owner):
        side.close()


def test_memory_of_a_peer_is_unmapped_when_its_end_is_reported(
    pair: tuple[Side, Side], double: Fake, steady_descriptors: None
) -> None:
    writer, _ = pair
    other = OtherProcess("mapped-cuda-double")
    try:
        other.call("add_buffer", 4096, 0)
        before = len(list(Path("/proc/self/fd").iterdir()))
        writer.connect("other", other.call("invite", "here"))
        with pytest.raises(ProtocolError, match="twice"):
            writer.connect("other", other.call("invite", "again"))
        assert double.counts().mappings == 1
        writer.close_peer("other")
        writer.wait_closed("other")
        assert double.counts().mappings == 0
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
    finally:
        other.end()


def test_name_of_a_peer_is_taken_until_its_end_is_fetched(pair: tuple[Side, Side], double: Fake) -> None:
    """Else the end of the first one would unmap the memory of the second, while kernels store into it."""
    writer, _ = pair
    other = OtherProcess("mapped-cuda-double")
    try:
        other.call("add_buffer", 4096, 0)
        writer.transport.invite("other")
        writer.close_peer("other")
        assert readable(writer.transport.fileno(), timeout_s=PATIENCE_S), "its end can be fetched"
        with pytest.raises(ProtocolError, match="peer name other is used twice"):
            writer.connect("other", other.call("invite", "here"))
        assert double.counts().mappings == 0
        writer.wait_closed("other")
        writer.connect("other", other.call("invite", "again"))
        writer.poll()
        assert double.counts().mappings == 1
        assert writer.wait_batch(writer.submit_block("other", 0, 16)) == "ok"
        writer.happened.clear()
        writer.close_peer("other")
        writer.wait_closed("other")
        assert double.counts().mappings == 0
    finally:
        other.end()


@pytest.mark.parametrize("call", ["poll", "invite", "register"])
def test_a_call_of_the_driver_that_stands_stops_no_other_thread(
    pair: tuple[Side, Side], double: Fake, device: Device, call: str
) -> None:
    """Who submits has the engine's lock then. Nobody may wait for it with Python's."""
    writer, _ = pair
    writer.transport.invite("other")
    writer.close_peer("other")
    assert readable(writer.transport.fileno(), timeout_s=PATIENCE_S), "its end can be fetched"

    def let_go() -> bool:
        double.wait_stalled()
        time.sleep(0.05)
        return double.let_go()

    with closing(DeviceBuffer(device, 4096)) as buffer, ThreadPoolExecutor(2) as others:
        calls: dict[str, Callable[[], object]] = {
            "poll": writer.poll,
            "invite": lambda: writer.transport.invite("third"),
            "register": lambda: writer.transport.register(buffer),
        }
        double.stall("cuLaunchKernel")
        went_on = others.submit(let_go)
        ticket = others.submit(writer.submit_block, "owner", 0, 16)
        double.wait_stalled()
        calls[call]()
        assert went_on.result(), f"{call} kept Python's lock until the call of the driver had returned"
        assert writer.wait_batch(ticket.result()) == "ok"
        writer.wait_closed("other")
        writer.close()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_close_leaves_what_a_kernel_in_flight_may_still_use() -> None:
    double = fake()
    before = double.counts()
    with contextlib.closing(Side(DoubleTransport())) as owner:
        writer = Side(DoubleTransport())
        writer.add_buffer(POOL_NBYTES, seed=0)
        owner.add_buffer(POOL_NBYTES, seed=1)
        join(writer, owner)
        double.hold()
        try:
            ticket = writer.submit_block("owner", 0, POOL_NBYTES)
            calls_until(double, "cuLaunchKernel", 1)
            writer.close()
            left = double.counts()
        finally:
            double.go_on()
        assert writer.done(ticket) == []
        assert left.registrations > before.registrations
        assert left.events - before.events >= NUM_SLOTS


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_launch_whose_event_could_not_be_recorded_counts_as_on_its_way() -> None:
    """Nobody will hear of its end, so the owner must not get its memory back."""
    writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
    for side in (writer, owner):
        side.add_buffer(POOL_NBYTES, seed=0)
    join(writer, owner)
    fake().fail("cuEventRecord", 700)
    assert writer.wait_batch(writer.submit_block("owner", 0, 16)) == "peer_failed"
    owner.close_peer("writer")
    assert not owner.closed_within("writer", 0.1)
    for side in (writer, owner):
        side.close()


@pytest.mark.parametrize(("gpu_share", "blocks"), [(1.0, 32), (0.125, 4), (0.001, 1)])
def test_a_launch_takes_a_share_of_the_gpu(
    double: Fake, monkeypatch: pytest.MonkeyPatch, gpu_share: float, blocks: int
) -> None:
    """The double has 4 multiprocessors of 2,048 threads, and a block has 256."""
    most: list[int] = []
    real = _cuda.KernelLauncher

    def launcher(library: str, context: int, kernels: Any, max_blocks: int) -> _cuda.KernelLauncher:
        most.append(max_blocks)
        return real(library, context, kernels, max_blocks)

    monkeypatch.setattr(_cuda, "KernelLauncher", launcher)
    monkeypatch.setattr(driver, "LIBRARY", double.path)
    transport = MappedCudaTransport.configured(TransportConfig(gpu_share=gpu_share), Site("cuda"))
    with closing(transport):
        transport.open()
    assert most == [blocks]


def memory_files() -> list[str]:
    """Descriptors of this process: one for each, those of mappings included."""
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [link for link in links if "memfd:pdlink" in link]


def test_the_memory_of_a_transport_is_one_descriptor_that_goes_when_it_is_closed(double: Fake) -> None:
    """Without the collector, and although the transport is still there."""
    gc.collect()
    gc.disable()
    try:
        before = memory_files()
        transport = DoubleTransport()
        transport.open()
        assert len(memory_files()) <= len(before) + 2
        transport.close()
        assert memory_files() == before
    finally:
        gc.enable()


ONCE = ["cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuStreamCreate", "cuMemHostRegister_v2"]


@pytest.mark.parametrize(("call", "later"), [*((call, 0) for call in ONCE), ("cuEventCreate", 1)])
def test_open_that_fails_leaves_nothing(call: str, later: int, double: Fake) -> None:
    before = double.counts()
    double.fail(call, 2, later)
    transport = DoubleTransport()
    with pytest.raises(TransportUnavailable, match=f"{call} failed"):
        transport.open()
    transport.close()
    assert double.counts() == before


def test_a_pinned_source_is_read_in_place_and_is_no_destination(device: Device) -> None:
    writer, owner = DoubleTransport(), Side(DoubleTransport())
    writer.open()
    source = PinnedBuffer(device, 4096)
    source.array[:] = 5
    writer.register(source)
    owner.add_buffer(4096, seed=1)
    writer.connect("owner", owner.transport.invite("writer"))
    before = owner.buffers[0].array[:200].copy()
    writer.submit("owner", [run_list([[0, 100, 50]])], 20)
    owner.wait_changed(before)
    assert (owner.buffers[0].array[100:150] == 5).all()
    owner.transport.connect("back", writer.invite("back"))
    with pytest.raises(ValueError, match=r"destination bytes 0 \+ 0 \+ 1 outside a region of 0 bytes"):
        owner.submit("back", run_list([[0, 0, 1]]))
    owner.close()
    writer.close()
    source.close()


def test_host_memory_that_is_not_pinned_is_refused(double: Fake) -> None:
    transport = MappedCudaTransport(library=double.path, image=IMAGE)
    transport.open()
    side = Side(DoubleTransport())
    side.add_buffer(4096, seed=0)
    with pytest.raises(TransportUnavailable, match="pinned"):
        transport.register(side.buffers[0])
    transport.close()
    side.close()


def test_real_device_buffers_carry_bytes_too(device: Device) -> None:
    """Allocated by the driver and exported, not lent by a test."""
    writer, owner = DoubleTransport(), DoubleTransport()
    for transport in (writer, owner):
        transport.open()
    with closing(DeviceBuffer(device, 4096)) as source, closing(DeviceBuffer(device, 4096)) as target:
        writer.register(source)
        owner.register(target)
        writer.connect("owner", owner.invite("writer"))
        writer.submit("owner", [run_list([[0, 0, 4096]])], 20)
        writer.close()
        owner.close()


def tampered(invitation: bytes, **changed: object) -> bytes:
    fields = msgspec.msgpack.decode(invitation)
    return msgspec.msgpack.encode({**fields, **changed})


def test_an_invitation_cannot_make_us_write_to_our_own_memory(pair: tuple[Side, Side]) -> None:
    """It names this process, so its addresses would be used as they are."""
    writer, owner = pair
    invitation = owner.transport.invite("other-writer")
    address, nbytes, export = msgspec.msgpack.decode(invitation)["regions"][0]
    for region in ([address + 4096, nbytes, export], [address, nbytes + 4096, export]):
        with pytest.raises(ProtocolError, match="no device memory of this process"):
            writer.transport.connect("evil", tampered(invitation, regions=[region]))


def test_a_transport_may_open_while_another_one_looks_whose_memory_it_is(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several nodes of one process begin at the same time."""
    writer, owner = pair
    third = DoubleTransport()

    def holds(transport: MappedCudaTransport, region: tuple[int, int]) -> bool:
        third.open()
        return False

    monkeypatch.setattr(MappedCudaTransport, "holds", holds)
    with closing(third), pytest.raises(ProtocolError, match="no device memory of this process"):
        writer.transport.connect("owner#2", owner.transport.invite("writer#2"))


def test_an_invitation_that_promises_more_memory_than_there_is_is_refused(
    pair: tuple[Side, Side], double: Fake
) -> None:
    """A kernel that writes beyond an allocation would cost the writer its context."""
    writer, _ = pair
    other = OtherProcess("mapped-cuda-double")
    try:
        other.call("add_buffer", 4096, 0)
        invitation = bytes.fromhex(other.call("invite", "here"))
        address, nbytes, (gpu, exported, *handle) = msgspec.msgpack.decode(invitation)["regions"][0]
        large = tampered(invitation, regions=[[address, nbytes, [gpu, exported + 1, *handle]]])
        with pytest.raises(ProtocolError, match="got 4096 bytes"):
            writer.transport.connect("other", large)
        assert double.counts().mappings == 0
        double.fail("cuIpcOpenMemHandle_v2", 201)
        with pytest.raises(TransportFailure, match="CUDA_ERROR_INVALID_CONTEXT"):
            writer.transport.connect("other", bytes.fromhex(other.call("invite", "again")))
    finally:
        other.end()


FORK = """
import os
from pdlink.errors import TransportFailure
from tests.conformance.transports.side import Side, join
from tests.cuda.double import DoubleTransport, block_plan

writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
for side in (writer, owner):
    side.add_buffer(4096, seed=0)
join(writer, owner)
child = os.fork()
if child == 0:
    try:
        writer.submit_block("owner", 0, 16)
    except TransportFailure as error:
        assert "forked" in str(error)
        writer.transport.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert writer.wait_batch(writer.submit_block("owner", 0, 16)) == "ok"
for side in (writer, owner):
    side.close()
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_forked_child_is_refused_and_its_parent_goes_on() -> None:
    """A child has neither the thread nor a context that works."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], cwd=root, check=False, timeout=50)
    assert done.returncode == 0
