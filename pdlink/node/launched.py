"""Transfers of device memory: what they are told has been launched, and happens some time later (`Marks`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdlink.endpoint.data_path import Outgoing
from pdlink.endpoint.receiver import Incoming
from pdlink.events import LayerWritten, emit, listeners
from pdlink.protocol.states import SENDER_ENDS

if TYPE_CHECKING:
    from pdlink.endpoint.marks import Mark, Marks
    from pdlink.endpoint.receiver import Receiver
    from pdlink.endpoint.sender import Sender
    from pdlink.kv.groups import BlockLists
    from pdlink.protocol.messages import Verify
    from pdlink.reasons import Reason


class LaunchedOutgoing(Outgoing):
    """What it pushes is read behind the marks of its layers."""

    def __init__(self, sender: Sender, transfer_id: str, marks: Marks) -> None:
        self._gpu = marks
        super().__init__(sender, transfer_id)

    def publish(self, blocks: BlockLists, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """Kernels that another request has launched may still write the cached tokens."""
        if not num_cached_tokens:
            super().publish(blocks, num_tokens)
            return
        mark = self._gpu.mark()
        with self._sender.lock:
            for layer in range(self._sender.groups.num_layers):
                self._follow(layer, mark)
            super().publish(blocks, num_tokens, num_cached_tokens)

    def layer_ready(self, layer: int, start: int = 0, end: int | None = None) -> None:
        if not 0 <= layer < self._sender.groups.num_layers:
            raise self._sender.groups.no_layer(layer)
        if end is None:
            end = self.num_tokens
        mark = self._gpu.mark()
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                self._follow(layer, mark)
                if listeners:
                    self._gpu.when_reached((mark,), partial(self._is_written, layer, start, end), _ignore)
                self._sender.act(self, self.machine.written(layer, start, end))

    def withdraw(self, timeout_s: float) -> None:
        super().withdraw(timeout_s)
        with self._sender.lock:
            self.marks.clear()

    def on_end(self) -> None:
        self.marks.clear()  # others need their events, and this may be kept for long
        super().on_end()

    def _follow(self, layer: int, mark: Mark) -> None:
        """A later mark of the same stream stands for an earlier one, too."""
        self.marks.setdefault(layer, {})[mark.event.stream] = mark

    def _is_written(self, layer: int, start: int, end: int) -> None:
        event = LayerWritten(transfer_id=self.transfer_id, layer=layer, start=start, end=end)
        self.written_s = event.at_s
        emit(event)


class LaunchedIncoming(Incoming):
    """Peers may write to its blocks when all that was launched before has run."""

    def __init__(
        self,
        receiver: Receiver,
        transfer_id: str,
        peer: str,
        marks: Marks,
        *,
        verify: Verify = "off",
        by_layer: bool = True,
    ) -> None:
        self._gpu = marks
        super().__init__(receiver, transfer_id, peer, verify=verify, by_layer=by_layer)

    def offer(self, blocks: BlockLists, tokens: range) -> None:
        """By the thread that launches what uses these blocks. A cancelled transfer offers nothing any more."""
        tables, _, _ = self._checked(blocks, tokens)
        self._gpu.when_reached((self._gpu.mark(),), partial(super().offer, tables, tokens), self.cancel)


def _ignore(_: Reason) -> None:
    """A GPU that has failed: the push behind the same mark says so."""
