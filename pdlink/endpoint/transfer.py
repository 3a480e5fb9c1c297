"""`Transfer`: one end of one transfer, and the `Port` by which it reaches its endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

from pdlink.endpoint.signals import Signal
from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.reasons import ABORTED, Code, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from pdlink.endpoint.clock import Clock
    from pdlink.kv.groups import KVGroups, Tables
    from pdlink.memory.blocks import BlockPool
    from pdlink.protocol.deadlines import Deadlines


class Port(Protocol):
    """What one end of a transfer knows of the half of its endpoint, `Sender` or `Receiver`."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def groups(self) -> KVGroups: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def timeouts(self) -> Deadlines: ...
    @property
    def pool(self) -> BlockPool | None: ...
    @property
    def live(self) -> set[Any]: ...


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

    def __init__(self, port: Port, transfer_id: str) -> None:
        self.transfer_id = transfer_id
        self.done, self.released = Signal(), Signal()
        self._port = port

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
        """Nothing touches the blocks any more. Exactly once."""
        self._let_go()
        self._port.live.discard(self)
        self.released.set()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _hold(self, blocks: Tables) -> None:
        """Take a reference to each of the blocks, until `on_end`."""
        if self._port.pool is not None:
            for table in blocks:
                self._port.pool.share(table)
                self._held = (*self._held, *table)

    def _let_go(self) -> None:
        """Give the references back. Two threads may be about to: a transfer ends while its blocks are withdrawn."""
        with self._port.lock:
            held, self._held = self._held, ()
        if held and self._port.pool is not None:
            self._port.pool.give_back(held)

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
