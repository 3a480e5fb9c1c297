"""Planted bugs: each is one that somebody made, or that is easy to make, and the model must find it.

A mutant replaces one method of the product, or two, while it is planted.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from pdlink.endpoint import data_path, liveness
from pdlink.endpoint.data_path import DataPath
from pdlink.endpoint.driver import Endpoint, Reports
from pdlink.endpoint.early import Early, EarlyInterest
from pdlink.endpoint.half import EndedTransfers, Transfer
from pdlink.endpoint.order import Order
from pdlink.endpoint.peer import Peer, PeerState
from pdlink.endpoint.receiver import Incoming, Receiver
from pdlink.endpoint.sender import Sender
from pdlink.endpoint.sessions import Sessions
from pdlink.kv.layout import KVLayout
from pdlink.node.port import EnginePort
from pdlink.protocol import messages
from pdlink.protocol.actions import End
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.sending import Lease, Sending
from pdlink.protocol.states import RECEIVER, ReceiverEvent, ReceiverState, SenderState
from pdlink.reasons import Code, Reason
from pdlink.transport.base import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Change = tuple[Any, str, "Callable[[Any], Callable[..., Any]]"]
"""Class, method, and what makes the faulty method out of the right one."""


def _free_at_stop(right: Any) -> Callable[..., Any]:
    def stop(self: Receiving, *args: Any, **named: Any) -> Any:
        actions = right(self, *args, **named)
        if self.state is ReceiverState.DRAINING:
            self.state = RECEIVER[self.state, ReceiverEvent.QUIET]
            actions.append(End(self.reason))
        return actions

    return stop


def _idle_with_transfers(_right: Any) -> Callable[..., Any]:
    def idle_for_s(peer: Peer, awake_s: float) -> float:
        return awake_s - peer.since_s if peer.dialed else 0.0

    return idle_for_s


def _quiet_at_stop(right: Any) -> Callable[..., Any]:
    def _quiet(self: Sending) -> Any:
        self._in_flight.clear()
        return right(self)

    return _quiet


def _landed_if_known(right: Any) -> Callable[..., Any]:
    return lambda self, push_id: right(self, push_id) if push_id in self._in_flight else []


def _announced_with_any_push(right: Any) -> Callable[..., Any]:
    def landed(self: Sending, push_id: int) -> Any:
        for layer in self._in_flight[push_id].layers:
            self._flying[layer] = 1
        return right(self, push_id)

    return landed


def _announced_by_chunk(right: Any) -> Callable[..., Any]:
    def landed(self: Sending, push_id: int) -> Any:
        pushed, self._pushed = self._pushed, [self._needed[group][1] for group in self._group_of]
        try:
            return right(self, push_id)
        finally:
            self._pushed = pushed

    return landed


def _finish_without_counting_layers(_right: Any) -> Callable[..., Any]:
    def finish(self: Sending, first_token: int) -> Any:
        if self.state not in (SenderState.WAITING, SenderState.WRITING):
            return []
        self._first_token = first_token
        return self._complete()

    return finish


def _done_counts_tokens(right: Any) -> Callable[..., Any]:
    def _complete(self: Sending) -> Any:
        pushed, self._pushed = self._pushed, [max(self._pushed)] * self._num_layers
        try:
            return right(self)
        finally:
            self._pushed = pushed

    return _complete


def _done_when_pushed(right: Any) -> Callable[..., Any]:
    def _complete(self: Sending) -> Any:
        flying, self._in_flight = self._in_flight, {}
        try:
            return right(self)
        finally:
            self._in_flight = flying

    return _complete


def _lost_is_quiet(_right: Any) -> Callable[..., Any]:
    def lost(self: Sending, push_id: int, reason: Reason) -> Any:
        self._in_flight.pop(push_id, None)
        return self._quiet() if self.state is SenderState.DRAINING else self.stop(reason)

    return lost


def _stop_at_first_live(right: Any) -> Callable[..., Any]:
    def tick(self: Sender, now: float) -> None:
        looked, every = True, Lease.ended

        def ended(lease: Lease, now: float, heard_s: float | None) -> Code | None:
            nonlocal looked
            reason = every(lease, now, heard_s) if looked else None
            looked = reason is not None
            return reason

        with patch.object(Lease, "ended", ended):
            right(self, now)

    return tick


def _no_offer(_right: Any) -> Any:
    return property(lambda _self: None)


def _no_reply_to_late_offers(right: Any) -> Callable[..., Any]:
    def _on_interest(self: Sender, peer: Any, transfer_id: str, offer: Any) -> None:
        if transfer_id in self._transfers or not _has_failed(self, transfer_id):
            right(self, peer, transfer_id, offer)

    return _on_interest


def _without_stop(right: Any) -> Callable[..., Any]:
    return lambda self, reason: [
        action for action in right(self, reason) if not isinstance(getattr(action, "body", None), messages.Stop)
    ]


def _without_the_fence(right: Any) -> Callable[..., Any]:
    def on_peer_lost(self: Any, peer: Any, reason: Reason) -> None:
        right(self, peer, reason)
        self.on_fenced(peer)

    return on_peer_lost


def _any_session_for(kinds: tuple[type, ...]) -> Callable[[Any], Callable[..., Any]]:
    return lambda right: (
        lambda self, envelope, epoch: isinstance(envelope.bodies[-1], kinds) or right(self, envelope, epoch)
    )


def _in_spite_of_gaps(right: Any) -> Callable[..., Any]:
    def out_of_turn(self: Peer, envelope: messages.Envelope) -> Any:
        if envelope.number < self.num_taken:
            return right(self, envelope)
        self.num_taken = envelope.number + 1
        return envelope.bodies

    return out_of_turn


def _again_and_again(right: Any) -> Callable[..., Any]:
    return lambda self, envelope: envelope.bodies if envelope.number < self.num_taken else right(self, envelope)


def _has_failed(half: Any, transfer_id: str) -> bool:
    ended = half._ended.get(transfer_id)
    return ended is not None and ended.reason is not None


def _take_it_again(right: Any) -> Callable[..., Any]:
    def announce(self: Sender, transfer: Any) -> None:
        if _has_failed(self, transfer.transfer_id):
            self._ended._forget(transfer.transfer_id)
        old = self._transfers.pop(transfer.transfer_id, None)
        if old is not None and old.peer is not None:
            del old.peer.transfers[transfer.transfer_id]
        right(self, transfer)

    return announce


def _ignore_failed_peers(right: Any) -> Callable[..., Any]:
    return lambda self, transport, occurrence: (
        None if isinstance(occurrence, PeerFailed) else right(self, transport, occurrence)
    )


def _nothing(_right: Any) -> Callable[..., Any]:
    return lambda *_args: None


def _empty(_right: Any) -> Callable[..., Any]:
    return lambda *_args: []


def _hold_given_back_too(right: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> None:
        transfer: Any = self._outgoing.get(args[0]) if isinstance(self, EnginePort) else self
        right(self, *args)
        if transfer is not None:
            held, transfer._held = transfer._held, []
            transfer._half.pool.give_back(held)

    return method


def _no_silence(right: Any) -> Callable[..., Any]:
    def _tick(self: Endpoint, now: float) -> None:
        for peer in self.peers():
            peer.heard_s = now
        right(self, now)

    return _tick


def _no_quiet_for_ended(right: Any) -> Callable[..., Any]:
    def _on_stop(self: Sender, peer: Any, transfer_id: str, reason: str) -> None:
        if not _has_failed(self, transfer_id):
            right(self, peer, transfer_id, reason)

    return _on_stop


def _refuse_ended_without_quiet(right: Any) -> Callable[..., Any]:
    def _refuse(self: Sender, peer: Any, transfer_id: str, reason: str) -> None:
        if not _has_failed(self, transfer_id):
            right(self, peer, transfer_id, reason)
        else:
            self._sessions.send(peer, messages.Stop(transfer_id, reason))

    return _refuse


def _close_what_was_never_opened(right: Any) -> Callable[..., Any]:
    def lose(self: Sessions, peer: Any, reason: Reason) -> None:
        if peer.state is not PeerState.LOST:
            peer.opened = peer.transport is not None
        right(self, peer, reason)

    return lose


def _from_the_first_block(right: Any) -> Callable[..., Any]:
    def plan_of(template: Any, push: Any) -> Any:
        return right(template, replace(push, first=push.start))

    return plan_of


def _taken_back_in_name_only(_right: Any) -> Callable[..., Any]:
    def take_back(self: DataPath, transfer: Any) -> None:
        for batch in transfer.backlog.entries if transfer.backlog is not None else ():
            self._sender.act(transfer, transfer.machine.dropped(batch.push.push_id))

    return take_back


def _only_the_first_group(right: Any) -> Callable[..., Any]:
    return lambda self, blocks: right(self, blocks[:1])


def _state_with_every_chunk(right: Any) -> Callable[..., Any]:
    def _push_ready(self: Sending, layers: Any) -> Any:
        for layer, group in enumerate(self._groups.group_of):
            if self._groups.layouts[group].state and self.offered is not None and self._written[layer]:
                self._pushed[layer] = min(self._pushed[layer], self._written[layer] - 1)
        return right(self, layers)

    return _push_ready


def _a_token_less(right: Any) -> Callable[..., Any]:
    def needed(self: KVLayout, start: int, end: int) -> Any:
        first, last = right(self, start, end)
        return (min(first + 1, last), last) if self.window and first > start else (first, last)

    return needed


@dataclass(frozen=True)
class Mutant:
    """A planted bug, and where to look for it."""

    profile: str
    changes: tuple[Change, ...]


_PLANTED: tuple[tuple[Any, ...], ...] = (
    ("blocks freed at stop", "gentle", (Receiving, "stop", _free_at_stop)),
    (
        "quiet at stop, pushes in flight",
        "gentle",
        (Sending, "_quiet", _quiet_at_stop),
        (Sending, "landed", _landed_if_known),
    ),
    (
        "done counts tokens, not layers",
        "faulty",
        (Sending, "finish", _finish_without_counting_layers),
        (Sending, "_complete", _done_counts_tokens),
    ),
    ("done before visible", "gentle", (Sending, "_complete", _done_when_pushed)),
    (
        "lost push counts as ended",
        "faulty",
        (Sending, "lost", _lost_is_quiet),
        (Sending, "landed", _landed_if_known),
    ),
    ("layer announced while pushes of it are in flight", "gentle", (Sending, "landed", _announced_with_any_push)),
    ("layer announced before all of it is pushed", "gentle", (Sending, "landed", _announced_by_chunk)),
    ("reaper stops at the first live lease", "lossy", (Sender, "tick", _stop_at_first_live)),
    ("no reply to a late offer", "gentle", (Sender, "_on_interest", _no_reply_to_late_offers)),
    ("no stop on failure", "gentle", (Sending, "stop", _without_stop)),
    (
        "receiver does not wait for the fence",
        "faulty",
        (Receiver, "on_peer_lost", _without_the_fence),
    ),
    ("sender does not wait for the fence", "faulty", (Sender, "on_peer_lost", _without_the_fence)),
    ("no check of epoch and session", "harsh", (Peer, "is_of", _any_session_for((object,)))),
    ("quiet of another life accepted", "harsh", (Peer, "is_of", _any_session_for((messages.Quiet,)))),
    ("no gap check", "lossy", (Peer, "out_of_turn", _in_spite_of_gaps)),
    ("no repeat check", "lossy", (Peer, "out_of_turn", _again_and_again)),
    ("transfer id taken twice by the sender", "faulty", (Sender, "announce", _take_it_again)),
    ("transfer id forgotten when it ends", "faulty", (EndedTransfers, "add", _nothing)),
    ("offer that came before its request is lost", "gentle", (Early, "offer", _no_offer)),
    ("early offers never expire", "gentle", (EarlyInterest, "older_than", _empty)),
    ("failed data connection ignored", "faulty", (Reports, "_on_peer", _ignore_failed_peers)),
    ("lost peer not told to the sender", "faulty", (Sender, "on_peer_lost", _nothing)),
    ("lost peer not told to the receiver", "faulty", (Receiver, "on_peer_lost", _nothing)),
    ("sessions with transfers are idle", "gentle", (liveness, "idle_for_s", _idle_with_transfers)),
    ("silence is not death", "faulty", (Endpoint, "_tick", _no_silence)),
    ("never fenced when quiet does not come", "faulty", (Receiving, "tick", _empty)),
    ("decode gives back at failure", "faulty", (Incoming, "on_failed", _hold_given_back_too)),
    ("prefill gives back at its end", "gentle", (EnginePort, "ended", _hold_given_back_too)),
    ("chunks placed by count, not by position", "gentle", (data_path, "plan_of", _from_the_first_block)),
    ("push taken back is submitted after stop", "gentle", (DataPath, "take_back", _taken_back_in_name_only)),
    ("push taken back is waited for", "gentle", (Sending, "dropped", _empty)),
    ("credits of what has landed stay taken", "gentle", (Order, "ended", _nothing)),
    ("blocks of groups after the first are not held", "faulty", (Transfer, "_hold", _only_the_first_group)),
    ("state pushed before the last chunk", "gentle", (Sending, "_push_ready", _state_with_every_chunk)),
    ("window lacks its first token", "gentle", (KVLayout, "needed", _a_token_less)),
    # These were in the product until the model found them.
    (
        "no quiet for what is not live",
        "gentle",
        (Sender, "_on_stop", _no_quiet_for_ended),
        (Sender, "_refuse", _refuse_ended_without_quiet),
    ),
    ("waits for the fence of what was never opened", "faulty", (Sessions, "lose", _close_what_was_never_opened)),
)
MUTANTS = {name: Mutant(profile, tuple(changes)) for name, profile, *changes in _PLANTED}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with this bug in it."""
    with ExitStack() as stack:
        for owner, method, make in MUTANTS[name].changes:
            stack.enter_context(patch.object(owner, method, make(getattr(owner, method))))
        yield
