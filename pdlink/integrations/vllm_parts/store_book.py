"""What vLLM's scheduler says about requests, turned into what the workers' stores are to find, load and keep.

As `requests.py`, it only decides: the stores are in the workers. A prompt is looked up when vLLM first tries to
schedule it. The answer comes back with the output of a step, and vLLM is told to ask again until then. It says how
much of the prompt every rank's store has, and vLLM parks the request while that is read and copied. A vLLM that fails
requests of which a part does not come is answered when all is in memory. What vLLM computes of a prompt is kept, step
by step.

A prompt that another server computes is looked up, too: what the store has of it is loaded first, and the rest is
offered for then. With `keeps_answers` what a request has received and generated is kept at its end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from pdlink.integrations.vllm_parts.params import NO_CAPS, Caps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pdlink.api.session import AskedSession
    from pdlink.integrations.vllm_parts.adapters import Adapter
    from pdlink.integrations.vllm_parts.requests import Scheduled
    from pdlink.kv.groups import BlockLists


@dataclass(frozen=True, slots=True)
class BookedPrompt:
    """All that the KV of a prompt depends on, beside the model."""

    request_id: str
    tokens: bytes
    """Native uint32."""
    salt: str = ""
    lora: str = ""
    media: tuple[tuple[int, str], ...] = ()
    """(First placeholder token, content hash), ascending."""
    adapter: Adapter | None = None
    """That `lora` names."""
    session: AskedSession | None = None
    """That keeps what is stored of it."""


@dataclass(frozen=True, slots=True)
class Look:
    """How much of this prompt is there? Begin to bring it into memory from token `begin` on."""

    request_id: str
    turn: int
    """Counts the looks of a request."""
    begin: int
    receives: bool = False
    """What is not loaded comes from another server; else it is computed here."""
    caps: Caps = NO_CAPS
    """Which tiers are asked; how much is loaded of it is cut later."""
    source: str = ""
    """Address of another store that may have it."""


class Chosen(NamedTuple):
    """Why so much of a prompt is loaded. Counts tokens."""

    reason: str
    """Of `pdlink.store.worth.Choice`, as the estimates."""
    found: int = 0
    """The store has tokens before this one."""
    load_s: float = 0.0
    other_s: float = 0.0
    places: tuple[tuple[str, int], ...] = ()
    """Where those were that are loaded, in their order."""


NOT_LOOKED = Chosen("not_found")
"""Of a prompt that is shorter than a chunk, or in vLLM's blocks."""


class Looked(NamedTuple):
    """One rank's answer."""

    request_id: str
    turn: int
    end: int | None
    """Tokens before this one are in memory, or on their way; None: not any more."""
    chosen: Chosen = NOT_LOOKED


@dataclass(frozen=True, slots=True)
class BlocksToLoad:
    """Tokens [begin, end) are to be copied into the request's blocks; `blocks[0]` holds token 0."""

    request_id: str
    blocks: BlockLists
    begin: int
    end: int
    receives: bool = False
    """What follows comes from another server: there is an offer that waits for this load."""
    fails: bool = False
    """What was found is of other weights, or of no use in part: nothing is copied, and the load is reported as one
    that brought nothing."""


@dataclass(frozen=True, slots=True)
class BlocksToSave:
    """After this step, layer by layer in it, tokens [start, end) of a prompt are in its blocks."""

    request_id: str
    blocks: BlockLists
    """All blocks so far if `first`, otherwise only the new ones."""
    first: bool
    start: int
    end: int
    stops: bool = True
    """The step computes nothing of the prompt behind `end`: only then a recurrent state is the one after it."""


@dataclass(frozen=True, slots=True)
class Keep:
    """A request has ended, and all tokens of `prompt`, its answer among them, are in its blocks."""

    prompt: BookedPrompt
    blocks: BlockLists
    num_tokens: int


@dataclass(slots=True)
class StorePlan:
    """What one step means for a store, in the order in which it is to be done."""

    withdrawn: list[str] = field(default_factory=list)
    """Preempted requests: their blocks are overwritten from this step on."""
    parked: list[str] = field(default_factory=list)
    """Requests that ended while they were loading: vLLM gets one report of each, which is the end of the load."""
    reset: str = ""
    """The weights have changed; names the change. What was stored before is not found any more."""
    prompts: list[BookedPrompt] = field(default_factory=list)
    """Of requests that are named for the first time."""
    drops: list[str] = field(default_factory=list)
    """Requests that do not need what was found."""
    looks: list[Look] = field(default_factory=list)
    loads: list[BlocksToLoad] = field(default_factory=list)
    saves: list[BlocksToSave] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    tells_again: bool = False
    """The ranks tell all that their tiers hold."""
    num_computed: int = 0
    """Tokens of prompts that this step computes."""


class _Phase(Enum):
    NEW = auto()
    ASKED = auto()
    FOUND = auto()
    LOADING = auto()
    COMPUTING = auto()
    """It has blocks, and what it lacks is computed."""


