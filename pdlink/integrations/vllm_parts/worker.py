"""A shard's half of the connector: what the step plans say becomes calls of the node.

vLLM calls it from one thread, between and inside forward passes, and nothing here waits, with two exceptions: blocks
of a preempted request are given up only when no push reads them any more, and a step that computes nothing may wait a
little for what vLLM waits for. The node calls back in its own thread.

vLLM asks once per step what has ended and wants every answer once: a sent request after it has said that the request
is over, a received one when nothing can write to its blocks any more, whatever has become of it. So a receive that
failed is reported after the fence only: vLLM computes into the same blocks at once.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.errors import InvalidRequest, PdlinkError
from pdlink.events import TransferEnded, emit
from pdlink.integrations.vllm_parts.requests import shown
from pdlink.protocol.reasons import NOT_NEEDED, code_of, in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pdlink.integrations.vllm_parts.layout import CacheLayout
    from pdlink.integrations.vllm_parts.requests import Announce, Chunk, Expect, Offer, StepPlan, Stop
    from pdlink.node.incoming import Incoming
    from pdlink.node.node import Node
    from pdlink.node.outgoing import Outgoing

log = logging.getLogger(__name__)


def _tell(text: str, transfer_id: str, request_id: str, reason: str) -> None:
    """A transfer that failed, for people: at the level that the reason deserves, in words, on one line."""
    level = logging.WARNING
    if reason == NOT_NEEDED:
        level = logging.DEBUG  # all is well
    elif reason == "aborted" or reason.startswith("refused: "):
        level = logging.INFO  # clients leave all the time; the endpoint has told once that it was refused
    log.log(level, text, shown(transfer_id), shown(request_id), shown(in_words(reason)))


@dataclass(slots=True)
class Results:
    """What has ended since the last step: ids of requests."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Those of `received` whose KV is not there."""
    failed_blocks: set[int] = field(default_factory=set)
    """Blocks of `failed` that hold nothing."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why, as a code (`pdlink.protocol.reasons`), for each of `failed`."""


@dataclass(slots=True)
class _Send:
    transfer_id: str
    outgoing: Outgoing | None = None
    """None if the transfer was over before it began."""
    over_here: bool = False
    """vLLM has said that the request is over."""
    quiet: bool = False
    """Nothing reads its blocks any more."""


class _Receive:
    """What vLLM waits for of one transfer."""

    def __init__(self, request_id: str, transfer_id: str, books: _Books) -> None:
        self.request_id, self.transfer_id, self._books = request_id, transfer_id, books
        self.asked = False
        """vLLM has reserved blocks for it."""
        self.parked: tuple[int, ...] | None = None
        """Blocks whose KV vLLM waits for; None while it does not."""
        self.arrived = False
        self.over = False
        """Nothing can write to the blocks any more."""
        self.reason = ""
        """Code of why it failed."""
        self.incoming: Incoming | None = None
        """None if the transfer was over before it began."""

    def follow(self, incoming: Incoming) -> None:
        self.incoming = incoming
        incoming.done.then(self._on_done)
        incoming.released.then(self.released)

    def _on_done(self) -> None:
        assert self.incoming is not None
        if self.incoming.error is not None:
            self.failed(self.incoming.error.reason)
            return
        with self._books.lock:
            self.arrived = True
            self._books.report(self)

    def failed(self, reason: str) -> None:
        self.reason = code_of(reason)
        _tell("transfer %s: the KV of request %s will not come: %s", self.transfer_id, self.request_id, reason)

    def released(self) -> None:
        with self._books.lock:
            self.over = True
            self._books.report(self)


