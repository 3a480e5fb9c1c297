"""`Receiver`: the decode side of transfers: what senders say of them, and how each ends."""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING

from pdlink.endpoint.half import Half
from pdlink.endpoint.incoming import Incoming
from pdlink.endpoint.live import LiveTransfer
from pdlink.errors import TransportFailure
from pdlink.events import MessageDropped, TransferEnded, emit, listeners
from pdlink.logs import about
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, Deliver, DeliverLayer, End, Fail, FencePeer, Send
from pdlink.protocol.states import ReceiverState
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.endpoint.half import Common
    from pdlink.endpoint.peer import Peer

log = logging.getLogger(__name__)


class Receiver(Half[Incoming]):
    """Every transfer this worker receives. Public methods may be called from any thread."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._unclosed: dict[Peer, list[Incoming]] = {}
        """Ended transfers whose blocks something may still be placed in, until the fence of their session."""

    # -- for the worker ----------------------------------------------------------------------------------------------

    def expect(self, transfer: Incoming, address: str) -> None:
        """The request of this transfer is here; its KV comes from the worker at this control address.

        Opens a session if there is none, so the handshake runs while the request waits for blocks. Raises
        InvalidRequest for a used id, TransferFailed if the transfer was stopped already, or during a back-off.
        """
        transfer_id = transfer.transfer_id
        with self.lock:
            self._check_unused(transfer_id)
            transfer.peer = self._sessions.at(address)
            transfer.deadline_s = self.clock.awake_s() + self.timeouts.request_s
            self._transfers[transfer_id] = transfer.peer.transfers[transfer_id] = transfer
            self.live.add(transfer)
            self._sessions.send(transfer.peer, messages.Expect(transfer_id))

    def cancel(self, transfer_id: str, reason: Reason) -> None:
        """End this transfer. An unknown id is refused when its request comes later."""
        with self.lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.cancel(reason)
            elif transfer_id not in self._ended:
                self._ended.add(transfer_id, reason)

    def states(self) -> dict[str, int]:
        """Live transfers by state."""
        with self.lock:
            counts = {state.value: 0 for state in ReceiverState}
            for transfer in self._transfers.values():
                counts[transfer.machine.state.value] += 1
            return counts

    def num_quarantined(self) -> int:
        """Offered blocks that wait for *quiet* or the fence."""
        with self.lock:
            return sum(
                sum(map(len, transfer.machine.offered.blocks))
                for transfer in self._transfers.values()
                if transfer.machine.state is ReceiverState.DRAINING and transfer.machine.offered
            )

    def transfers(self, most: int) -> list[LiveTransfer]:
        """Up to so many live transfers, the oldest first."""
        with self.lock:
            now_s = self.clock.now_s()
            return [
                LiveTransfer(
                    transfer_id=transfer.machine.transfer_id,
                    side="receiver",
                    state=transfer.machine.state.value,
                    peer=transfer.peer.name or transfer.peer.address,
                    lane=transfer.peer.lane or (transfer.peer.transport.name if transfer.peer.transport else ""),
                    num_tokens=offer.end - offer.start if (offer := transfer.machine.offered) else 0,
                    nbytes=0,
                    age_s=now_s - transfer.started_s,
                    layers="",
                )
                for transfer in itertools.islice(self._transfers.values(), most)
            ]

    # -- for the driver, under its lock ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, body: messages.OfTransfer) -> None:
        """A sender's message about a transfer."""
        transfer = self._transfers.get(body.transfer_id)
        if transfer is None or transfer.peer is not peer:
            over = body.transfer_id in self._ended
            if not (over and isinstance(body, messages.Quiet | messages.Stop)):
                emit(MessageDropped(reason="unknown_transfer"))
            return
        machine = transfer.machine
        match body:
            case messages.Landed(layer=layer, end=end, first_token=token):
                self.act(transfer, machine.landed(layer, end, token))
            case messages.Done():
                self._on_done(transfer, body)
            case messages.Stop(reason=reason):  # *quiet* follows when nothing is in flight
                self.act(transfer, machine.stop(Reason.of(reason), self.clock.awake_s(), tell=False))
            case messages.Quiet():
                self.act(transfer, machine.quiet())
            case _:
                emit(MessageDropped(reason="wrong_direction"))

    def on_peer_lost(self, peer: Peer, reason: Reason) -> None:
        """The session is over: its requests fall back now, their blocks are quarantined until the fence."""
        for transfer in self._of(peer):
            self.act(transfer, transfer.machine.stop(reason, self.clock.awake_s(), tell=False))

    def on_fenced(self, peer: Peer) -> None:
        """The peer cannot reach our pages any more."""
        for transfer in self._of(peer):
            self.act(transfer, transfer.machine.fenced(self.clock.awake_s()))
        for transfer in self._unclosed.pop(peer, ()):
            self._work.defer(transfer.on_end)

    def tick(self, now: float) -> None:
        """End transfers whose time is over. now: `Clock.awake_s`, as for every deadline here."""
        for transfer in list(self._transfers.values()):
            if now >= transfer.deadline_s:
                self.act(transfer, transfer.machine.stop(Reason(Code.DEADLINE), now))
            self.act(transfer, transfer.machine.tick(now))

    # -- inside ------------------------------------------------------------------------------------------------------

    def act(self, transfer: Incoming, actions: Sequence[Action]) -> None:
        """Do what its machine has decided. Under the lock."""
        for action in actions:
            match action:
                case Send(body=body):
                    self._sessions.send(transfer.peer, body)
                case Deliver(first_token=token):
                    self._work.defer(partial(transfer.on_ready, token))
                case DeliverLayer(layer=layer, end=end, first_token=token):
                    self._work.defer(partial(transfer.on_landed, layer, end, token))
                case Fail(reason=reason):
                    self._work.defer(partial(transfer.on_failed, reason))
                case FencePeer(reason=reason):
                    name, extra = transfer.transfer_id, about(transfer_id=transfer.transfer_id)
                    log.warning("transfer %s: %s; fencing %s", name, reason.words, transfer.peer, extra=extra)
                    self._sessions.lose(transfer.peer, reason)
                case End(reason=reason):
                    self._end(transfer, reason)
                case other:
                    raise AssertionError(f"{transfer.transfer_id}: a receiver does not {other}")

    def _on_done(self, transfer: Incoming, done: messages.Done) -> None:
        """The sender reports that everything has landed. Verify it, if asked for, before the handler is called."""
        machine, verifier = transfer.machine, self._verifier
        offered = machine.offered
        if machine.state is not ReceiverState.OFFERED or offered is None or offered.verify == "off":
            self.act(transfer, machine.done(done, self.clock.awake_s()))
        elif verifier is None:
            self._verified(transfer, done, "verify: this endpoint cannot read its buffers; use verify: off")
        elif not transfer.verifying:
            transfer.verifying = True
            verifier.compare(machine, done, lambda mismatch: self._verified(transfer, done, mismatch))

    def _verified(self, transfer: Incoming, done: messages.Done, mismatch: str) -> None:
        """mismatch: the difference found; empty if there is none."""
        if self._transfers.get(transfer.machine.transfer_id) is transfer:
            self.act(transfer, transfer.machine.done(done, self.clock.awake_s(), mismatch))

    def _end(self, transfer: Incoming, reason: Reason | None) -> None:
        machine, peer = transfer.machine, transfer.peer
        del self._transfers[machine.transfer_id], peer.transfers[machine.transfer_id]
        self._ended.add(machine.transfer_id, reason, peer.name or peer.address)
        if machine.offered is not None and peer.transport is not None:
            try:
                peer.transport.close_blocks(peer.key, machine.offered.blocks)
            except TransportFailure as failure:
                self._unclosed.setdefault(peer, []).append(transfer)
                self._sessions.lose(peer, Reason(Code.PEER_LOST, str(failure)))
        if listeners:
            emit(
                TransferEnded(
                    transfer_id=machine.transfer_id,
                    side="receiver",
                    peer=peer.name,
                    state=machine.state.name,
                    reason=str(reason or ""),
                    nbytes=machine.nbytes if machine.state is ReceiverState.READY else 0,
                    transport=peer.transport.name if peer.transport else "",
                    started_s=transfer.started_s,
                )
            )
        if transfer not in self._unclosed.get(peer, ()):
            self._work.defer(transfer.on_end)
