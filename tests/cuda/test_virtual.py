"""Virtual memory of a GPU between processes: chunks, handles and who gets them, on the test double of the driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pdlink.cuda.buffers import BorrowedDeviceBuffer, DeviceBuffer
from pdlink.cuda.driver import CudaFailure, CudaUnavailable, Device
from pdlink.cuda.virtual import PeerRange, Range, SharedMemory
from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.transport.handle_door import DoorPlace, HandleDoor, handles
from pdlink.transport.mapped_cuda import MappedCudaTransport
from tests.conformance.transports.side import Side
from tests.cuda.double import DoubleTransport
from tests.cuda.fake import IMAGE, Fake
from tests.cuda.virtual import FABRIC, POSIX_FD, Segment
from tests.other_process import OtherProcess
from tests.waiting import WAIT_S

PAGE = 4096
pytestmark = pytest.mark.usefixtures("steady_descriptors")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def room_for_descriptors(count: int) -> Iterator[None]:
    """This process can open so many more. The limit is of numbers: open ones above it leave gaps below it."""
    taken = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(max(taken) + count + 2) if number not in taken]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[OtherProcess]:
    """A process whose device memory is virtual."""
    kind: int = getattr(request, "param", POSIX_FD)
    process = OtherProcess("tests.cuda.virtual", str(kind))
    yield process
    process.end()


@pytest.fixture
def writer(double: Fake) -> Iterator[Side]:
    side = Side(DoubleTransport())
    side.add_buffer(64 * PAGE, seed=0)
    yield side
    side.close()


def changed(invitation: bytes, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(invitation), **fields})


def test_bytes_of_another_process_arrive_across_the_borders_of_chunks(
    writer: Side, owner: OtherProcess, double: Fake
) -> None:
    owner.call("add_buffer", 64 * PAGE, 1)
    before = num_descriptors()
    writer.connect("owner", owner.call("invite", "writer"))
    assert double.counts().mappings == 4, "three chunks of 21 pages, and one of one"
    assert double.counts().handles == 0, "the mapping keeps the memory"
    for offset, nbytes in ((0, 64 * PAGE), (21 * PAGE - 100, 200), (0, 16)):
        assert writer.wait_batch(writer.submit_block("owner", offset, nbytes)) == "ok"
    assert owner.call("digest_of", 0, 64 * PAGE) == writer.digest_of(0, 64 * PAGE)
    writer.close_peer("owner")
    writer.wait_closed("owner")
    assert (double.counts().mappings, double.counts().reserved) == (0, 0)
    assert num_descriptors() <= before


@pytest.mark.parametrize("owner", [FABRIC], indirect=True)
def test_fabric_handles_need_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, writer: Side, owner: OtherProcess
) -> None:
    """As torch takes them where the machine has an IMEX channel. Without one here the peer is refused."""
    monkeypatch.setenv("PDLINK_FAKE_IMEX", "1")
    owner.call("set_environment", "PDLINK_FAKE_IMEX", "1")
    owner.call("add_buffer", 64 * PAGE, 1)
    writer.connect("owner", owner.call("invite", "writer"))
    assert writer.wait_batch(writer.submit_block("owner", 0, 64 * PAGE)) == "ok"
    assert owner.call("digest_of", 0, 64 * PAGE) == writer.digest_of(0, 64 * PAGE)
    monkeypatch.delenv("PDLINK_FAKE_IMEX")
    with pytest.raises(TransportFailure, match="cuMemImportFromShareableHandle failed with CUDA_ERROR_NOT_PERMITTED"):
        writer.connect("again", owner.call("invite", "again"))


def test_many_chunks_are_mapped_with_few_descriptors(writer: Side, owner: OtherProcess, double: Fake) -> None:
    """A cache of 60 GB has 3,000, and a process may have 1,024 files open."""
    owner.call("add_chunks", 600, PAGE)
    with room_for_descriptors(80):
        writer.connect("owner", owner.call("invite", "writer"))
    assert double.counts().mappings == 600


def test_descriptors_that_do_not_fit_are_a_failure_that_names_the_limit(writer: Side, owner: OtherProcess) -> None:
    owner.call("add_chunks", 60, PAGE)
    invitation = owner.call("invite", "writer")
    before = num_descriptors()
    with room_for_descriptors(4), pytest.raises(TransportFailure, match="ulimit -n"):
        writer.connect("owner", invitation)
    assert num_descriptors() <= before


def test_a_stranger_gets_no_handle(writer: Side, owner: OtherProcess, double: Fake) -> None:
    owner.call("add_buffer", 64 * PAGE, 1)
    invitation = bytes.fromhex(owner.call("invite", "writer"))
    name, secret = msgspec.msgpack.decode(invitation)["door"]
    before = num_descriptors()
    with pytest.raises(TransportFailure, match="no such memory is shared with you"):
        writer.transport.connect("owner", changed(invitation, door=[name, bytes(len(secret))]))
    with pytest.raises(ProtocolError, match="virtual memory without a door"):
        writer.transport.connect("owner", changed(invitation, door=None))
    with pytest.raises(TransportFailure, match="Connection refused.*another network namespace"):
        writer.transport.connect("owner", changed(invitation, door=[name + "x", secret]))
    assert double.counts().reserved == 0
    assert num_descriptors() <= before


def test_handles_are_taken_from_the_process_that_has_invited_alone(writer: Side, owner: OtherProcess) -> None:
    """Else a stranger who takes the door's name could have us write into memory of its own."""
    owner.call("add_buffer", 64 * PAGE, 1)
    invitation = bytes.fromhex(owner.call("invite", "writer"))
    with closing(HandleDoor()) as mine:
        changed_door = changed(invitation, door=[mine.place.name, mine.place.secret])
        with pytest.raises(ProtocolError, match="another process listens"):
            writer.transport.connect("owner", changed_door)


