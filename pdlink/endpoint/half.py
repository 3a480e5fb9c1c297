"""`Half`: all that a worker sends, or receives, and what has ended of it. `Transfer`: one of these."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from msgspec.structs import replace

from pdlink.endpoint.signals import Signal
from pdlink.errors import DeadlineExceeded, InvalidRequest, TransferFailed
from pdlink.reasons import ABORTED, Code, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.marks import Marks
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.sessions import Sessions
    from pdlink.endpoint.verifying import Verifier
    from pdlink.endpoint.work import Work
    from pdlink.kv.groups import BlocksByGroup, KVGroups
    from pdlink.memory.blocks import BlockPool
    from pdlink.protocol.deadlines import Deadlines

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
    marks: Marks | None
    """None for memory of the host."""


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
        ended = self._ended.get(transfer_id)
        if ended is not None and ended.reason is not None:
            words = f"transfer {transfer_id} was stopped before it began: {ended.reason}"
            raise TransferFailed(words, ended.reason)
        if ended is not None or transfer_id in self._transfers:
            raise InvalidRequest(f"transfer_id {transfer_id!r} was used before; every attempt needs a new one")


class Transfer:
    """One end of one transfer. Every method may be called from any thread; only `wait…` methods wait.

    Leaving its `with` (or `async with`) block before it is done cancels it. That does not wait: the blocks stay held
    until nothing can touch them any more, which `released` says.
    """

    error: TransferFailed | None = None
    """Why it failed; None while it has not."""
    done: Signal
    """Set when the outcome is known: success, or `error`."""
    released: Signal
    """Set once, after `done`: nothing touches the blocks any more. A pool has the node's reference back by then."""
    num_tokens = 0
    """Tokens of the prompt whose KV it is; 0 while that is not known."""
    _failure = ""
    _held: Sequence[int] = ()
    """Blocks that the pool counts for it."""

    def __init__(self, half: Half[Any], transfer_id: str) -> None:
        self.transfer_id = transfer_id
        self.done, self.released = Signal(), Signal()
        self._half = half

    def cancel(self, reason: Reason = ABORTED) -> None:
        """End the transfer; the other side is told `reason`. Nothing happens if it is done already."""
        raise NotImplementedError

    # -- in the endpoint's thread ------------------------------------------------------------------------------------

    def on_failed(self, reason: Reason) -> None:
        """It will not succeed. At most once, before `on_end`."""
        if not self.done.is_set():
            self.error = TransferFailed(f"transfer {self.transfer_id}: {self._failure}: {reason}", reason)
            self.done.set()

    def on_end(self) -> None:
        """Nothing touches the blocks any more. Exactly once. What has not failed by now has succeeded."""
        try:
            self.done.set()
        finally:
            self._let_go()
            self._half.live.discard(self)
            self.released.set()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _hold(self, blocks: BlocksByGroup) -> None:
        """Take a reference to each of the blocks, until `on_end`."""
        if self._half.pool is not None:
            for mine in blocks:
                self._half.pool.share(mine)
                self._held = (*self._held, *mine)

    def _let_go(self) -> None:
        """Give the references back. Two threads may be about to: a transfer ends while its blocks are withdrawn."""
        with self._half.lock:
            held, self._held = self._held, ()
        if held and self._half.pool is not None:
            self._half.pool.give_back(held)

    def _wait(self, signal: Signal, timeout_s: float | None, what: str) -> None:
        """Raises `error`, if there is one, and DeadlineExceeded after `timeout_s`."""
        if not signal.wait(timeout_s):
            raise DeadlineExceeded(f"transfer {self.transfer_id}: {what} within {timeout_s} s")
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.done.is_set():
            self.cancel(ABORTED if kind is None else Reason(Code.ABORTED, f"by {kind.__name__}"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class TransferOutcome(NamedTuple):
    reason: Reason | None
    """Why it failed; None for success."""
    peer: str
    """Its name, which outlives sessions; empty for this worker itself."""


class EndedTransfers(OrderedDict[str, TransferOutcome]):
    """Ended transfers by id, the oldest first, to recognise late or repeated messages. Changed by `add` only.

    Bounded, in all and for each peer: the oldest are forgotten. A peer that ends many transfers pushes out its own.
    """

    def __init__(self, capacity: int = 40_000, share: int = 5_000) -> None:
        """share: the most ids of one peer."""
        super().__init__()
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._capacity, self._share = capacity, share

    def add(self, transfer_id: str, reason: Reason | None, peer: str = "") -> None:
        """reason, peer: see `TransferOutcome`."""
        if transfer_id in self:
            self._forget(transfer_id)
        if len(self._of.get(peer, ())) >= self._share:
            self._forget(next(iter(self._of[peer])))
        elif len(self) >= self._capacity:
            self._forget(next(iter(self)))
        if reason is not None and len(reason.words) > _MAX_REASON:
            reason = replace(reason, words=reason.words[:_MAX_REASON])
        self[transfer_id] = TransferOutcome(reason, peer)
        of_peer = self._of.get(peer)  # after the above, which may have forgotten its last one
        if of_peer is None:
            of_peer = self._of[peer] = OrderedDict()
        of_peer[transfer_id] = None

    def _forget(self, transfer_id: str) -> None:
        peer = self.pop(transfer_id).peer
        of_peer = self._of[peer]
        del of_peer[transfer_id]
        if not of_peer:
            del self._of[peer]
