"""`DataPath`: brings the sender's pushes to their transports, and the ends of pushes back to the machines.

Pushes are cut into parts (`parts.py`), and the parts leave in the order of `Order`, one for each transport. Only
parts that fit into its window are handed over; a stopped transfer takes back its waiting parts at once, because they
never were in flight. A push that cannot be handed over fails its transfer if it has no plan; otherwise bytes may have
left, and its session ends.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.endpoint.order import Order, Part
from pdlink.endpoint.parts import Flight, Job, jobs_of, plan_of
from pdlink.errors import PdlinkError
from pdlink.events import HandlingFailed, LayerLanded, emit, listeners
from pdlink.kv.layout import Piece
from pdlink.logs import about
from pdlink.protocol import messages
from pdlink.protocol.states import SENDER_ENDS
from pdlink.transport.base import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.endpoint.outgoing import Outgoing
    from pdlink.endpoint.sharing import Sharing
    from pdlink.endpoint.transfer import Common
    from pdlink.endpoint.verifying import Verifier
    from pdlink.protocol.actions import Action, Push
    from pdlink.transport.base import BatchDone, Transport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lane:
    """What goes over one transport."""

    transport: Transport
    order: Order[Job]
    in_flight: dict[int, Part[Job]] = field(default_factory=dict)
    """By ticket."""


class DataPath:
    """Used under the endpoint's lock."""

    def __init__(
        self,
        common: Common,
        batch_timeout_s: float,
        sharing: Sharing,
        run: Callable[[Outgoing, list[Action]], None],
    ) -> None:
        """batch_timeout_s: counts from the hand-over of a part, not from the start of its wait.

        run(transfer, actions): does what a machine answered to the end of a push.
        """
        self._now_s, self._sessions, self._verifier = common.clock.now_s, common.sessions, common.verifier
        self._batch_timeout_s, self._sharing, self._run = batch_timeout_s, sharing, run
        self._groups = common.groups
        self.lanes: dict[str, Lane] = {}
        """By name of the transport."""
        self._ended, self._num_waiting = threading.Condition(common.work.lock), 0

    def push(self, transfer: Outgoing, pushes: Sequence[Push]) -> None:
        """Hand over these pushes as far as there is room; small ones travel in one part."""
        peer, now_s = transfer.peer, self._now_s()
        assert peer is not None
        assert peer.transport is not None
        assert peer.templates
        lane = self.lanes.get(peer.transport.name)
        if lane is None:
            lane = self.lanes[peer.transport.name] = Lane(peer.transport, Order(self._sharing))
        backlog = transfer.backlog
        if backlog is None:
            if peer.flow is None:
                peer.flow = lane.order.flow()
            backlog = transfer.backlog = lane.order.backlog(peer.flow, transfer.machine.nbytes)
        flights = [Flight(transfer, push, now_s) for push in pushes]
        for nbytes, job in jobs_of(peer.templates, self._groups.index_of, flights, self._sharing.part_nbytes):
            lane.order.add(Part(backlog, nbytes, job))
        self._release(lane)

    def take_back(self, transfer: Outgoing) -> None:
        """Drop the waiting parts of this transfer, which never were in flight, and forget its blocks.

        Pushes with parts in flight end with these parts, not `whole`.
        """
        if transfer.backlog is None:
            return
        assert transfer.peer is not None
        assert transfer.peer.transport is not None
        lane = self.lanes.get(transfer.peer.transport.name)  # None once the endpoint is closed
        parts = lane.order.drop(transfer.backlog) if lane is not None else []
        taken = [flight for part in parts for flight, _, _, _ in part.job]
        for flight in taken:
            flight.take_back()
        transfer.backlog = None
        transfer.plans.clear()
        self._dropped(transfer, taken)

    def release(self) -> None:
        """Hand over what has room now. Call periodically."""
        for lane in self.lanes.values():
            self._release(lane)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of a push; False if none ends within `timeout_s`."""
        self._num_waiting += 1
        try:
            return self._ended.wait(timeout_s)
        finally:
            self._num_waiting -= 1

    def notify(self) -> None:
        """A push has ended, or all of a peer's were fenced."""
        if self._num_waiting:
            self._ended.notify_all()

    def nbytes(self) -> dict[str, int]:
        """KV bytes `waiting` for room on their transport, and those `in_flight`."""
        orders = [lane.order for lane in self.lanes.values()]
        return {
            "waiting": sum(order.waiting_nbytes for order in orders),
            "in_flight": sum(order.in_flight_nbytes for order in orders),
        }

    def handed(self) -> dict[str, set[int]]:
        """Layers of which a transport has a part now, by transfer id."""
        found: dict[str, set[int]] = {}
        for lane in self.lanes.values():
            for part in lane.in_flight.values():
                for flight, _, _, _ in part.job:
                    found.setdefault(flight.transfer.transfer_id, set()).add(flight.push.layer)
        return found

    def on_batch(self, transport: Transport, done: BatchDone) -> None:
        """Some pushes, or a part of one, have ended. All of one transfer."""
        lane = self.lanes.get(transport.name)
        part = lane.in_flight.pop(done.ticket, None) if lane is not None else None
        if lane is None or part is None:
            return
        lane.order.ended(part, self._now_s())
        self.notify()
        transfer = part.job[0].flight.transfer
        if done.status is not Status.OK:
            self._lost(transfer, part.job, f"push {done.status.value}: {done.detail}")
        self._release(lane)  # before the reports: the link must not run dry
        if done.status is not Status.OK:
            return
        peer = transfer.peer
        assert peer is not None
        peer.lane = peer.lane or transport.lane(done.peer)
        transfer.nbytes += done.nbytes
        if transfer.first_landed_s is None:
            transfer.first_landed_s = done.done_s
        transfer.last_landed_s = done.done_s
        for flight, _, _, nbytes in part.job:
            flight.left -= 1
            flight.nbytes += nbytes
            if flight.left:
                continue
            if not flight.whole:
                self._run(transfer, transfer.machine.dropped(flight.push.push_id))
                continue
            if listeners:
                _report(flight, peer.lane, done.done_s)
            if self._verifier is not None and self._verifier.wants(flight.push):
                self._compute_checksum(self._verifier, transfer, flight.push)
            else:
                self._run(transfer, transfer.machine.landed(flight.push.push_id))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _release(self, lane: Lane) -> None:
        """Hand over parts as far as there is room."""
        while (part := lane.order.next(self._now_s())) is not None:
            transfer = part.job[0].flight.transfer
            peer, planned, pieces = transfer.peer, False, list[Piece]()
            assert peer is not None
            try:
                for flight, start, end, _ in part.job:
                    push = flight.push
                    plan = transfer.plans.get((push.group, start, end))
                    if plan is None:
                        plan = plan_of(peer.templates[push.group], push, start, end)
                        transfer.plans[push.group, start, end] = plan
                    pieces.extend(plan.pieces(self._groups.index_of[push.layer]))
                planned, submitted_s = True, self._now_s()
                for flight, _, _, _ in part.job:
                    flight.submitted_s = flight.submitted_s or submitted_s
                lane.in_flight[lane.transport.submit(peer.key, pieces, self._batch_timeout_s)] = part
            except Exception as error:  # noqa: BLE001  a peer's numbers, in the engine's thread: they cost only it
                lane.order.ended(part, self._now_s())
                self._refused(transfer, part.job, error, planned=planned)

    def _refused(self, transfer: Outgoing, job: Job, error: Exception, *, planned: bool) -> None:
        """A part cannot be handed to the transport. Without a plan for it nothing of it can have left."""
        if not isinstance(error, PdlinkError | ValueError):
            emit(HandlingFailed(what="push", error=f"{type(error).__name__}: {error}"))
        name, layer = transfer.transfer_id, job[0].flight.push.layer
        log.warning("transfer %s: cannot push layer %d: %s", name, layer, error, extra=about(transfer_id=name))
        if planned:
            self._lost(transfer, job, f"push refused: {error}")
            peer = transfer.peer
            assert peer is not None
            self._sessions.lose(peer, str(error))
            for other in list(peer.outgoing.values()):  # now, or all its other parts would fail one by one
                self._run(other, other.machine.stop(str(error)))
            return
        for flight, _, _, _ in job:
            flight.take_back()
        self._run(transfer, transfer.machine.stop(f"push impossible: {error}"))
        self._dropped(transfer, [flight for flight, _, _, _ in job])

    def _dropped(self, transfer: Outgoing, flights: Sequence[Flight]) -> None:
        """Parts of these flights will not go: those without other parts have ended."""
        for flight in dict.fromkeys(flights):
            if not flight.left:
                self._run(transfer, transfer.machine.dropped(flight.push.push_id))

    def _lost(self, transfer: Outgoing, job: Job, reason: str) -> None:
        for flight, _, _, _ in job:
            self._run(transfer, transfer.machine.lost(flight.push.push_id, reason))

    def _compute_checksum(self, verifier: Verifier, transfer: Outgoing, push: Push) -> None:
        """Until the checksum is there the push counts as in flight: its blocks are read, and *done* waits for it."""
        machine = transfer.machine

        def computed(value: int) -> None:
            if machine.state not in SENDER_ENDS:
                transfer.checksums.append(messages.Checksum(push.layer, push.start, push.end, value))
                self.notify()
                self._run(transfer, machine.landed(push.push_id))

        def failed(reason: str) -> None:
            if machine.state not in SENDER_ENDS:
                self._run(transfer, machine.stop(reason))
                self.notify()
                self._run(transfer, machine.landed(push.push_id))

        verifier.compute(push, computed, failed)


def _report(flight: Flight, lane: str, done_s: float) -> None:
    push = flight.push
    emit(
        LayerLanded(
            at_s=done_s,
            transfer_id=flight.transfer.transfer_id,
            layer=push.layer,
            start=push.start,
            end=push.end,
            nbytes=flight.nbytes,
            transport=lane,
            submitted_s=flight.submitted_s,
            asked_s=flight.asked_s,
        )
    )
