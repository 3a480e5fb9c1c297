"""`Outgoing`: the KV of one request on its way to the worker that decodes it.

`layer_ready` is the hot path: one lock, one decision of the machine, and one native call if the offer is there and
the transport has room. It never waits for a peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pdlink.endpoint.signals import Signal
from pdlink.endpoint.transfer import Port, Transfer
from pdlink.events import LayerWritten, emit, listeners
from pdlink.protocol.sending import Sending
from pdlink.protocol.states import SENDER_ENDS
from pdlink.reasons import ABORTED

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType

    from pdlink.endpoint.order import Backlog
    from pdlink.endpoint.peer import Peer
    from pdlink.kv.groups import AnyTables
    from pdlink.kv.plan import Plan
    from pdlink.protocol.actions import Action
    from pdlink.protocol.leases import Lease
    from pdlink.protocol.messages import Checksum
    from pdlink.reasons import Reason


class SenderPort(Port, Protocol):
    """`Sender`, which says what each does."""

    @property
    def cut_at_nbytes(self) -> int: ...
    def announce(self, transfer: Outgoing) -> None: ...
    def act(self, transfer: Outgoing, actions: Sequence[Action]) -> None: ...
    def wait_idle(self, transfer: Outgoing, timeout_s: float) -> bool: ...


class Outgoing(Transfer):
    """The sending end of a transfer, made by `Node.send`.

    `done` is set when the receiver has everything, `released` right after it; when the transfer fails, `released`
    follows as soon as no push reads the blocks any more.
    """

    accepted: Signal
    """Set when the receiver has asked for this transfer, in a session whose handshake holds."""

    # For the endpoint, under its lock:
    machine: Sending
    lease: Lease
    """How long its KV is kept; held by `peer` once there is one."""
    peer: Peer | None = None
    """The receiver, once it has shown interest."""
    backlog: Backlog[Any] | None = None
    """Its waiting pushes, from the first one on."""
    plans: dict[tuple[int, int, int], Plan]
    """Byte runs by group and token range: every layer of a chunk uses the same."""
    checksums: list[Checksum]
    nbytes = 0
    """Landed so far."""
    first_landed_s: float | None = None
    last_landed_s: float | None = None
    written_s: float | None = None
    """When the last layer so far was written, on the clock of events; kept for listeners."""
    finished_s: float | None = None
    """When prefill ended (`Clock.awake_s`)."""

    _failure = "its KV was not sent"
    _finished = False

    def __init__(self, sender: SenderPort, transfer_id: str) -> None:
        """Raises InvalidRequest for a used id, TransferFailed if the transfer was stopped already."""
        super().__init__(sender, transfer_id)
        self.accepted = Signal()
        self._sender = sender
        self.machine = Sending(transfer_id, sender.groups, sender.cut_at_nbytes)
        self.plans, self.checksums = {}, []
        self.started_s = sender.clock.now_s()
        sender.announce(self)

    def publish(self, blocks: AnyTables, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """The KV of the request's `num_tokens` tokens will be in these blocks, from token 0 on.

        blocks: one list for each group of layers, or the list of the only group. Where a group does not keep all
        tokens, blocks that hold none of those it keeps may be anything.
        num_cached_tokens: the first so many are in them already, for all layers. The blocks must stay as they are
        until `released`; with a pool the node holds a reference of its own, so they do.
        """
        self.num_tokens = num_tokens
        tables = self._sender.groups.tables(blocks)
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                self._hold(tables)
                self._sender.act(self, self.machine.publish(tables, num_tokens, num_cached_tokens))

    def extend(self, blocks: AnyTables) -> None:
        """More blocks behind those published, for an engine that reserves them chunk by chunk."""
        tables = self._sender.groups.tables(blocks)
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                self._hold(tables)
                self.machine.extend(tables)

    def layer_ready(self, layer: int, start: int = 0, end: int | None = None) -> None:
        """Tokens [start, end) of `layer` are in the published blocks; `end` None stands for all tokens.

        Each layer is reported front to back, once for every chunk. If the receiver's offer is here the bytes are
        handed to the transport before this returns: one lock and one native call, no waiting. On a GPU it is enough
        that the kernels which write the layer were launched in this thread's current stream.
        """
        if end is None:
            end = self.num_tokens
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                if listeners:
                    event = LayerWritten(transfer_id=self.transfer_id, layer=layer, start=start, end=end)
                    self.written_s = event.at_s
                    emit(event)
                self._sender.act(self, self.machine.written(layer, start, end))

    def finish(self, first_token: int = 0) -> None:
        """The prompt is computed; `first_token`, the first of the answer, goes to the receiver with the last byte.

        A transfer whose layers have not all been reported by now fails.
        """
        self._finished = True
        with self._sender.lock:
            self.finished_s = self._sender.clock.awake_s()
            self._sender.act(self, self.machine.finish(first_token))

    def withdraw(self, timeout_s: float) -> None:
        """Wait until no push reads the published blocks any more, and take them back (preemption).

        Publish again to go on. A transfer whose pushes do not end within `timeout_s` fails: later writes only reach
        pages that the receiver keeps in quarantine. Not for a callback, nor for the endpoint's thread.
        """
        with self._sender.lock:
            if self._sender.wait_idle(self, timeout_s):
                self.machine.withdraw()
        self._let_go()

    def cancel(self, reason: Reason = ABORTED) -> None:
        with self._sender.lock:
            self._sender.act(self, self.machine.stop(reason))

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

    def on_end(self) -> None:
        try:
            self.done.set()
        finally:
            super().on_end()
