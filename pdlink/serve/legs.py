"""The two legs of a request in the built-in engine: what a transfer's signals mean for the engine and for the client.

What the engine says about a request goes to `pdlink.node.port` without passing here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError, TransferFailed
from pdlink.protocol import kv_path, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.engine.engine import Engine
    from pdlink.engine.request import TokenOutput
    from pdlink.node.port import EnginePort

    Item = TokenOutput | PdlinkError | None
    """What a client gets: a token, or the end (None, or the error that ended the request)."""


def recomputed(failure: TransferFailed) -> str:
    """The value of `X-Pdlink-KV` after this failure."""
    code = reasons.code_of(failure.reason)
    return kv_path.recomputed(failure.code if code == reasons.OTHER else code)


class PrefillLeg:
    """A request whose prompt is computed here and whose KV goes to another worker.

    Decode continues from its token, so both workers must have the same model, which their handshake proves. The token
    waits until the receiver has spoken in a session whose handshake holds; as a rule it has before the prompt is
    computed.
    """

    def __init__(
        self,
        request_id: str,
        transfer_id: str,
        num_prompt_tokens: int,
        *,
        put: Callable[[Item], None],
        engine: Engine,
        port: EnginePort,
    ) -> None:
        """put: takes what goes to the client. Raises InvalidRequest if the transfer id was used before."""
        self._request_id, self._engine, self._put = request_id, engine, put
        self._lock = threading.Lock()
        self._held: list[Item] | None = []
        """What waits for the receiver; None once it has spoken, or the request has failed."""
        self.failure: TransferFailed | None = None
        """Why the transfer failed, if it did: the request is aborted then, because nobody wants its KV."""
        self.outgoing = port.send(request_id, transfer_id, num_prompt_tokens)
        self.outgoing.accepted.then(self._on_accepted)
        self.outgoing.done.then(self._on_done)
        self.outgoing.released.then(engine.wake)

    def put(self, item: Item) -> None:
        """A token or the end, for the client; from any thread. An error passes, and drops what waits."""
        with self._lock:
            if self._held is not None and not isinstance(item, PdlinkError):
                self._held.append(item)
            else:
                self._held = None
                self._put(item)

    def left(self) -> None:
        """The client has gone: nobody waits for a token that still waits for the receiver."""
        if self._held is not None:
            self.outgoing.cancel()

    def _on_accepted(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
            for item in held:
                self._put(item)

    def _on_done(self) -> None:
        error = self.outgoing.error
        if error is not None:
            self.failure = TransferFailed(f"the KV was not wanted or could not be sent: {error.reason}")
            if self._held is not None:
                self.put(self.failure)
            self._engine.abort(self._request_id)


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
        port: EnginePort,
    ) -> None:
        """recompute: compute the prompt here if its KV does not come, instead of failing the request.

        Raises what `Node.receive` raises.
        """
        self._request_id, self._engine, self._recompute = request_id, engine, recompute
        self.kv_path = ""
        """How the prompt's KV came here, as `recomputed` writes it; empty while that is open."""
        # An engine that runs other requests does not begin before all layers are here: it saves the announcements.
        by_layer = engine.num_running == 0
        self.incoming = port.receive(request_id, transfer_id, address, num_prompt_tokens, by_layer=by_layer)
        self.incoming.sampled.then(self._on_sampled)
        self.incoming.done.then(self._on_done)
        self.incoming.released.then(engine.wake)

    def submitted(self) -> None:
        """The engine has the request now. It has missed a failure that came before: repeat it."""
        if self.incoming.error is not None:
            self._on_done()

    def _on_sampled(self) -> None:
        token = self.incoming.first_token
        if token is not None and not self.incoming.done.is_set():
            self._engine.kv_arriving(self._request_id, token)

    def _on_done(self) -> None:
        incoming, error = self.incoming, self.incoming.error
        if error is None:
            self.kv_path = kv_path.TRANSFERRED
            self._engine.kv_arrived(self._request_id, incoming.num_tokens, incoming.first_token)
        else:
            self.kv_path = recomputed(error)
            self._engine.kv_failed(self._request_id, recompute=self._recompute, error=error)
