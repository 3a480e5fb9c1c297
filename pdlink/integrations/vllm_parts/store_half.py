"""A rank's half of the connector as far as its store goes: what the step plans say is found, loaded and kept.

vLLM calls from one thread, between and inside forward passes, and nothing here waits: look-ups are made by threads of
their own, copies by the store's. vLLM keeps the blocks of a request until its copies have been made. The exception is
a preempted one, whose copies are dropped (`StoredPrompt.withdraw`).
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pdlink.integrations.vllm_parts.pace import Pace
from pdlink.integrations.vllm_parts.store_book import Chosen, Looked
from pdlink.integrations.vllm_parts.worker import Results
from pdlink.kv.sources import TokenRange
from pdlink.store.line import Line
from pdlink.store.worth import longest_look_s

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future

    from pdlink.integrations.vllm_parts.layout import CacheLayout
    from pdlink.integrations.vllm_parts.store_book import Keep, Load, Look, Prompt, Save, StorePlan
    from pdlink.store.interface import AnyFetch
    from pdlink.store.loading import StoreLoad
    from pdlink.store.prompt import StoredPrompt
    from pdlink.store.source import StoreSource
    from pdlink.store.worth import Choice

log = logging.getLogger(__name__)

_HOLD_S = 30.0
"""How long a found prompt waits in memory for blocks of vLLM's; then it is looked up again. Half a lease of the
store: what is in memory stays there until the scheduler has heard of it."""
_LOOKERS = 2
_CLOSE_S = 2.0


class VllmBlocks:
    """Implements `pdlink.store.source.BlockHolds`: vLLM keeps blocks by request, until that is reported."""

    def share(self, blocks: Sequence[int]) -> None:
        pass

    def give_back(self, blocks: Sequence[int]) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Look:
    """A prompt that is looked up, and what was found of it. Guarded by the half's lock."""

    request_id: str
    turn: int
    since_s: float
    stored: StoredPrompt
    fetch: AnyFetch | None = None
    receives: bool = False
    """As of `Look`."""
    fetched_s: float = 0.0
    """When its fetch began."""
    chosen: Choice | None = None
    wanted: bool = True
    answered: bool = False
    lapsed: bool = False


@dataclass(slots=True, eq=False)
class _Saving:
    """A prompt of which a part is kept."""

    stored: StoredPrompt
    blocks: list[int] = field(default_factory=list)
    """Kernel blocks, from token 0 on."""


