"""Between engine and node: what each of them says about a request becomes calls to the other.

The engine does not know that transfers exist, and the node does not know requests. Both hold their own reference to
the blocks: the node's is given back when nothing reads (prefill) or can still write (decode) them, whatever has
become of the request by then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from pdlink.errors import PdlinkError, TransferFailed
from pdlink.events import FallbackUsed, emit
from pdlink.kv.sources import TokenRange
from pdlink.node.source import PeerSource
from pdlink.protocol import kv_path, reasons

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.engine.engine import Engine
    from pdlink.engine.request import TokenOutput
    from pdlink.node.node import Node

    Item = TokenOutput | PdlinkError | None
    """What a client gets: a token, or the end (None, or the error that ended the request)."""


class Leg(Protocol):
    """How one request takes part in a transfer. Called in the engine's thread."""

    def admitted(self, block_table: Sequence[int], num_cached_tokens: int) -> None: ...
    def layer_written(self, layer: int, start: int, end: int) -> None: ...
    def output(self, output: TokenOutput) -> None: ...
    def ended(self, error: PdlinkError | None) -> None: ...


class _Gate:
    """Holds back what a prefill leg has for its client until the receiver has spoken."""

    def __init__(self, put: Callable[[Item], None]) -> None:
        self._put = put
        self._lock = threading.Lock()
        self._held: list[Item] | None = []
        """None once it is open."""

    @property
    def is_open(self) -> bool:
        return self._held is None

    def put(self, item: Item) -> None:
        """From any thread: a token, or the end. An error passes, and what is held before it never will."""
        with self._lock:
            if self._held is not None and not isinstance(item, PdlinkError):
                self._held.append(item)
                return
            self._held = None
            self._put(item)

    def open(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
            for item in held:
                self._put(item)


def recomputed(failure: TransferFailed) -> str:
    """The value of `X-Pdlink-KV` after this failure."""
    code = reasons.code_of(failure.reason)
    return kv_path.recomputed(failure.code if code == reasons.OTHER else code)


class PrefillLeg:
    """A request whose prompt is computed here and whose KV goes to another worker.

    Its token may reach the client before decode says anything, and decode goes on from it. So both must be of one
    mind about the model, which is what their handshake proves: the token waits until the receiver has spoken in a
    session whose handshake holds. As a rule it has, long before the prompt is computed.
    """

    def __init__(
        self,
        request_id: str,
        transfer_id: str,
        num_prompt_tokens: int,
        *,
        put: Callable[[Item], None],
        engine: Engine,
        node: Node,
    ) -> None:
        """put: takes what goes to the client.

        Raises InvalidRequest if the transfer id was used before.
        """
        self._request_id, self._engine = request_id, engine
        self._num_tokens = num_prompt_tokens
        self._gate = _Gate(put)
        self.failure: TransferFailed | None = None
        """Why the transfer failed, if it did: the request is aborted then, because nobody wants its KV."""
        self.outgoing = node.send(transfer_id)
        self.layer_written = self.outgoing.layer_ready
        self.outgoing.accepted.then(self._gate.open)
        self.outgoing.done.then(self._on_done)
        self.outgoing.released.then(engine.wake)

    def _on_done(self) -> None:
        error = self.outgoing.error
        if error is not None:
            self.failure = TransferFailed(f"the KV was not wanted or could not be sent: {error.reason}")
            if not self._gate.is_open:
                self._gate.put(self.failure)
            self._engine.abort(self._request_id)

    def put(self, item: Item) -> None:
        """A token or the end, for the client."""
        self._gate.put(item)

    def left(self) -> None:
        """The client has gone. A token that waits for the receiver then has nobody to wait for."""
        if not self._gate.is_open:
            self.outgoing.cancel()

    def admitted(self, block_table: Sequence[int], num_cached_tokens: int) -> None:
        self.outgoing.publish(block_table, self._num_tokens, num_cached_tokens)

    def output(self, output: TokenOutput) -> None:
        if output.index == 0:
            self.outgoing.finish(output.token_id)

    def ended(self, error: PdlinkError | None) -> None:
        if error is not None:
            self.outgoing.cancel(error.code)


class DecodeLeg:
    """A request whose prompt's KV comes from another worker."""

    def __init__(
        self,
        request_id: str,
        transfer_id: str,
        num_prompt_tokens: int,
        address: str,
        *,
        recompute: bool,
        engine: Engine,
        node: Node,
    ) -> None:
        """recompute: compute the prompt here if its KV does not come, instead of failing the request.

        Raises what `Node.receive` raises.
        """
        self._request_id, self._engine, self._recompute = request_id, engine, recompute
        self._num_tokens, self._block_tokens = num_prompt_tokens, node.layout.block_tokens
        self._fell_back = False
        self._failure: TransferFailed | None = None
        self.kv_path = ""
        """How the prompt's KV came here, as `recomputed` writes it; empty while that is open."""
        # An engine that runs other requests does not begin before all layers are here: it saves the announcements.
        self.incoming = node.receive(transfer_id, address, by_layer=engine.num_running == 0)
        self._source = PeerSource(self.incoming, num_prompt_tokens)
        self.external = self._source.lookup(())
        """What the engine need not compute."""
        self.incoming.sampled.then(self._on_sampled)
        self.incoming.done.then(self._on_done)
        self.incoming.released.then(engine.wake)

    def submitted(self) -> None:
        """The engine has the request now. A failure that came before it was lost on the engine: say it again."""
        if self._failure is not None:
            self._engine.kv_failed(self._request_id, recompute=self._recompute, error=self._failure)

    # -- the engine's side -------------------------------------------------------------------------------------------

    def admitted(self, block_table: Sequence[int], num_cached_tokens: int) -> None:
        if self._failure is not None:
            if not self._fell_back:  # the prompt is being computed here after all
                self._fell_back = True
                emit(FallbackUsed(kind="recompute", reason=str(self._failure)))
            return
        first = num_cached_tokens // self._block_tokens
        last = -(-self._num_tokens // self._block_tokens)
        blocks = list(block_table[first:last]) if num_cached_tokens < self._num_tokens else []
        self._source.load(TokenRange(num_cached_tokens, self._num_tokens, self._source), blocks)

    def layer_needed(self, layer: int, timeout_s: float) -> bool:
        """Whether the prompt's KV of `layer` is here; waits for it."""
        try:
            self.incoming.wait_layer(layer, timeout_s)
        except PdlinkError:  # too late, or never: `_on_done` says so to the engine
            return False
        return True

    def layer_written(self, layer: int, start: int, end: int) -> None:
        """Prompt tokens computed here after a failure: nobody else wants them."""

    def output(self, output: TokenOutput) -> None:
        """The answer goes to the client only."""

    def ended(self, error: PdlinkError | None) -> None:
        self.incoming.cancel(error.code if error else "request_ended")

    def _on_sampled(self) -> None:
        token = self.incoming.first_token
        if token is not None and not self.incoming.done.is_set():
            self._engine.kv_arriving(self._request_id, token)

    def _on_done(self) -> None:
        error = self.incoming.error
        if error is None:
            self.kv_path = kv_path.TRANSFERRED
            self._engine.kv_arrived(self._request_id, self._num_tokens, self.incoming.first_token)
        else:
            self._failure, self.kv_path = error, recomputed(error)
            self._engine.kv_failed(self._request_id, recompute=self._recompute, error=error)
