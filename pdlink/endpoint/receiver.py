"""`Receiver`: the decode side of transfers.

`expect` when a request arrives, `offer` when its blocks are reserved. The handler gets `ready` or `failed` once, and
`released` once when nothing can write to the offered blocks any more; in between the blocks are quarantined.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from pdlink.endpoint.ended import Ended
from pdlink.endpoint.transfers import Incoming
from pdlink.errors import InvalidRequest, TransferFailed
from pdlink.events import MessageDropped, TransferEnded, emit
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, Deliver, DeliverLayer, End, Fail, FencePeer, Send
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.states import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import TimeoutConfig
    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.sessions import Sessions
    from pdlink.endpoint.transfers import ReceiveHandler
    from pdlink.endpoint.verifying import Verifier
    from pdlink.endpoint.work import Work
    from pdlink.kv.layout import KVLayout

log = logging.getLogger(__name__)


class Receiver:
    """Every transfer this worker receives. Public methods may be called from any thread."""

    def __init__(
        self,
        layout: KVLayout,
        work: Work,
        clock: Clock,
        sessions: Sessions,
        verifier: Verifier | None,
        timeouts: TimeoutConfig,
    ) -> None:
        self._work, self._clock, self._sessions, self._verifier = work, clock, sessions, verifier
        self._num_layers, self._token_nbytes = len(layout.layers), layout.token_nbytes
        self._timeouts = timeouts
        self._transfers: dict[str, Incoming] = {}
        self._ended = Ended()

    # -- for the worker ----------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str, address: str, handler: ReceiveHandler) -> None:
        """A request is here, and its KV comes from the worker at control address `address`.

        Opens a session if there is none, so the handshake runs while the request waits for blocks. Raises
        InvalidRequest for a used id, TransferFailed if the transfer was stopped already, or during a back-off.
        """
        with self._work.lock:
            reason = self._ended.get(transfer_id)
            if reason:
                raise TransferFailed(f"transfer {transfer_id} was stopped before it began: {reason}", reason)
            if reason is not None or transfer_id in self._transfers:
                raise InvalidRequest(f"transfer_id {transfer_id!r} was used before; every attempt needs a new one")
            machine = Receiving(transfer_id, self._num_layers, self._token_nbytes, quiet_s=self._timeouts.peer_s)
            peer = self._sessions.at(address)
            deadline_s = self._clock.awake_s() + self._timeouts.request_s
            transfer = Incoming(machine, peer, handler, self._clock.now_s(), deadline_s)
            self._transfers[transfer_id] = peer.incoming[transfer_id] = transfer
            self._run(transfer, machine.expect())

    def offer(
        self,
        transfer_id: str,
        blocks: Sequence[int],
        start: int,
        end: int,
        *,
        on_landed: Callable[[int, int, int | None], None] | None = None,
        verify: messages.Verify = "off",
    ) -> None:
        """Offer the blocks that hold the missing tokens [start, end); blocks[0] holds token `start`.

        They belong to the transfer until the handler's `released`. Ignored if the transfer is over.
        on_landed(layer, end, first_token): asks the sender to announce single layers, and runs in the endpoint's
        thread for each: the offered tokens before `end` are visible in `layer`, not verified yet. first_token is
        None until the sender has sampled it.
        verify: compare checksums of "all" layers or of a "sample" before `ready`.
        """
        with self._work.lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.on_landed = on_landed
                per_layer = on_landed is not None
                actions = transfer.machine.offer(blocks, start, end, per_layer=per_layer, verify=verify)
                self._run(transfer, actions)

    def cancel(self, transfer_id: str, reason: str) -> None:
        """End this transfer. An unknown id is refused when its request comes later."""
        with self._work.lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                self._run(transfer, transfer.machine.stop(reason, self._clock.awake_s()))
            elif self._ended.get(transfer_id) is None:
                self._ended.add(transfer_id, reason)

    def states(self) -> dict[str, int]:
        """Live transfers by state, and `quarantined_blocks`: offered blocks that wait for *quiet* or the fence."""
        with self._work.lock:
            counts = {state.value: 0 for state in ReceiverState}
            quarantined = 0
            for transfer in self._transfers.values():
                counts[transfer.machine.state.value] += 1
                if transfer.machine.state is ReceiverState.DRAINING and transfer.machine.offered:
                    quarantined += len(transfer.machine.offered.blocks)
            counts["quarantined_blocks"] = quarantined
            return counts

    # -- for the driver, under its lock ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, body: messages.Body) -> None:
        """A sender's message about a transfer."""
        transfer_id = getattr(body, "transfer_id", "")
        transfer = peer.incoming.get(transfer_id)
        if transfer is None:
            if not (isinstance(body, messages.Quiet | messages.Stop) and self._ended.get(transfer_id) is not None):
                emit(MessageDropped(reason="unknown_transfer"))
            return
        machine = transfer.machine
        match body:
            case messages.Landed(layer=layer, end=end, first_token=token):
                self._run(transfer, machine.landed(layer, end, token))
            case messages.Done():
                self._on_done(transfer, body)
            case messages.Stop(reason=reason):
                self._run(transfer, machine.stopped(reason, self._clock.awake_s()))
            case messages.Quiet():
                self._run(transfer, machine.quiet())
            case _:
                emit(MessageDropped(reason="wrong_direction"))

    def on_peer_lost(self, peer: Peer, reason: str) -> None:
        """The session is over: its requests fall back now, their blocks are quarantined until the fence."""
        reason = reason if reason.startswith("refused: ") else f"peer_lost: {reason}"
        for transfer in list(peer.incoming.values()):
            self._run(transfer, transfer.machine.stopped(reason, self._clock.awake_s()))

    def on_fenced(self, peer: Peer) -> None:
        """The peer cannot reach our pages any more."""
        for transfer in list(peer.incoming.values()):
            self._run(transfer, transfer.machine.fenced("peer_lost", self._clock.awake_s()))

    def tick(self, now: float) -> None:
        """End transfers whose time is over. now: `Clock.awake_s`, as for every deadline here."""
        for transfer in list(self._transfers.values()):
            if now >= transfer.deadline_s:
                self._run(transfer, transfer.machine.stop("deadline", now))
            self._run(transfer, transfer.machine.tick(now))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run(self, transfer: Incoming, actions: list[Action]) -> None:
        handler, machine = transfer.handler, transfer.machine
        for action in actions:
            match action:
                case Send(body=body):
                    self._sessions.send(transfer.peer, body)
                case Deliver(first_token=token):
                    self._work.defer(
                        lambda token=token: handler.ready(token)  # type: ignore[misc]
                    )
                case DeliverLayer(layer=layer, end=end, first_token=token):
                    if transfer.on_landed is not None:
                        self._work.defer(partial(transfer.on_landed, layer, end, token))
                case Fail(reason=reason):
                    self._work.defer(lambda reason=reason: handler.failed(reason))  # type: ignore[misc]
                case FencePeer(reason=reason):
                    log.warning("transfer %s: %s; fencing %s", machine.transfer_id, reason, transfer.peer)
                    self._sessions.lose(transfer.peer, reason)
                case End(reason=reason):
                    self._end(transfer, reason)
                case other:
                    raise AssertionError(f"{machine.transfer_id}: a receiver does not {other}")

    def _on_done(self, transfer: Incoming, done: messages.Done) -> None:
        """The sender reports that everything has landed. Verify it, if asked for, before the handler is called."""
        machine, verifier = transfer.machine, self._verifier
        offered = machine.offered
        if machine.state is not ReceiverState.OFFERED or offered is None or offered.verify == "off":
            self._run(transfer, machine.done(done, self._clock.awake_s()))
        elif verifier is None:
            self._verified(transfer, done, "verify: this endpoint cannot read its buffers; use verify: off")
        elif not transfer.verifying:
            transfer.verifying = True
            verifier.compare(machine, done, lambda mismatch: self._verified(transfer, done, mismatch))

    def _verified(self, transfer: Incoming, done: messages.Done, mismatch: str) -> None:
        """mismatch: the difference found; empty if there is none."""
        if self._transfers.get(transfer.machine.transfer_id) is transfer:
            self._run(transfer, transfer.machine.done(done, self._clock.awake_s(), mismatch))

    def _end(self, transfer: Incoming, reason: str) -> None:
        machine, peer = transfer.machine, transfer.peer
        del self._transfers[machine.transfer_id], peer.incoming[machine.transfer_id]
        self._ended.add(machine.transfer_id, reason, peer.name or peer.address)
        if machine.offered is not None and peer.transport is not None:
            peer.transport.close_blocks(peer.key, machine.offered.blocks)
        emit(
            TransferEnded(
                transfer_id=machine.transfer_id,
                side="receiver",
                peer=peer.name,
                state=machine.state.name,
                reason=reason,
                nbytes=machine.nbytes if machine.state is ReceiverState.READY else 0,
                transport=peer.transport.name if peer.transport else "",
                started_s=transfer.started_s,
            )
        )
        self._work.defer(transfer.handler.released)
