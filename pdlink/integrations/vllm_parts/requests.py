"""What vLLM's scheduler says about requests, turned into one plan per step for the workers.

This half only decides: it opens nothing, reads no clock and does not know vLLM, so every case can be played through
with plain numbers. The plan travels to the workers with vLLM's own step; `worker.py` acts on it.

A *sending* request is announced when it arrives. Every step that computes a part of its prompt adds a
`ComputedChunk`. It is kept by vLLM (its blocks are) from its end until the workers report that nothing reads the
blocks.

Blocks are what vLLM has reserved: a list for each group of layers, or the list of the only group. Where a group
does not keep all tokens (a sliding window, a recurrent state), prefill computes all but the last token of a prompt:
decode computes that one itself, and needs what was there before it.

A *receiving* request is expected when it arrives, and offers its blocks as soon as vLLM has reserved them: all but
the last prompt token, which vLLM computes in any case to sample from. What the store has of them is loaded first
(`store_book.py`), and the rest is offered for. It is parked until the workers report it. Of
several requests for the same transfer (n > 1) the first one leads: the others wait for it and find its blocks in the
prefix cache, or, where there is none, compute the prompt.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.api import kv_path
from pdlink.api.legs import DecodeParams, PrefillParams
from pdlink.errors import InvalidRequest
from pdlink.integrations.vllm_parts import params as legs
from pdlink.integrations.vllm_parts.store_book import StorePlan
from pdlink.logs import printable
from pdlink.reasons import ABORTED, Code, Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pdlink.integrations.vllm_parts.adapters import Adapter
    from pdlink.integrations.vllm_parts.store_book import StoreBook
    from pdlink.kv.groups import BlockLists

log = logging.getLogger(__name__)

_MAX_LISTS = 1000
"""Attempts with several prompts that are counted at one time."""


def shown(text: str) -> str:
    """What others chose (ids, reasons of a peer) for a log: one line, cut."""
    return printable(text, 300)


@dataclass(frozen=True, slots=True)
class Announce:
    """A request whose prompt is computed here for another server."""

    request_id: str
    transfer_id: str
    num_tokens: int
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class ExpectedRequest:
    """A request whose KV comes from the server at these control addresses, one per shard."""

    request_id: str
    transfer_id: str
    num_tokens: int
    """That come from there: all but the last one of the prompt."""
    addresses: tuple[str, ...]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """What a request lacks from token `start` on is to be written into its blocks; `blocks[0]` holds token 0."""

    request_id: str
    blocks: BlockLists
    start: int
    end: int
    after_load: bool = False
    """A load of the store's comes first, and the offer begins where that ends."""


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """After this step, layer by layer in it, tokens [start, end) of a request that is to be sent are in its blocks.

    The first chunk begins with token 0, also where a prefix was found in the cache: vLLM finds blocks there that
    another request computes in this very step, so they hold nothing yet when the step begins.
    """

    request_id: str
    blocks: BlockLists
    """All blocks so far if `first`, otherwise only the new ones."""
    first: bool
    start: int
    end: int
    num_tokens: int
    """Of the prompt; the chunk that ends there is the last one."""


@dataclass(frozen=True, slots=True)
class StoppedRequest:
    """This server ends the transfer of a request."""

    request_id: str
    reason: Reason


@dataclass(slots=True)
class StepPlan:
    """What one step means for transfers, in the order in which it is to be done."""

    withdrawn: list[str] = field(default_factory=list)
    """Preempted requests: their blocks are overwritten from this step on."""
    announces: list[Announce] = field(default_factory=list)
    complete: list[tuple[str, int]] = field(default_factory=list)
    """Attempts whose prompts have all been announced, and how many those are."""
    expects: list[ExpectedRequest] = field(default_factory=list)
    offers: list[OfferedBlocks] = field(default_factory=list)
    chunks: list[ComputedChunk] = field(default_factory=list)
    stops: list[StoppedRequest] = field(default_factory=list)
    store: StorePlan = field(default_factory=StorePlan)
    short: bool = False
    """Requests wait for blocks: prompts that are computed and that nobody asks for are in their way."""


NOTHING = StepPlan()
"""The plan of most steps: vLLM runs a thousand empty ones a second while a request is parked."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part in one step, in vLLM's terms."""

    request_id: str
    blocks: BlockLists
    whole: bool
    """`blocks` are all of the request's (new, or resumed after a preemption), not only the added ones."""
    start: int
    """Tokens computed before this step."""
    count: int


@dataclass(slots=True)
class _Sending:
    transfer_id: str
    num_tokens: int
    started: bool = False
    """A chunk has been planned, and its blocks have not been withdrawn."""
    complete: bool = False
    """The chunk with the last prompt token has been planned."""


@dataclass(slots=True)
class _Path:
    """Where the KV of a prompt came from, once that is known; as the proxy tells its clients in X-Pdlink-KV."""

    said: str = ""


