"""The two legs of a request in the built-in engine: what a transfer's signals mean for the engine and for the client.

What the engine says about a request goes to its `EnginePort` without passing here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdlink.api import kv_path
from pdlink.errors import TransferFailed

if TYPE_CHECKING:
    from pdlink.engine.engine import Engine
    from pdlink.node.port import EnginePort
    from pdlink.serve.stream import Stream


def recomputed(failure: TransferFailed) -> str:
    """The value of `X-Pdlink-KV` after this failure."""
    return kv_path.recomputed(failure.reason.label)


class PrefillLeg:
    """A request whose prompt is computed here and whose KV goes to another worker.

    Decode continues from its token, so both workers must have the same model, which their handshake proves. The token
    waits until the receiver has spoken in a session whose handshake holds; as a rule it has before the prompt is
    computed.
    """

    def __init__(self, stream: Stream, transfer_id: str, engine: Engine, port: EnginePort) -> None:
        """Raises InvalidRequest if the transfer id was used before."""
        self._stream, self._engine = stream, engine
        stream.hold()
        self.outgoing = port.send(stream.request_id, transfer_id, stream.num_prompt_tokens)
        self.outgoing.accepted.then(stream.let_pass)
        self.outgoing.done.then(self._on_done)
        self.outgoing.released.then(engine.wake)

    def submitted(self) -> None:
        """The engine has the request now. It has missed a failure that came before: repeat it."""
        if self.outgoing.error is not None:
            self._on_done()

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


class DecodeLeg:
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
        self.incoming = port.receive(
            stream.request_id, transfer_id, address, stream.num_prompt_tokens, by_layer=by_layer
        )
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
            coming = partial(self._engine.kv_coming, self._stream.request_id, self.incoming.num_tokens, token)
            self._engine.soon(coming)

    def _on_done(self) -> None:
        incoming, error, request_id = self.incoming, self.incoming.error, self._stream.request_id
        if error is None:
            self._stream.kv_path = kv_path.TRANSFERRED
            arrived = partial(self._engine.kv_arrived, request_id, incoming.num_tokens, incoming.first_token)
            self._engine.soon(arrived)
        else:
            self._stream.kv_path = recomputed(error)
            failed = partial(self._engine.kv_failed, request_id, recompute=self._recompute, error=error)
            self._engine.soon(failed)
