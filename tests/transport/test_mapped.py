"""What is particular to mapped memory: lies in an invitation, the gate, mappings and descriptors given back, fork."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pdlink.errors import ProtocolError, TransportFailure
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import BatchDone
from pdlink.transport.mapped import MappedTransport
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import PATIENCE_S, Side, assert_cut_off, join, run_list
from tests.transport.standing import native_threads, wait_for_threads
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POOL_NBYTES = 1 << 20
RANGE_NBYTES = 256 << 10
"""`kRangeNbytes` of csrc/copy/batch.h."""
GATE_WORDS = struct.Struct("=IIqQ")
"""closed, busy, writer_pid, writer_born: `GateWords` of csrc/common/gate.h."""


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    """A writer and an owner that do not know each other yet."""
    with contextlib.ExitStack() as stack:
        sides = [Side(MappedTransport(within_process=True)) for _ in range(2)]
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
    assert MappedTransport().probe().ok
    assert open_files() <= before[0]
    assert mappings() == before[1]


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
    "another version": lambda fields: fields.update(type="pdlink-mapped/1"),
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
    assert open_files() <= before[0]
    assert mappings() == before[1]


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


def test_holes_of_a_region_are_refused_until_they_have_memory(pair: tuple[Side, Side]) -> None:
    """Touching a hole allocates it, and the allocation is charged to the one who touches."""
    writer, owner = pair
    with Buffer(1 << 19, committed_nbytes=1 << 16) as buffer:
        invitation = owner.transport.invite("writer")
        writer.transport.connect("owner", point_region_at(invitation, buffer.fd, buffer.nbytes))
        assert writer.wait_batch(writer.submit_block("owner", 0, 1 << 16)) == "ok"
        for first in (1 << 16, (1 << 16) - 4096):
            with pytest.raises(ValueError, match="outside a region of 65536 bytes"):
                writer.submit_block("owner", first, 8192)
        assert os.fstat(buffer.fd).st_blocks * 512 == 1 << 16
        buffer.populate(1 << 16, 1 << 18)
        assert writer.wait_batch(writer.submit_block("owner", 0, 1 << 18)) == "ok"
        assert (buffer.array[: 1 << 18] == writer.buffers[0].array[: 1 << 18]).all()
        assert os.fstat(buffer.fd).st_blocks * 512 == 1 << 18, "what is prepared for copies is no hole"


def test_a_descriptor_that_is_another_file_by_now_is_refused(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    invitation = owner.transport.invite("writer")
    stale = changed(invitation, lambda fields: fields["regions"][0].update(inode=fields["gate"]["inode"]))
    with pytest.raises(TransportFailure, match="not the invited file"):
        writer.transport.connect("owner", stale)


def test_an_ended_process_is_refused(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    ended = subprocess.Popen(["true"])
    ended.wait(WAIT_S)
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
        writer.submit("owner", run_list([[0, 0, 4]], dst_region=1))
    assert writer.wait_batch(writer.submit("owner#2", run_list([[0, 0, 4]], dst_region=1))) == "ok"


def test_batches_to_one_peer_land_and_are_reported_in_the_order_of_submits(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    join(writer, owner)
    lengths = [600_000, 5, 300_000] * 20
    tickets = [
        writer.submit("owner", run_list([[64 * index, 0, nbytes], [index * 4096, 700_000 + index * 4096, 4096]]))
        for index, nbytes in enumerate(lengths)
    ]
    writer.wait_batch(tickets[-1])
    assert [one.ticket for one in writer.happened if isinstance(one, BatchDone)] == tickets
    assert np.array_equal(owner.buffers[0].array[700_000:][: 60 * 4096], writer.buffers[0].array[: 60 * 4096])


def test_a_small_batch_has_landed_when_its_submit_returns(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"  # so the owner's pages are mapped
    rows = [[at, at + 512, 256] for at in range(1024, POOL_NBYTES // 2, 2048)]  # 65,280 bytes in short runs
    ticket = writer.submit("owner", run_list(rows))
    for src, dst, nbytes in rows:
        assert (
            owner.buffers[0].array[dst : dst + nbytes].tobytes()
            == writer.buffers[0].array[src : src + nbytes].tobytes()
        )
    assert writer.wait_batch(ticket) == "ok"


@pytest.mark.usefixtures("steady_descriptors")
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
        # Right behind the report.
        until(lambda: open_files() <= before[0] and mappings() <= before[1], "the mapping goes")
    finally:
        other.end()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def inside_the_gate(owner: Side, process: subprocess.Popen[bytes]) -> Iterator[mmap.mmap]:
    """The gate that the owner made for "writer", with `process` in the middle of a range."""
    gate_fd = msgspec.msgpack.decode(owner.transport.invite("writer"))["gate"]["fd"]
    after_name = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    with mmap.mmap(gate_fd, mmap.PAGESIZE) as gate:
        gate[: GATE_WORDS.size] = GATE_WORDS.pack(0, 1, process.pid, int(after_name[19]))
        yield gate


def test_a_writer_in_the_middle_of_a_range_holds_up_the_end(
    pair: tuple[Side, Side], sleeper: subprocess.Popen[bytes]
) -> None:
    _, owner = pair
    with inside_the_gate(owner, sleeper) as gate:
        owner.close_peer("writer")
        assert not owner.closed_within("writer", 0.1)
        assert GATE_WORDS.unpack(gate[: GATE_WORDS.size])[0] == 1
        gate[4:8] = b"\0\0\0\0"
        owner.wait_closed("writer")


def test_a_writer_that_dies_in_the_middle_of_a_range_is_quiet(
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


def test_close_does_not_wait_for_ever_for_a_writer_in_the_middle_of_a_range(
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
    tickets = [writer.submit("owner", run_list([[0, 0, POOL_NBYTES]])) for _ in range(200)]
    writer.transport.close()
    writer.poll()
    assert [len(writer.done(ticket)) for ticket in tickets] == [1] * 200
    assert writer.transport.poll() == []


MANY_NBYTES = 32 << 20


@pytest.fixture
def two() -> Iterator[tuple[Side, Side]]:
    """A writer that copies with two threads, and an owner whose pages are prepared."""
    with contextlib.ExitStack() as stack:
        writer, owner = (Side(MappedTransport(threads=2, within_process=True)) for _ in range(2))
        for seed, side in enumerate((writer, owner)):
            stack.callback(side.close)
            side.add_buffer(MANY_NBYTES, seed)
        join(writer, owner)
        assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
        yield writer, owner


def ranges_taken(side: Side) -> tuple[int, int]:
    assert isinstance(side.transport, MappedTransport)
    return side.transport.ranges_taken()


def submit_many(writer: Side, shift: int) -> int:
    """The whole of the first buffer, rotated by so many eighths: enough to wake the second thread for."""
    part = MANY_NBYTES // 8
    return writer.submit("owner", run_list([[(index + shift) % 8 * part, index * part, part] for index in range(8)]))


def assert_rotated(writer: Side, owner: Side, shift: int) -> None:
    rotated = np.roll(writer.buffers[0].array, -shift * MANY_NBYTES // 8)
    assert np.array_equal(owner.buffers[0].array, rotated)


def until_second(writer: Side, num_ranges: int) -> None:
    """Return when the second thread has taken more than so many ranges."""
    deadline = time.monotonic() + PATIENCE_S
    while ranges_taken(writer)[1] <= num_ranges:
        assert time.monotonic() < deadline, "the second thread does nothing"
        time.sleep(0.0005)


def both_at_work(writer: Side, num_ranges: int = 0) -> list[int]:
    """Batches in the middle of which both threads are; the second one has taken more than so many ranges of them."""
    already = ranges_taken(writer)[1]
    tickets = [writer.submit_long("owner") for _ in range(6)]
    until_second(writer, already + num_ranges)
    return tickets


def test_two_threads_share_a_batch_and_each_slice_is_taken_once(two: tuple[Side, Side]) -> None:
    writer, owner = two
    deadline = time.monotonic() + PATIENCE_S
    shift = 0
    while not ranges_taken(writer)[1]:  # it may be woken too late for some
        assert time.monotonic() < deadline, "the second thread does nothing"
        shift += 1
        before = sum(ranges_taken(writer))
        assert writer.wait_batch(submit_many(writer, shift)) == "ok"
        assert sum(ranges_taken(writer)) - before == MANY_NBYTES // RANGE_NBYTES
        assert_rotated(writer, owner, shift)


def test_the_second_thread_rests_while_a_prefill_is_computed(two: tuple[Side, Side]) -> None:
    writer, owner = two
    writer.transport.computing(on=True)
    assert writer.wait_batch(submit_many(writer, 1)) == "ok"
    assert ranges_taken(writer)[1] == 0
    deadline = time.monotonic() + PATIENCE_S
    taken = rounds = 0
    while rounds < 5 or not taken:  # it may be woken too late in some
        assert time.monotonic() < deadline, "the second thread does nothing"
        writer.transport.computing(on=False)
        tickets = [submit_many(writer, 1) for _ in range(4)]
        writer.transport.computing(on=True)
        tickets.append(submit_many(writer, 1))
        taken = ranges_taken(writer)[1]  # one that did not see the flag was taken before that submit
        assert [writer.wait_batch(ticket) for ticket in tickets] == ["ok"] * 5
        assert ranges_taken(writer)[1] == taken
        rounds += 1
    assert_rotated(writer, owner, 1)


def test_little_at_once_wakes_nobody(two: tuple[Side, Side]) -> None:
    writer, _ = two
    for _ in range(50):
        assert writer.wait_batch(writer.submit_block("owner", 0, RANGE_NBYTES)) == "ok"
    assert ranges_taken(writer)[1] == 0


def test_one_thread_copies_everything_if_told_to() -> None:
    with contextlib.closing(MappedTransport(threads=3)) as transport, pytest.raises(ValueError, match="not 3"):
        transport.open()
    with contextlib.closing(MappedTransport(threads=1)) as transport:
        before = native_threads()
        transport.open()
        assert [name for tid, name in native_threads().items() if tid not in before] == ["pdlink-copy"]


@pytest.mark.parametrize("num_ranges", [0, 1, 7, 50])
@pytest.mark.parametrize("closing", ["writer", "owner"])
def test_both_threads_have_stopped_when_the_peer_is_closed(
    two: tuple[Side, Side], closing: str, num_ranges: int
) -> None:
    writer, owner = two
    tickets = both_at_work(writer, num_ranges)
    side, peer = (writer, "owner") if closing == "writer" else (owner, "writer")
    side.close_peer(peer)
    side.wait_closed(peer)
    at_the_end = owner.snapshot()
    assert_cut_off([writer.wait_batch(ticket) for ticket in tickets], "cancelled")
    writer.close_peer("owner")
    writer.wait_closed("owner")
    assert [len(writer.done(ticket)) for ticket in tickets] == [1] * len(tickets)
    assert owner.snapshot() == at_the_end


def test_no_thread_is_left_and_nothing_changes_after_close_in_the_middle_of_a_batch(two: tuple[Side, Side]) -> None:
    writer, owner = two
    tickets = both_at_work(writer)
    assert list(native_threads().values()).count("pdlink-copy-2") == 2
    writer.transport.close()
    at_the_end = owner.snapshot()
    wait_for_threads(lambda now: list(now.values()).count("pdlink-copy-2") == 1)  # the owner's
    writer.poll()
    assert_cut_off([one.status.value for ticket in tickets for one in writer.done(ticket)], "cancelled")
    assert owner.snapshot() == at_the_end


def test_a_deadline_is_kept_while_both_threads_copy(two: tuple[Side, Side]) -> None:
    writer, _ = two
    in_time = both_at_work(writer)
    late = writer.submit_long("owner", timeout_s=0.02)
    assert writer.wait_batch(late) == "timeout"
    assert_cut_off([writer.wait_batch(ticket) for ticket in in_time], "peer_failed")
    writer.wait_failed("owner")


def test_neither_thread_copies_anything_of_a_batch_that_is_late_already(two: tuple[Side, Side]) -> None:
    """Both are woken for it, and either may be the first to look."""
    writer, owner = two
    before = owner.buffers[0].array.copy()
    for index in range(30):
        join(writer, owner, f"writer {index}", f"owner {index}")
        assert writer.wait_batch(writer.submit(f"owner {index}", run_list([]))) == "ok"  # so the pages are mapped
        taken = ranges_taken(writer)
        late = writer.submit(f"owner {index}", run_list([[0, 100, MANY_NBYTES - 100]]), timeout_s=0)
        assert writer.wait_batch(late) == "timeout"
        assert ranges_taken(writer) == taken
        writer.close_peer(f"owner {index}")
        writer.wait_closed(f"owner {index}")
    assert np.array_equal(owner.buffers[0].array, before)
