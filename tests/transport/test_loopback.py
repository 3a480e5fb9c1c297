"""The faults of the null transport, each as its docstring says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink.errors import TransportFailure
from pdlink.transport.base import BatchDone, PeerClosed, PeerFailed
from tests.conformance.transports.side import Side, join, piece
from tests.loopback import Flight, LoopbackHub, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL_NBYTES = 4096
ROWS = [[0, 0, 10], [100, 100, 10], [200, 200, 10]]


class Scene:
    """A writer connected to an owner, in a hub."""

    def __init__(self, *, hold: bool) -> None:
        self.hub = LoopbackHub(hold=hold)
        self.writing, self.owning = LoopbackTransport(self.hub), LoopbackTransport(self.hub)
        self.writer, self.owner = Side(self.writing), Side(self.owning)
        for seed, side in enumerate((self.writer, self.owner)):
            side.add_buffer(POOL_NBYTES, seed)
        join(self.writer, self.owner)

    def submit(self, timeout_s: float = 5.0) -> Flight | None:
        """Three runs; the flight, unless it has landed already."""
        self.writer.submit("owner", piece(ROWS), timeout_s=timeout_s)
        return self.hub.flights[-1] if self.hub.flights else None

    def fly(self, timeout_s: float = 5.0) -> Flight:
        flight = self.submit(timeout_s)
        assert flight is not None
        return flight

    def landed(self) -> list[bool]:
        """Which of the three runs the owner's memory holds."""
        source, destination = self.writer.buffers[0].array, self.owner.buffers[0].array
        return [np.array_equal(destination[at : at + 10], source[at : at + 10]) for at, _, _ in ROWS]

    def close(self) -> None:
        self.writer.close()
        self.owner.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with contextlib.closing(Scene(hold=True)) as scene:
        yield scene


def statuses(side: Side) -> list[str]:
    side.poll()
    return [one.status.value for one in side.happened if isinstance(one, BatchDone)]


def test_without_faults_a_batch_is_done_when_submit_returns() -> None:
    with contextlib.closing(Scene(hold=False)) as scene:
        assert scene.submit() is None
        assert scene.landed() == [True] * 3
        assert statuses(scene.writer) == ["ok"]


def test_a_held_batch_lands_run_by_run(scene: Scene) -> None:
    scene.fly()
    for count in range(3):
        assert scene.landed() == [True] * count + [False] * (3 - count)
        assert statuses(scene.writer) == []
        assert scene.hub.step()
    assert statuses(scene.writer) == ["ok"]
    assert not scene.hub.step()


def test_flights_may_overtake_each_other(scene: Scene) -> None:
    first, second = scene.fly(), scene.fly()
    scene.hub.land(second)
    scene.hub.land(first)
    scene.writer.poll()
    assert [one.ticket for one in scene.writer.happened if isinstance(one, BatchDone)] == [
        second.ticket,
        first.ticket,
    ]


def test_a_delayed_report_comes_when_it_is_asked_for(scene: Scene) -> None:
    flight = scene.fly()
    scene.hub.land(flight, report=False)
    assert scene.landed() == [True] * 3
    assert statuses(scene.writer) == []
    scene.hub.report(flight)
    assert statuses(scene.writer) == ["ok"]


def test_an_injected_failure_writes_nothing_and_fails_the_peer(scene: Scene) -> None:
    earlier = scene.fly()
    scene.hub.fail_next = 1
    scene.submit()
    assert scene.landed() == [False] * 3
    assert statuses(scene.writer) == ["peer_failed"] * 2
    assert earlier.reported
    assert scene.writer.happened[0] == PeerFailed("owner", "injected failure")
    with pytest.raises(TransportFailure, match="injected"):
        scene.submit()


def test_a_torn_batch_leaves_half_and_fails(scene: Scene) -> None:
    scene.hub.tear(scene.fly(), 2)
    assert scene.landed() == [True, True, False]
    assert statuses(scene.writer) == ["peer_failed"]


