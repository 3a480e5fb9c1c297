"""What is special to UCX: its lanes, the form of invitations, stalled sockets, its thread, fork.

What every transport must do is in tests/conformance, which runs over ucx-tcp and ucx-shm too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import pytest

from pdlink.errors import ProtocolError, TransportFailure
from pdlink.transport import ucx
from pdlink.transport.ucx import UcxTransport
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import LONG_NBYTES, LONG_PASSES, PATIENCE_S, Side, join, run_list
from tests.transport.standing import standing_still, wait_for_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROBE = UcxTransport().probe()
needs_ucx = pytest.mark.skipif(not PROBE.ok, reason=PROBE.reason)
TLS = ["tcp", "shm", "auto"]
LONG_SOURCE_NBYTES = LONG_NBYTES + 64 * LONG_PASSES
"""What `Side.submit_long` reads from."""


class MakeSide(Protocol):
    def __call__(self, tls: str, nbytes: int = 1 << 20) -> Side: ...


@pytest.fixture
def make_side() -> Iterator[MakeSide]:
    """Makes sides with one buffer each in this process; they are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(tls: str, nbytes: int = 1 << 20) -> Side:
            side = Side(UcxTransport(tls))
            stack.callback(side.close)
            side.add_buffer(nbytes, seed=nbytes)
            return side

        yield make


@pytest.fixture
def make_other() -> Iterator[Callable[[str, int], OtherProcess]]:
    """Makes sides with one buffer each in processes of their own."""
    with contextlib.ExitStack() as stack:

        def make(tls: str, nbytes: int) -> OtherProcess:
            other = OtherProcess(f"ucx-{tls}")
            stack.callback(other.end)
            other.call("add_buffer", nbytes, 1)
            return other

        yield make


# -- lanes -----------------------------------------------------------------------------------------------------------


@needs_ucx
@pytest.mark.parametrize(("tls", "lane"), [("tcp", "tcp"), ("shm", "cma")])
def test_the_lane_is_the_one_that_puts_take(make_side: MakeSide, tls: str, lane: str) -> None:
    """Also over shm UCX keeps a tcp lane, for its own messages; that is not the one asked for."""
    writer, owner = make_side(tls), make_side(tls)
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 1 << 20)) == "ok"
    assert writer.transport.lane("owner") == lane


