"""What only a second process can show: visibility across it, and its death or suspension."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import TransportFailure
from pdlink.transport.base import PeerFailed
from pdlink.transport.native import NativeTransport
from tests.conformance.transports.side import (
    LONG_NBYTES,
    LONG_PASSES,
    PATIENCE_S,
    Side,
    assert_cut_off,
    join,
    wait_until_sockets_are_full,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.transports.entries import Entry
    from tests.conformance.transports.other_process import OtherProcess

SOURCE_NBYTES = LONG_NBYTES + 64 * LONG_PASSES
LONG_BATCHES = 4
"""Behind the batch that something happens to; the last of them has not begun by then."""


def write_to(make_side: Callable[[], Side], other: OtherProcess) -> Side:
    """This process writes into the other one, and has done so once."""
    writer = make_side()
    writer.add_buffer(SOURCE_NBYTES, seed=0)
    other.call("add_buffer", LONG_NBYTES, 1)
    writer.connect("other", other.call("invite", "here"))
    assert writer.wait_batch(writer.submit_block("other", 0, 100)) == "ok"
    return writer


def be_written_by(make_side: Callable[[], Side], other: OtherProcess, *, short: bool = False) -> tuple[Side, int]:
    """The other process is in the middle of long batches into this one; returns the ticket of the last of them.

    However late the test does the next thing, that one is not over.
    """
    owner = make_side()
    owner.add_buffer(LONG_NBYTES, seed=1)
    other.call("add_buffer", SOURCE_NBYTES, 0)
    other.call("connect", "here", owner.invite("other"))
    before = owner.buffers[0].array[: 32 << 10].copy()
    other.call("submit_short" if short else "submit_long", "here")
    for _ in range(LONG_BATCHES):
        ticket = other.call("submit_long", "here")
    owner.wait_changed(before)
    return owner, ticket


def test_bytes_are_visible_to_the_other_process_when_the_batch_is_reported(
    make_side: Callable[[], Side], other: OtherProcess
) -> None:
    writer = write_to(make_side, other)
    for offset in range(0, LONG_NBYTES, LONG_NBYTES // 8):
        nbytes = LONG_NBYTES // 8
        assert writer.wait_batch(writer.submit_block("other", offset, nbytes)) == "ok"
        landed = other.call("digest_of", offset, nbytes)
        assert landed == hashlib.sha256(writer.buffers[0].array[offset : offset + nbytes].tobytes()).hexdigest()


@pytest.mark.parametrize("short", [False, True], ids=["long runs", "short runs"])
def test_a_killed_owner_fails_every_open_batch_once_and_nobody_else(
    make_side: Callable[[], Side], other: OtherProcess, short: bool
) -> None:
    """ucx#5027: kill -9 of the peer made the survivor abort."""
    writer = write_to(make_side, other)
    bystander = make_side()
    bystander.add_buffer(LONG_NBYTES, seed=2)
    join(writer, bystander, "writer", "bystander")
    assert writer.wait_batch(writer.submit_block("bystander", 0, 100)) == "ok"
    tickets = [
        writer.submit_long("other", short=short),
        writer.submit_block("other", 0, 100),
        *(writer.submit_long("other") for _ in range(LONG_BATCHES)),
    ]
    other.kill()
    assert_cut_off([writer.wait_batch(ticket) for ticket in tickets], "peer_failed")
    writer.wait_failed("other")
    with pytest.raises(TransportFailure):
        writer.submit_block("other", 0, 100)

    assert writer.wait_batch(writer.submit_block("bystander", 200, 1000)) == "ok"
    assert (bystander.buffers[0].array[200:1200] == writer.buffers[0].array[200:1200]).all()
    writer.close_peer("other")
    writer.wait_closed("other")
    assert [len(writer.done(ticket)) for ticket in tickets] == [1] * len(tickets)
    assert len([one for one in writer.happened if isinstance(one, PeerFailed)]) == 1


def test_a_killed_owner_is_noticed_while_nothing_is_sent(make_side: Callable[[], Side], other: OtherProcess) -> None:
    writer = write_to(make_side, other)
    other.kill()
    writer.wait_failed("other")


