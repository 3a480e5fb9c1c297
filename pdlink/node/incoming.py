"""`Incoming`: the KV of one request on its way here from the worker that computes its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdlink.errors import InvalidRequest
from pdlink.kv.sources import TokenRange
from pdlink.node.signals import Signal
from pdlink.node.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from pdlink.endpoint.receiver import Receiver
    from pdlink.kv.layout import KVLayout
    from pdlink.memory.blocks import BlockPool
    from pdlink.protocol.messages import Verify


class _Handler(NamedTuple):
    """`ReceiveHandler` of one transfer: what the endpoint calls in its thread."""

    ready: Callable[[int], None]
    failed: Callable[[str], None]
    released: Callable[[], None]


class Incoming(Transfer):
    """The receiving end of a transfer, made by `Node.receive`; a source of KV (`KVSource`), and what it loads.

    `done` is set when all KV is in the offered blocks, or will not come. After a failure a peer may still write to
    the blocks until `released` is set: compute into other ones, or wait.
    """

    first_token: int | None
    """The first token of the answer, which the sender sampled; None until `sampled`."""
    sampled: Signal
    """Set when `first_token` is known. By layer this may be before `done`, but then the KV may still fail."""

    def __init__(
        self,
        receiver: Receiver,
        transfer_id: str,
        peer: str,
        layout: KVLayout,
        *,
        pool: BlockPool | None,
        live: set[Transfer],
        verify: Verify = "off",
        by_layer: bool = True,
    ) -> None:
        super().__init__(transfer_id, pool, live)
        self.first_token = None
        self.sampled = Signal()
        self._receiver, self._layout, self._verify = receiver, layout, verify
        self._by_layer = by_layer and verify == "off"
        self._tokens: range | None = None
        self._landed: dict[int, int] | None = {} if self._by_layer else None
        """Per layer: the offered tokens before this one are here."""
        self._layers: dict[int, Signal] | None = None
        """Set when all offered tokens of a layer are here, or never will be; made when somebody waits."""
        try:
            receiver.expect(transfer_id, peer, _Handler(self._on_ready, self._on_failed, self._release))
        except BaseException:
            live.discard(self)
            raise

    def offer(self, blocks: Sequence[int], tokens: range) -> None:
        """Let the sender write these tokens, which are the ones that are missing here, into these blocks.

        blocks[0] holds token `tokens.start`; there are as many as the tokens take, one or both ends of which may
        begin or end within a block. Until `released` they belong to the transfer; with a pool the node holds a
        reference of its own. Raises InvalidRequest if the two do not fit together.
        """
        size, start, end = self._layout.block_tokens, tokens.start, tokens.stop
        needed = -(-end // size) - start // size if end > start else 0
        if tokens.step != 1 or start < 0 or len(blocks) != needed:
            raise InvalidRequest(
                f"blocks: got {len(blocks)} for {tokens}; tokens in blocks of {size} take {needed}, with a step of 1"
            )
        self._tokens = tokens
        if self._hold(blocks):
            on_landed = self._on_landed if self._by_layer else None
            self._receiver.offer(self.transfer_id, blocks, start, end, on_landed=on_landed, verify=self._verify)

    def lookup(self, keys: Sequence[bytes]) -> tuple[TokenRange, ...]:
        """The whole prompt, whatever its keys: the sender computes it for this transfer."""
        return (TokenRange(0, self.num_tokens, self),)

    def load(self, wanted: TokenRange, blocks: Sequence[int]) -> Incoming:
        self.offer(blocks, range(wanted.begin, wanted.end))
        return self

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
        if self._tokens is None or self._landed is None:
            return False
        return self._landed.get(layer, -1) >= self._tokens.stop

    def cancel(self, reason: str = "aborted") -> None:
        self._receiver.cancel(self.transfer_id, reason)

    # -- in the endpoint's thread ------------------------------------------------------------------------------------

    def _on_ready(self, first_token: int) -> None:
        self.first_token = first_token
        self.done.set()
        self.sampled.set()
        self._wake_layers()

    def _on_failed(self, reason: str) -> None:
        self._failed("its KV did not arrive", reason)
        self._wake_layers()

    def _on_landed(self, layer: int, end: int, first_token: int | None) -> None:
        assert self._tokens is not None
        assert self._landed is not None
        with self._lock:
            self._landed[layer] = max(end, self._landed.get(layer, 0))
            complete = self._landed[layer] >= self._tokens.stop
            signal = self._layers.get(layer) if complete and self._layers else None
        if signal is not None:
            signal.set()
        if first_token is not None and self.first_token is None:
            self.first_token = first_token
            self.sampled.set()

    def _signal(self, layer: int) -> Signal:
        if not 0 <= layer < len(self._layout.layers):
            raise InvalidRequest(f"layer: got {layer}, the layout has {len(self._layout.layers)}")
        with self._lock:
            if self._layers is None:
                self._layers = {}
            return self._layers.setdefault(layer, Signal())

    def _wake_layers(self) -> None:
        """`done` is set: who asks for a layer from now on sees that, and who has asked before is in `_layers`."""
        if self._layers:
            with self._lock:
                signals = list(self._layers.values())
            for signal in signals:
                signal.set()

    def _token(self) -> int:
        self._raise()
        assert self.first_token is not None
        return self.first_token