class StoreHalf:
    """The store of one rank."""

    def __init__(
        self,
        source: StoreSource,
        cache: CacheLayout,
        *,
        block_ratio: int,
        news: threading.Event,
        load_if_faster: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """block_ratio: blocks of the layout to one block of vLLM's scheduler. news: set when there is a result.

        load_if_faster: False loads all that is found.
        """
        self.source = source
        self.pace = Pace(cache.token_unit)
        self._load_if_faster = load_if_faster
        self._cache, self._ratio, self._unit = cache, block_ratio, cache.token_unit
        self._news, self._clock = news, clock
        self._lookers = Line("pdlink-vllm-look", _LOOKERS)
        self._lock = threading.Lock()
        self._results = Results()
        self._looks: dict[str, _Look] = {}
        self._loads: dict[str, StoreLoad] = {}
        # vLLM's thread only:
        self.copying: set[str] = set()
        """Requests that vLLM has finished, of which a part was kept, and whose end `results` has not told yet."""
        self._prompts: dict[str, Prompt] = {}
        self._savings: dict[str, _Saving] = {}
        self._saved: set[str] = set()
        """Requests of which a part was kept; vLLM waits for their report."""
        self._spans: list[tuple[_Saving, int, int]] = []
        """What this step computes, in positions of the layout."""
        self._written: set[int] = set()
        self._next_plane = 0

    # -- in the order of a step --------------------------------------------------------------------------------------

    def withdraw(self, plan: StorePlan) -> None:
        """Before the blocks of preempted requests are written to by others."""
        for request_id in plan.withdrawn:
            self._drop(request_id)
            saving = self._savings.pop(request_id, None)
            if saving is not None:
                saving.stored.withdraw()

    def begin(self, plan: StorePlan) -> None:
        """Before the forward pass."""
        self._saved.difference_update(plan.parked)
        if plan.reset:
            self.source.rename(plan.reset)
            self._lookers.put(self.source.drop_own)
        for prompt in plan.prompts:
            self._prompts[prompt.request_id] = prompt
        for request_id in plan.drops:
            self._drop(request_id)
        for look in plan.looks:
            self._look(look)
        for load in plan.loads:
            self._load(load)
        self._spans = []
        for save in plan.saves:
            self._save(save)
        for keep in plan.keeps:
            self._keep(keep)

    def layer_saved(self, name: str) -> None:
        """In the forward pass: this layer's KV of the step's tokens is in its blocks."""
        if not self._spans:
            return
        self._written.update(self._cache.planes[name])
        while self._next_plane in self._written:  # a store takes them in order
            for saving, start, end in self._spans:
                saving.stored.store(start, end, saving.blocks, self._next_plane)
            self._next_plane += 1

    def end(self) -> None:
        """After the forward pass: layers whose hook did not run (a full graph) are ready now, too."""
        for name in self._cache.planes if self._spans else ():
            self.layer_saved(name)
        self._spans, self._next_plane = [], 0
        self._written.clear()

    def results(self, over: Collection[str]) -> Results:
        """What has ended. over: requests that vLLM has finished since the last call.

        `sent` are those whose blocks are not read any more, of the requests that something was kept of.
        """
        for request_id in over if self._prompts else ():
            if self._prompts.pop(request_id, None) is not None:
                self._ended(request_id)
        now_s = self._clock()
        with self._lock:
            results, self._results = self._results, Results()
            self.copying -= results.sent
            for look in self._looks.values():
                if look.answered and not look.lapsed and now_s - look.since_s > _HOLD_S:
                    look.lapsed = True  # its lease goes on: the scheduler may be a step ahead, and load it
                    results.looked.append(Looked(look.request_id, look.turn, None))
        return results

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for a result."""
        with self._lock:
            asked = any(not look.answered for look in self._looks.values())
            return asked or bool(self._loads or self.copying)

    def close(self) -> None:
        """After the last step."""
        self._lookers.close(_CLOSE_S)
        self.source.close()
        self.source.store.close()

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _look(self, look: Look) -> None:
        self._drop(look.request_id)
        stored = self._stored(self._prompts[look.request_id])
        found = _Look(look.request_id, look.turn, self._clock(), stored, receives=look.receives)
        with self._lock:
            self._looks[look.request_id] = found
        begun = self._lookers.submit(partial(self._find, found, look.begin // self._unit))
        begun.add_done_callback(partial(self._begun, found))

    def _find(self, look: _Look, begin: int) -> None:
        """In a thread that may wait for tiers: no longer than the prompt would take otherwise. begin: a position."""
        other = self.pace.receiving if look.receives else self.pace.computing
        timeout_s = self.source.lookup_timeout_s
        if self._load_if_faster:
            timeout_s = longest_look_s(timeout_s, other, look.stored.num_tokens - begin, time.monotonic())
        look.stored.lookup(timeout_s=timeout_s)
        look.chosen = look.stored.choose(begin, other, always=not self._load_if_faster)
        if not look.wanted or look.chosen.end <= begin:
            self._answer(look, begin, 0)
            return
        look.fetched_s = time.monotonic()
        look.fetch = look.stored.fetch(begin, look.chosen.end)
        look.fetch.done.add_done_callback(partial(self._fetched, look, begin))

    def _begun(self, look: _Look, begun: Future[None]) -> None:
        if begun.cancelled():  # closed meanwhile
            self._answer(look, 0, 0)
        elif (error := begun.exception()) is not None:
            log.error("request %s: the store cannot be asked", look.request_id, exc_info=error)
            self._answer(look, 0, 0)

    def _fetched(self, look: _Look, begin: int, done: Future[tuple[object, ...]]) -> None:
        chunk, num_came = self.source.chunk_tokens, len(done.result())
        end = (begin // chunk + num_came) * chunk
        if look.wanted and look.chosen is not None:
            took_s = time.monotonic() - look.fetched_s
            self.source.copier.put(partial(look.stored.brought, begin, look.chosen.end, num_came, took_s))
        self._answer(look, begin, end if end > begin else 0)

    def _answer(self, look: _Look, begin: int, end: int) -> None:
        """What is in memory ends there, in positions; 0 for nothing that is loaded."""
        stored, choice, unit = look.stored, look.chosen, self._unit
        places = tuple((place, count * unit) for place, count in stored.tokens_by_place(begin, end).items())
        found = stored.found[0].end * unit if stored.found else 0
        chosen = Chosen("look_up_failed", found)
        if choice is not None:
            chosen = Chosen(choice.reason, found, choice.load_s, choice.other_s, places)
        with self._lock:
            look.answered = True
            if look.wanted:
                self._results.looked.append(Looked(look.request_id, look.turn, end * unit, chosen))
                self._news.set()
        if not look.wanted or not end:  # not here: this may be the thread that hears the store's answer
            self._lookers.put(partial(_close, look))

    def _load(self, load: Load) -> None:
        with self._lock:
            look = self._looks.pop(load.request_id)
        unit, block_tokens = self._unit, self._cache.layout.block_tokens
        wanted = TokenRange(load.begin // unit, load.end // unit, look.stored)
        blocks = self._kernel_blocks(load.blocks)[wanted.begin // block_tokens : -(-wanted.end // block_tokens)]
        loading = look.stored.load(wanted, blocks)
        with self._lock:
            self._loads[load.request_id] = loading
        loading.done.add_done_callback(partial(self._loaded, load, wanted))

    def _loaded(self, load: Load, wanted: TokenRange, done: Future[int]) -> None:
        """In any thread."""
        end = done.result() if done.exception() is None else wanted.begin
        whole = end >= wanted.end
        with self._lock:
            del self._loads[load.request_id]
            if load.receives:  # what it did not bring is asked of the other server
                self._results.loaded.append((load.request_id, max(load.begin, end * self._unit)))
                self._news.set()
                return
            self._results.received.add(load.request_id)
            if not whole:
                log.warning("request %s: its KV was lost on its way from the store", load.request_id)
                self._results.failed.add(load.request_id)
                block_tokens = self._cache.layout.block_tokens * self._unit * self._ratio
                self._results.failed_blocks.update(load.blocks[load.begin // block_tokens :])
            self._news.set()

    def _save(self, save: Save) -> None:
        saving = self._savings.get(save.request_id)
        if saving is None:
            saving = self._savings[save.request_id] = _Saving(self._stored(self._prompts[save.request_id]))
        if save.first:
            saving.blocks.clear()
        saving.blocks += self._kernel_blocks(save.blocks)
        self._saved.add(save.request_id)
        start, end = save.start // self._unit, save.end // self._unit
        if start < end:
            self._spans.append((saving, start, end))

    def _keep(self, keep: Keep) -> None:
        """Its blocks are reported with the end of the request, which is in this step."""
        request_id = keep.prompt.request_id
        self._prompts.setdefault(request_id, keep.prompt)
        self._saved.add(request_id)
        stored, blocks = self._stored(keep.prompt), self._kernel_blocks(keep.blocks)
        for plane in range(len(self.source.layout.layers)):
            stored.store(0, keep.num_tokens // self._unit, blocks, plane)
        stored.close()

    def _ended(self, request_id: str) -> None:
        self._drop(request_id)
        with self._lock:
            loading = self._loads.get(request_id)
        if loading is not None:  # vLLM keeps the blocks until it is reported
            loading.cancel()
        saving = self._savings.pop(request_id, None)
        if saving is not None:
            saving.stored.close()
        if request_id in self._saved:
            self._saved.discard(request_id)
            self.copying.add(request_id)
            self.source.when_settled(partial(self._copied, request_id))

    def _copied(self, request_id: str) -> None:
        """In the copier's thread, after all that was in line for the request."""
        with self._lock:
            self._results.sent.add(request_id)
            self._news.set()

    # -- small things ------------------------------------------------------------------------------------------------

    def _stored(self, prompt: Prompt) -> StoredPrompt:
        tokens = array("I", prompt.tokens).tolist()
        return self.source.prompt(prompt.request_id, tokens, prompt.salt, lora=prompt.lora, media=prompt.media)

    def _drop(self, request_id: str) -> None:
        """What was found is not needed."""
        with self._lock:
            look = self._looks.pop(request_id, None)
            if look is None:
                return
            look.wanted = False
            answered = look.answered
        if answered:  # not here: a store in another process may not answer
            self._lookers.put(partial(_close, look))
        elif look.fetch is not None:  # its answer closes it
            look.fetch.finish()

    def _kernel_blocks(self, blocks: Sequence[int]) -> Sequence[int]:
        ratio = self._ratio
        return blocks if ratio == 1 else [block * ratio + part for block in blocks for part in range(ratio)]


def _close(look: _Look) -> None:
    if look.fetch is not None:
        look.fetch.close()
