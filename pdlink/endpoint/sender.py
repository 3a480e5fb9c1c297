"""`Sender`: the prefill side of transfers.

`announce` when a request arrives, `publish` when its blocks are reserved, `layer_ready` from the forward pass,
`finish` with the first token. `layer_ready` is the hot path: it takes one lock, asks the machine, and if the offer is
there and the transport has room makes one native call; it never waits for a peer.
"""

from __future__ import annotations

import logging
import threading
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdlink.endpoint.early import EarlyInterest
from pdlink.endpoint.link import Ended
from pdlink.endpoint.pushing import Pushes
from pdlink.errors import InvalidRequest
from pdlink.events import LayerLanded, LayerWritten, MessageDropped, TransferEnded, emit
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, End, Fail, Push, Send
from pdlink.protocol.leases import LeaseTable
from pdlink.protocol.reasons import OTHER_PROMPT
from pdlink.protocol.sending import Sending
from pdlink.protocol.states import SenderState
from pdlink.transport.base import BatchDone, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import SharingConfig, TimeoutConfig
    from pdlink.endpoint.link import Link
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.pushing import Flight
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Outgoing:
    machine: Sending
    on_failed: Callable[[str], None]
    on_end: Callable[[], None]
    on_receiver: Callable[[], None]
    started_s: float
    peer: Peer | None = None
    nbytes: int = 0
    checksums: list[messages.Checksum] = field(default_factory=list)
    first_landed_s: float | None = None
    finished_s: float | None = None
    """When prefill ended, on the clock of an awake loop."""