def test_a_broken_connection_reports_every_open_batch_once(scene: Scene) -> None:
    flights = [scene.fly() for _ in range(3)]
    link = scene.hub.links(scene.writing)["owner"]
    scene.hub.fail_peer(link, "cable cut")
    scene.hub.fail_peer(link, "cable cut")
    for flight in flights:
        scene.hub.land(flight)
    assert statuses(scene.writer) == ["peer_failed"] * 3
    assert scene.landed() == [False] * 3


def test_time_passes_only_when_told_and_a_deadline_is_a_timeout(scene: Scene) -> None:
    scene.fly(timeout_s=1.0)
    scene.fly(timeout_s=9.0)
    scene.hub.advance(0.9)
    assert statuses(scene.writer) == []
    scene.hub.advance(0.1)
    assert statuses(scene.writer) == ["timeout", "peer_failed"]


def test_a_write_after_the_end_is_blocked_and_counted(scene: Scene) -> None:
    flight = scene.fly()
    scene.owner.close_peer("writer")
    scene.owner.wait_closed("writer")
    before = scene.owner.snapshot()
    assert not scene.hub.stale_write(flight)
    assert scene.hub.num_blocked == 1
    assert scene.hub.step()
    assert scene.hub.num_blocked == 2
    assert scene.owner.snapshot() == before
    assert statuses(scene.writer) == ["cancelled"]
    assert PeerFailed("owner", "peer closed") in scene.writer.happened


def test_a_write_before_the_end_gets_through(scene: Scene) -> None:
    flight = scene.fly()
    assert scene.hub.stale_write(flight, 1)
    assert scene.landed() == [False, True, False]
    assert scene.hub.num_blocked == 0


def test_a_writer_stopped_in_a_run_holds_up_the_end_and_finishes_that_run(scene: Scene) -> None:
    scene.fly()
    scene.hub.step()
    scene.hub.stop(scene.writing)
    scene.owner.close_peer("writer")
    assert not scene.hub.step()
    scene.owner.poll()
    assert scene.owner.happened == []
    scene.hub.resume(scene.writing)
    scene.owner.wait_closed("writer")
    assert scene.landed() == [True, True, False]
    assert statuses(scene.writer) == ["cancelled"]
    assert not scene.hub.flights


def test_a_stopped_writer_that_was_not_closed_goes_on(scene: Scene) -> None:
    scene.fly()
    scene.hub.stop(scene.writing)
    assert not scene.hub.step()
    scene.hub.resume(scene.writing)
    scene.hub.deliver_all()
    assert statuses(scene.writer) == ["ok"]


def test_a_deadline_that_passes_while_stopped_is_missed_afterwards(scene: Scene) -> None:
    scene.fly(timeout_s=1.0)
    scene.hub.stop(scene.writing)
    scene.hub.advance(2.0)
    assert statuses(scene.writer) == []
    scene.hub.resume(scene.writing)
    assert statuses(scene.writer) == ["timeout"]


def test_a_killed_owner_fails_its_writers(scene: Scene) -> None:
    flight = scene.fly()
    scene.hub.kill(scene.owning)
    assert statuses(scene.writer) == ["peer_failed"]
    scene.writer.close_peer("owner")
    scene.writer.wait_closed("owner")
    assert not scene.hub.stale_write(flight) or scene.landed() == [False] * 3


def test_a_killed_writer_no_longer_holds_up_the_end(scene: Scene) -> None:
    scene.fly()
    scene.hub.stop(scene.writing)
    scene.owner.close_peer("writer")
    scene.hub.kill(scene.writing)
    scene.owner.wait_closed("writer")
    assert scene.landed() == [False] * 3
    assert not scene.hub.flights


def test_closing_the_writing_side_cancels_and_reports_once(scene: Scene) -> None:
    scene.fly()
    scene.writer.close_peer("owner")
    scene.writer.wait_closed("owner")
    assert statuses(scene.writer) == ["cancelled"]
    assert scene.writer.happened[-1] == PeerClosed("owner")
    assert not scene.hub.step()


def test_the_same_calls_give_the_same_occurrences() -> None:
    def play() -> list[object]:
        with contextlib.closing(Scene(hold=True)) as scene:
            scene.fly()
            scene.hub.tear(scene.fly(), 1)
            scene.hub.advance(3.0)
            scene.writer.close_peer("owner")
            scene.writer.poll()
            return [*scene.writer.happened]

    assert play() == play()