@dataclass(slots=True)
class _Request:
    prompt: BookedPrompt
    num_tokens: int
    receives: bool = False
    """Another server computes the prompt."""
    keeps: bool = True
    caps: Caps = NO_CAPS
    source: str = ""
    phase: _Phase = _Phase.NEW
    named: bool = False
    """The workers know its prompt."""
    turn: int = 0
    begin: int = 0
    """What was asked for begins with this token."""
    num_missing: int = 0
    """Ranks that have not answered."""
    end: int = 0
    """What is found ends before this token, on all ranks that have answered."""
    chosen: Chosen = NOT_LOOKED
    """Of the rank that has found the least."""
    computed: int = 0
    """Tokens that vLLM had when it last asked."""
    lapsed: bool = False
    """The next question begins another look-up: the ranks have let go of what was found, or it is `gone`."""
    gone: bool = False
    """What was found is of other weights."""
    saving: bool = False
    saved: bool = False
    """A part of it was kept, before a preemption perhaps."""
    stale: bool = False
    """Tokens before a reset are in its blocks: nothing of it is kept until it is preempted."""


class StoreBook:
    """Every request of this server whose KV may come from a store, or go to it."""

    def __init__(
        self,
        chunk_tokens: int,
        num_ranks: int = 1,
        *,
        block_tokens: int = 1,
        keeps_answers: bool = False,
        keeps_all: bool = True,
    ) -> None:
        """block_tokens: of vLLM's prefix cache, which always leaves the last block of a prompt: that is computed.

        keeps_answers: keep what requests have received and generated, too.

        keeps_all: whether every group of layers keeps all tokens; else a prefix that one rank has is none where
        another rank has less of it.
        """
        self.chunk_tokens, self._num_ranks, self._keeps_answers = chunk_tokens, num_ranks, keeps_answers
        self._least = min(block_tokens, chunk_tokens)
        """Tokens that are worth a look-up."""
        self._keeps_all = keeps_all
        self._requests: dict[str, _Request] = {}
        self._plan = StorePlan()
        """Of the next step."""

    # -- what the scheduler tells ------------------------------------------------------------------------------------

    def arrived(
        self,
        request_id: str,
        tokens: Sequence[int],
        salt: str,
        lora: str,
        media: tuple[tuple[int, str], ...],
        adapter: Adapter | None = None,
        *,
        receives: bool = False,
        keeps: bool = True,
        caps: Caps = NO_CAPS,
        session: AskedSession | None = None,
        source: str = "",
    ) -> None:
        """A new request. receives: another server computes its prompt. keeps: what is computed of it is kept, and so
        by its session. source: as of `Look`.

        Raises OverflowError for a token that no vocabulary has.
        """
        keeps = keeps and caps.keep != 0
        if not keeps or (receives and not self._keeps_answers):
            session = None
        prompt = BookedPrompt(request_id, array("I", tokens).tobytes(), salt, lora, media, adapter, session)
        request = self._requests[request_id] = _Request(prompt, len(tokens), receives, keeps, caps, source)
        if session is not None:  # it keeps the store's records, also where all of the prompt is in vLLM's blocks
            self._name(request)

    def missing(self, request_id: str, num_computed: int) -> int | None:
        """How many tokens after the first `num_computed` come from the store. None: ask again in the next step.

        A number is a promise until `allocated`, `ended` or the next question, whatever the ranks say meanwhile: vLLM
        may reserve blocks several steps later (`deferred_loads`, 0.33), and waits for the load from then on.
        """
        request = self._requests.get(request_id)
        if request is None or request.phase in (_Phase.LOADING, _Phase.COMPUTING):
            return 0
        request.computed = num_computed
        most = min(self._whole(request.num_tokens), request.num_tokens - 1)
        if most - num_computed < self._least or request.caps.load == 0:
            return 0
        again = request.phase is _Phase.FOUND and (request.lapsed or num_computed < request.begin)
        if request.phase is _Phase.NEW or again:
            self._look(request, self._whole(num_computed))
        if request.phase is _Phase.ASKED:
            return None
        return max(0, self._end(request) - num_computed)

    def allocated(self, request_id: str, blocks: BlockLists, num_external: int) -> int:
        """vLLM has reserved blocks; those after what it has computed are for `num_external` tokens from elsewhere.

        How many of these the store loads: all, unless the others come from another server.
        """
        request = self._requests.get(request_id)
        if request is None or request.phase is _Phase.LOADING:
            return 0
        found = self._end(request) - request.computed if request.phase is _Phase.FOUND else 0
        count = min(num_external, max(0, found))
        if count:
            begin, end = request.computed, request.computed + count
            fails = request.gone or not (count == found or self._parts(request))
            self._plan.loads.append(BlocksToLoad(request_id, blocks, begin, end, request.receives, fails))
            request.phase = _Phase.LOADING
            return count
        if request.phase in (_Phase.ASKED, _Phase.FOUND):
            self._plan.drops.append(request_id)
        request.phase = _Phase.COMPUTING
        return 0

    def chosen(self, request_id: str) -> Chosen:
        """Why so much of this request is loaded."""
        request = self._requests.get(request_id)
        return request.chosen if request is not None else NOT_LOOKED

    def step(self, scheduled: Iterable[Scheduled], preempted: Collection[str]) -> StorePlan:
        """The plan of the step that vLLM has just put together."""
        for request_id in preempted:
            request = self._requests.get(request_id)
            if request is not None:
                self._withdraw(request)
                request.phase, request.stale = _Phase.NEW, False
        for part in scheduled:
            self._save(part)
        plan, self._plan = self._plan, StorePlan()
        return plan

    def is_loading(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.phase is _Phase.LOADING

    def ended(self, request_id: str, tokens: Sequence[int] = (), blocks: BlockLists = ()) -> bool:
        """A request has ended, however it did. True: its blocks are read until the workers report it.

        tokens: of prompt and answer whose KV is in `blocks`, of a request whose answer is complete.
        """
        loading = self.is_loading(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if loading:
            self._plan.parked.append(request_id)
            return False
        end = self._kept(request, len(tokens)) if self._keeps_answers and request.keeps and not request.stale else 0
        if end > (0 if request.receives else self._kept(request, request.num_tokens)):
            whole = replace(request.prompt, tokens=array("I", tokens[:end]).tobytes())
            self._plan.keeps.append(Keep(whole, blocks, end))
            return True
        return request.saved

    def reset(self, era: str) -> None:
        """What was computed so far is of no use any more: the model's weights have changed. era: names the change."""
        self._plan.reset = era
        for request in self._requests.values():
            if request.phase is _Phase.ASKED:
                request.phase = _Phase.NEW
            request.stale = request.phase not in (_Phase.NEW, _Phase.FOUND)
            request.lapsed = request.gone = request.phase is _Phase.FOUND

    def ask_tiers(self) -> None:
        """What they hold is to be told again."""
        self._plan.tells_again = True

    # -- what the workers report -------------------------------------------------------------------------------------

    def looked(self, answers: Iterable[Looked]) -> None:
        for request_id, turn, end, chosen in answers:
            request = self._requests.get(request_id)
            if request is None or request.turn != turn:
                continue
            if end is None:
                request.lapsed = True
            if end is not None and request.phase is _Phase.ASKED:
                first = request.num_missing == self._num_ranks
                if not (first or self._keeps_all or end == request.end):
                    end = 0
                if end < request.end:
                    request.end, request.chosen = end, chosen
                request.num_missing -= 1
                if not request.num_missing:
                    request.phase = _Phase.FOUND

    def received(self, request_ids: Iterable[str]) -> None:
        """These requests' KV has come or will not."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.phase is _Phase.LOADING:
                request.phase = _Phase.COMPUTING

    # -- small things ------------------------------------------------------------------------------------------------

    def _end(self, request: _Request) -> int:
        """What is loaded of what was found ends there: behind a whole chunk, if the request's cap cuts it."""
        cap = request.caps.load
        if cap is None or request.computed + cap >= request.end:
            return request.end
        return self._whole(request.computed + cap) if self._parts(request) else 0

    def _parts(self, request: _Request) -> bool:
        """Whether a part of what was found is of use. Windows and states are those of its end, or of the prompt's end
        where what follows comes from another server."""
        return self._keeps_all or request.receives

    def _kept(self, request: _Request, num_tokens: int) -> int:
        """How many leading tokens of so many are kept."""
        cap = request.caps.keep
        return self._whole(num_tokens if cap is None else min(num_tokens, cap))

    def _look(self, request: _Request, begin: int) -> None:
        request.phase, request.begin, request.end = _Phase.ASKED, begin, request.num_tokens
        request.lapsed = request.gone = False
        request.turn += 1
        request.num_missing = self._num_ranks
        self._name(request)
        name, caps, source = request.prompt.request_id, request.caps, request.source
        self._plan.looks.append(Look(name, request.turn, begin, request.receives, caps, source))

    def _save(self, part: Scheduled) -> None:
        request = self._requests.get(part.request_id)
        if request is None:
            return
        self._plan.num_computed += max(0, min(part.start + part.count, request.num_tokens) - part.start)
        if request.stale or request.receives or not request.keeps:
            return
        end = min(part.start + part.count, self._kept(request, request.num_tokens))
        if part.start >= end:
            return
        if part.whole and request.saving:  # preempted, and nobody said so
            self._withdraw(request)
        self._name(request)
        stops = part.start + part.count == end
        self._plan.saves.append(BlocksToSave(part.request_id, part.blocks, part.whole, part.start, end, stops))
        request.saving = request.saved = True

    def _withdraw(self, request: _Request) -> None:
        if request.named:
            self._plan.withdrawn.append(request.prompt.request_id)
        request.saving = False

    def _name(self, request: _Request) -> None:
        if not request.named:
            request.named = True
            self._plan.prompts.append(request.prompt)

    def _whole(self, num_tokens: int) -> int:
        """Of so many tokens those in full chunks."""
        return num_tokens // self.chunk_tokens * self.chunk_tokens
