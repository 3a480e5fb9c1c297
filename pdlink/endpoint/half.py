"""`Half`: all that a worker sends, or receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pdlink.endpoint.ended import EndedTransfers
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

AnyTransfer = TypeVar("AnyTransfer", bound="Transfer")


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
