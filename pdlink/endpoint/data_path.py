"""`DataPath`: brings the sender's pushes to their transports, and the ends of pushes back to the machines.

There is one `Pusher` for each transport. A push that cannot be handed over fails its transfer if it has no plan;
otherwise bytes may have left, and its session ends.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pdlink.endpoint.pushing import Pusher
from pdlink.events import LayerLanded, emit
from pdlink.protocol import messages
from pdlink.protocol.states import SENDER_ENDS
from pdlink.transport.base import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import SharingConfig
    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.pushing import Flight
    from pdlink.endpoint.sessions import Sessions
    from pdlink.endpoint.transfers import Outgoing
    from pdlink.endpoint.verifying import Verifier
    from pdlink.endpoint.work import Work
    from pdlink.protocol.actions import Action, Push
    from pdlink.transport.base import BatchDone, Transport


class DataPath:
    """Used under the endpoint's lock."""

    def __init__(
        self,
        work: Work,
        clock: Clock,
        sessions: Sessions,
        verifier: Verifier | None,
        batch_timeout_s: float,
        sharing: SharingConfig,
        run: Callable[[Outgoing, list[Action]], None],
    ) -> None:
        """run(transfer, actions): does what a machine answered to the end of a push."""
        self._clock, self._sessions, self._verifier, self._run = clock, sessions, verifier, run
        self._batch_timeout_s, self._sharing = batch_timeout_s, sharing
        self.pushers: dict[str, Pusher] = {}
        """By transport name."""
        self.ended = threading.Condition(work.lock)
        """A push has ended, or all of a peer's were fenced."""

    def push(self, transfer: Outgoing, pushes: Sequence[Push]) -> None:
        """Hand over these pushes as far as there is room; small ones travel in one part."""
        assert transfer.peer is not None
        pusher = self._pusher_of(transfer.peer)
        pusher.add(transfer, transfer.peer, pushes)
        self._release(pusher)

    def take_back(self, transfer: Outgoing) -> None:
        """Drop the waiting parts of this transfer; they never were in flight."""
        if transfer.backlog is not None:
            assert transfer.peer is not None
            for push_id in self._pusher_of(transfer.peer).take_back(transfer):
                self._run(transfer, transfer.machine.dropped(push_id))

    def release(self) -> None:
        """Hand over what has room now. Call periodically."""
        for pusher in self.pushers.values():
            self._release(pusher)

    def nbytes(self) -> dict[str, int]:
        """KV bytes `waiting` for room on their transport, and those `in_flight`."""
        orders = [pusher.order for pusher in self.pushers.values()]
        return {
            "waiting": sum(order.waiting_nbytes for order in orders),
            "in_flight": sum(order.in_flight_nbytes for order in orders),
        }

    def on_batch(self, transport: Transport, done: BatchDone) -> None:
        """Some pushes, or a part of one, have ended."""
        pusher = self.pushers.get(transport.name)
        flights = pusher.ended(done) if pusher is not None else []
        if pusher is None or not flights:
            return
        self.ended.notify_all()
        transfer = flights[0].transfer
        if done.status is not Status.OK:
            self._lost(flights, f"push {done.status.value}: {done.detail}")
        self._release(pusher)  # before the reports: the link must not run dry
        if done.status is not Status.OK:
            return
        peer = transfer.peer
        assert peer is not None
        peer.lane = peer.lane or transport.lane(done.peer)
        transfer.nbytes += done.nbytes
        if transfer.first_landed_s is None:
            transfer.first_landed_s = done.done_s
        for flight in flights:
            if flight.left:
                continue
            if not flight.whole:
                self._run(transfer, transfer.machine.dropped(flight.push.push_id))
                continue
            _report(flight, peer.lane, done.done_s)
            if self._verifier is not None and self._verifier.wants(flight.push):
                self._compute_checksum(self._verifier, transfer, flight.push)
            else:
                self._run(transfer, transfer.machine.landed(flight.push.push_id))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _pusher_of(self, peer: Peer) -> Pusher:
        assert peer.transport is not None
        pusher = self.pushers.get(peer.transport.name)
        if pusher is None:
            pusher = Pusher(peer.transport, self._sharing, self._batch_timeout_s, self._clock.now_s)
            self.pushers[peer.transport.name] = pusher
        return pusher

    def _release(self, pusher: Pusher) -> None:
        for flights, error, in_flight in pusher.release():
            transfer = flights[0].transfer
            if in_flight:
                self._lost(flights, f"push refused: {error}")
                peer = transfer.peer
                assert peer is not None
                self._sessions.lose(peer, str(error))
                for other in list(peer.outgoing.values()):  # now, or all its other parts would fail one by one
                    self._run(other, other.machine.stop(str(error)))
                continue
            self._run(transfer, transfer.machine.stop(f"push impossible: {error}"))
            for push_id in {flight.push.push_id for flight in flights if not flight.left}:
                self._run(transfer, transfer.machine.dropped(push_id))

    def _lost(self, flights: Sequence[Flight], reason: str) -> None:
        transfer = flights[0].transfer
        for flight in flights:
            self._run(transfer, transfer.machine.lost(flight.push.push_id, reason))

    def _compute_checksum(self, verifier: Verifier, transfer: Outgoing, push: Push) -> None:
        """Until the checksum is there the push counts as in flight: its blocks are read, and *done* waits for it."""
        machine = transfer.machine

        def computed(value: int) -> None:
            if machine.state not in SENDER_ENDS:
                transfer.checksums.append(messages.Checksum(push.layer, push.start, push.end, value))
                self.ended.notify_all()
                self._run(transfer, machine.landed(push.push_id))

        def failed(reason: str) -> None:
            if machine.state not in SENDER_ENDS:
                self._run(transfer, machine.stop(reason))
                self.ended.notify_all()
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
