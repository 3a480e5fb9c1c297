"""What both ends of a transfer have in common: an outcome, blocks that are held until the fence, and two signals."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.node.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from pdlink.memory.blocks import BlockPool


class Transfer:
    """One end of one transfer. Every method may be called from any thread; only `wait…` methods wait.

    Leaving its `with` (or `async with`) block before it is done cancels it. That does not wait: the blocks stay held
    until nothing can touch them any more, which `released` says.
    """

    error: TransferFailed | None
    """Why it failed; None while it has not."""
    done: Signal
    """Set when the outcome is known: success, or `error`."""
    released: Signal
    """Set once, after `done`: nothing touches the blocks any more. A pool has the node's reference back by then."""
    num_tokens: int
    """Tokens of the prompt whose KV it is; 0 while that is not known."""

    def __init__(self, transfer_id: str, pool: BlockPool | None, live: set[Transfer]) -> None:
        """pool: counts the blocks; None leaves that to the caller. live: has this in it until it is released."""
        self.transfer_id = transfer_id
        self.error = None
        self.num_tokens = 0
        self.done, self.released = Signal(), Signal()
        self._pool, self._live = pool, live
        live.add(self)
        self._lock = threading.Lock()
        self._held: Sequence[int] = ()
        self._over = False

    def cancel(self, reason: str = "aborted") -> None:
        """End the transfer; the other side is told `reason`. Nothing happens if it is done already."""
        raise NotImplementedError

    def fail(self, error: TransferFailed) -> None:
        """The outcome is `error`, unless there is one already. For the node, not for users: they `cancel`."""
        if self.error is None and not self.done.is_set():
            self.error = error
            self.done.set()

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _hold(self, blocks: Sequence[int]) -> bool:
        """Take a reference to each of the blocks; False if the transfer is over already."""
        if self._pool is None:
            return True
        with self._lock:
            if self._over:
                return False
            self._pool.share(blocks)
            self._held = (*self._held, *blocks)
            return True

    def _release(self) -> None:
        """Nothing touches the blocks any more."""
        if self._pool is not None:
            with self._lock:
                self._over = True
                held, self._held = self._held, ()
            self._pool.give_back(held)
        self._live.discard(self)
        self.released.set()

    # -- outcome -----------------------------------------------------------------------------------------------------

    def _wait(self, signal: Signal, timeout_s: float | None, what: str) -> None:
        """Raises `error`, if there is one, and DeadlineExceeded after `timeout_s`."""
        if not signal.wait(timeout_s):
            raise DeadlineExceeded(f"transfer {self.transfer_id}: {what} within {timeout_s} s")
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _failed(self, what: str, reason: str) -> None:
        self.fail(TransferFailed(f"transfer {self.transfer_id}: {what}: {reason}", reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.done.is_set():
            self.cancel("aborted" if kind is None else f"aborted by {kind.__name__}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