@needs_ucx
def test_a_run_longer_than_a_put_arrives_whole(make_side: MakeSide) -> None:
    nbytes = 9 << 20
    writer, owner = make_side("tcp", nbytes + 4096), make_side("tcp", nbytes + 8192)
    join(writer, owner)
    expected = owner.buffers[0].array.copy()
    expected[5 : 5 + nbytes] = writer.buffers[0].array[3 : 3 + nbytes]
    halves = [[3, 5, nbytes // 2], [3 + nbytes // 2, 5 + nbytes // 2, nbytes - nbytes // 2]]
    assert writer.wait_batch(writer.submit("owner", run_list(halves))) == "ok"
    np.testing.assert_array_equal(owner.buffers[0].array, expected)


# -- invitations -----------------------------------------------------------------------------------------------------


def changed(invitation: bytes, **fields: object) -> bytes:
    """The invitation with other contents and a right checksum."""
    return ucx._pack(msgspec.structs.replace(ucx._unpack(invitation), **fields))


@needs_ucx
def test_every_flipped_bit_of_an_invitation_is_noticed(make_side: MakeSide) -> None:
    """UCX itself aborts the process for an address it cannot read."""
    invitation = make_side("auto").transport.invite("writer")
    for position in range(len(invitation)):
        damaged = bytearray(invitation)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(ProtocolError):
            ucx._unpack(bytes(damaged))
    assert ucx._pack(ucx._unpack(invitation)) == invitation


@needs_ucx
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"ucx": "1.19.1"}, TransportFailure, "1.19.1, needed is 1.20"),
        ({"ucx": "new"}, ProtocolError, "'new' is not a version"),
        ({"host": "another/1"}, TransportFailure, "another host"),
        ({"born": 1}, TransportFailure, "has ended"),
        ({"gate_inode": 1}, TransportFailure, "not the invited file"),
        ({"gate_fd": 0}, TransportFailure, "cannot connect"),
        ({"regions": [ucx._Region(2**64 - 5, 10, b"key")]}, ProtocolError, "region 0"),
        ({"regions": [ucx._Region(0, 10, b"key")]}, ProtocolError, "region 0"),
        ({"address": b""}, ProtocolError, "cannot be read"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_invitation_that_cannot_work_is_refused_with_the_reason(
    make_side: MakeSide, fields: dict[str, object], error: type[Exception], words: str
) -> None:
    writer, owner = make_side("shm"), make_side("shm")
    invitation = owner.transport.invite("writer")
    with pytest.raises(error, match=words):
        writer.transport.connect("owner", changed(invitation, **fields))
    writer.transport.connect("owner", invitation)
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"


@needs_ucx
def test_a_key_that_ucx_refuses_fails_its_peer_and_nobody_else(make_side: MakeSide) -> None:
    """UCX looks at it in its own thread; `connect` has returned by then."""
    writer, owner = make_side("tcp"), make_side("tcp")
    invitation = owner.transport.invite("writer")
    region = ucx._unpack(invitation).regions[0]
    foreign = ucx._Region(region.base, region.nbytes, b"\xff\xff" + region.rkey[2:])
    writer.transport.connect("owner", changed(invitation, regions=[foreign]))
    assert "cannot connect" in writer.wait_failed("owner")
    writer.close_peer("owner")
    writer.wait_closed("owner")
    writer.transport.connect("owner again", invitation)
    assert writer.wait_batch(writer.submit_block("owner again", 0, 100)) == "ok"


@needs_ucx
@pytest.mark.parametrize("tls", TLS)
def test_a_peer_in_another_pid_namespace_is_reached_by_sockets_only(make_side: MakeSide, tls: str) -> None:
    """Its memory could be written directly, but it could not shut its gate: that one cannot be opened from here."""
    writer, owner = make_side(tls), make_side(tls)
    invitation = owner.transport.invite("writer")
    boot_id = ucx._unpack(invitation).host.partition("/")[0]
    invitation = changed(invitation, host=f"{boot_id}/1")
    if tls == "tcp":
        writer.transport.connect("owner", invitation)
        assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    else:
        with pytest.raises(TransportFailure, match="pid namespace"):
            writer.transport.connect("owner", invitation)


# -- stalled and stopped peers ---------------------------------------------------------------------------------------


@needs_ucx
def test_a_stopped_owner_is_given_up_and_can_fence_itself(
    make_side: MakeSide, make_other: Callable[[str, int], OtherProcess]
) -> None:
    """Bytes in the sockets of a stopped process are beyond the writer; the owner's close_peer gets them."""
    owner, writer = make_other("tcp", LONG_NBYTES), make_side("tcp", LONG_SOURCE_NBYTES)
    writer.connect("owner", owner.call("invite", "writer"))
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    owner.stop()
    tickets = [writer.submit_long("owner"), writer.submit_long("owner", timeout_s=0.1)]
    assert [writer.wait_batch(ticket) for ticket in tickets] == ["peer_failed", "timeout"]
    assert "deadline" in writer.wait_failed("owner")
    writer.close_peer("owner")
    writer.wait_closed("owner")
    owner.resume()
    owner.call("close_peer", "writer")
    owner.call("wait_closed", "writer")
    at_the_end = owner.call("digest_of", 0, LONG_NBYTES)

    writer.connect("owner again", owner.call("invite", "writer again"))
    assert owner.call("digest_of", 0, LONG_NBYTES) == at_the_end
    assert writer.wait_batch(writer.submit_block("owner again", 0, 100)) == "ok"
    assert [len(writer.done(ticket)) for ticket in tickets] == [1, 1]


@needs_ucx
def test_a_writer_stopped_inside_the_gate_holds_up_its_end_until_it_is_dead(
    make_side: MakeSide, make_other: Callable[[str, int], OtherProcess]
) -> None:
    """Cross-memory attach: no closed connection keeps out a process that is about to store.

    The moment of the stop is up to the scheduler; the gate tells whether the writer was inside.
    """
    owner = make_side("shm", LONG_NBYTES)
    for attempt in range(20):
        writer, name = make_other("shm", LONG_SOURCE_NBYTES), f"writer {attempt}"
        invitation = owner.invite(name)
        writer.call("connect", "owner", invitation)
        before = owner.buffers[0].array[: 32 << 10].copy()
        writer.call("submit_long", "owner")
        owner.wait_changed(before)
        writer.stop()
        gate_fd = ucx._unpack(bytes.fromhex(invitation)).gate_fd
        busy = int.from_bytes(os.pread(gate_fd, 4, 4), sys.byteorder)
        owner.close_peer(name)
        early = owner.closed_within(name, 0.1)
        writer.kill()
        owner.wait_closed(name)
        assert early == (busy == 0)
        if busy:
            break
    else:
        pytest.fail("the writer was never stopped inside the gate")


# -- the process -----------------------------------------------------------------------------------------------------


@needs_ucx
def test_a_progress_thread_that_stands_still_holds_up_no_handshake(make_side: MakeSide) -> None:
    """The endpoint's thread invites and connects with its lock held; what was asked for is done afterwards."""
    owner = make_side("tcp")
    invitation = owner.transport.invite("somebody")
    with standing_still("pdlink-ucx"):
        late = owner.transport.invite("late")
        owner.transport.connect("later", invitation)
        ticket = owner.submit_block("later", 0, 100)
        owner.close_peer("somebody")
        assert owner.transport.poll() == []
    assert owner.wait_batch(ticket) != "ok"
    for name in ("later", "somebody"):
        owner.close_peer(name)
        owner.wait_closed(name)
    writer = make_side("tcp")
    writer.transport.connect("owner", late)
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"


@needs_ucx
def test_a_progress_thread_that_stands_still_holds_up_close_two_seconds_at_most(make_side: MakeSide) -> None:
    """It goes on later, with what it uses still there."""
    writer, owner = make_side("tcp"), make_side("tcp")
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    with standing_still("pdlink-ucx"):
        start_s = time.monotonic()
        writer.transport.close()  # one of them is the stopped one
        owner.transport.close()
        assert time.monotonic() - start_s < PATIENCE_S / 2, "on a busy machine, too"
        for side in (writer, owner):
            side.transport._native = None  # type: ignore[attr-defined]
        gc.collect()
    wait_for_threads(lambda now: "pdlink-ucx" not in now.values())
