"""What a transport says, when, how often, and what it costs to listen."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.transport.base import PeerClosed
from tests.conformance.transports.side import PATIENCE_S, Side, join, run_list
from tests.waiting import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.transports.entries import Entry


def pair(make_side: Callable[[], Side], nbytes: int = 1 << 16) -> tuple[Side, Side]:
    writer, owner = make_side(), make_side()
    writer.add_buffer(nbytes, seed=0)
    owner.add_buffer(nbytes, seed=1)
    join(writer, owner)
    return writer, owner


def is_readable(side: Side, timeout_s: float = 0.0) -> bool:
    return readable(side.transport.fileno(), timeout_s=timeout_s)


def test_fileno_is_readable_exactly_while_poll_has_something(make_side: Callable[[], Side]) -> None:
    writer, _ = pair(make_side)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    for _ in range(3):
        assert not is_readable(writer)
        assert writer.transport.poll() == []
        writer.submit_block("owner", 0, 4)
        assert is_readable(writer, PATIENCE_S)
        assert is_readable(writer)
        assert len(writer.transport.poll()) == 1


def test_a_batch_carries_the_times_of_its_submission_and_its_end(make_side: Callable[[], Side], entry: Entry) -> None:
    writer, _ = pair(make_side)
    before_s = time.monotonic() if entry.native else 0.0
    ticket = writer.submit_block("owner", 0, 4)
    writer.wait_batch(ticket)
    done = writer.done(ticket)[0]
    assert before_s <= done.submitted_s <= done.done_s <= time.monotonic()


def test_submit_to_an_unknown_peer_fails(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    for side, peer in ((writer, "stranger"), (owner, "writer")):
        with pytest.raises(TransportFailure, match=peer):
            side.submit_block(peer, 0, 4)


def test_submit_after_close_peer_fails(make_side: Callable[[], Side]) -> None:
    writer, _ = pair(make_side)
    writer.close_peer("owner")
    with pytest.raises(TransportFailure):
        writer.submit_block("owner", 0, 4)
    writer.wait_closed("owner")
    with pytest.raises(TransportFailure):
        writer.submit_block("owner", 0, 4)


def test_submit_after_close_fails(make_side: Callable[[], Side]) -> None:
    writer, _ = pair(make_side)
    writer.transport.close()
    with pytest.raises(TransportFailure):
        writer.submit_block("owner", 0, 4)


@pytest.mark.parametrize("nbytes", [4096, 128 << 10, 2 << 20], ids=["at once", "one range", "many ranges"])
def test_a_peer_that_closed_us_is_failed_and_refuses_more(make_side: Callable[[], Side], nbytes: int) -> None:
    writer, owner = pair(make_side, nbytes=2 << 20)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    owner.close_peer("writer")
    owner.wait_closed("writer")
    before = owner.snapshot()
    owner_alone = [*owner.happened]
    try:
        ticket = writer.submit_block("owner", 0, nbytes)
    except TransportFailure:
        pass  # it knew already
    else:
        assert writer.wait_batch(ticket) != "ok"
    writer.wait_failed("owner")
    with pytest.raises(TransportFailure):
        writer.submit_block("owner", 0, 4)
    assert owner.snapshot() == before
    owner.poll()
    assert owner.happened == owner_alone == [PeerClosed("writer")]


def test_peer_closed_is_reported_once(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    for side, peer in ((writer, "owner"), (owner, "writer")):
        side.close_peer(peer)
        side.close_peer(peer)
        side.wait_closed(peer)
        side.close_peer(peer)
        side.close_peer("stranger")
    # Whatever else there was to say would have come by the time another conversation has ended.
    join(writer, owner, "writer#2", "owner#2")
    assert writer.wait_batch(writer.submit_block("owner#2", 0, 4)) == "ok"
    for side, peer in ((writer, "owner"), (owner, "writer")):
        side.close_peer(f"{peer}#2")
        side.wait_closed(f"{peer}#2")
        assert [one for one in side.happened if isinstance(one, PeerClosed)] == [
            PeerClosed(peer),
            PeerClosed(f"{peer}#2"),
        ]


def test_a_new_invitation_works_after_the_old_peer_was_closed(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    for attempt in range(3):
        names = (f"writer@{attempt}", f"owner@{attempt}")
        join(writer, owner, *names)
        assert writer.wait_batch(writer.submit_block(names[1], 1000 * attempt, 999)) == "ok"
        block = slice(1000 * attempt, 1000 * attempt + 999)
        np.testing.assert_array_equal(owner.buffers[0].array[block], writer.buffers[0].array[block])
        owner.close_peer(names[0])
        owner.wait_closed(names[0])
        writer.close_peer(names[1])
        writer.wait_closed(names[1])


def test_both_directions_of_one_peer_end_together(make_side: Callable[[], Side]) -> None:
    one, two = pair(make_side)
    two.connect("writer", one.invite("owner"))
    assert one.wait_batch(one.submit_block("owner", 0, 100)) == "ok"
    assert two.wait_batch(two.submit_block("writer", 200, 100)) == "ok"
    np.testing.assert_array_equal(one.buffers[0].array[:100], two.buffers[0].array[:100])
    np.testing.assert_array_equal(one.buffers[0].array[200:300], two.buffers[0].array[200:300])
    one.close_peer("owner")
    one.wait_closed("owner")
    assert one.happened.count(PeerClosed("owner")) == 1
    with pytest.raises(TransportFailure):
        one.submit_block("owner", 0, 4)
    before = one.snapshot()
    try:
        ticket = two.submit_block("writer", 0, 4096)
    except TransportFailure:
        pass  # it knew already
    else:
        assert two.wait_batch(ticket) != "ok"
    assert one.snapshot() == before


GARBAGE = [
    b"",
    b"\x00",
    b"\xc1" * 40,
    b"\x80" * 40,
    b"{}",
    bytes(range(256)),
    b"\xdd\xff\xff\xff\xff",
    b"\x00" * 4096,
]


def test_an_invitation_that_cannot_be_read_is_a_protocol_error(
    make_side: Callable[[], Side], subtests: pytest.Subtests
) -> None:
    side = make_side()
    side.add_buffer(4096, seed=0)
    for invitation in GARBAGE:
        with subtests.test(invitation[:20].hex()), pytest.raises(ProtocolError):
            side.transport.connect("peer", invitation)


def test_an_invitation_cut_short_or_lengthened_is_refused(make_side: Callable[[], Side]) -> None:
    writer, owner = make_side(), make_side()
    writer.add_buffer(4096, seed=0)
    owner.add_buffer(4096, seed=0)
    invitation = owner.transport.invite("writer")
    cuts = np.random.default_rng(0).integers(1, len(invitation), 10)
    for wrong in (invitation + b"\x00", invitation[:-1], *(invitation[:cut] for cut in cuts)):
        with pytest.raises((ProtocolError, TransportFailure)):
            writer.transport.connect("owner", wrong)
    writer.transport.connect("owner", invitation)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"


def test_an_invitation_is_good_for_one_writer(make_side: Callable[[], Side], entry: Entry) -> None:
    if entry.name == "ucx-tcp":
        pytest.skip("UCX takes whatever comes on its sockets (docs/security.md)")
    writer, owner, thief = make_side(), make_side(), make_side()
    for side in (writer, owner, thief):
        side.add_buffer(4096, seed=0)
    invitation = owner.transport.invite("writer")
    writer.transport.connect("owner", invitation)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    try:
        thief.transport.connect("owner", invitation)
        assert thief.wait_batch(thief.submit_block("owner", 0, 4)) != "ok"
    except (ProtocolError, TransportFailure):
        pass  # it knew already
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"


def test_a_name_in_use_is_refused_and_goes_on_working(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    with pytest.raises(ProtocolError, match="twice"):
        owner.transport.invite("writer")
    third = make_side()
    third.add_buffer(4096, seed=2)
    with pytest.raises(ProtocolError, match="twice"):
        writer.transport.connect("owner", third.transport.invite("writer"))
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"


def test_the_lane_is_named_once_bytes_have_travelled(make_side: Callable[[], Side]) -> None:
    writer, _ = pair(make_side)
    assert writer.transport.lane("stranger") == ""
    writer.wait_batch(writer.submit_block("owner", 0, 4))
    assert writer.transport.lane("owner") != ""


def test_close_ends_in_bounded_time_and_twice_is_harmless(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    join(owner, writer, "back", "forth")
    writer.submit_block("owner", 0, 1 << 16)

    def close() -> None:
        for side in (writer, owner, writer, owner):
            side.transport.close()

    closer = threading.Thread(target=close, daemon=True)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


def test_a_closed_transport_is_not_opened_again(make_side: Callable[[], Side]) -> None:
    side = make_side()
    side.transport.close()
    with pytest.raises(TransportUnavailable, match="make a new one"):
        side.transport.open()


def test_a_transport_that_is_not_open_refuses(entry: Entry) -> None:
    transport = entry.group()()
    with pytest.raises(TransportFailure, match="not open"):
        transport.invite("writer")


def test_nobody_is_invited_to_no_memory(make_side: Callable[[], Side]) -> None:
    with pytest.raises(TransportUnavailable, match="register a buffer"):
        make_side().transport.invite("writer")


def test_an_idle_transport_uses_no_cpu(make_side: Callable[[], Side]) -> None:
    writer, _ = pair(make_side)
    assert writer.wait_batch(writer.submit_block("owner", 0, 4)) == "ok"
    before_s = time.process_time()
    assert not is_readable(writer, timeout_s=0.4)
    assert time.process_time() - before_s < 0.1


def test_submit_lets_other_threads_run(make_side: Callable[[], Side], entry: Entry) -> None:
    """With an endless switch interval a thread gets the interpreter only when another one lets go of it."""
    if not entry.native:
        pytest.skip(f"{entry.name} is Python")
    writer, _ = pair(make_side)
    many = run_list([[0, 0, 0]] * 500_000)
    state, entered = "", threading.Event()

    def work() -> None:
        nonlocal state
        for _ in range(20):
            state = "inside"
            entered.set()
            writer.submit("owner", many)
            state = "outside"
            if seen:
                return

    seen: list[str] = []
    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        while thread.is_alive() and not seen:
            entered.wait(PATIENCE_S)
            entered.clear()
            if state == "inside":
                seen.append(state)
    finally:
        sys.setswitchinterval(interval_s)
        thread.join(PATIENCE_S)
    assert seen == ["inside"]
