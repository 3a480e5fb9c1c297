"""`EnginePort`: translates an engine's reports about its requests into calls of a node for their transfers.

An engine calls these verbs for each of its requests, by its own request id; requests without a transfer are ignored.
The way back (KV has arrived, failed, blocks are free) are the signals of the `Outgoing` or `Incoming` that `send` and
`receive` return. So an engine behind pdlink is one file that translates its hooks into these verbs, and these signals
into its own calls. The engine does not know transfers, the node does not know requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.errors import InvalidRequest, PdlinkError
from pdlink.events import FallbackUsed, emit
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdlink.kv.groups import BlockLists
    from pdlink.node.node import Incoming, Node, Outgoing


class EnginePort:
    """The requests of one engine that take part in transfers of one node. Every method may be called from any thread.

    The verbs of a request are called in the order in which they happen.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}

    # -- a request begins --------------------------------------------------------------------------------------------

    def send(self, request_id: str, transfer_id: str, num_tokens: int) -> Outgoing:
        """The KV of this request's `num_tokens` tokens is computed here for another node. Raises as `Node.send`."""
        self._check(request_id)
        outgoing = self._outgoing[request_id] = self.node.send(transfer_id)
        outgoing.num_tokens = num_tokens
        return outgoing

    def receive(
        self, request_id: str, transfer_id: str, peer: str, num_tokens: int, *, by_layer: bool = True
    ) -> Incoming:
        """The KV of the first `num_tokens` tokens comes from the node at `peer`. Raises as `Node.receive`."""
        self._check(request_id)
        incoming = self._incoming[request_id] = self.node.receive(transfer_id, peer, by_layer=by_layer)
        incoming.num_tokens = num_tokens
        return incoming

    # -- what an engine says -----------------------------------------------------------------------------------------

    def admitted(
        self, request_id: str, blocks: BlockLists, num_cached_tokens: int = 0, end: int | None = None
    ) -> None:
        """The request has blocks: one list for each group of layers, from token 0 on.

        Its first `num_cached_tokens` tokens are in them. end: of what is received; None: all of the request's tokens.

        Called again, with other blocks, by an engine that computes the prompt after a transfer to here has failed,
        and by one that computes it anew after `preempted`.
        """
        outgoing, incoming = self._outgoing.get(request_id), self._incoming.get(request_id)
        if outgoing is not None:
            outgoing.publish(blocks, outgoing.num_tokens, num_cached_tokens)
        elif incoming is not None and incoming.error is not None:
            del self._incoming[request_id]
            emit(FallbackUsed(kind="recompute", reason=incoming.error.reason.code))
        elif incoming is not None:
            groups = self.node.groups
            end = incoming.num_tokens if end is None else min(end, incoming.num_tokens)
            start = min(num_cached_tokens, end)
            incoming.offer(groups.part(groups.by_group(blocks), start, end), range(start, end))

    def extended(self, request_id: str, blocks: BlockLists) -> None:
        """The request has more blocks, behind those it was admitted with."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            outgoing.extend(blocks)

    def preempted(self, request_id: str, timeout_s: float) -> None:
        """The request is about to lose its blocks: wait until no push reads them (`Outgoing.withdraw`)."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            outgoing.withdraw(timeout_s)

    def layer_written(self, layer: int, spans: Iterable[tuple[str, int, int]]) -> None:
        """Tokens [start, end) of each (request_id, start, end) are in their blocks for `layer` (`layer_ready`)."""
        for request_id, start, end in spans:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.layer_ready(layer, start, end)

    def layer_needed(self, request_id: str, layer: int, timeout_s: float) -> bool:
        """Whether the request's KV of `layer` is here; waits up to `timeout_s` for it."""
        incoming = self._incoming.get(request_id)
        if incoming is None:
            return False
        try:
            incoming.wait_layer(layer, timeout_s)
        except PdlinkError:  # too late, or never: then `done` says so
            return False
        return True

    def finished(self, request_id: str, first_token: int = 0) -> None:
        """The request's prompt is computed, and `first_token` sampled."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            outgoing.finish(first_token)

    def ended(self, request_id: str, reason: Reason | None = None) -> None:
        """The engine has done with the request. reason: why, if it did not complete: its transfer ends, too.

        What was `finished` goes on without the engine.
        """
        outgoing, incoming = self._outgoing.pop(request_id, None), self._incoming.pop(request_id, None)
        if outgoing is not None and reason is not None:
            outgoing.cancel(reason)
        if incoming is not None and not incoming.done.is_set():
            incoming.cancel(reason or Reason(Code.ABORTED, "the request has ended"))

    def _check(self, request_id: str) -> None:
        if request_id in self._outgoing or request_id in self._incoming:
            raise InvalidRequest(f"request id {request_id!r} is in use")
