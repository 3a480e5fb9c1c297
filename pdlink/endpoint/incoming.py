"""`Incoming`: the KV of one request on its way here from the worker that computes its prompt."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from pdlink.endpoint.signals import Signal, call_all
from pdlink.endpoint.transfer import Port, Transfer
from pdlink.errors import InvalidRequest
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.states import ReceiverState
from pdlink.reasons import ABORTED

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pdlink.endpoint.peer import Peer
    from pdlink.kv.groups import AnyTables, Tables
    from pdlink.protocol.actions import Action
    from pdlink.protocol.messages import Verify
    from pdlink.reasons import Reason


class ReceiverPort(Port, Protocol):
    """`Receiver`, which says what each does."""

    def expect(self, transfer: Incoming, address: str) -> None: ...
    def act(self, transfer: Incoming, actions: Sequence[Action]) -> None: ...


class Incoming(Transfer):
    """The receiving end of a transfer, made by `Node.receive`.

    `done` is set when all KV is in the offered blocks, or will not come. After a failure a peer may still write to
    the blocks until `released` is set: compute into other ones, or wait.
    """

    first_token: int | None = None
    """The first token of the answer, which the sender sampled; None until `sampled`."""
    sampled: Signal
    """Set when `first_token` is known. By layer this may be before `done`, but then the KV may still fail."""

    # For the endpoint, under its lock:
    machine: Receiving
    peer: Peer
    deadline_s: float
    """The transfer fails then (`Clock.awake_s`)."""
    verifying = False
    """Whether *done* has come, and its checksums are being compared."""

    _failure = "its KV did not arrive"
    _end = -1
    """The offered tokens end before this one; -1 before the offer."""
    _layers: dict[int, Signal] | None = None
    """Set when all offered tokens of a layer are here, or never will be; made when somebody waits."""

    def __init__(
        self, receiver: ReceiverPort, transfer_id: str, peer: str, *, verify: Verify = "off", by_layer: bool = True
    ) -> None:
        """Raises InvalidRequest for a used id, TransferFailed if the transfer was stopped already or its peer is in
        back-off."""
        super().__init__(receiver, transfer_id)
        self.sampled = Signal()
        self._receiver, self._verify = receiver, verify
        self._landed: dict[int, int] | None = {} if by_layer and verify == "off" else None
        """Per layer: the offered tokens before this one are here."""
        quiet_s = receiver.timeouts.peer_s
        self.machine = Receiving(transfer_id, receiver.groups, quiet_s=quiet_s)
        self.started_s = receiver.clock.now_s()
        receiver.expect(self, peer)

    def offer(self, blocks: AnyTables, tokens: range) -> None:
        """Let the sender write these tokens, which are the ones that are missing here, into these blocks.

        blocks: one list for each group of layers, or the list of the only group. Each begins with the block of the
        first token that the group needs (`KVLayout.needed`; `tokens.start` where it keeps all), and has as many as
        these tokens take, one or both ends of which may begin or end within a block (`KVGroups.part`).

        Until `released` they belong to the transfer; with a pool the node holds a
        reference of its own. Raises InvalidRequest if the two do not fit together.
        """
        self._offer(*self._checked(blocks, tokens))

    def _checked(self, blocks: AnyTables, tokens: range) -> tuple[Tables, int, int]:
        """Block tables, first token, end. Raises InvalidRequest."""
        groups, start, end = self._receiver.groups, tokens.start, max(tokens.start, tokens.stop)
        tables = groups.tables(blocks)
        if tokens.step != 1 or start < 0:
            raise InvalidRequest(f"tokens: got {tokens}; a range from 0 or later on, with a step of 1")
        problem = groups.problem(tables, start, end)
        if problem:
            raise InvalidRequest(f"blocks: got an offer {problem}")
        return tables, start, end

    def _offer(self, tables: Tables, start: int, end: int) -> None:
        with self._receiver.lock:
            if self.machine.state is ReceiverState.EXPECTED:
                self._end = end
                self._hold(tables)
                per_layer = self._landed is not None
                actions = self.machine.offer(tables, start, end, per_layer=per_layer, verify=self._verify)
                self._receiver.act(self, actions)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until all KV is here; the first token. Raises TransferFailed, DeadlineExceeded after `timeout_s`."""
        self._wait(self.done, timeout_s, "its KV was not here")
        return self._token()

    def __await__(self) -> Generator[object, None, int]:
        yield from self.done.__await__()
        return self._token()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Wait until the offered tokens of one layer are here, for attention to read.

        With `verify`, or without `by_layer`, single layers are not announced, and this waits for all of them. Costs
        nothing for a layer that is here. Raises TransferFailed, DeadlineExceeded after `timeout_s`.
        """
        if not self.has_layer(layer):
            signal = self._signal(layer)
            if not self.has_layer(layer):  # it may have come before the signal was there to be set
                self._wait(signal, timeout_s, f"layer {layer} was not here")

    async def layer(self, layer: int) -> None:
        """`wait_layer` for coroutines; `asyncio.timeout` limits it."""
        if not self.has_layer(layer):
            signal = self._signal(layer)
            if not self.has_layer(layer):
                await signal
                self._raise()

    def has_layer(self, layer: int) -> bool:
        """Whether the offered tokens of this layer are here. Raises TransferFailed if the transfer has failed."""
        if self.done.is_set():
            self._raise()
            return True
        return self._landed is not None and self._landed.get(layer, -2) >= self._end

    def cancel(self, reason: Reason = ABORTED) -> None:
        with self._receiver.lock:
            self._receiver.act(self, self.machine.stop(reason, self._receiver.clock.awake_s()))

    # -- in the endpoint's thread ------------------------------------------------------------------------------------

    def on_ready(self, first_token: int) -> None:
        """All KV is in the offered blocks. This or `on_failed`, once, before `on_end`."""
        self.first_token = first_token
        call_all((self.done.set, self.sampled.set, self._wake_layers))

    def on_failed(self, reason: Reason) -> None:
        """The KV will not come. The offered blocks are quarantined until `on_end`."""
        call_all((partial(super().on_failed, reason), self._wake_layers))

    def on_landed(self, layer: int, end: int, first_token: int | None) -> None:
        """The offered tokens before `end` are visible in `layer`. first_token: None until it is sampled."""
        assert self._landed is not None
        with self._receiver.lock:
            self._landed[layer] = max(end, self._landed.get(layer, 0))
            complete = self._landed[layer] >= self._end
            signal = self._layers.get(layer) if complete and self._layers else None
        if signal is not None:
            signal.set()
        if first_token is not None and self.first_token is None:
            self.first_token = first_token
            self.sampled.set()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _signal(self, layer: int) -> Signal:
        if not 0 <= layer < self._receiver.groups.num_layers:
            raise InvalidRequest(f"layer: got {layer}, the layout has {self._receiver.groups.num_layers}")
        with self._receiver.lock:
            if self._layers is None:
                self._layers = {}
            return self._layers.setdefault(layer, Signal())

    def _wake_layers(self) -> None:
        """`done` is set: who asks for a layer from now on sees that, and who has asked before is in `_layers`."""
        if self._layers:
            with self._receiver.lock:
                signals = list(self._layers.values())
            call_all(signal.set for signal in signals)

    def _token(self) -> int:
        self._raise()
        assert self.first_token is not None
        return self.first_token
