"""`Half`: all that a worker sends, or receives, and what has ended of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec.structs import replace

from pdlink.errors import InvalidRequest, TransferFailed

if TYPE_CHECKING:
    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.sessions import Sessions
    from pdlink.endpoint.transfer import Transfer
    from pdlink.endpoint.verifying import Verifier
    from pdlink.endpoint.work import Work
    from pdlink.kv.groups import KVGroups
    from pdlink.memory.blocks import BlockPool
    from pdlink.protocol.deadlines import Deadlines
    from pdlink.reasons import Reason

AnyTransfer = TypeVar("AnyTransfer", bound="Transfer")

_MAX_REASON = 200
"""Characters kept of a reason, which may be a peer's words."""


@dataclass(frozen=True, slots=True)
class Common:
    """What both halves of an endpoint work with."""

    groups: KVGroups
    work: Work
    clock: Clock
    sessions: Sessions
    verifier: Verifier | None
    timeouts: Deadlines
    pool: BlockPool | None
    """Counts the blocks of transfers; None leaves that to the caller."""


class Half(Generic[AnyTransfer]):
    """What the two halves of an endpoint, `Sender` and `Receiver`, have in common."""

    def __init__(self, common: Common) -> None:
        self.groups, self.pool, self.clock, self.lock = common.groups, common.pool, common.clock, common.work.lock
        self.timeouts = common.timeouts
        self.live: set[AnyTransfer] = set()
        """Transfers that are not `released`."""
        self._work, self._sessions, self._verifier = common.work, common.sessions, common.verifier
        self._transfers: dict[str, AnyTransfer] = {}
        """Transfers whose machine has not ended, by id."""
        self._ended = EndedTransfers()

    def _of(self, peer: Peer) -> list[AnyTransfer]:
        """Live transfers of a session."""
        return [self._transfers[transfer_id] for transfer_id in peer.transfers]

    def _check_unused(self, transfer_id: str) -> None:
        """Raises TransferFailed if the other side, or the end of its session, has stopped this transfer before its
        request came here; InvalidRequest if the id was used before."""
        reason = self._ended.get(transfer_id)
        if reason is not None:
            raise TransferFailed(f"transfer {transfer_id} was stopped before it began: {reason}", reason)
        if transfer_id in self._ended or transfer_id in self._transfers:
            raise InvalidRequest(f"transfer_id {transfer_id!r} was used before; every attempt needs a new one")


class EndedTransfers:
    """Reasons of ended transfers by id, to recognise late or repeated messages.

    Bounded, in all and for each peer: the oldest are forgotten. A peer that ends many transfers pushes out its own.
    """

    def __init__(self, capacity: int = 40_000, share: int = 5_000) -> None:
        """share: the most ids of one peer."""
        self._entries: OrderedDict[str, tuple[Reason | None, str]] = OrderedDict()
        """Reason and peer by id, the oldest first."""
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._capacity, self._share = capacity, share

    def add(self, transfer_id: str, reason: Reason | None, peer: str = "") -> None:
        """reason: None for success. peer: its name, which outlives sessions; empty for this worker itself."""
        if transfer_id in self._entries:
            self._forget(transfer_id)
        if len(self._of.get(peer, ())) >= self._share:
            self._forget(next(iter(self._of[peer])))
        elif len(self._entries) >= self._capacity:
            self._forget(next(iter(self._entries)))
        if reason is not None and len(reason.words) > _MAX_REASON:
            reason = replace(reason, words=reason.words[:_MAX_REASON])
        self._entries[transfer_id] = (reason, peer)
        of_peer = self._of.get(peer)  # after the above, which may have forgotten its last one
        if of_peer is None:
            of_peer = self._of[peer] = OrderedDict()
        of_peer[transfer_id] = None

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._entries

    def get(self, transfer_id: str) -> Reason | None:
        """Why it failed; None if it did not, or the id is not known."""
        entry = self._entries.get(transfer_id)
        return entry[0] if entry is not None else None

    def _forget(self, transfer_id: str) -> None:
        peer = self._entries.pop(transfer_id)[1]
        of_peer = self._of[peer]
        del of_peer[transfer_id]
        if not of_peer:
            del self._of[peer]
