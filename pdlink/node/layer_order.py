"""On a GPU a layer is reported before it is written: the host has only launched the kernels that will write it. And a
block is free before the last kernel that writes it has run: one that zeroes it, or a step scheduled ahead.

So what is to follow the writing waits, in a thread of its own and asleep, for an event recorded behind it. What then
happens holds for every transport, whether a kernel, UCX or a network card reads the bytes: none of them needs to know
the engine's stream. The forward pass never waits; it pays for one hop between threads per layer.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from functools import partial
from typing import TYPE_CHECKING

from pdlink import threads
from pdlink.endpoint.data_path import Outgoing
from pdlink.endpoint.receiver import Incoming
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.endpoint.receiver import Receiver
    from pdlink.endpoint.sender import Sender
    from pdlink.kv.groups import BlockLists
    from pdlink.memory.buffers import StreamEvent
    from pdlink.protocol.messages import Verify

    Act = Callable[[], None]
    Failed = Callable[[Reason], None]

log = logging.getLogger(__name__)


class LayerOrder:
    """One per node of device memory. `when_written` may be called from any thread."""

    def __init__(self, make_event: Callable[[], StreamEvent]) -> None:
        self._make_event = make_event
        self._spare: list[StreamEvent] = []
        self._launched: queue.SimpleQueue[tuple[StreamEvent, Act, Failed] | None] = queue.SimpleQueue()
        self._closed = False
        self._died = ""
        self._thread = threads.guarded("pdlink-layer-order", self._run, self._fail)
        self._thread.start()

    def when_written(self, act: Act, failed: Failed) -> None:
        """Act in the other thread as soon as all that this thread has launched by now has run; in order.

        failed(reason): instead, if what was launched has failed; also if `act` raises, of which nobody else hears.
        """
        try:
            event = self._spare.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        self._launched.put((event, act, failed))
        if self._died:
            self._fail(self._died)

    def close(self) -> None:
        """End the thread; what waits by then, or comes later, does not happen. Safe to call twice."""
        self._closed = True
        self._launched.put(None)

    def _run(self) -> None:
        while (launched := self._launched.get()) is not None and not self._closed:
            self._act(*launched)

    def _fail(self, why: str) -> None:
        """What waits, and what will."""
        self._died = why
        with contextlib.suppress(queue.Empty):
            while (launched := self._launched.get_nowait()) is not None:
                launched[2](Reason(Code.GPU_FAILED, why))

    def _act(self, event: StreamEvent, act: Act, failed: Failed) -> None:
        try:
            event.synchronize()
        except RuntimeError as error:
            failed(Reason(Code.GPU_FAILED, f"what writes the layers has failed: {error}"))
            return
        self._spare.append(event)
        try:
            act()
        except Exception as error:  # noqa: BLE001  whatever the caller would have been raised
            log.exception("what follows a launched layer has failed")
            words = f"what was reported of its layers cannot be handled: {type(error).__name__}: {error}"
            failed(Reason(Code.HANDLING_FAILED, words))


class LaunchedOutgoing(Outgoing):
    """An `Outgoing` of device memory: what it is told has been launched, and has happened some time later."""

    _turn = 0
    """Counts `withdraw`: what was launched before is not in the blocks that are published after it."""

    def __init__(self, sender: Sender, transfer_id: str, order: LayerOrder) -> None:
        super().__init__(sender, transfer_id)
        self._order = order

    def publish(self, blocks: BlockLists, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """Kernels that another request has launched may still write the cached tokens."""
        super().publish(blocks, num_tokens)
        for layer in range(self._sender.groups.num_layers) if num_cached_tokens else ():
            self.layer_ready(layer, 0, num_cached_tokens)

    def layer_ready(self, layer: int, start: int = 0, end: int | None = None) -> None:
        if not 0 <= layer < self._sender.groups.num_layers:
            raise self._sender.groups.no_layer(layer)
        self._when_written(partial(super().layer_ready, layer, start, end))

    def finish(self, first_token: int = 0) -> None:
        self._finished = True
        self._when_written(partial(super().finish, first_token))

    def withdraw(self, timeout_s: float) -> None:
        with self._sender.lock:
            self._turn += 1
        super().withdraw(timeout_s)

    def _when_written(self, act: Callable[[], None]) -> None:
        self._order.when_written(partial(self._act, self._turn, act), self.cancel)

    def _act(self, turn: int, act: Callable[[], None]) -> None:
        with self._sender.lock:
            if turn == self._turn:
                act()


class LaunchedIncoming(Incoming):
    """An `Incoming` of device memory: peers may write to its blocks when all that was launched before has run."""

    def __init__(
        self,
        receiver: Receiver,
        transfer_id: str,
        peer: str,
        order: LayerOrder,
        *,
        verify: Verify = "off",
        by_layer: bool = True,
    ) -> None:
        self._order = order
        super().__init__(receiver, transfer_id, peer, verify=verify, by_layer=by_layer)

    def offer(self, blocks: BlockLists, tokens: range) -> None:
        """By the thread that launches what uses these blocks. A cancelled transfer offers nothing any more."""
        tables, _, _ = self._checked(blocks, tokens)
        self._order.when_written(partial(super().offer, tables, tokens), self.cancel)
