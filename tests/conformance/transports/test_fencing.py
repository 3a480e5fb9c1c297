"""Promise 2: after PeerClosed no byte changes, whatever was in flight. Both ends are in this process."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import TransportFailure
from tests.conformance.transports.side import LONG_NBYTES, LONG_PASSES, Side, assert_cut_off, join

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.transports.entries import Entry


@pytest.fixture(params=[False, True], ids=["long runs", "short runs"])
def busy_pair(
    entry: Entry, make_side: Callable[[], Side], request: pytest.FixtureRequest
) -> tuple[Side, Side, list[int]]:
    """A writer in the middle of a long batch, with two more behind it."""
    if not entry.native:
        pytest.skip(f"{entry.name} has no batch in flight unless its hub holds it; see tests/transport")
    writer, owner = make_side(), make_side()
    writer.add_buffer(LONG_NBYTES + 64 * LONG_PASSES, seed=0)
    owner.add_buffer(LONG_NBYTES, seed=1)
    join(writer, owner)
    before = owner.buffers[0].array[: 32 << 10].copy()
    tickets = [
        writer.submit_long("owner", short=request.param),
        writer.submit_block("owner", 0, 100),
        writer.submit_long("owner"),
    ]
    owner.wait_changed(before)
    return writer, owner, tickets


def all_reported(writer: Side, tickets: list[int]) -> list[str]:
    """The statuses, after making sure that each batch was reported exactly once."""
    statuses = [writer.wait_batch(ticket) for ticket in tickets]
    for ticket in tickets:
        assert len(writer.done(ticket)) == 1
    return statuses


def test_nothing_changes_after_the_owner_closed_the_writer(busy_pair: tuple[Side, Side, list[int]]) -> None:
    """nixl#2067: cancelled was not quiesced."""
    writer, owner, tickets = busy_pair
    owner.close_peer("writer")
    owner.wait_closed("writer")
    at_the_end = owner.snapshot()
    assert_cut_off(all_reported(writer, tickets), "peer_failed", "cancelled")
    writer.wait_failed("owner")
    writer.close_peer("owner")
    writer.wait_closed("owner")
    assert owner.snapshot() == at_the_end


def test_nothing_changes_after_the_writer_closed_the_owner(
    busy_pair: tuple[Side, Side, list[int]], entry: Entry
) -> None:
    writer, owner, tickets = busy_pair
    writer.close_peer("owner")
    writer.wait_closed("owner")
    if entry.owner_places:
        owner.close_peer("writer")
        owner.wait_closed("writer")
    at_the_end = owner.snapshot()
    assert_cut_off(all_reported(writer, tickets), "peer_failed", "cancelled")
    with pytest.raises(TransportFailure):
        writer.submit_block("owner", 0, 100)
    owner.close_peer("writer")
    owner.wait_closed("writer")
    assert owner.snapshot() == at_the_end


def test_a_batch_that_misses_its_deadline_fails_its_peer(entry: Entry, make_side: Callable[[], Side]) -> None:
    if not entry.native:
        pytest.skip(f"{entry.name} has its own clock; see tests/transport")
    writer, owner = make_side(), make_side()
    writer.add_buffer(LONG_NBYTES + 64 * LONG_PASSES, seed=0)
    owner.add_buffer(LONG_NBYTES, seed=1)
    join(writer, owner)
    in_time = writer.submit_long("owner")
    late = writer.submit_long("owner", timeout_s=0.02)
    assert writer.wait_batch(late) == "timeout"
    assert writer.wait_batch(in_time) in ("peer_failed", "cancelled")
    writer.wait_failed("owner")
    with pytest.raises(TransportFailure):
        writer.submit_block("owner", 0, 100)
    writer.close_peer("owner")
    writer.wait_closed("owner")
    all_reported(writer, [late, in_time])


def test_a_deadline_that_was_met_does_not_count_any_more(make_side: Callable[[], Side]) -> None:
    writer, owner = make_side(), make_side()
    writer.add_buffer(LONG_NBYTES, seed=0)
    owner.add_buffer(LONG_NBYTES, seed=1)
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, LONG_NBYTES)) == "ok"
    assert writer.wait_batch(writer.submit_block("owner", 0, 100, timeout_s=2.0)) == "ok"
    select.select([], [], [], 2.01)
    assert writer.wait_batch(writer.submit_block("owner", 0, LONG_NBYTES)) == "ok"


def test_a_long_batch_to_one_peer_does_not_hold_up_another(busy_pair: tuple[Side, Side, list[int]]) -> None:
    """The small batch is there before the last of the long ones, which were submitted first."""
    writer, owner, tickets = busy_pair
    join(writer, owner, "writer#2", "owner#2")
    small = writer.submit_block("owner#2", 0, 100)
    assert writer.wait_batch(small) == "ok"
    assert not writer.done(tickets[-1])
