"""What is particular to mapped memory: lies in an invitation, the gate, mappings and descriptors given back, fork."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.memory.buffers import Buffer
from pdlink.transport.mapped import MappedTransport
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import Side, join, piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POOL_NBYTES = 1 << 20
GATE_WORDS = struct.Struct("=IIqQ")
"""closed, busy, writer_pid, writer_born: `GateWords` of csrc/gate.h."""


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    """A writer and an owner that do not know each other yet."""
    with contextlib.ExitStack() as stack:
        sides = [Side(MappedTransport()), Side(MappedTransport())]
        for seed, side in enumerate(sides):
            stack.callback(side.close)
            side.add_buffer(POOL_NBYTES, seed)
        yield sides[0], sides[1]


def changed(invitation: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    fields = msgspec.msgpack.decode(invitation)
    change(fields)
    return msgspec.msgpack.encode(fields)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:pdlink")


@pytest.mark.usefixtures("steady_descriptors")
def test_probe_says_yes_and_leaves_nothing_behind() -> None:
    before = open_files(), mappings()
    assert MappedTransport.probe().ok
    assert (open_files(), mappings()) == before


def test_another_host_is_refused_by_name(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    elsewhere = changed(owner.transport.invite("writer"), lambda fields: fields.update(boot_id="other"))
    with pytest.raises(TransportFailure, match="another host"):
        writer.transport.connect("owner", elsewhere)


def test_another_pid_namespace_is_refused_with_the_remedy(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    elsewhere = changed(owner.transport.invite("writer"), lambda fields: fields.update(pid_namespace=1))
    with pytest.raises(TransportFailure, match="--pid"):
        writer.transport.connect("owner", elsewhere)


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "more bytes than the file has": lambda fields: fields["regions"][0].update(nbytes=POOL_NBYTES + 1),
    "as many bytes as there are numbers": lambda fields: fields["regions"][0].update(nbytes=2**62),
    "no bytes": lambda fields: fields["regions"][0].update(nbytes=0),
    "a negative descriptor": lambda fields: fields["regions"][0].update(fd=-1),
    "no regions": lambda fields: fields.update(regions=[]),
    "pid 0": lambda fields: fields.update(pid=0),
    "an unknown field": lambda fields: fields.update(extra=1),
    "another version": lambda fields: fields.update(type="pdlink-mapped/2"),
}


@pytest.mark.usefixtures("steady_descriptors")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_in_an_invitation_is_a_protocol_error_and_leaks_nothing(
    pair: tuple[Side, Side], lie: Callable[[dict[str, Any]], None]
) -> None:
    writer, owner = pair
    invitation = changed(owner.transport.invite("writer"), lie)
    before = open_files(), mappings()
    with pytest.raises(ProtocolError):
        writer.transport.connect("owner", invitation)
    assert (open_files(), mappings()) == before


def point_region_at(invitation: bytes, fd: int, nbytes: int) -> bytes:
    status = os.fstat(fd)
    region = {"fd": fd, "device": status.st_dev, "inode": status.st_ino, "nbytes": nbytes}
    return changed(invitation, lambda fields: fields.update(regions=[region]))


def test_only_sealed_memory_files_are_mapped(pair: tuple[Side, Side]) -> None:
    """A file that can be cut short would kill the writer; one on a disk is not what an invitation is for."""
    writer, owner = pair
    invitation = owner.transport.invite("writer")
    with tempfile.TemporaryFile() as on_disk:
        on_disk.truncate(4096)
        with pytest.raises(ProtocolError, match="sealed"):
            writer.transport.connect("owner", point_region_at(invitation, on_disk.fileno(), 4096))
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(unsealed, 0, 4096)
        with pytest.raises(ProtocolError, match="sealed"):
            writer.transport.connect("owner", point_region_at(invitation, unsealed, 4096))
    finally:
        os.close(unsealed)


def test_a_file_with_holes_is_refused(pair: tuple[Side, Side]) -> None:
    """Touching a hole allocates it, and the allocation is charged to the one who touches."""
    writer, owner = pair
    with Buffer(1 << 16) as buffer:
        os.ftruncate(buffer.fd, 1 << 40)
        with pytest.raises(ProtocolError, match="holes"):
            writer.transport.connect("owner", point_region_at(owner.transport.invite("writer"), buffer.fd, 1 << 40))


def test_a_descriptor_that_is_another_file_by_now_is_refused(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    invitation = owner.transport.invite("writer")
    stale = changed(invitation, lambda fields: fields["regions"][0].update(inode=fields["gate"]["inode"]))
    with pytest.raises(TransportFailure, match="not the invited file"):
        writer.transport.connect("owner", stale)


def test_an_ended_process_is_refused(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    ended = subprocess.Popen(["true"])
    ended.wait(20)
    gone = changed(owner.transport.invite("writer"), lambda fields: fields.update(pid=ended.pid))
    with pytest.raises(TransportFailure, match=str(ended.pid)):
        writer.transport.connect("owner", gone)


def test_an_invitation_works_once(pair: tuple[Side, Side]) -> None:
    """One gate has one writer: what the owner learns from it would be about the wrong one otherwise."""
    writer, owner = pair
    invitation = owner.transport.invite("writer")
    writer.transport.connect("owner", invitation)
    with pytest.raises(TransportFailure, match="has a writer already"):
        writer.transport.connect("owner again", invitation)


def test_an_invitation_covers_what_was_registered_before_it(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    join(writer, owner, "early", "owner")
    assert owner.add_buffer(4096, seed=5) == 1
    join(writer, owner, "late", "owner#2")
    with pytest.raises(ValueError, match="no destination region 1"):
        writer.submit("owner", piece([[0, 0, 4]], dst_region=1))
    assert writer.wait_batch(writer.submit("owner#2", piece([[0, 0, 4]], dst_region=1))) == "ok"


def test_inviting_to_nothing_is_refused() -> None:
    with contextlib.closing(MappedTransport()) as transport:
        with pytest.raises(TransportFailure, match="not open"):
            transport.invite("writer")
        transport.open()
        with pytest.raises(TransportUnavailable, match="register"):
            transport.invite("writer")
    with pytest.raises(TransportUnavailable, match="closed"):
        transport.open()


def test_batches_to_one_peer_land_and_are_reported_in_order(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    join(writer, owner)
    tickets = [writer.submit("owner", piece([[64 * index, 0, 600_000]])) for index in range(50)]
    writer.wait_batch(tickets[-1])
    assert [one.ticket for ticket in tickets for one in writer.done(ticket)] == tickets
    assert np.array_equal(owner.buffers[0].array[:600_000], writer.buffers[0].array[64 * 49 :][:600_000])


def test_connections_come_and_go_without_growth(pair: tuple[Side, Side]) -> None:
    writer, owner = pair

    def once(index: int) -> None:
        join(writer, owner, f"writer@{index}", f"owner@{index}")
        assert writer.wait_batch(writer.submit_block(f"owner@{index}", 0, 100)) == "ok"
        writer.close_peer(f"owner@{index}")
        owner.close_peer(f"writer@{index}")
        writer.wait_closed(f"owner@{index}")
        owner.wait_closed(f"writer@{index}")

    once(0)
    gc.collect()  # what earlier tests left; it may still shrink, but nothing here may grow
    files, maps = open_files(), mappings()
    for index in range(1, 20):
        once(index)
    assert open_files() <= files
    assert mappings() <= maps


def test_the_memory_of_a_dead_peer_is_given_back_before_anybody_asks(pair: tuple[Side, Side]) -> None:
    writer, _ = pair
    other = OtherProcess("mapped")
    try:
        other.call("add_buffer", POOL_NBYTES, 0)
        before = open_files(), mappings()
        writer.connect("other", other.call("invite", "here"))
        assert (open_files(), mappings()) > before
        other.kill()
        writer.wait_failed("other")
        writer.wait_until(lambda: open_files() <= before[0] and mappings() <= before[1], "the mapping to go")
    finally:
        other.end()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def inside_the_gate(owner: Side, process: subprocess.Popen[bytes]) -> Iterator[mmap.mmap]:
    """The gate that the owner made for "writer", with `process` in the middle of a slice."""
    gate_fd = msgspec.msgpack.decode(owner.transport.invite("writer"))["gate"]["fd"]
    after_name = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    with mmap.mmap(gate_fd, mmap.PAGESIZE) as gate:
        gate[: GATE_WORDS.size] = GATE_WORDS.pack(0, 1, process.pid, int(after_name[19]))
        yield gate


def test_a_writer_in_the_middle_of_a_slice_holds_up_the_end(
    pair: tuple[Side, Side], sleeper: subprocess.Popen[bytes]
) -> None:
    _, owner = pair
    with inside_the_gate(owner, sleeper) as gate:
        owner.close_peer("writer")
        assert not owner.closed_within("writer", 0.1)
        assert GATE_WORDS.unpack(gate[: GATE_WORDS.size])[0] == 1
        gate[4:8] = b"\0\0\0\0"
        owner.wait_closed("writer")


def test_a_writer_that_dies_in_the_middle_of_a_slice_is_quiet(
    pair: tuple[Side, Side], sleeper: subprocess.Popen[bytes]
) -> None:
    _, owner = pair
    with inside_the_gate(owner, sleeper):
        owner.close_peer("writer")
        assert not owner.closed_within("writer", 0.05)
        sleeper.kill()
        owner.wait_closed("writer")  # a zombie by now: nobody has reaped it


def test_a_pid_given_to_another_process_does_not_count_as_the_writer(
    pair: tuple[Side, Side], sleeper: subprocess.Popen[bytes]
) -> None:
    _, owner = pair
    with inside_the_gate(owner, sleeper) as gate:
        gate[16:24] = struct.pack("=Q", 1)
        owner.close_peer("writer")
        owner.wait_closed("writer")


def test_close_does_not_wait_for_ever_for_a_writer_in_the_middle_of_a_slice(
    pair: tuple[Side, Side], sleeper: subprocess.Popen[bytes]
) -> None:
    _, owner = pair
    with inside_the_gate(owner, sleeper):
        owner.transport.close()
        owner.poll()
        assert owner.happened == []


def test_a_close_with_batches_queued_reports_each_once(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    join(writer, owner)
    tickets = [writer.submit("owner", piece([[0, 0, POOL_NBYTES]])) for _ in range(200)]
    writer.transport.close()
    writer.poll()
    assert [len(writer.done(ticket)) for ticket in tickets] == [1] * 200
    assert writer.transport.poll() == []


FORK = """
import os, sys, warnings
from pdlink.errors import TransportFailure
from pdlink.transport.mapped import MappedTransport
from tests.conformance.transports.side import Side, join
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike any fork of a threaded process
writer, owner = Side(MappedTransport()), Side(MappedTransport())
for side in (writer, owner):
    side.add_buffer(1 << 20, seed=1)
join(writer, owner)
child = os.fork()
if child == 0:
    try:
        writer.submit_block("owner", 0, 100)
    except TransportFailure as refused:
        assert "fork" in str(refused)
        assert writer.transport.poll() == []
        writer.close_peer("owner")
        writer.close()
        owner.close()
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
writer.close()
owner.close()
"""


def test_a_forked_child_is_refused_and_ends_and_the_parent_goes_on() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", FORK], cwd=root, check=True, timeout=30)
