"""A rank's half of the connector: what the step plans say goes to the ports of its nodes, one for each shard.

Shard s of a prefill server sends to shard s of a decode server, whichever ranks hold them (`shards.py`). A request is
done when all shards are.

vLLM calls from one thread, between and inside forward passes. Nothing here waits, with two exceptions: blocks of a
preempted request are given up when no push reads them any more, and a step that computes nothing waits a little for
what vLLM waits for. Nodes call back in their own threads.

vLLM polls once per step. Report each request exactly once: a sending request after vLLM finished it and no push reads
its blocks; a receiving request once it is complete, or failed and fenced: vLLM then computes into the same blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import InvalidRequest, PdlinkError
from pdlink.events import TransferEnded, emit
from pdlink.integrations.vllm_parts.requests import StoppedRequest, shown
from pdlink.node.port import EnginePort
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdlink.integrations.vllm_parts.adapters import Adapter, LoadedAdapters
    from pdlink.integrations.vllm_parts.layout import CacheGroups
    from pdlink.integrations.vllm_parts.requests import (
        Announce,
        ComputedChunk,
        ExpectedRequest,
        OfferedBlocks,
        StepPlan,
    )
    from pdlink.integrations.vllm_parts.store_book import Looked
    from pdlink.node.node import Incoming, Node, Outgoing

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Results:
    """What has ended since the last step: ids of requests."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Those of `received` whose KV is not there."""
    failed_blocks: set[int] = field(default_factory=set)
    """Blocks of `failed` that hold nothing."""
    lost_blocks: set[int] = field(default_factory=set)
    """Blocks that hold nothing of others of `received`, whose first tokens are there."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why, as a `Reason.label`, for each of `failed` that came from another server."""
    looked: list[Looked] = field(default_factory=list)
    """What the store has."""
    short: dict[str, int] = field(default_factory=dict)
    """Loads that have brought less than was promised: the request, and where what came ends."""
    loaded: list[tuple[str, int]] = field(default_factory=list)
    """Loads that an offer waits for: the request, and where what is in its blocks ends."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that takes part in a transfer on every shard. Guarded by the half's lock."""

    request_id: str
    transfer_id: str
    sends: bool
    num_open: int
    """Shards on which something may still touch its blocks."""
    num_missing: int
    """Receives: shards whose KV is not here and may still come, or be written."""
    over_here: bool = False
    """Sends: vLLM has finished it."""
    adapter: Adapter | None = None
    asked: bool = False
    """Receives: vLLM has reserved blocks for it."""
    parked: tuple[int, ...] | None = None
    """Receives: blocks whose KV vLLM waits for; None while it does not."""
    reason: str = ""
    """`Reason.label` of why it failed."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One shard of this rank."""

    number: int
    port: EnginePort
    planes: Mapping[str, tuple[int, ...]]
    """Of its layers, by name."""
    unsaved: set[str] = field(default_factory=set)
    """Layers that this step has not written yet."""


OTHER_ADAPTER = "this server has not loaded the files that lie at the path of the request's adapter now"


