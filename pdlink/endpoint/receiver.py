"""`Receiver`: the decode side of transfers.

`expect` when a request arrives, `offer` when its blocks are reserved. The handler hears `ready` or `failed` once,
and `released` once when nothing can write to the offered blocks any more; between the two the blocks are quarantined.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdlink.endpoint.link import Ended
from pdlink.errors import DeadlineExceeded, InvalidRequest, TransferFailed
from pdlink.events import MessageDropped, TransferEnded, emit
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, Deliver, End, Fail, FencePeer, Send
from pdlink.protocol.leases import LeaseTable
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.states import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import TimeoutConfig
    from pdlink.endpoint.link import Link
    from pdlink.endpoint.peer import Peer
    from pdlink.memory.checksums import Checksums

log = logging.getLogger(__name__)


class ReceiveHandler(Protocol):
    """Told about one transfer, in the endpoint's thread."""

    def ready(self, first_token: int) -> None:
        """All KV is in the offered blocks."""

    def failed(self, reason: str) -> None:
        """The KV will not come. Fall back now; the offered blocks stay untouchable until `released`."""

    def released(self) -> None:
        """Exactly once, after `ready` or `failed`: nothing can write to the offered blocks any more."""


@dataclass(slots=True, eq=False)
class _Incoming:
    machine: Receiving
    peer: Peer
    handler: ReceiveHandler
    started_s: float
    verifying: bool = False
    """Whether *done* has come, and its checksums are compared."""


