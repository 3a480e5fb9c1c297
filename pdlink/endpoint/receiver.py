"""The decode side of transfers. `Incoming`: the KV of one request on its way here from the worker that computes its
prompt. `Receiver`: all of them, what senders say of them, and how each ends.
"""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING

from pdlink.endpoint.half import Half, Transfer
from pdlink.endpoint.live import LiveTransfer
from pdlink.endpoint.signals import Signal, call_all
from pdlink.errors import InvalidRequest, TransportFailure
from pdlink.events import MessageDropped, TransferEnded, emit, listeners
from pdlink.logs import about
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, Deliver, DeliverLayer, End, Fail, FencePeer, Send
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.states import ReceiverState
from pdlink.reasons import ABORTED, Code, Reason

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pdlink.endpoint.half import Common
    from pdlink.endpoint.peer import Peer
    from pdlink.kv.groups import BlockLists, BlocksByGroup
    from pdlink.protocol.messages import Verify

log = logging.getLogger(__name__)


class Incoming(Transfer):
    """The receiving end of a transfer, made by `Node.receive`.

    `done` is set when all KV is in the offered blocks, or will not come. After a failure a peer may still write to
    the blocks until `released` is set: compute into other ones, or wait.
    """

    first_token: int | None = None
    """The first token of the answer, which the sender sampled; None until `sampled`."""
    sampled: Signal
    """Set when `first_token` is known. By layer this may be before `done`, but then the KV may still fail."""

    # For the endpoint, under its lock:
    machine: Receiving
    peer: Peer
    deadline_s: float
    """The transfer fails then (`Clock.awake_s`)."""
    verifying = False
    """Whether *done* has come, and its checksums are being compared."""

    _failure = "its KV did not arrive"
    _end = -1
    """The offered tokens end before this one; -1 before the offer."""
    _layers: dict[int, Signal] | None = None
    """Set when all offered tokens of a layer are here, or never will be; made when somebody waits."""

    def __init__(
        self, receiver: Receiver, transfer_id: str, peer: str, *, verify: Verify = "off", by_layer: bool = True
    ) -> None:
        """Raises InvalidRequest for a used id, TransferFailed if the transfer was stopped already or its peer is in
        back-off."""
        super().__init__(receiver, transfer_id)
        self.sampled = Signal()
        self._receiver, self._verify = receiver, verify
        self._landed: dict[int, int] | None = {} if by_layer and verify == "off" else None
        """Per layer: the offered tokens before this one are here."""
        quiet_s = receiver.timeouts.peer_s
        self.machine = Receiving(transfer_id, receiver.groups, quiet_s=quiet_s)
        self.started_s = receiver.clock.now_s()
        receiver.expect(self, peer)

    def offer(self, blocks: BlockLists, tokens: range) -> None:
        """Let the sender write these tokens, which are the ones that are missing here, into these blocks.

        blocks: one list for each group of layers. Each begins with the block of the
        first token that the group needs (`KVLayout.needed`; `tokens.start` where it keeps all), and has as many as
        these tokens take, one or both ends of which may begin or end within a block (`KVGroups.part`).

        Until `released` they belong to the transfer; with a pool the node holds a
        reference of its own. Raises InvalidRequest if the two do not fit together.
        """
        mine, start, end = self._checked(blocks, tokens)
        with self._receiver.lock:
            if self.machine.state is ReceiverState.EXPECTED:
                self._end = end
                self._hold(mine)
                per_layer = self._landed is not None
                actions = self.machine.offer(mine, start, end, per_layer=per_layer, verify=self._verify)
                self._receiver.act(self, actions)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until all KV is here; the first token. Raises TransferFailed, DeadlineExceeded after `timeout_s`."""
        self._wait(self.done, timeout_s, "its KV was not here")
        return self._token()

    def __await__(self) -> Generator[object, None, int]:
        yield from self.done.__await__()
        return self._token()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Wait until the offered tokens of one layer are here, for attention to read.

        With `verify`, or without `by_layer`, single layers are not announced, and this waits for all of them. Costs
        nothing for a layer that is here. Raises TransferFailed, DeadlineExceeded after `timeout_s`.
        """
        if not self.has_layer(layer):
            signal = self._signal(layer)
            if not self.has_layer(layer):  # it may have come before the signal was there to be set
                self._wait(signal, timeout_s, f"layer {layer} was not here")

    async def layer(self, layer: int) -> None:
        """`wait_layer` for coroutines; `asyncio.timeout` limits it."""
        if not self.has_layer(layer):
            signal = self._signal(layer)
            if not self.has_layer(layer):
                await signal
                self._raise()

    def has_layer(self, layer: int) -> bool:
        """Whether the offered tokens of this layer are here. Raises TransferFailed if the transfer has failed."""
        if self.done.is_set():
            self._raise()
            return True
        return self._landed is not None and self._landed.get(layer, -2) >= self._end

    def cancel(self, reason: Reason = ABORTED) -> None:
        with self._receiver.lock:
            self._receiver.act(self, self.machine.stop(reason, self._receiver.clock.awake_s()))

    # -- in the endpoint's thread ------------------------------------------------------------------------------------

    def on_ready(self, first_token: int) -> None:
        """All KV is in the offered blocks. This or `on_failed`, once, before `on_end`."""
        self.first_token = first_token
        call_all((self.done.set, self.sampled.set, self._wake_layers))

    def on_failed(self, reason: Reason) -> None:
        """The KV will not come. The offered blocks are quarantined until `on_end`."""
        call_all((partial(super().on_failed, reason), self._wake_layers))

    def on_landed(self, layer: int, end: int, first_token: int | None) -> None:
        """The offered tokens before `end` are visible in `layer`. first_token: None until it is sampled."""
        assert self._landed is not None
        with self._receiver.lock:
            self._landed[layer] = max(end, self._landed.get(layer, 0))
            complete = self._landed[layer] >= self._end
            signal = self._layers.get(layer) if complete and self._layers else None
        if signal is not None:
            signal.set()
        if first_token is not None and self.first_token is None:
            self.first_token = first_token
            self.sampled.set()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _checked(self, blocks: BlockLists, tokens: range) -> tuple[BlocksByGroup, int, int]:
        """Blocks by group, first token, end. Raises InvalidRequest."""
        groups, start, end = self._receiver.groups, tokens.start, max(tokens.start, tokens.stop)
        mine = groups.by_group(blocks)
        if tokens.step != 1 or start < 0:
            raise InvalidRequest(f"tokens: got {tokens}; a range from 0 or later on, with a step of 1")
        problem = groups.problem(mine, start, end)
        if problem:
            raise InvalidRequest(f"blocks: got an offer {problem}")
        return mine, start, end

    def _signal(self, layer: int) -> Signal:
        if not 0 <= layer < self._receiver.groups.num_layers:
            raise self._receiver.groups.no_layer(layer)
        with self._receiver.lock:
            if self._layers is None:
                self._layers = {}
            return self._layers.setdefault(layer, Signal())

    def _wake_layers(self) -> None:
        """`done` is set: who asks for a layer from now on sees that, and who has asked before is in `_layers`."""
        if self._layers:
            with self._receiver.lock:
                signals = list(self._layers.values())
            call_all(signal.set for signal in signals)

    def _token(self) -> int:
        self._raise()
        assert self.first_token is not None
        return self.first_token


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
            self._transfers[transfer_id] = transfer
            transfer.peer.transfers[transfer_id] = None
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