class WorkerHalf:
    """The transfers of one rank."""

    def __init__(
        self,
        shards: Sequence[tuple[int, Node, CacheGroups]],
        cache: CacheGroups,
        *,
        preemption_s: float,
        news: threading.Event,
        adapters: LoadedAdapters,
        held_steps: int = 0,
    ) -> None:
        """shards: of this rank: number, node and cache. cache: whose lists of blocks are those of all shards.

        preemption_s: longest wait for pushes of a preempted request. news: set when there is a result.

        held_steps: where vLLM zeroes the blocks that it gives to others, how many steps it may plan, and take a
        prompt's blocks in, before it knows that the prompt is computed: one for each pipeline stage. Its runner V2
        zeroes them before it says whose they were (`handle_preemptions`), so a prompt is complete when these steps
        have not taken its blocks, or when its request has ended.
        """
        self._lanes = [_Lane(number, EnginePort(node), part.planes) for number, node, part in shards]
        self._ports = [lane.port for lane in self._lanes]
        self._cache = cache
        self._preemption_s, self._adapters, self._held_steps = preemption_s, adapters, held_steps
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._results = Results()
        self._news = news
        self._spans: list[tuple[str, int, int]] = []
        """What this step computes for others: (request, start, end)."""
        self._complete: list[str] = []
        """Requests whose last chunk is among them."""
        self._held: dict[str, int] = {}
        """Requests of earlier steps that are complete if so many more do not preempt them."""
        self._offers: dict[str, OfferedBlocks] = {}
        """Requests that wait for a load of the store's. vLLM's thread only."""
        self.short_of_blocks = False
        """Whether requests waited for blocks in the last step."""

    # -- in the order of a step --------------------------------------------------------------------------------------

    def withdraw(self, plan: StepPlan) -> None:
        """Before the blocks of preempted requests are written to by others."""
        for request_id in plan.withdrawn:
            self._held.pop(request_id, None)
            for port in self._ports:
                port.preempted(request_id, self._preemption_s)

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        self.short_of_blocks = plan.short
        for request_id, left in list(self._held.items()):
            if left > 1:
                self._held[request_id] = left - 1
            else:
                self._finished(request_id)
        for announce in plan.announces:
            self._announce(announce)
        for attempt, num_prompts in plan.complete:
            for port in self._ports:
                port.node.complete(attempt, num_prompts)
        for expect in plan.expects:
            self._expect(expect)
        for offer in plan.offers:
            if offer.after_load:
                self._offers[offer.request_id] = offer
            else:
                self._offer(offer)
        if plan.chunks:
            self._spans, self._complete = [], []
            for chunk in plan.chunks:
                self._publish(chunk)
        if self._spans:
            for lane in self._lanes:
                lane.unsaved = {name for name, planes in lane.planes.items() if planes}
            self._prefilling(on=True)
        for stop in plan.stops:
            self._stop(stop)
        with self._lock:
            for request_id in plan.store.parked:
                request = self._requests.get(request_id)
                if request is not None and request.sends:
                    del self._requests[request_id]

    def loaded(self, request_id: str, end: int) -> int:
        """The store has loaded tokens before `end`: offer for the rest. How many tokens that is.

        0: nothing more comes, and so nothing will be reported; this server has all of it, or the request has ended.
        """
        offer = self._offers.pop(request_id)
        with self._lock:
            is_live = request_id in self._requests
        if end >= offer.end:
            self._stop(StoppedRequest(request_id, Reason(Code.NOT_NEEDED)))
        elif is_live:
            self._offer(replace(offer, start=end))
            return offer.end - end
        return 0

    def layer_saved(self, name: str) -> None:
        """In the forward pass: this layer's KV of the step's tokens is in its blocks.

        A prompt is complete on a shard with the last of its layers of the last chunk, unless it is held: decode need
        not wait for what follows that layer's attention here, nor for a token that nobody reads.
        """
        if not self._spans:
            return
        for lane in self._lanes:
            if name not in lane.unsaved:
                continue
            lane.unsaved.discard(name)
            for plane in lane.planes[name]:
                lane.port.layer_written(plane, self._spans)
            for request_id in () if lane.unsaved or self._held_steps else self._complete:
                lane.port.finished(request_id)

    def end(self) -> None:
        """After the forward pass: layers whose hook did not run (a full graph) are ready now, too."""
        if self._spans:
            self._prefilling(on=False)
            for lane in self._lanes:
                for name in lane.planes:
                    self.layer_saved(name)
            if self._held_steps:
                self._held.update(dict.fromkeys(self._complete, self._held_steps))
            self._spans, self._complete = [], []

    def abandon(self) -> None:
        """The forward pass has failed: the transfers of which it was to compute a part end."""
        spans, self._spans, self._complete = self._spans, [], []
        if spans:
            self._prefilling(on=False)
        for request_id, _, _ in spans:
            self._stop(StoppedRequest(request_id, Reason(Code.REQUEST_FAILED, "a step of prefill's has failed")))

    def results(self, over: Collection[str]) -> Results:
        """What has ended. over: requests that vLLM has finished since the last call."""
        for request_id in over if self._held else ():
            if request_id in self._held:
                self._finished(request_id)
        with self._lock:
            for request_id in over if self._requests else ():
                request = self._requests.get(request_id)
                if request is not None and request.sends:
                    request.over_here = True
                    self._report(request)
            results, self._results = self._results, Results()
            return results

    def sends(self, request_id: str) -> bool:
        """Whether the end of this request is to be reported."""
        with self._lock:
            request = self._requests.get(request_id)
            return request is not None and request.sends

    @property
    def computed(self) -> set[str]:
        """Requests of which this step computes a part for others."""
        return {request_id for request_id, _, _ in self._spans}

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for a result."""
        with self._lock:
            return any(request.parked is not None or request.over_here for request in self._requests.values())

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _announce(self, announce: Announce) -> None:
        request = self._new(announce.request_id, announce.transfer_id, sends=True)
        request.adapter = announce.adapter

        def send(port: EnginePort) -> Outgoing:
            if self._adapters.has(announce.adapter) is False:  # one that is not loaded is, when its first chunk is
                raise InvalidRequest(OTHER_ADAPTER)
            return port.send(*_names(request), announce.num_tokens)

        for port in self._ports:
            self._join(request, port, partial(send, port))

    def _expect(self, expect: ExpectedRequest) -> None:
        request = self._new(expect.request_id, expect.transfer_id, sends=False)

        def receive(shard: int, port: EnginePort) -> Incoming:
            if not self._adapters.has(expect.adapter):
                raise InvalidRequest(OTHER_ADAPTER)
            if shard >= len(expect.addresses):
                raise InvalidRequest(f"shard {shard} has no peer among {len(expect.addresses)} addresses")
            return port.receive(*_names(request), expect.addresses[shard], expect.num_tokens, by_layer=False)

        for lane in self._lanes:
            self._join(request, lane.port, partial(receive, lane.number, lane.port))

    def _offer(self, offer: OfferedBlocks) -> None:
        """vLLM has reserved blocks. A request that is over on all shards by now is reported at once."""
        with self._lock:
            request = self._requests.get(offer.request_id)
            if request is None:
                return
            request.asked = True
            request.parked = tuple(self._cache.blocks_from(offer.start, offer.blocks))
            self._report(request)
        blocks = self._cache.kernel_blocks(offer.blocks)
        for port in self._ports:
            port.admitted(offer.request_id, blocks, offer.start, offer.end)

    def _publish(self, chunk: ComputedChunk) -> None:
        with self._lock:
            request = self._requests.get(chunk.request_id)
            if request is None or not request.num_open:
                return
        if not self._adapters.has(request.adapter):
            self._stop(StoppedRequest(chunk.request_id, Reason.refused("adapter", OTHER_ADAPTER)))
            return
        blocks = self._cache.kernel_blocks(chunk.blocks)
        for port in self._ports:
            if chunk.first:
                port.admitted(chunk.request_id, blocks)
            elif any(blocks):
                port.extended(chunk.request_id, blocks)
        self._spans.append((chunk.request_id, chunk.start, chunk.end))
        if chunk.end == chunk.num_tokens:
            self._complete.append(chunk.request_id)

    def _stop(self, stop: StoppedRequest) -> None:
        with self._lock:
            request = self._requests.get(stop.request_id)
            if request is not None and not request.sends and not request.asked:  # vLLM does not wait for it
                del self._requests[stop.request_id]
        for port in self._ports:
            port.ended(stop.request_id, stop.reason)

    def _finished(self, request_id: str) -> None:
        """Nobody takes the blocks of this complete prompt any more."""
        del self._held[request_id]
        for port in self._ports:
            port.finished(request_id)

    def _prefilling(self, on: bool) -> None:
        for port in self._ports:
            port.node.prefilling(on)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _new(self, request_id: str, transfer_id: str, *, sends: bool) -> _Request:
        num_shards = len(self._ports)
        request = _Request(request_id, transfer_id, sends, num_shards, 0 if sends else num_shards)
        with self._lock:
            self._requests[request_id] = request
        return request

    def _join(self, request: _Request, port: EnginePort, begin: Callable[[], Outgoing | Incoming]) -> None:
        """Begin the transfer on one shard, and follow it."""
        try:
            transfer = begin()
        except PdlinkError as error:
            reason = port.node.why_stopped(request.transfer_id) if request.sends else None
            reason = reason or error.reason
            if reason.code is not Code.NOT_NEEDED:
                self._count(request, reason)
            self._failed(request, reason)
            self._released(request, failed=True)
            return

        def done() -> None:
            if transfer.error is not None:
                self._failed(request, transfer.error.reason)
            elif not request.sends:
                with self._lock:
                    request.num_missing -= 1
                    self._report(request)

        def released() -> None:
            port.ended(request.request_id)
            self._released(request, failed=transfer.error is not None)

        transfer.done.then(done)
        transfer.released.then(released)

    def _failed(self, request: _Request, reason: Reason) -> None:
        """Say so, at the level that the reason deserves, in words, on one line."""
        with self._lock:
            request.reason = reason.label
        level = logging.WARNING
        if reason.code is Code.NOT_NEEDED:
            level = logging.DEBUG  # all is well
        elif reason.code in (Code.ABORTED, Code.REFUSED):
            level = logging.INFO  # clients leave all the time; the endpoint has logged a refusal once
        what = "is not sent" if request.sends else "will not come"
        names = shown(request.transfer_id), shown(request.request_id)
        log.log(level, "transfer %s: the KV of request %s %s: %s", *names, what, shown(reason.sentence))

    def _released(self, request: _Request, *, failed: bool) -> None:
        with self._lock:
            request.num_open -= 1
            request.num_missing -= failed and not request.sends
            self._report(request)

    def _report(self, request: _Request) -> None:
        """Report it, if it is time to, and forget it when nothing is left to report. Under the lock."""
        results = self._results
        forget = request.over_here if request.sends else request.asked
        if request.sends and request.over_here and not request.num_open:
            results.sent.add(request.request_id)
            self._news.set()
        elif request.parked is not None and not request.num_missing:
            results.received.add(request.request_id)
            if request.reason:
                results.failed.add(request.request_id)
                results.failed_blocks.update(request.parked)
                results.reasons[request.request_id] = request.reason
            request.parked = None
            self._news.set()
        if forget and not request.num_open and self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    @staticmethod
    def _count(request: _Request, reason: Reason) -> None:
        """A transfer that failed before the endpoint knew it."""
        emit(
            TransferEnded(
                transfer_id=request.transfer_id,
                side="sender" if request.sends else "receiver",
                peer="",
                state="FAILED",
                reason=str(reason),
                nbytes=0,
                transport="",
                started_s=time.monotonic(),
            )
        )


def _names(request: _Request) -> tuple[str, str]:
    return request.request_id, request.transfer_id