class Receiver:
    """Every transfer this worker receives. Public methods may be called from any thread."""

    def __init__(self, link: Link, timeouts: TimeoutConfig) -> None:
        self._link = link
        self._num_layers, self._token_nbytes = len(link.layout.layers), link.layout.token_nbytes
        self._timeouts = timeouts
        self._live: dict[str, _Incoming] = {}
        self._draining: dict[str, _Incoming] = {}
        """Those of them that wait for *quiet*, or for the fence."""
        self._ended = Ended()
        self._leases = LeaseTable(timeouts.request_s, timeouts.request_s)
        self._changed = threading.Condition(link.lock)

    # -- for the worker ----------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str, address: str, handler: ReceiveHandler) -> None:
        """A request whose KV comes from the worker at control address `address` is here.

        Connects to it if need be, so that the handshake runs while the request waits for blocks. Raises
        InvalidRequest if the id is in use or was used, TransferFailed if the sender's side has failed already or has
        refused this worker a moment ago.
        """
        with self._link.lock:
            reason = self._ended.get(transfer_id)
            if reason:
                raise TransferFailed(f"transfer {transfer_id} was stopped before it began: {reason}", reason)
            if reason is not None or transfer_id in self._live:
                raise InvalidRequest(f"transfer_id {transfer_id!r} was used before; every attempt needs a new one")
            machine = Receiving(transfer_id, self._num_layers, self._token_nbytes, quiet_s=self._timeouts.peer_s)
            peer = self._link.peer_at(address)
            incoming = _Incoming(machine, peer, handler, self._link.now_s())
            self._live[transfer_id] = incoming
            self._leases.grant(transfer_id, self._link.awake_s())
            peer.transfers.add(transfer_id)
            self._run(incoming, machine.expect())

    def offer(
        self,
        transfer_id: str,
        blocks: Sequence[int],
        start: int,
        end: int,
        *,
        per_layer: bool = False,
        verify: messages.Verify = "off",
    ) -> None:
        """Offer the blocks that hold the missing tokens [start, end); blocks[0] holds token `start`.

        They belong to the transfer until the handler's `released`. per_layer: let `wait` see single layers.
        verify: compare checksums of "all" layers or of a "sample" before `ready`. An id that is over already is
        ignored: its handler has been told.
        """
        with self._link.lock:
            incoming = self._live.get(transfer_id)
            if incoming is not None:
                actions = incoming.machine.offer(blocks, start, end, per_layer=per_layer, verify=verify)
                self._run(incoming, actions)

    def cancel(self, transfer_id: str, reason: str) -> None:
        """End this transfer. An id that is not known yet is refused when it comes: the two may cross."""
        with self._link.lock:
            incoming = self._live.get(transfer_id)
            if incoming is not None:
                self._run(incoming, incoming.machine.stop(reason, self._link.awake_s()))
            elif self._ended.get(transfer_id) is None:
                self._ended.add(transfer_id, reason)

    def wait(self, transfer_id: str, timeout_s: float, *, layer: int | None = None) -> None:
        """Return when the whole transfer is ready, or `layer` of one offered `per_layer`.

        Raises TransferFailed if it failed, DeadlineExceeded after `timeout_s`. Not for the endpoint's own thread.
        """
        deadline_s = self._link.now_s() + timeout_s
        with self._changed:
            while True:
                incoming = self._live.get(transfer_id)
                reason = incoming.machine.reason if incoming else self._ended.get(transfer_id)
                if reason or reason is None:
                    raise TransferFailed(f"transfer {transfer_id}: {reason or 'not known'}")
                if incoming is None:
                    return
                machine = incoming.machine
                if layer is not None and machine.offered and machine.landed_tokens[layer] >= machine.offered.end:
                    return
                if not self._changed.wait(deadline_s - self._link.now_s()) and self._link.now_s() >= deadline_s:
                    raise DeadlineExceeded(f"transfer {transfer_id} was not complete within {timeout_s} s")

    def states(self) -> dict[str, int]:
        """Live transfers by state, and `quarantined_blocks`: offered ones that wait for the fence."""
        with self._link.lock:
            counts = {state.value: 0 for state in ReceiverState}
            quarantined = 0
            for incoming in self._live.values():
                counts[incoming.machine.state.value] += 1
                if incoming.machine.state is ReceiverState.DRAINING and incoming.machine.offered:
                    quarantined += len(incoming.machine.offered.blocks)
            counts["quarantined_blocks"] = quarantined
            return counts

    # -- for the driver, under its lock ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, body: messages.Body) -> None:
        """A sender's message about a transfer."""
        transfer_id = getattr(body, "transfer_id", "")
        incoming = self._live.get(transfer_id)
        if incoming is None or incoming.peer is not peer:
            if not (isinstance(body, messages.Quiet | messages.Stop) and self._ended.get(transfer_id) is not None):
                emit(MessageDropped(reason="unknown_transfer"))
            return
        machine = incoming.machine
        match body:
            case messages.Landed(layer=layer, end=end):
                machine.landed(layer, end)
                self._changed.notify_all()
            case messages.Done():
                self._on_done(incoming, body)
            case messages.Stop(reason=reason):
                self._run(incoming, machine.stopped(reason, self._link.awake_s()))
            case messages.Quiet():
                self._run(incoming, machine.quiet())
            case _:
                emit(MessageDropped(reason="wrong_direction"))

    def on_peer_lost(self, peer: Peer, reason: str) -> None:
        """The session is over: its requests fall back now, their blocks wait for the fence."""
        reason = reason if reason.startswith("refused: ") else f"peer_lost: {reason}"
        for transfer_id in list(peer.transfers):
            incoming = self._live[transfer_id]
            self._run(incoming, incoming.machine.stopped(reason, self._link.awake_s()))

    def on_fenced(self, peer: Peer) -> None:
        """The peer cannot reach our pages any more."""
        for transfer_id in list(peer.transfers):
            incoming = self._live[transfer_id]
            self._run(incoming, incoming.machine.fenced("peer_lost", self._link.awake_s()))

    def tick(self, now: float) -> None:
        """End what has run out. now: `Link.awake_s`, as for every deadline here."""
        for transfer_id, reason in self._leases.expired(now):
            self._leases.drop(transfer_id)
            incoming = self._live[transfer_id]
            self._run(incoming, incoming.machine.stop(reason, now))
        for incoming in list(self._draining.values()):
            self._run(incoming, incoming.machine.tick(now))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run(self, incoming: _Incoming, actions: list[Action]) -> None:
        handler, machine = incoming.handler, incoming.machine
        if machine.state is ReceiverState.DRAINING:
            self._draining[machine.transfer_id] = incoming
        for action in actions:
            match action:
                case Send(body=body):
                    self._link.send(incoming.peer, body)
                case Deliver(first_token=token):
                    self._link.defer(
                        lambda token=token: handler.ready(token)  # type: ignore[misc]
                    )
                case Fail(reason=reason):
                    self._link.defer(lambda reason=reason: handler.failed(reason))  # type: ignore[misc]
                case FencePeer(reason=reason):
                    log.warning("transfer %s: %s; fencing %s", machine.transfer_id, reason, incoming.peer)
                    self._link.lose(incoming.peer, reason)
                case End(reason=reason):
                    self._end(incoming, reason)
                case other:
                    raise AssertionError(f"{machine.transfer_id}: a receiver does not {other}")
        if actions:
            self._changed.notify_all()

    def _on_done(self, incoming: _Incoming, done: messages.Done) -> None:
        """Everything is here, they say. What is to be verified is, in another thread, before anybody is told."""
        machine, checksums = incoming.machine, self._link.checksums
        offered = machine.offered
        if machine.state is not ReceiverState.OFFERED or offered is None or offered.verify == "off":
            self._run(incoming, machine.done(done, self._link.awake_s()))
        elif checksums is None:
            self._verified(incoming, done, "verify was asked for, but this endpoint cannot read its buffers")
        elif not incoming.verifying:
            incoming.verifying = True
            self._link.hashing.submit(
                lambda: self._mismatch(machine, offered, done, checksums),
                lambda mismatch: self._verified(incoming, done, mismatch),
                lambda reason: self._verified(incoming, done, reason),
            )

    def _verified(self, incoming: _Incoming, done: messages.Done, mismatch: str) -> None:
        """mismatch: what is wrong with the bytes that arrived; empty if nothing is."""
        if self._live.get(incoming.machine.transfer_id) is incoming:
            self._run(incoming, incoming.machine.done(done, self._link.awake_s(), mismatch))

    def _mismatch(
        self, machine: Receiving, offered: messages.Offer, done: messages.Done, checksums: Checksums
    ) -> str:
        """In the hashing thread, without the lock. The blocks belong to the transfer; if it ends meanwhile, they may
        hold anything, and nobody asks for the result."""
        block_tokens, num_layers = self._link.layout.block_tokens, offered.num_layers
        covered = 0
        for told in done.checksums:
            if machine.state is not ReceiverState.OFFERED or self._link.hashing.closing:
                return "ended while it was verified"
            if not (0 <= told.layer < num_layers and offered.start <= told.start < told.end <= offered.end):
                return f"checksum of layer {told.layer}, tokens [{told.start}, {told.end}), which were not offered"
            blocks = offered.blocks[told.start // block_tokens - offered.start // block_tokens :]
            if checksums.of(told.layer, blocks, told.start, told.end) != told.xxh3:
                return f"checksum of layer {told.layer}, tokens [{told.start}, {told.end}) differs"
            covered += told.end - told.start
        if offered.verify == "all" and covered != (offered.end - offered.start) * num_layers:
            return f"checksums of {covered} tokens, {(offered.end - offered.start) * num_layers} were offered"
        return ""

    def _end(self, incoming: _Incoming, reason: str) -> None:
        machine, peer = incoming.machine, incoming.peer
        del self._live[machine.transfer_id]
        self._draining.pop(machine.transfer_id, None)
        self._leases.drop(machine.transfer_id)
        self._ended.add(machine.transfer_id, reason, peer.name or peer.address)
        peer.transfers.discard(machine.transfer_id)
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
                started_s=incoming.started_s,
            )
        )
        self._link.defer(incoming.handler.released)