@pytest.mark.parametrize("short", [False, True], ids=["long runs", "short runs"])
def test_a_killed_writer_can_be_closed(make_side: Callable[[], Side], other: OtherProcess, short: bool) -> None:
    owner, _ = be_written_by(make_side, other, short=short)
    other.kill()
    owner.close_peer("other")
    owner.wait_closed("other")
    at_the_end = owner.snapshot()
    writer = make_side()
    writer.add_buffer(4096, seed=3)
    join(writer, owner, "successor", "here")
    assert writer.wait_batch(writer.submit_block("here", 0, 100)) == "ok"
    changed = owner.snapshot()[0]
    assert changed[100:] == at_the_end[0][100:]


def test_a_stopped_owner_either_does_not_matter_or_is_a_timeout(
    make_side: Callable[[], Side], other: OtherProcess, entry: Entry
) -> None:
    writer = write_to(make_side, other)
    other.stop()
    ticket = writer.submit_block("other", 0, LONG_NBYTES, timeout_s=0.5 if entry.needs_peer else PATIENCE_S)
    if entry.needs_peer:
        assert writer.wait_batch(ticket) == "timeout"
        writer.wait_failed("other")
    else:
        assert writer.wait_batch(ticket) == "ok"
    writer.close_peer("other")
    other.resume()  # bytes on their way to it may have to land before the end of the peer can be told
    writer.wait_closed("other")


@pytest.mark.parametrize("short", [False, True], ids=["long runs", "short runs"])
@pytest.mark.parametrize("attempt", range(3))
def test_nothing_changes_after_a_stopped_writer_was_closed_and_goes_on(
    make_side: Callable[[], Side], other: OtherProcess, attempt: int, short: bool
) -> None:
    """PeerClosed may come while the writer is stopped or only after it went on; from then on memory stays as it is.

    The moment of the stop is up to the scheduler, hence several attempts.
    """
    owner, ticket = be_written_by(make_side, other, short=short)
    other.stop()
    owner.close_peer("other")
    closed_meanwhile = owner.closed_within("other", 0.1)
    at_the_end = owner.snapshot() if closed_meanwhile else None
    other.resume()
    if at_the_end is None:
        owner.wait_closed("other")
        at_the_end = owner.snapshot()
    assert other.call("wait_batch", ticket) != "ok"
    other.call("wait_failed", "here")
    assert owner.snapshot() == at_the_end


def write_to_stopped(make_side: Callable[[], Side], other: OtherProcess, entry: Entry) -> Side:
    """A writer to the other process, which is stopped."""
    writer = write_to(make_side, other)
    if not entry.needs_peer or not isinstance(writer.transport, NativeTransport):
        pytest.skip("bytes do not wait in sockets")
    other.stop()
    return writer


def test_a_writers_end_waits_for_what_is_in_its_sockets(
    make_side: Callable[[], Side], other: OtherProcess, entry: Entry
) -> None:
    """Nobody can call it back: closing a UCX endpoint by force reports puts as cancelled that arrive later."""
    writer = write_to_stopped(make_side, other, entry)
    ticket = writer.submit_long("other")
    wait_until_sockets_are_full()
    writer.close_peer("other")
    assert writer.wait_batch(ticket) == "cancelled"
    assert not writer.closed_within("other", 0.2)
    other.resume()
    writer.wait_closed("other")
    landed = other.call("digest_of", 0, LONG_NBYTES)
    other.call("close_peer", "here")
    other.call("wait_closed", "here")
    assert other.call("digest_of", 0, LONG_NBYTES) == landed


def test_what_a_stopped_owner_did_not_read_is_gone_at_its_close_peer(
    make_side: Callable[[], Side], other: OtherProcess, entry: Entry
) -> None:
    writer = write_to_stopped(make_side, other, entry)
    tickets = [writer.submit_long("other"), writer.submit_long("other", timeout_s=0.1)]
    assert [writer.wait_batch(ticket) for ticket in tickets] == ["peer_failed", "timeout"]
    writer.close_peer("other")
    other.resume()
    other.call("close_peer", "here")
    other.call("wait_closed", "here")
    at_the_end = other.call("digest_of", 0, LONG_NBYTES)
    writer.wait_closed("other")
    writer.connect("other again", other.call("invite", "here again"))
    assert other.call("digest_of", 0, LONG_NBYTES) == at_the_end
    assert writer.wait_batch(writer.submit_block("other again", 0, 100)) == "ok"
    assert [len(writer.done(ticket)) for ticket in tickets] == [1, 1]
