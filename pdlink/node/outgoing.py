"""`Outgoing`: the KV of one request on its way to the worker that decodes it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdlink.node.signals import Signal
from pdlink.node.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType

    from pdlink.endpoint.sender import Sender
    from pdlink.memory.blocks import BlockPool
    from pdlink.node.layer_order import LayerOrder


class Outgoing(Transfer):
    """The sending end of a transfer, made by `Node.send`.

    `done` is set when the receiver has everything, `released` right after it; when the transfer fails, `released`
    follows as soon as no push reads the blocks any more.
    """

    accepted: Signal
    """Set when the receiver has asked for this transfer, in a session whose handshake holds."""

    def __init__(
        self,
        sender: Sender,
        transfer_id: str,
        *,
        pool: BlockPool | None,
        live: set[Transfer],
        order: LayerOrder | None = None,
    ) -> None:
        """order: for device memory, whose layers are written some time after `layer_ready` is called."""
        super().__init__(transfer_id, pool, live)
        self.accepted = Signal()
        self._sender, self._order = sender, order
        self._finished = False
        try:
            sender.announce(transfer_id, self._on_failed, self._on_end, self.accepted.set)
        except BaseException:
            live.discard(self)
            raise

    def publish(self, blocks: Sequence[int], num_tokens: int, num_cached_tokens: int = 0) -> None:
        """The KV of the request's `num_tokens` tokens will be in these blocks, from token 0 on.

        num_cached_tokens: the first so many are in them already, for all layers. The blocks must stay as they are
        until `released`; with a pool the node holds a reference of its own, so they do.
        """
        self.num_tokens = num_tokens
        if self._hold(blocks):
            self._sender.publish(self.transfer_id, blocks, num_tokens, num_cached_tokens)

    def extend(self, blocks: Sequence[int]) -> None:
        """More blocks behind those published, for an engine that reserves them chunk by chunk."""
        if self._hold(blocks):
            self._sender.extend(self.transfer_id, blocks)

    def layer_ready(self, layer: int, start: int = 0, end: int | None = None) -> None:
        """Tokens [start, end) of `layer` are in the published blocks; `end` None stands for all tokens.

        Each layer is reported front to back, once for every chunk. If the receiver's offer is here the bytes are
        handed to the transport before this returns: one lock and one native call, no waiting. On a GPU it is enough
        that the kernels which write the layer were launched in this thread's current stream.
        """
        if end is None:
            end = self.num_tokens
        if self._order is None:
            self._sender.layer_ready(self.transfer_id, layer, start, end)
        else:
            self._order.when_written(
                partial(self._sender.layer_ready, self.transfer_id, layer, start, end), self.cancel
            )

    def finish(self, first_token: int = 0) -> None:
        """The prompt is computed; `first_token`, the first of the answer, goes to the receiver with the last byte.

        A transfer whose layers have not all been reported by now fails.
        """
        self._finished = True
        if self._order is None:
            self._sender.finish(self.transfer_id, first_token)
        else:
            self._order.when_written(partial(self._sender.finish, self.transfer_id, first_token), self.cancel)

    def withdraw(self, timeout_s: float) -> None:
        """Wait until no push reads the published blocks any more, and take them back (preemption).

        Publish again to go on. A transfer whose pushes do not end within `timeout_s` fails.
        """
        self._sender.withdraw(self.transfer_id, timeout_s)
        with self._lock:
            held, self._held = self._held, ()
        if held and self._pool is not None:
            self._pool.give_back(held)

    def cancel(self, reason: str = "aborted") -> None:
        self._sender.cancel(self.transfer_id, reason)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the receiver has everything. Raises TransferFailed, DeadlineExceeded after `timeout_s`."""
        self._wait(self.done, timeout_s, "the receiver did not have all of it")

    def __await__(self) -> Generator[object, None, None]:
        yield from self.done.__await__()
        self._raise()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A finished transfer goes on without its caller: the receiver may still take its time to offer blocks."""
        if kind is not None or not self._finished:
            super().__exit__(kind, error, trace)

    def _on_failed(self, reason: str) -> None:
        self._failed("its KV was not sent", reason)

    def _on_end(self) -> None:
        self.done.set()
        self._release()