FORK = """
import os, time
from pdlink.errors import TransportFailure
from pdlink.transport.handle_door import HandleDoor, handles

door = HandleDoor()
child = os.fork()
if child == 0:
    door.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    list(handles(door.place, os.getpid(), 0, 1, time.monotonic() + 50))
except TransportFailure as refusal:
    assert "no such memory is shared with you" in str(refusal)
door.close()
"""


def test_forked_child_that_closes_the_door_leaves_it_open_to_the_parent_s_peers() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], cwd=root, check=True, timeout=55)


@pytest.mark.parametrize("more", [PAGE, -PAGE])
def test_an_invitation_that_promises_another_size_is_refused(writer: Side, owner: OtherProcess, more: int) -> None:
    owner.call("add_buffer", 64 * PAGE, 1)
    invitation = bytes.fromhex(owner.call("invite", "writer"))
    address, nbytes, (gpu, size, handle, offset, range_nbytes) = msgspec.msgpack.decode(invitation)["regions"][0]
    regions = [[address, nbytes, [gpu, size + more, handle, offset, range_nbytes + more]]]
    with pytest.raises(
        (ProtocolError, TransportFailure), match="closed the connection|expected the 0 that are left|got one"
    ):
        writer.transport.connect("owner", changed(invitation, regions=regions))


def test_a_peer_that_does_not_answer_is_given_up(double: Fake) -> None:
    """In all, not for each answer: one that sends a chunk now and then would be waited for without end."""
    name = f"pdlink-test-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while True:
                connection.send(msgspec.msgpack.encode([[PAGE], [bytes(64)], ""]))
                time.sleep(0.05)

    thread = threading.Thread(target=trickle)
    thread.start()
    began_s = time.monotonic()
    with listener, pytest.raises(TimeoutError):
        list(handles(DoorPlace(name, bytes(16)), os.getpid(), 0, 2**40, began_s + 0.5))
    assert time.monotonic() - began_s < 10
    thread.join(WAIT_S)


def test_the_range_under_a_buffer_is_that_of_its_chunks(device: Device) -> None:
    with closing(Segment(device, 8 * PAGE, 3 * PAGE)) as segment:
        found = Range.under(device, segment.ptr + 4 * PAGE, 3 * PAGE)
        assert (found.start, found.nbytes, found.is_fabric) == (segment.ptr + 3 * PAGE, 5 * PAGE, False)
        assert [chunk.nbytes for chunk in found.chunks] == [3 * PAGE, 2 * PAGE]


def test_memory_without_a_shareable_handle_is_refused_with_the_lane_that_it_takes(
    device: Device, double: Fake
) -> None:
    with closing(Segment(device, 2 * PAGE, PAGE, handle_types=0)) as segment:
        buffer = BorrowedDeviceBuffer(Device(0, double.path), segment.ptr, segment.nbytes, segment)
        transport = MappedCudaTransport(library=double.path, image=IMAGE)
        transport.open()
        with pytest.raises(TransportUnavailable, match="no other process can map.*pinned slots"):
            transport.register(buffer)
        transport.close()
        buffer.close()


def test_memory_that_may_be_exchanged_is_not_shared(device: Device, double: Fake) -> None:
    """Of vLLM's sleep mode: after it has woken up, a peer would still write to the memory of before."""
    with closing(Segment(device, 2 * PAGE, PAGE)) as segment:
        buffer = BorrowedDeviceBuffer(Device(0, double.path), segment.ptr, segment.nbytes, segment, stays=False)
        with pytest.raises(CudaUnavailable, match="of which a peer would not hear.*turn sleep mode off"):
            buffer.virtual_range()
        buffer.close()
    with closing(DeviceBuffer(device, PAGE)) as whole:
        buffer = BorrowedDeviceBuffer(Device(0, double.path), whole.ptr, PAGE, whole, stays=False)
        assert buffer.virtual_range() is None
        buffer.close()


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_range_that_cannot_be_mapped_leaves_nothing(device: Device, double: Fake, call: str) -> None:
    with closing(Segment(device, 4 * PAGE, PAGE)) as segment:
        found = Range.under(device, segment.ptr, segment.nbytes)
        before, counts = num_descriptors(), double.counts()
        shared = [found.export(chunk) for chunk in found.chunks]
        double.fail(call, 1, 0 if call == "cuMemSetAccess" else 2)
        with pytest.raises(CudaFailure, match=call):
            PeerRange(device, segment.nbytes, iter(shared))
        for one in shared[3:] if call != "cuMemSetAccess" else []:
            assert isinstance(one.handle, int)
            os.close(one.handle)
        assert num_descriptors() <= before
        assert double.counts() == counts


def test_what_is_mapped_is_the_same_memory(device: Device) -> None:
    with closing(Segment(device, 4 * PAGE, PAGE)) as segment:
        found = Range.under(device, segment.ptr, segment.nbytes)
        segment.array[:] = np.arange(4 * PAGE, dtype=np.uint8)
        shared: Iterator[SharedMemory] = (found.export(chunk) for chunk in found.chunks)
        with closing(PeerRange(device, segment.nbytes, shared)) as mapped:
            assert device.extent(mapped.ptr) == (mapped.ptr, PAGE)
            assert ctypes.string_at(mapped.ptr, 4 * PAGE) == segment.array.tobytes()