class Sender:
    """Every transfer this worker sends. Public methods may be called from any thread."""

    def __init__(
        self,
        link: Link,
        timeouts: TimeoutConfig,
        batch_timeout_s: float,
        sharing: SharingConfig,
        short_of_blocks: Callable[[], bool],
    ) -> None:
        """short_of_blocks: whether requests of this worker wait for blocks that transfers hold."""
        self._link = link
        self._num_layers, self._token_nbytes = len(link.layout.layers), link.layout.token_nbytes
        self._short_of_blocks, self._offer_s = short_of_blocks, timeouts.offer_s
        self._live: dict[str, _Outgoing] = {}
        self._early = EarlyInterest()
        self._ended = Ended()
        self._leases = LeaseTable(timeouts.lease_s, timeouts.request_s, timeouts.other_leg_s)
        self._complete = Ended(10_000, 10_000)
        """Attempts whose transfers have all been announced, with their number."""
        self._pushes = Pushes(link, sharing, batch_timeout_s, self._on_refused, self._on_impossible)
        self._landed = threading.Condition(link.lock)
        """A push has ended, or all of a peer's were fenced."""

    # -- for the worker ----------------------------------------------------------------------------------------------

    def announce(
        self,
        transfer_id: str,
        on_failed: Callable[[str], None],
        on_end: Callable[[], None],
        on_receiver: Callable[[], None] = lambda: None,
    ) -> None:
        """A request with this transfer id is here; its KV will be published.

        on_failed(reason): the transfer will not succeed; prefill for it may stop. on_end(): called exactly once,
        after success or failure; nothing reads the published blocks any more. on_receiver(): called at most once,
        when the receiver has spoken, in a session whose handshake holds. All run in the endpoint's thread.
        Raises InvalidRequest if the id is in use or was used: an id names one attempt.
        """
        with self._link.lock:
            old = self._ended.get(transfer_id)
            if old is not None or transfer_id in self._live:
                raise InvalidRequest(
                    f"transfer_id {transfer_id!r} "
                    + (f"has ended already: {old or 'sent'}" if old is not None else "is in use")
                    + "; every attempt needs a new one"
                )
            machine = Sending(transfer_id, self._num_layers, self._token_nbytes)
            outgoing = _Outgoing(machine, on_failed, on_end, on_receiver, self._link.now_s())
            self._live[transfer_id] = outgoing
            self._leases.grant(transfer_id, self._link.awake_s())
            early = self._early.pop(transfer_id)
            if early is not None:
                self._take(outgoing, early.peer, early.offer)

    def complete(self, attempt: str, num_transfers: int) -> None:
        """No other transfer of this attempt (its id, "-", a digest of the prompt) will be announced.

        A receiver that expects one computes another prompt. It is told so at once instead of waiting for its request.
        """
        with self._link.lock:
            self._complete.add(attempt, str(num_transfers))
            for transfer_id in [name for name in self._early if _attempt_of(name) == attempt]:
                early = self._early.get(transfer_id)
                assert early is not None
                self._drop_early(transfer_id, OTHER_PROMPT, early.peer)
                self._refuse(early.peer, transfer_id, OTHER_PROMPT)

    def stopped(self, transfer_id: str) -> str:
        """Why this transfer is over; empty if it is not, or was sent."""
        with self._link.lock:
            return self._ended.get(transfer_id) or ""

    def publish(self, transfer_id: str, blocks: Sequence[int], num_tokens: int, num_cached_tokens: int) -> None:
        """The request's KV will be (its first `num_cached_tokens` tokens: is) in these blocks, from token 0 on.

        The caller keeps the blocks until `on_end`.
        """
        with self._link.lock:
            outgoing = self._live.get(transfer_id)
            if outgoing is not None:
                self._run(outgoing, outgoing.machine.publish(blocks, num_tokens, num_cached_tokens))

    def extend(self, transfer_id: str, blocks: Sequence[int]) -> None:
        """More blocks of a published request, behind those it has. Kept until `on_end`, too."""
        with self._link.lock:
            outgoing = self._live.get(transfer_id)
            if outgoing is not None:
                outgoing.machine.extend(blocks)

    def withdraw(self, transfer_id: str, timeout_s: float) -> None:
        """Return when nothing reads the published blocks any more, which the caller is about to lose (preemption).

        The request may be published again. If its pushes do not end within `timeout_s` the transfer does: what they
        read from then on only reaches pages that the receiver has given up. Not for the endpoint's own thread.
        """
        deadline_s = self._link.now_s() + timeout_s
        with self._landed:
            outgoing = self._live.get(transfer_id)
            while outgoing is not None:
                self._drop(outgoing)
                if not outgoing.machine.num_in_flight:
                    break
                if not self._landed.wait(deadline_s - self._link.now_s()) and self._link.now_s() >= deadline_s:
                    self._run(outgoing, outgoing.machine.stop("preempted with a push in flight"))
                    return
                outgoing = self._live.get(transfer_id)
            if outgoing is not None:
                outgoing.machine.withdraw()

    def layer_ready(self, transfer_id: str, layer: int, start: int, end: int) -> None:
        """Tokens [start, end) of `layer` are written in the published blocks. Unknown ids are ignored."""
        with self._link.lock:
            outgoing = self._live.get(transfer_id)
            if outgoing is not None:
                emit(LayerWritten(transfer_id=transfer_id, layer=layer, start=start, end=end))
                self._run(outgoing, outgoing.machine.written(layer, start, end))

    def finish(self, transfer_id: str, first_token: int) -> None:
        """Prefill has ended; `first_token` goes to the receiver with the last byte."""
        with self._link.lock:
            outgoing = self._live.get(transfer_id)
            if outgoing is not None:
                outgoing.finished_s = self._link.awake_s()
                self._run(outgoing, outgoing.machine.finish(first_token))

    def cancel(self, transfer_id: str, reason: str) -> None:
        """This worker ends the transfer. Unknown and ended ids are ignored."""
        with self._link.lock:
            outgoing = self._live.get(transfer_id)
            if outgoing is not None:
                self._run(outgoing, outgoing.machine.stop(reason))

    def states(self) -> dict[str, int]:
        """Live transfers by state, and `early`: offers whose request has not come."""
        with self._link.lock:
            counts = {state.value: 0 for state in SenderState}
            for outgoing in self._live.values():
                counts[outgoing.machine.state.value] += 1
            counts["early"] = len(self._early)
            return counts

    def early_nbytes(self) -> int:
        """Held for transfers whose request has not come."""
        with self._link.lock:
            return self._early.nbytes

    def push_nbytes(self) -> dict[str, int]:
        """KV bytes `waiting` for room on their transport, and those `in_flight`."""
        with self._link.lock:
            return self._pushes.nbytes

    # -- for the driver, under its lock ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, body: messages.Body) -> None:
        """A receiver's message about a transfer."""
        match body:
            case messages.Expect(transfer_id=transfer_id):
                self._on_interest(peer, transfer_id, None)
            case messages.Offer(transfer_id=transfer_id):
                self._on_interest(peer, transfer_id, body)
            case messages.Ack(transfer_id=transfer_id) | messages.Stop(transfer_id=transfer_id):
                outgoing = self._live.get(transfer_id)
                if outgoing is not None and outgoing.peer is peer:
                    machine = outgoing.machine
                    self._run(
                        outgoing, machine.stop(body.reason) if isinstance(body, messages.Stop) else machine.ack()
                    )
                elif isinstance(body, messages.Stop) and outgoing is None and self._may_stop_early(peer, transfer_id):
                    self._drop_early(transfer_id, body.reason, peer)  # the request may still come: it is refused then
                    self._link.send(peer, messages.Quiet(transfer_id))
                else:
                    emit(MessageDropped(reason="unknown_transfer"))
                    if isinstance(body, messages.Stop):  # it waits for this, and would fence the peer without it
                        self._link.send(peer, messages.Quiet(transfer_id))
            case _:
                emit(MessageDropped(reason="wrong_direction"))

    def on_batch(self, transport: Transport, done: BatchDone) -> None:
        """Some pushes, or a part of one, have ended."""
        flights = self._pushes.ended(transport, done)
        if not flights:
            return
        self._landed.notify_all()
        machine = flights[0].machine
        outgoing = self._live[machine.transfer_id]
        if done.status is not Status.OK:
            self._lost(flights, f"push {done.status.value}: {done.detail}")
            self._pushes.release()
            return
        self._pushes.release()  # before anything else: the link must not run dry
        outgoing.nbytes += done.nbytes
        peer = flights[0].peer
        peer.lane = peer.lane or transport.lane(done.peer)
        if outgoing.first_landed_s is None:
            outgoing.first_landed_s = done.done_s
        for flight in flights:
            push = flight.push
            if flight.left:
                continue
            if not flight.whole:
                self._run(outgoing, machine.dropped(push.push_id))
                continue
            emit(
                LayerLanded(
                    at_s=done.done_s,
                    transfer_id=machine.transfer_id,
                    layer=push.layer,
                    start=push.start,
                    end=push.end,
                    nbytes=flight.nbytes,
                    transport=peer.lane,
                    submitted_s=flight.submitted_s,
                    asked_s=flight.asked_s,
                )
            )
            if self._is_verified(outgoing, push):
                self._checksum(outgoing, push)
            else:
                self._run(outgoing, machine.landed(push.push_id))

    def on_peer_lost(self, peer: Peer, reason: str) -> None:
        """The session is over: stop its transfers; those with pushes in flight wait for the fence."""
        for transfer_id in list(peer.transfers):
            self._run(self._live[transfer_id], self._live[transfer_id].machine.stop(reason))
        for transfer_id in self._early.of(peer):
            self._drop_early(transfer_id, reason, peer)
        self._leases.forget(peer.key)

    def on_fenced(self, peer: Peer) -> None:
        """The data connection is closed for good."""
        self._landed.notify_all()
        for transfer_id in list(peer.transfers):
            self._run(self._live[transfer_id], self._live[transfer_id].machine.fenced())
        self._pushes.forget(peer)

    def give_up(self, reason: str) -> None:
        """No receiver can come any more: end what waits for one."""
        for outgoing in list(self._live.values()):
            self._run(outgoing, outgoing.machine.stop(reason))

    def on_heard(self, peer: Peer, now: float) -> None:
        """A sign of life."""
        self._leases.heard(peer.key, now)

    def tick(self, now: float) -> None:
        """End what has run out, and what others wait for without need. now: `Link.awake_s`."""
        self._pushes.release()
        if self._short_of_blocks():
            for outgoing in list(self._live.values()):
                finished_s, waiting = outgoing.finished_s, outgoing.machine.state is SenderState.WAITING
                if waiting and finished_s is not None and now - finished_s >= self._offer_s:
                    self._run(outgoing, outgoing.machine.stop("no_offer"))
        for transfer_id, reason in self._leases.expired(now):
            if transfer_id in self._live:
                self._leases.drop(transfer_id)
                outgoing = self._live[transfer_id]
                self._run(outgoing, outgoing.machine.stop(reason if outgoing.peer else "no_receiver"))
            else:
                early = self._early.get(transfer_id)
                self._leases.drop(transfer_id)
                if early is not None:
                    self._drop_early(transfer_id, "no_request", early.peer)
                    self._refuse(early.peer, transfer_id, "no_request")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _refuse(self, peer: Peer, transfer_id: str, reason: str) -> None:
        """Tell a receiver that nothing will be sent; nothing is in flight either."""
        self._link.send(peer, messages.Stop(transfer_id, reason))
        self._link.send(peer, messages.Quiet(transfer_id))
        if reason == OTHER_PROMPT and self._complete.get(_attempt_of(transfer_id)) == "1":
            # The one prompt that is computed here is another one, which nobody will ask for.
            for outgoing in [
                outgoing
                for name, outgoing in self._live.items()
                if outgoing.peer is None and _attempt_of(name) == _attempt_of(transfer_id)
            ]:
                self._run(outgoing, outgoing.machine.stop(OTHER_PROMPT))

    def _on_interest(self, peer: Peer, transfer_id: str, offer: messages.Offer | None) -> None:
        wrong = self._wrong_blocks(peer, offer) if offer else ""
        outgoing = self._live.get(transfer_id)
        if outgoing is not None:
            self._take(outgoing, peer, offer, wrong)
            return
        ended = self._ended.get(transfer_id)
        if ended is not None:
            self._link.send(peer, messages.Stop(transfer_id, ended or "already_sent"))
            self._link.send(peer, messages.Quiet(transfer_id))
        else:
            known = self._early.get(transfer_id) is not None
            other = "" if self._complete.get(_attempt_of(transfer_id)) is None else OTHER_PROMPT
            refusal = wrong or other or self._early.put(transfer_id, peer, offer)
            if refusal:
                self._refuse(peer, transfer_id, refusal)
            elif not known:
                self._leases.grant(transfer_id, self._link.awake_s())

    def _may_stop_early(self, peer: Peer, transfer_id: str) -> bool:
        """Whether this peer may end a transfer whose request has not come: not if another one waits for it."""
        early = self._early.get(transfer_id)
        return self._ended.get(transfer_id) is None and (early is None or early.peer is peer)

    def _drop_early(self, transfer_id: str, reason: str, peer: Peer) -> None:
        self._early.pop(transfer_id)
        self._leases.drop(transfer_id)
        self._ended.add(transfer_id, reason, peer.name)

    def _take(self, outgoing: _Outgoing, peer: Peer, offer: messages.Offer | None, wrong: str = "") -> None:
        """A receiver has shown interest in a transfer that is announced here. wrong: with its offer."""
        machine = outgoing.machine
        if outgoing.peer is None:
            outgoing.peer = peer
            peer.transfers.add(machine.transfer_id)
            self._leases.assign(machine.transfer_id, peer.key, self._link.awake_s())
            self._link.defer(outgoing.on_receiver)
        elif outgoing.peer is not peer:
            self._refuse(peer, machine.transfer_id, "taken_by_another_receiver")
            return
        if offer is not None:
            self._run(outgoing, machine.stop(wrong) if wrong else machine.offer(offer))

    @staticmethod
    def _wrong_blocks(peer: Peer, offer: messages.Offer) -> str:
        """Why this offer cannot be written to; empty if it can. What a peer sends is checked before it is used."""
        assert peer.identity is not None
        layout = peer.identity.layout
        if not 0 <= offer.start <= offer.end:
            return f"offer of tokens [{offer.start}, {offer.end})"
        needed = layout.blocks_for(offer.end) - offer.start // layout.block_tokens if offer.end > offer.start else 0
        if len(offer.blocks) != needed:
            return f"offer of {len(offer.blocks)} blocks, tokens [{offer.start}, {offer.end}) take {needed}"
        if needed and not 0 <= min(offer.blocks) <= max(offer.blocks) < layout.num_blocks:
            return f"offer names a block outside 0..{layout.num_blocks - 1}"
        if len(set(offer.blocks)) != len(offer.blocks):
            return "offer names a block twice"
        return ""

    def _run(self, outgoing: _Outgoing, actions: list[Action]) -> None:
        pushes: list[Push] = []
        for action in actions:
            match action:
                case Push():
                    pushes.append(action)
                case Send(body=body):
                    if isinstance(body, messages.Done) and outgoing.checksums:
                        body = replace(body, checksums=tuple(outgoing.checksums))
                    if outgoing.peer is not None:
                        self._link.send(outgoing.peer, body)
                case Fail(reason=reason):
                    on_failed = outgoing.on_failed
                    self._link.defer(lambda on_failed=on_failed, reason=reason: on_failed(reason))  # type: ignore[misc]
                    self._drop(outgoing)
                case End(reason=reason):
                    self._end(outgoing, reason)
                case other:
                    raise AssertionError(f"{outgoing.machine.transfer_id}: a sender does not {other}")
        if pushes:
            assert outgoing.peer is not None
            self._pushes.add(outgoing.peer, outgoing.machine, pushes)  # together: small ones travel in one part

    def _drop(self, outgoing: _Outgoing) -> None:
        """Take back what this transfer has waiting."""
        for push_id in self._pushes.drop(outgoing.machine.transfer_id):
            self._run(outgoing, outgoing.machine.dropped(push_id))

    def _lost(self, flights: Sequence[Flight], reason: str) -> None:
        machine = flights[0].machine
        outgoing = self._live[machine.transfer_id]
        for flight in flights:
            self._run(outgoing, machine.lost(flight.push.push_id, reason))

    def _on_refused(self, flights: Sequence[Flight], error: Exception) -> None:
        """Pushes cannot be handed to their transport: that ends the session."""
        self._lost(flights, f"push refused: {error}")
        self._link.lose(flights[0].peer, str(error))

    def _on_impossible(self, flights: Sequence[Flight], error: Exception) -> None:
        """There is no way to put these bytes where the offer says: that ends the transfer."""
        machine = flights[0].machine
        outgoing = self._live[machine.transfer_id]
        self._run(outgoing, machine.stop(f"push impossible: {error}"))
        for push_id in {flight.push.push_id for flight in flights if not flight.left}:
            self._run(outgoing, machine.dropped(push_id))

    def _is_verified(self, outgoing: _Outgoing, push: Push) -> bool:
        """Whether the offer asked for a checksum of this push."""
        machine = outgoing.machine
        if machine.offered is None or machine.blocks is None or self._link.checksums is None:
            return False
        return machine.offered.verify == "all" or (
            machine.offered.verify == "sample" and (push.push_id + zlib.crc32(machine.transfer_id.encode())) % 8 == 0
        )

    def _checksum(self, outgoing: _Outgoing, push: Push) -> None:
        """Of what has just landed, in another thread. Until it is there the push counts as in flight: its blocks are
        read, and *done* waits for it."""
        machine, checksums = outgoing.machine, self._link.checksums
        assert machine.blocks is not None
        assert checksums is not None
        blocks = machine.blocks[push.start // self._link.layout.block_tokens :]

        def landed(value: int) -> None:
            if self._live.get(machine.transfer_id) is outgoing:
                outgoing.checksums.append(messages.Checksum(push.layer, push.start, push.end, value))
                self._landed.notify_all()
                self._run(outgoing, machine.landed(push.push_id))

        def failed(reason: str) -> None:
            if self._live.get(machine.transfer_id) is outgoing:
                self._run(outgoing, machine.stop(reason))
                self._landed.notify_all()
                self._run(outgoing, machine.landed(push.push_id))

        self._link.hashing.submit(lambda: checksums.of(push.layer, blocks, push.start, push.end), landed, failed)

    def _end(self, outgoing: _Outgoing, reason: str) -> None:
        machine, peer = outgoing.machine, outgoing.peer
        del self._live[machine.transfer_id]
        self._pushes.drop(machine.transfer_id)
        self._leases.drop(machine.transfer_id)
        self._ended.add(machine.transfer_id, reason, peer.name if peer else "")
        if peer is not None:
            peer.transfers.discard(machine.transfer_id)
        emit(
            TransferEnded(
                transfer_id=machine.transfer_id,
                side="sender",
                peer=peer.name if peer else "",
                state=machine.state.name,
                reason=reason,
                nbytes=outgoing.nbytes,
                transport=peer.lane if peer else "",
                started_s=outgoing.started_s,
                first_landed_s=outgoing.first_landed_s,
            )
        )
        self._link.defer(outgoing.on_end)


def _attempt_of(transfer_id: str) -> str:
    """The attempt of a transfer that is one of several: its id without the digest."""
    return transfer_id.rpartition("-")[0]
