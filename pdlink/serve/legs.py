"""Between engine and endpoint: what each of them says about a request becomes calls to the other.

The engine does not know that transfers exist, and the endpoint does not know requests. Both hold their own reference
to the blocks: the endpoint's is given back when nothing reads (prefill) or can still write (decode) them, whatever
has become of the request by then.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Protocol

from pdlink.errors import PdlinkError, TransferFailed
from pdlink.events import FallbackUsed, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.endpoint.receiver import Receiver
    from pdlink.endpoint.sender import Sender
    from pdlink.engine.engine import Engine
    from pdlink.engine.request import TokenOutput
    from pdlink.memory.blocks import BlockPool
    from pdlink.protocol.messages import Verify

    Item = TokenOutput | PdlinkError | None
    """What a client gets: a token, or the end (None, or the error that ended the request)."""


class Leg(Protocol):
    """How one request takes part in a transfer. Called in the engine's thread."""

    def admitted(self, block_table: Sequence[int], num_cached_tokens: int) -> None: ...
    def layer_written(self, layer: int, start: int, end: int) -> None: ...
    def output(self, output: TokenOutput) -> None: ...
    def ended(self, error: PdlinkError | None) -> None: ...


class _Hold:
    """The endpoint's own reference to a request's blocks: taken at most once, given back at most once."""

    def __init__(self, pool: BlockPool, wake: Callable[[], None]) -> None:
        self._pool, self._wake = pool, wake
        self._lock = threading.Lock()
        self._blocks: list[int] = []
        self._over = False

    def take(self, blocks: Sequence[int]) -> bool:
        """Share the blocks; False if the transfer is over already."""
        with self._lock:
            if self._over:
                return False
            self._pool.share(blocks)
            self._blocks = list(blocks)
            return True

    def give_back(self) -> None:
        with self._lock:
            self._over = True
            blocks, self._blocks = self._blocks, []
        if blocks:
            self._pool.give_back(blocks)
            self._wake()


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


_FACTOR = re.compile(r"refused: (.{1,80}?) differs: ", re.DOTALL)
_CODE = re.compile(r"([a-z][a-z0-9_]{0,39})(?:: |$)")


def recomputed(failure: TransferFailed) -> str:
    """For a header: the prompt was computed where its KV should have come to, and why: one word of [a-z0-9_:.-]."""
    if match := _FACTOR.match(failure.reason):
        code = "refused:" + re.sub(r"[^a-z0-9_.-]+", "_", match[1].lower())
    elif match := _CODE.match(failure.reason):
        code = match[1]
    else:
        code = failure.code
    return f"recomputed;reason={code}"


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
        pool: BlockPool,
        sender: Sender,
    ) -> None:
        """put: takes what goes to the client.

        Raises InvalidRequest if the transfer id was used before.
        """
        self._transfer_id, self._sender = transfer_id, sender
        self._num_tokens = num_prompt_tokens
        self._hold = _Hold(pool, engine.wake)
        self._gate = _Gate(put)
        self.failure: TransferFailed | None = None
        """Why the transfer failed, if it did: the request is aborted then, because nobody wants its KV."""

        def failed(reason: str) -> None:
            self.failure = TransferFailed(f"the KV was not wanted or could not be sent: {reason}")
            if not self._gate.is_open:
                self._gate.put(self.failure)
            engine.abort(request_id)

        sender.announce(transfer_id, failed, self._hold.give_back, self._gate.open)

    def put(self, item: Item) -> None:
        """A token or the end, for the client."""
        self._gate.put(item)

    def left(self) -> None:
        """The client has gone. A token that waits for the receiver then has nobody to wait for."""
        if not self._gate.is_open:
            self._sender.cancel(self._transfer_id, "aborted")

    def admitted(self, block_table: Sequence[int], num_cached_tokens: int) -> None:
        if self._hold.take(block_table):
            self._sender.publish(self._transfer_id, block_table, self._num_tokens, num_cached_tokens)

    def layer_written(self, layer: int, start: int, end: int) -> None:
        self._sender.layer_ready(self._transfer_id, layer, start, end)

    def output(self, output: TokenOutput) -> None:
        if output.index == 0:
            self._sender.finish(self._transfer_id, output.token_id)

    def ended(self, error: PdlinkError | None) -> None:
        if error is not None:
            self._sender.cancel(self._transfer_id, error.code)


class DecodeLeg:
    """A request whose prompt's KV comes from another worker."""

    def __init__(
        self,
        request_id: str,
        transfer_id: str,
        num_prompt_tokens: int,
        address: str,
        *,
        block_tokens: int,
        verify: Verify,
        recompute: bool,
        engine: Engine,
        pool: BlockPool,
        receiver: Receiver,
    ) -> None:
        """recompute: compute the prompt here if its KV does not come, instead of failing the request.

        Raises InvalidRequest if the transfer id was used before, TransferFailed if prefill has failed already.
        """
        self._request_id, self._transfer_id = request_id, transfer_id
        self._engine, self._receiver = engine, receiver
        self._num_tokens, self._block_tokens = num_prompt_tokens, block_tokens
        self._recompute, self._verify = recompute, verify
        self._hold = _Hold(pool, engine.wake)
        self._fell_back = False
        self._failure: TransferFailed | None = None
        self.kv_path = ""
        """How the prompt's KV came here, as `recomputed` writes it; empty while that is open."""
        receiver.expect(transfer_id, address, self)

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
        if self._hold.take(blocks):
            self._receiver.offer(self._transfer_id, blocks, num_cached_tokens, self._num_tokens, verify=self._verify)

    def layer_written(self, layer: int, start: int, end: int) -> None:
        """Prompt tokens computed here after a failure: nobody else wants them."""

    def output(self, output: TokenOutput) -> None:
        """The answer goes to the client only."""

    def ended(self, error: PdlinkError | None) -> None:
        self._receiver.cancel(self._transfer_id, error.code if error else "request_ended")

    # -- the endpoint's side: ReceiveHandler -------------------------------------------------------------------------

    def ready(self, first_token: int) -> None:
        self.kv_path = "transferred"
        self._engine.kv_arrived(self._request_id, first_token)

    def failed(self, reason: str) -> None:
        self._failure = TransferFailed(f"the KV of transfer {self._transfer_id} did not arrive: {reason}", reason)
        self.kv_path = recomputed(self._failure)
        self._engine.kv_failed(self._request_id, recompute=self._recompute, error=self._failure)

    def released(self) -> None:
        self._hold.give_back()
