"""One request between HTTP, the engine and its transfer. `Stream`: its tokens. `PrefillLeg`, `DecodeLeg`: what the
transfer's signals mean for the engine and for the client.

What the engine says about a request goes to its `EnginePort` without passing here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from pdlink.api import kv_path
from pdlink.errors import DeadlineExceeded, PdlinkError, TransferFailed
from pdlink.logs import about

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink.engine.engine import Engine
    from pdlink.engine.request import TokenOutput
    from pdlink.node.node import Incoming, Outgoing
    from pdlink.node.port import EnginePort

    Item = TokenOutput | PdlinkError | None
    """What a client gets: a token, or the end (None, or the error that ended the request)."""

log = logging.getLogger(__name__)


class Stream:
    """The tokens of one request, in the asyncio loop that asked for them."""

    kv_path = ""
    """How the KV of a decode leg's prompt came here, for a header; known with its first token. Else empty."""
    failure: TransferFailed | None = None
    """Why the transfer of a prefill leg failed, which aborts its request."""
    leg: PrefillLeg | None = None
    """Of a prefill leg, which waits for its receiver longer than the engine computes."""
    first_token_s: float | None = None
    num_tokens = 0
    """Of the answer, so far."""
    finish_reason = ""

    def __init__(self, request_id: str, num_prompt_tokens: int, timeout_s: float, *, held: bool = False) -> None:
        """held: keep what is put from the client until `let_pass`."""
        self.request_id, self.num_prompt_tokens = request_id, num_prompt_tokens
        self.started_s = time.monotonic()
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._lock = threading.RLock()
        self._held: list[Item] | None = [] if held else None
        """What waits for `let_pass`; None if nothing has to."""

    @property
    def holds(self) -> bool:
        return self._held is not None

    def let_pass(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
            for item in held:
                self.put(item)

    def put(self, item: Item) -> None:
        """From any thread: a token, or the end. An error is not held, and drops what is."""
        with self._lock:
            if self._held is not None and not isinstance(item, PdlinkError):
                self._held.append(item)
                return
            self._held = None
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
            except RuntimeError:  # the loop is closed: nobody reads any more
                name = self.request_id
                log.debug("request %s ended after its reader", name, extra=about(request_id=name))

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        """Tokens until the request has ended. Raises the error that ended it, DeadlineExceeded after the deadline."""
        deadline_s = self._loop.time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    item = await self._queue.get()
            except TimeoutError:
                raise DeadlineExceeded(f"the request was not answered within {self._timeout_s} s") from None
            if item is None:
                return
            if isinstance(item, PdlinkError):
                raise item
            yield item


class TransferLeg:
    """A request's part in its transfer."""

    _stream: Stream
    _engine: Engine
    _transfer: Outgoing | Incoming

    def submitted(self) -> None:
        """The engine has the request now, and hears of the transfer from here on: also what has happened already."""
        self._transfer.done.then(self._on_done)
        self._transfer.released.then(self._engine.wake)

    def _on_done(self) -> None:
        raise NotImplementedError


class PrefillLeg(TransferLeg):
    """A request whose prompt is computed here and whose KV goes to another worker. Its stream is held.

    Decode continues from its token, so both workers must have the same model, which their handshake proves. The token
    waits until the receiver has spoken in a session whose handshake holds; as a rule it has before the prompt is
    computed.
    """

    def __init__(self, stream: Stream, transfer_id: str, engine: Engine, port: EnginePort) -> None:
        """Raises InvalidRequest if the transfer id was used before."""
        self._stream, self._engine = stream, engine
        self.outgoing = self._transfer = port.send(stream.request_id, transfer_id, stream.num_prompt_tokens)
        self.outgoing.accepted.then(stream.let_pass)

    def left(self) -> None:
        """The client has gone: nobody waits for a token that still waits for the receiver."""
        if self._stream.holds:
            self.outgoing.cancel()

    def _on_done(self) -> None:
        """A transfer that failed aborts the request: nobody wants its KV."""
        error = self.outgoing.error
        if error is not None:
            failure = TransferFailed(f"the KV was not wanted or could not be sent: {error.reason}", error.reason)
            self._stream.failure = failure
            if self._stream.holds:
                self._stream.put(failure)
            self._engine.abort(self._stream.request_id)


class DecodeLeg(TransferLeg):
    """A request whose prompt's KV comes from another worker."""

    def __init__(
        self, stream: Stream, transfer_id: str, address: str, engine: Engine, port: EnginePort, *, recompute: bool
    ) -> None:
        """recompute: compute the prompt here if its KV does not come, instead of failing the request.

        Raises what `Node.receive` raises.
        """
        self._stream, self._engine, self._recompute = stream, engine, recompute
        # An engine that runs other requests does not begin before all layers are here: it saves the announcements.
        by_layer = engine.num_running == 0
        self.incoming = self._transfer = port.receive(
            stream.request_id, transfer_id, address, stream.num_prompt_tokens, by_layer=by_layer
        )
        self.incoming.sampled.then(self._on_sampled)

    def _on_sampled(self) -> None:
        token = self.incoming.first_token
        if token is not None and not self.incoming.done.is_set():
            coming = partial(self._engine.kv_coming, self._stream.request_id, self.incoming.num_tokens, token)
            self._engine.soon(coming)

    def _on_done(self) -> None:
        incoming, error, request_id = self.incoming, self.incoming.error, self._stream.request_id
        if error is None:
            self._stream.kv_path = kv_path.TRANSFERRED
            arrived = partial(self._engine.kv_arrived, request_id, incoming.num_tokens, incoming.first_token)
            self._engine.soon(arrived)
        else:
            self._stream.kv_path = kv_path.recomputed(error.reason.label)
            failed = partial(self._engine.kv_failed, request_id, recompute=self._recompute, error=error)
            self._engine.soon(failed)