class _Books:
    """What is under way and what has to be reported. Guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: dict[str, _Send] = {}
        """By request."""
        self.outgoing: dict[str, Outgoing] = {}
        """Those of `sends` that are not released yet, by transfer."""
        self.receives: dict[str, _Receive] = {}
        """By transfer."""
        self.results = Results()
        self.news = threading.Event()
        """Set while `results` has something that was not taken."""

    def report(self, receive: _Receive) -> None:
        """Tell vLLM, once, that a parked request can go on; forget the receive when it is over. Under `lock`."""
        if receive.parked is not None and (receive.arrived or receive.over):
            self.results.received.add(receive.request_id)
            self.news.set()
            if not receive.arrived:
                self.results.failed.add(receive.request_id)
                self.results.failed_blocks.update(receive.parked)
                self.results.reasons[receive.request_id] = receive.reason
            receive.parked = None
        if receive.over and receive.asked:
            self.receives.pop(receive.transfer_id, None)


class WorkerHalf:
    """The transfers of one shard: of a rank's KV, or of a part of its heads (`shards.py`)."""

    def __init__(
        self,
        node: Node,
        cache: CacheLayout,
        *,
        shard: int,
        block_ratio: int,
        preemption_s: float,
    ) -> None:
        """block_ratio: blocks of the layout to one block of vLLM's scheduler.

        preemption_s: longest wait for pushes of a preempted request.
        """
        self._node, self._cache = node, cache
        self._shard, self._ratio, self._unit = shard, block_ratio, cache.token_unit
        self._scheduler_block_tokens = cache.layout.block_tokens * cache.token_unit * block_ratio
        self._preemption_s = preemption_s
        self._books = _Books()
        self._chunks: Sequence[tuple[Chunk, Outgoing, int, int]] = ()
        """Of this step: what is computed, as positions of the layout."""
        self._unsaved: set[str] = set()
        self.short_of_blocks = False
        """Whether requests waited for blocks in the last step."""

    # -- in the order of a step --------------------------------------------------------------------------------------

    def withdraw(self, plan: StepPlan) -> None:
        """Before the blocks of preempted requests are written to by others."""
        for transfer_id in plan.withdrawn:
            outgoing = self._books.outgoing.get(transfer_id)
            if outgoing is not None:
                outgoing.withdraw(self._preemption_s)

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        self.short_of_blocks = plan.short
        for announce in plan.announces:
            self._announce(announce)
        for expect in plan.expects:
            self._expect(expect)
        for offer in plan.offers:
            self._offer(offer)
        if plan.chunks:
            found = [(chunk, self._books.outgoing.get(chunk.transfer_id)) for chunk in plan.chunks]
            self._chunks = [self._publish(chunk, outgoing) for chunk, outgoing in found if outgoing is not None]
        if self._chunks:
            self._unsaved = {name for name, planes in self._cache.planes.items() if planes}
            self._node.prefilling(on=True)
        for stop in plan.stops:
            self._stop(stop)

    def layer_saved(self, name: str) -> None:
        """In the forward pass: this layer's KV of the step's tokens is in its blocks.

        With the last layer of its last chunk a prompt is complete. Decode need not wait for what follows that layer's
        attention here, nor for the sampling of a token that nobody reads.
        """
        if not self._chunks or name not in self._unsaved:
            return
        self._unsaved.discard(name)
        for plane in self._cache.planes[name]:
            for _, outgoing, start, end in self._chunks:
                outgoing.layer_ready(plane, start, end)
        if not self._unsaved:
            for chunk, outgoing, _, _ in self._chunks:
                if chunk.end == chunk.num_tokens:
                    outgoing.finish()

    def end(self) -> None:
        """After the forward pass: layers whose hook did not run (a full graph) are ready now, too."""
        if not self._chunks:
            return
        self._node.prefilling(on=False)
        for name in self._cache.planes:
            self.layer_saved(name)
        self._chunks = ()

    def results(self, over: Collection[str]) -> Results:
        """What has ended. over: requests that vLLM has done with since the last call."""
        with self._books.lock:
            if over and self._books.sends:
                for request_id in over:
                    send = self._books.sends.get(request_id)
                    if send is not None:
                        send.over_here = True
                        self._report(request_id, send)
            results, self._books.results = self._books.results, Results()
            self._books.news.clear()
            return results

    def pause(self, timeout_s: float) -> None:
        """Wait for the next result, if vLLM waits for one; for steps that compute nothing."""
        with self._books.lock:
            awaited = any(receive.parked is not None for receive in self._books.receives.values()) or any(
                send.over_here for send in self._books.sends.values()
            )
        if awaited:
            self._books.news.wait(timeout_s)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _announce(self, announce: Announce) -> None:
        if announce.request_id:
            self._announce_one(announce)
        if announce.last_of:
            self._node.endpoint.sender.complete(announce.last_of, announce.num_prompts)

    def _announce_one(self, announce: Announce) -> None:
        request_id, send = announce.request_id, _Send(announce.transfer_id)
        with self._books.lock:
            self._books.sends[request_id] = send

        def failed(reason: str) -> None:
            _tell("transfer %s: the KV of request %s is not sent: %s", send.transfer_id, request_id, reason)

        def quiet() -> None:
            with self._books.lock:
                send.quiet = True
                self._books.outgoing.pop(send.transfer_id, None)
                self._report(request_id, send)

        def done() -> None:
            if outgoing.error is not None:
                failed(outgoing.error.reason)

        try:
            outgoing = self._node.send(announce.transfer_id)
        except PdlinkError as error:
            reason = self._node.endpoint.sender.stopped(announce.transfer_id) or str(error)
            if reason != NOT_NEEDED:
                self._count("sender", announce.transfer_id, reason)
            failed(reason)
            quiet()
            return
        with self._books.lock:
            send.outgoing = self._books.outgoing[announce.transfer_id] = outgoing
        outgoing.done.then(done)
        outgoing.released.then(quiet)

    def _count(self, side: str, transfer_id: str, reason: str) -> None:
        """A transfer that failed before the endpoint knew it."""
        emit(
            TransferEnded(
                transfer_id=transfer_id,
                side=side,
                peer="",
                state="FAILED",
                reason=reason,
                nbytes=0,
                transport="",
                started_s=self._node.endpoint.clock.now_s(),
            )
        )

    def _report(self, request_id: str, send: _Send) -> None:
        """Tell vLLM, once, that it can have the blocks. Under the books' lock."""
        if send.over_here and send.quiet and self._books.sends.pop(request_id, None) is not None:
            self._books.results.sent.add(request_id)
            self._books.news.set()

    def _publish(self, chunk: Chunk, outgoing: Outgoing) -> tuple[Chunk, Outgoing, int, int]:
        start = chunk.start // self._unit
        whole = -(-chunk.num_tokens // self._unit)
        if chunk.first:
            outgoing.publish(self._kernel_blocks(chunk.blocks), whole)
        elif chunk.blocks:
            outgoing.extend(self._kernel_blocks(chunk.blocks))
        return chunk, outgoing, start, whole if chunk.end == chunk.num_tokens else chunk.end // self._unit

    def _expect(self, expect: Expect) -> None:
        receive = _Receive(expect.request_id, expect.transfer_id, self._books)
        with self._books.lock:
            self._books.receives[expect.transfer_id] = receive
        try:
            if self._shard >= len(expect.addresses):
                raise InvalidRequest(f"shard {self._shard} has no peer among {len(expect.addresses)} addresses")
            address = expect.addresses[self._shard]
            receive.follow(self._node.receive(expect.transfer_id, address, by_layer=False))
        except PdlinkError as error:
            self._count("receiver", expect.transfer_id, str(error))
            receive.failed(str(error))
            receive.released()

    def _offer(self, offer: Offer) -> None:
        start, end = offer.start // self._unit, -(-offer.end // self._unit)
        blocks: Sequence[int] = ()
        if offer.start == offer.end:
            start = end
        else:
            block_tokens = self._cache.layout.block_tokens
            blocks = self._kernel_blocks(offer.blocks)[start // block_tokens : -(-end // block_tokens)]
        with self._books.lock:
            receive = self._books.receives.get(offer.transfer_id)
            if receive is None:
                return
            receive.asked = True
            if blocks:
                receive.parked = offer.blocks[offer.start // self._scheduler_block_tokens :]
            self._books.report(receive)
            if receive.over:
                return
        assert receive.incoming is not None
        receive.incoming.offer(blocks, range(start, end))

    def _stop(self, stop: Stop) -> None:
        with self._books.lock:
            receive = self._books.receives.get(stop.transfer_id)
            if receive is not None and not receive.asked:  # vLLM does not wait for it: no report
                del self._books.receives[stop.transfer_id]
        if receive is not None:
            self._node.endpoint.receiver.cancel(stop.transfer_id, stop.reason)
        else:
            self._node.endpoint.sender.cancel(stop.transfer_id, stop.reason)

    def _kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        ratio = self._ratio
        return list(blocks) if ratio == 1 else [block * ratio + part for block in blocks for part in range(ratio)]

    def states(self) -> Mapping[str, int]:
        """Requests that this half has not reported as ended yet."""
        with self._books.lock:
            return {"sends": len(self._books.sends), "receives": len(self._books.receives)}