@dataclass(slots=True)
class _Receiving:
    transfer_id: str
    num_tokens: int
    leads: bool
    begin: int = 0
    promised: int = 0
    """vLLM was last told that so many tokens from `begin` on come from elsewhere."""
    asked: bool = False
    """vLLM has reserved blocks; it is asked for KV once."""
    over: bool = False
    """Its KV is here, or will not come."""
    computes_all: bool = False
    """Here, whatever lies elsewhere."""
    path: _Path = field(default_factory=_Path)
    """Shared by all requests of this transfer."""


@dataclass(slots=True)
class RequestBook:
    """Every request of this server that takes part in a transfer."""

    sends: bool
    """Whether this server may be a prefill server."""
    receives: bool
    shares_prefixes: bool
    keeps_all: bool = True
    """Whether every group of layers keeps all tokens."""
    engine: int = 0
    """Which of the data-parallel engines behind one HTTP port this is."""
    block_tokens: int = 1
    """Of a block of vLLM's scheduler."""
    store: StoreBook | None = None
    _sending: dict[str, _Sending] = field(default_factory=dict)
    _receiving: dict[str, _Receiving] = field(default_factory=dict)
    _in_use: dict[str, str] = field(default_factory=dict)
    """Transfer id to the request that owns it."""
    _plan: StepPlan = field(default_factory=StepPlan)
    """Of the next step."""
    _arrivals: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """By attempt: prompts that have come, of those with several. Bounded: see `_is_last`."""
    _tried: set[str] = field(default_factory=set)
    """Requests for which vLLM looks for blocks in this step and has found none yet."""

    # -- what the scheduler tells ------------------------------------------------------------------------------------

    def arrived(
        self,
        request_id: str,
        params: Mapping[str, object] | None,
        prompt: Sequence[int],
        identity: Iterable[str] = (),
        adapter: Adapter | None = None,
    ) -> int:
        """A new request. One without parameters, or with some that cannot be used, is served as if alone.

        Returns how many of its last tokens vLLM is not to compute here.
        """
        if not params or request_id in self._sending or request_id in self._receiving:
            return 0
        try:
            leg = legs.parse(params)
            if not (self.sends if isinstance(leg, PrefillParams) else self.receives):
                raise InvalidRequest("this server's kv_role has no part in this leg")
            if isinstance(leg, PrefillParams):
                legs.check_engine(leg, self.engine)
        except InvalidRequest as error:
            log.warning("request %s is served without a transfer: %s", shown(request_id), shown(str(error)))
            return 0
        transfer_id = legs.transfer_id(leg.transfer_id, prompt, identity)
        owner = self._in_use.setdefault(transfer_id, request_id)
        if isinstance(leg, DecodeParams):
            receiving = self._receiving[request_id] = _Receiving(transfer_id, len(prompt), leads=owner == request_id)
            leader = self._receiving.get(owner)
            if leader is not None:
                receiving.path = leader.path
            if owner == request_id:
                self._plan.expects.append(
                    ExpectedRequest(request_id, transfer_id, len(prompt) - 1, leg.prefill.addresses, adapter)
                )
            return 0
        left = 0 if self.keeps_all or len(prompt) == 1 else 1
        if owner == request_id:
            self._sending[request_id] = _Sending(transfer_id, len(prompt) - left)
            self._plan.announces.append(Announce(request_id, transfer_id, len(prompt) - left, adapter))
        if self._is_last(leg):
            self._plan.complete.append((leg.transfer_id, leg.num_prompts))
        return left

    def comes_from_elsewhere(self, request_id: str) -> bool:
        """Whether another server was named that computes this request's prompt."""
        return request_id in self._receiving

    def _is_last(self, leg: PrefillParams) -> bool:
        """Whether all prompts of this attempt have come. Of several that never all come the oldest are forgotten."""
        if leg.num_prompts <= 1:
            return leg.num_prompts == 1
        count = self._arrivals.pop(leg.transfer_id, 0) + 1
        if count >= leg.num_prompts:
            return True
        self._arrivals[leg.transfer_id] = count
        if len(self._arrivals) > _MAX_LISTS:
            self._arrivals.popitem(last=False)
        return False

    def missing(self, request_id: str, num_computed: int, *, computes_all: bool = False) -> tuple[int | None, bool]:
        """How many tokens after the first `num_computed` come from elsewhere, and whether to park the request.

        None: ask again in the next step. Decides nothing: vLLM asks as often as it likes.
        computes_all: it wants what only the computation of its whole prompt gives, as `prompt_logprobs`.
        """
        self._tried.add(request_id)
        request = self._receiving.get(request_id)
        if computes_all:
            if request is not None:
                request.computes_all = True
            return 0, False
        if request is None and self.store is not None:
            found = self.store.missing(request_id, num_computed)
            if found is None:
                self._tried.discard(request_id)
            return found, bool(found)
        if request is None or request.asked:
            return 0, False
        if not request.leads:
            leader = self._receiving.get(self._in_use.get(request.transfer_id, ""))
            if self.shares_prefixes and leader is not None and not leader.over:
                self._tried.discard(request_id)
                return None, False
            return 0, False
        if self.store is not None and self.store.missing(request_id, num_computed) is None:
            self._tried.discard(request_id)
            return None, False
        count = request.num_tokens - 1 - num_computed
        request.begin, request.promised = num_computed, max(0, count)
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request_id: str, blocks: BlockLists, num_external: int) -> int:
        """vLLM has reserved blocks, from token 0 on. The `num_external` tokens behind those it has are to come: all
        that `missing` said, fewer where vLLM has cut that (it has no routed experts of them), or none.

        How many of these come from the store.
        """
        self._tried.discard(request_id)
        request = self._receiving.get(request_id)
        loaded = 0
        if self.store is not None:
            loaded = self.store.allocated(request_id, blocks, num_external)
        if request is None or request.asked:
            return loaded
        request.asked = True
        if request.leads and num_external == 0:
            request.over = True
            # Less than a block vLLM has in its own prefix cache, which it asks for in whole blocks.
            computes = request.computes_all or request.promised >= self.block_tokens
            request.path.said = kv_path.recomputed(Code.WHOLE_PROMPT) if computes else kv_path.CACHED
            self._plan.stops.append(StoppedRequest(request_id, Reason(Code.NOT_NEEDED)))
        elif request.leads:
            if loaded == num_external:
                request.path.said = kv_path.CACHED
            begin, end = request.begin, request.begin + num_external
            self._plan.offers.append(OfferedBlocks(request_id, blocks, begin, end, after_load=loaded > 0))
        return loaded

    def step(self, scheduled: Iterable[Scheduled], preempted: Collection[str] = ()) -> StepPlan:
        """The plan of the step that vLLM has just put together."""
        plan = self._plan
        if self.store is not None:
            scheduled = tuple(scheduled)
            plan.store = self.store.step(scheduled, preempted)
        if self._sending:
            for request_id in preempted:
                request = self._sending.get(request_id)
                if request is not None:
                    request.started = request.complete = False
                    plan.withdrawn.append(request_id)
            for part in scheduled:
                self._compute(part)
        plan.short = bool(self._tried)
        self._tried.clear()
        if plan == NOTHING:
            return NOTHING
        self._plan = StepPlan()
        return plan

    def _compute(self, part: Scheduled) -> None:
        request = self._sending.get(part.request_id)
        if request is None or request.complete or part.start >= request.num_tokens:
            return
        end = min(part.start + part.count, request.num_tokens)
        request.complete = end == request.num_tokens
        if part.whole and request.started:  # preempted, and nobody said so before its blocks were given away
            self._plan.stops.append(StoppedRequest(part.request_id, Reason(Code.PREEMPTED)))
        request.started = True
        start = 0 if part.whole else part.start
        self._plan.chunks.append(
            ComputedChunk(part.request_id, part.blocks, part.whole, start, end, request.num_tokens)
        )

    def path(self, request_id: str) -> str:
        """Where the KV of this request's prompt came from; empty if it is in no transfer, or that is not known."""
        receiving = self._receiving.get(request_id)
        return receiving.path.said if receiving is not None else ""

    def leg(self, request_id: str) -> str:
        """Which leg of an attempt this request is: prefill, decode, or empty."""
        return "prefill" if request_id in self._sending else "decode" if request_id in self._receiving else ""

    def is_awaited(self, request_id: str) -> bool:
        """Whether KV may be written to its blocks until `received`."""
        request = self._receiving.get(request_id)
        comes = request is not None and request.leads and request.asked and not request.over
        return comes or (self.store is not None and self.store.is_loading(request_id))

    def ended(self, request_id: str, tokens: Sequence[int] = (), blocks: BlockLists = ()) -> bool:
        """A request has ended, however it did. True: its blocks are read until `sent`.

        tokens: see `StoreBook.ended`.
        """
        loading = self.store is not None and self.store.is_loading(request_id)
        kept = self.store is not None and self.store.ended(request_id, tokens, blocks)
        sending = self._sending.get(request_id)
        if sending is not None:
            if not sending.complete:
                self._plan.stops.append(StoppedRequest(request_id, ABORTED))
            if loading:  # nothing of it was published
                self.sent([request_id])
            return not loading
        receiving = self._receiving.pop(request_id, None)
        if receiving is not None and receiving.leads:
            del self._in_use[receiving.transfer_id]
            if not receiving.over:
                self._plan.stops.append(StoppedRequest(request_id, ABORTED))
        return kept

    # -- what the workers report -------------------------------------------------------------------------------------

    def received(self, request_ids: Iterable[str], reasons: Mapping[str, str] | None = None) -> None:
        """These requests' KV has come or, with a reason (a code), will not."""
        request_ids = tuple(request_ids)
        if self.store is not None:
            self.store.received(request_ids)
        for request_id, code in (reasons or {}).items():
            request = self._receiving.get(request_id)
            if request is not None:
                request.path.said = kv_path.recomputed(code)
        for request_id in request_ids:
            request = self._receiving.get(request_id)
            if request is not None:
                request.over = True
                request.path.said = request.path.said or kv_path.TRANSFERRED

    def sent(self, request_ids: Iterable[str]) -> None:
        """Nothing reads these requests' blocks any more, on any rank."""
        for request_id in request_ids:
            request = self._sending.pop(request_id, None)
            if request is not None:
                del self._in_use[request.transfer_id]
