"""`Sender`: the prefill side of transfers: which receiver is interested in which, and how each ends."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdlink.endpoint.data_path import DataPath, SenderPort
from pdlink.endpoint.early import EarlyInterest
from pdlink.endpoint.live import LiveTransfer
from pdlink.events import MessageDropped, TransferEnded, emit, listeners
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, End, Fail, Push, Send
from pdlink.protocol.sending import Lease
from pdlink.protocol.states import SenderState
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.endpoint.data_path import Outgoing
    from pdlink.endpoint.half import Common
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.sharing import Sharing

_MAX_ATTEMPTS = 10_000
"""Attempts remembered by `complete`; the oldest are forgotten first."""


class Sender(SenderPort):
    """Every transfer this worker sends. Public methods may be called from any thread."""

    def __init__(
        self, common: Common, batch_timeout_s: float, sharing: Sharing, short_of_blocks: Callable[[], bool]
    ) -> None:
        """short_of_blocks: whether requests of this worker wait for blocks that transfers hold."""
        super().__init__(common)
        self._short_of_blocks = short_of_blocks
        self.cut_at_nbytes = sharing.push_nbytes
        self.data_path = DataPath(self, common, batch_timeout_s, sharing)
        self._early = EarlyInterest()
        self._complete: OrderedDict[str, int] = OrderedDict()
        """Number of transfers, by attempt, once all of an attempt are announced."""

    # -- for the worker ----------------------------------------------------------------------------------------------

    def announce(self, transfer: Outgoing) -> None:
        """The request of this transfer is here; its KV will be published.

        Raises InvalidRequest for a used id, TransferFailed if the transfer was stopped already.
        """
        transfer_id = transfer.transfer_id
        with self.lock:
            self._check_unused(transfer_id)
            now, timeouts = self.clock.awake_s(), self.timeouts
            transfer.lease = Lease(now + timeouts.request_s, min(timeouts.other_leg_s, timeouts.lease_s), now)
            self._transfers[transfer_id] = transfer
            self.live.add(transfer)
            early = self._early.pop(transfer_id) if self._early.nbytes else None
            if early is not None:
                self._take(transfer, early.peer, early.offer)

    def complete(self, attempt: str, num_transfers: int) -> None:
        """All transfers of this attempt (ids: attempt, "-", a digest of the prompt) are announced.

        Receivers of any other id of it compute another prompt. They are refused at once, not when a lease ends.
        """
        with self.lock:
            self._complete[attempt] = num_transfers
            if len(self._complete) > _MAX_ATTEMPTS:
                self._complete.popitem(last=False)
            for transfer_id in [name for name in self._early if _attempt_of(name) == attempt]:
                peer = self._end_early(transfer_id, Reason(Code.OTHER_PROMPT))
                self._refuse_other_prompt(peer, transfer_id)

    def stopped(self, transfer_id: str) -> Reason | None:
        """Why this transfer failed; None if it did not."""
        with self.lock:
            ended = self._ended.get(transfer_id)
            return ended.reason if ended is not None else None

    def cancel(self, transfer_id: str, reason: Reason) -> None:
        """This worker ends the transfer. Unknown and ended ids are ignored."""
        with self.lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.cancel(reason)

    def wait_idle(self, transfer: Outgoing, timeout_s: float) -> bool:
        """Wait until nothing reads the blocks of this transfer any more; if that takes longer, end it: False.

        Under the lock, once.
        """
        deadline_s = self.clock.now_s() + timeout_s
        while True:
            self.data_path.take_back(transfer)
            if not transfer.machine.num_in_flight:
                return True
            left_s = deadline_s - self.clock.now_s()
            if not self.data_path.wait(left_s) and self.clock.now_s() >= deadline_s:
                self.act(transfer, transfer.machine.stop(Reason(Code.PREEMPTED, "a push is in flight")))
                return False

    def states(self) -> dict[str, int]:
        """Live transfers by state, and `early`: receivers' interest in requests that have not come."""
        with self.lock:
            counts = {state.value: 0 for state in SenderState}
            for transfer in self._transfers.values():
                counts[transfer.machine.state.value] += 1
            counts["early"] = len(self._early)
            return counts

    def transfers(self, most: int) -> list[LiveTransfer]:
        """Up to so many live transfers, the oldest first. Costs nothing until it is asked."""
        with self.lock:
            handed, now_s = self.data_path.handed(), self.clock.now_s()
            return [
                LiveTransfer(
                    transfer_id=transfer.transfer_id,
                    side="sender",
                    state=transfer.machine.state.value,
                    peer=transfer.peer.name if transfer.peer else "",
                    lane=transfer.peer.lane if transfer.peer else "",
                    num_tokens=transfer.machine.num_tokens,
                    nbytes=transfer.nbytes,
                    age_s=now_s - transfer.started_s,
                    layers=transfer.machine.stages(handed.get(transfer.transfer_id, ())),
                )
                for transfer in itertools.islice(self._transfers.values(), most)
            ]

    def early_nbytes(self) -> int:
        """Bytes held for transfers whose request has not come."""
        with self.lock:
            return self._early.nbytes

    def push_nbytes(self) -> dict[str, int]:
        """KV bytes `waiting` for room on their transport, and those `in_flight`."""
        with self.lock:
            return self.data_path.nbytes()

    # -- for the driver, under its lock ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, body: messages.OfTransfer) -> None:
        """A receiver's message about a transfer."""
        match body:
            case messages.Expect(transfer_id=transfer_id):
                self._on_interest(peer, transfer_id, None)
            case messages.Offer(transfer_id=transfer_id):
                self._on_interest(peer, transfer_id, body)
            case messages.Ack(transfer_id=transfer_id):
                transfer = self._transfers.get(transfer_id)
                if transfer is not None and transfer.peer is peer:
                    self.act(transfer, transfer.machine.ack())
                else:
                    emit(MessageDropped(reason="unknown_transfer"))
            case messages.Stop(transfer_id=transfer_id, reason=reason):
                self._on_stop(peer, transfer_id, Reason.of(reason))
            case _:
                emit(MessageDropped(reason="wrong_direction"))

    def on_peer_lost(self, peer: Peer, reason: Reason) -> None:
        """The session is over: stop its transfers; those with pushes in flight wait for the fence."""
        for transfer in self._of(peer):
            self.act(transfer, transfer.machine.stop(reason))
        for transfer_id in list(peer.early):
            self._end_early(transfer_id, reason)

    def on_fenced(self, peer: Peer) -> None:
        """The data connection is closed; nothing is in flight to this peer."""
        self.data_path.notify()
        for transfer in self._of(peer):
            self.act(transfer, transfer.machine.fenced())

    @property
    def begun(self) -> list[Outgoing]:
        """Transfers that have not ended."""
        return list(self._transfers.values())

    def give_up(self, reason: Reason, transfers: Iterable[Outgoing]) -> None:
        """No receiver can come for these any more: end them."""
        for transfer in transfers:
            self.act(transfer, transfer.machine.stop(reason))

    def tick(self, now: float) -> None:
        """End transfers whose time is over, or that hold blocks others wait for. now: `Clock.awake_s`."""
        self.data_path.release()
        short_of_blocks = self._short_of_blocks()
        for transfer in list(self._transfers.values()):
            machine, peer, finished_s = transfer.machine, transfer.peer, transfer.finished_s
            over = transfer.lease.ended(now, peer.heard_s if peer is not None else None)
            if over is not None:
                self.act(transfer, machine.stop(Reason(over if peer is not None else Code.NO_RECEIVER)))
            elif (
                short_of_blocks
                and machine.state is SenderState.WAITING
                and finished_s is not None
                and now - finished_s >= self.timeouts.offer_s
            ):
                self.act(transfer, machine.stop(Reason(Code.NO_OFFER)))
        for transfer_id in self._early.older_than(now - min(self.timeouts.other_leg_s, self.timeouts.lease_s)):
            no_request = Reason(Code.NO_REQUEST)
            self._refuse(self._end_early(transfer_id, no_request), transfer_id, no_request)

    # -- inside: interest of receivers -------------------------------------------------------------------------------

    def _on_interest(self, peer: Peer, transfer_id: str, offer: messages.Offer | None) -> None:
        words = peer.groups.problem(offer.blocks, offer.start, offer.end) if offer is not None else ""
        problem = Reason(Code.BAD_OFFER, f"offer {words}") if words else None
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._take(transfer, peer, offer, problem)
        elif (ended := self._ended.get(transfer_id)) is not None:
            self._refuse(peer, transfer_id, ended.reason or Reason(Code.ALREADY_SENT))
        elif problem is None and _attempt_of(transfer_id) in self._complete:
            self._refuse_other_prompt(peer, transfer_id)
        else:
            code = None if problem else self._early.put(transfer_id, peer, offer, self.clock.awake_s())
            refusal = problem if code is None else Reason(code)
            if refusal is not None:
                self._refuse(peer, transfer_id, refusal)

    def _take(
        self, transfer: Outgoing, peer: Peer, offer: messages.Offer | None, problem: Reason | None = None
    ) -> None:
        """A receiver shows interest in an announced transfer. problem: why its offer is invalid."""
        machine = transfer.machine
        if transfer.peer is None:
            transfer.peer = peer
            peer.transfers[machine.transfer_id] = None
            now = self.clock.awake_s()  # from here on its signs of life renew the lease
            transfer.lease = transfer.lease._replace(length_s=self.timeouts.lease_s, from_s=now)
            self._work.defer(transfer.accepted.set)
        elif transfer.peer is not peer:
            self._refuse(peer, machine.transfer_id, Reason(Code.TAKEN_BY_ANOTHER_RECEIVER))
            return
        if offer is not None:
            self.act(transfer, machine.stop(problem) if problem else machine.offer(offer, peer.groups))

    def _on_stop(self, peer: Peer, transfer_id: str, reason: Reason) -> None:
        """A receiver ends a transfer. Always answer *quiet*, also for an unknown id, or it fences us."""
        transfer, early = self._transfers.get(transfer_id), self._early.get(transfer_id)
        if transfer is not None and transfer.peer is peer:
            self.act(transfer, transfer.machine.stop(reason))
            return
        unknown = transfer_id not in self._transfers and transfer_id not in self._ended
        if unknown and (early is None or early.peer is peer):
            self._early.pop(transfer_id)
            self._ended.add(transfer_id, reason, peer.name)  # refuses its request if it comes later
        else:
            emit(MessageDropped(reason="unknown_transfer"))
        self._sessions.send(peer, messages.Quiet(transfer_id))

    def _end_early(self, transfer_id: str, reason: Reason) -> Peer:
        """Forget a receiver's interest; returns the receiver."""
        early = self._early.pop(transfer_id)
        assert early is not None
        self._ended.add(transfer_id, reason, early.peer.name)
        return early.peer

    def _refuse(self, peer: Peer, transfer_id: str, reason: Reason) -> None:
        """Send *stop* and *quiet*: nothing is in flight, nor will be."""
        self._sessions.send(peer, messages.Stop.because(transfer_id, reason))
        self._sessions.send(peer, messages.Quiet(transfer_id))

    def _refuse_other_prompt(self, peer: Peer, transfer_id: str) -> None:
        """A receiver has another prompt than this attempt. If the attempt has only one, end its transfer, too."""
        self._refuse(peer, transfer_id, Reason(Code.OTHER_PROMPT))
        attempt = _attempt_of(transfer_id)
        if self._complete.get(attempt) == 1:
            for transfer in list(self._transfers.values()):
                if transfer.peer is None and _attempt_of(transfer.transfer_id) == attempt:
                    self.act(transfer, transfer.machine.stop(Reason(Code.OTHER_PROMPT)))

    # -- inside: actions ---------------------------------------------------------------------------------------------

    def act(self, transfer: Outgoing, actions: Sequence[Action]) -> None:
        """Do what its machine has decided. Under the lock."""
        if not actions:  # as after most of what happens
            return
        pushes: list[Push] = []
        for action in actions:
            match action:
                case Push():
                    pushes.append(action)
                case Send(body=body):
                    if transfer.checksums and isinstance(body, messages.Done):
                        body = replace(body, checksums=tuple(transfer.checksums))
                    if transfer.peer is not None:
                        self._sessions.send(transfer.peer, body)
                case Fail(reason=reason):
                    self._work.defer(partial(transfer.on_failed, reason))
                    self.data_path.take_back(transfer)
                case End(reason=reason):
                    self._end(transfer, reason)
                case other:
                    raise AssertionError(f"{transfer.transfer_id}: a sender does not {other}")
        if pushes:
            self.data_path.push(transfer, pushes)

    def _end(self, transfer: Outgoing, reason: Reason | None) -> None:
        machine, peer = transfer.machine, transfer.peer
        del self._transfers[transfer.transfer_id]
        if peer is not None:
            del peer.transfers[transfer.transfer_id]
        self._ended.add(transfer.transfer_id, reason, peer.name if peer else "")
        if listeners:
            written_s, landed_s = transfer.written_s, transfer.last_landed_s
            exposed_s = None if written_s is None or landed_s is None else max(0.0, landed_s - written_s)
            emit(
                TransferEnded(
                    transfer_id=transfer.transfer_id,
                    side="sender",
                    peer=peer.name if peer else "",
                    state=machine.state.name,
                    reason=str(reason or ""),
                    nbytes=transfer.nbytes,
                    transport=peer.lane if peer else "",
                    started_s=transfer.started_s,
                    first_landed_s=transfer.first_landed_s,
                    exposed_s=exposed_s,
                )
            )
        self._work.defer(transfer.on_end)


def _attempt_of(transfer_id: str) -> str:
    """The attempt of a transfer: its id without the digest."""
    return transfer_id.rpartition("-")[0]
