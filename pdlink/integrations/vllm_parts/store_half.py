"""A rank's half of the connector as far as its store goes: what the step plans say is found, loaded and kept.

vLLM calls from one thread, between and inside forward passes, and nothing here waits: look-ups are made by threads of
their own, copies by the store's. vLLM keeps the blocks of a request until its copies have been made. The exception is
a preempted one, whose copies are dropped (`Prompt.withdraw` of the store). Blocks that leave a window, and those of
states, vLLM gives to others while their request goes on: a step ends when its copies of these have been made, or
drops them.
On a GPU a step ends when they are in the GPU's line, and what the next step launches runs behind them.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pdlink.integrations.vllm_parts.pace import VllmPace
from pdlink.integrations.vllm_parts.params import NO_CAPS, Caps
from pdlink.integrations.vllm_parts.store_book import Chosen, Looked
from pdlink.integrations.vllm_parts.worker import Results
from pdlink.store.line import Line
from pdlink.store.worth import longest_look_s

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

    from pdlink.api.session import AskedSession
    from pdlink.integrations.vllm_parts.adapters import LoadedAdapters
    from pdlink.integrations.vllm_parts.layout import CacheGroups
    from pdlink.integrations.vllm_parts.store_book import (
        BlocksToLoad,
        BlocksToSave,
        BookedPrompt,
        Keep,
        Look,
        StorePlan,
    )
    from pdlink.integrations.vllm_parts.tier_events import RankTiers
    from pdlink.store.loading import Load
    from pdlink.store.prompt import Prompt, PromptFetch, PromptKeys
    from pdlink.store.source import Source
    from pdlink.store.worth import Choice

log = logging.getLogger(__name__)

_HOLD_S = 30.0
"""How long a found prompt waits in memory for blocks of vLLM's; then it is looked up again. Half a lease of the
store: what is in memory stays there until the scheduler has heard of it."""
_COPIES_S = 1.0
"""Longest wait for the copies of windows and states at the end of a step: a store in another process may be stuck."""
_LOOKERS = 2
_CLOSE_S = 2.0


@dataclass(slots=True, eq=False)
class _Look:
    """A prompt that is looked up, and what was found of it. Guarded by the half's lock."""

    request_id: str
    turn: int
    since_s: float
    stored: Prompt
    fetch: PromptFetch | None = None
    receives: bool = False
    caps: Caps = NO_CAPS
    source: str = ""
    """As of `Look`."""
    session: AskedSession | None = None
    """That keeps what is found, while its turn runs."""
    chosen: Choice | None = None
    wanted: bool = True
    answered: bool = False
    lapsed: bool = False


@dataclass(slots=True, eq=False)
class _Saving:
    """A prompt of which a part is kept."""

    stored: Prompt
    tables: list[list[int]] = field(default_factory=list)
    """By group: kernel blocks, from token 0 on. Blocks that a group has given up since are not read again."""


@dataclass(frozen=True, slots=True)
class _Span:
    """What this step computes of a prompt."""

    saving: _Saving
    start: int
    end: int
    stops: bool
    """As `BlocksToSave.stops`."""


class StoreHalf:
    """The store of one rank."""

    def __init__(
        self,
        source: Source,
        cache: CacheGroups,
        *,
        news: threading.Event,
        adapters: LoadedAdapters,
        load_if_faster: bool = True,
        recomputes: bool = False,
        by_blocks: bool = False,
        zeroed: bool = False,
        copies_s: float = _COPIES_S,
        tiers: RankTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """source, cache: of the same groups. news: set when there is a result.

        load_if_faster: False loads all that is found. recomputes: vLLM computes what a load has promised and does not
        bring, where it else fails the request. by_blocks: it takes the first part of a prompt whose last one did not
        come. zeroed: it zeroes the blocks that it gives to others, before it says whose they were. copies_s: how long
        a step waits for copies of windows and states, or of all if `zeroed`. tiers: what is told of the store; closed
        here.
        """
        self.source, self.tiers = source, tiers
        self.pace = VllmPace()
        self._load_if_faster, self._adapters = load_if_faster, adapters
        self._recomputes, self._by_blocks, self._zeroed = recomputes, by_blocks, zeroed
        self._cache = cache
        group_of = cache.groups.group_of
        self._planes = [
            [plane for plane, mine in enumerate(group_of) if mine == group] for group in range(len(source.groups))
        ]
        """By group."""
        self._news, self._copies_s, self._clock = news, copies_s, clock
        self._lookers = Line("pdlink-vllm-look", _LOOKERS)
        self._lock = threading.Lock()
        self._results = Results()
        self._looks: dict[str, _Look] = {}
        self._loads: dict[str, Load] = {}
        # vLLM's thread only:
        self.copying: set[str] = set()
        """Requests that vLLM has finished, of which a part was kept, and whose end `results` has not told yet."""
        self._prompts: dict[str, BookedPrompt] = {}
        self._keys: dict[str, PromptKeys] = {}
        """Of these prompts, if they were needed: one hash for the look-up and for what is saved."""
        self._savings: dict[str, _Saving] = {}
        self._saved: set[str] = set()
        """Requests of which a part was kept; vLLM waits for their report."""
        self._spans: list[_Span] = []
        self._written: set[int] = set()
        self._next = [0] * len(self._planes)
        """By group: which of its planes the store takes next."""
        self._copied_before = threading.Event()
        """Set when the copies that a step waited for have been made."""
        self._copied_before.set()

    # -- in the order of a step --------------------------------------------------------------------------------------

    def withdraw(self, plan: StorePlan) -> None:
        """Before the blocks of preempted requests are written to by others."""
        for request_id in plan.withdrawn:
            self._drop(request_id)
            self._withdraw(request_id)

    def _withdraw(self, request_id: str) -> None:
        saving = self._savings.pop(request_id, None)
        if saving is not None:
            saving.stored.withdraw()

    def begin(self, plan: StorePlan) -> None:
        """Before the forward pass."""
        self._saved.difference_update(plan.parked)
        if plan.reset:
            self.source.rename(plan.reset)
            self._keys.clear()
            self._lookers.put(self.source.drop_own)
        if plan.tells_again and self.tiers is not None:
            self.tiers.tell_again()
        for prompt in plan.prompts:
            self._prompts[prompt.request_id] = prompt
            self._keys.pop(prompt.request_id, None)
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
        if self._spans:
            self._written.update(self._cache.planes[name])
            self._store_written(states=False)

    def _store_written(self, *, states: bool) -> None:
        """states: those are there, too."""
        for group, (planes, kept) in enumerate(zip(self._planes, self.source.groups, strict=True)):
            if kept.layout.state and not states:
                continue
            while self._next[group] < len(planes) and planes[self._next[group]] in self._written:
                layer = self._next[group]  # a store takes them in order
                for span in self._spans:
                    table = span.saving.tables[group]
                    stored = span.saving.stored
                    stored.store(span.start, span.end, table, layer, group=group, stops=span.stops)
                self._next[group] += 1

    def end(self) -> None:
        """After the forward pass: layers whose hook did not run (a full graph) are ready now, too."""
        if self._spans:
            self._written.update(*self._cache.planes.values())
            self._store_written(states=True)
            if self._zeroed or not self.source.keeps_all:
                self._wait_for_copies()
        self._forget_step()

    def abandon(self) -> None:
        """The forward pass has failed: of the prompts that it was to compute a part of nothing more is kept."""
        failed = {id(span.saving) for span in self._spans}
        for request_id in [name for name, saving in self._savings.items() if id(saving) in failed]:
            self._withdraw(request_id)
        self._forget_step()

    def _forget_step(self) -> None:
        self._spans, self._next = [], [0] * len(self._planes)
        self._written.clear()

    def _wait_for_copies(self) -> None:
        """From the next step on others may write into blocks that a request has given up."""
        if self._copied_before.is_set():  # else it is stuck since an earlier step
            copied = self._copied_before = threading.Event()
            self.source.when_read_by(copied.set)
            if copied.wait(self._copies_s):
                self.source.follow_stores()
                return
            log.warning("the store does not take what is computed: windows and states are not kept until it does")
        for span in self._spans:
            span.saving.stored.withdraw(all_groups=self._zeroed)

    def results(self, over: Collection[str]) -> Results:
        """What has ended. over: requests that vLLM has finished since the last call.

        `sent` are those whose blocks are not read any more, of the requests that something was kept of.
        """
        for request_id in over if self._prompts else ():
            keys, prompt = self._keys.pop(request_id, None), self._prompts.pop(request_id, None)
            if prompt is not None:
                self._ended(request_id)
                if prompt.session is not None:
                    self.source.copier.put(partial(self._wait, prompt, prompt.session, keys))
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
        if self.tiers is not None:
            self.tiers.close()

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _look(self, look: Look) -> None:
        self._drop(look.request_id)
        stored = self._stored(look.request_id)
        found = _Look(look.request_id, look.turn, self._clock(), stored, receives=look.receives, caps=look.caps)
        found.source, found.session = look.source, None if look.receives else self._prompts[look.request_id].session
        with self._lock:
            self._looks[look.request_id] = found
        if not self._adapters.has(self._prompts[look.request_id].adapter):
            self._answer(found, look.begin, 0)
            return
        begun = self._lookers.submit(partial(self._find, found, look.begin))
        begun.add_done_callback(partial(self._begun, found))

    def _find(self, look: _Look, begin: int) -> None:
        """In a thread that may wait for tiers: no longer than the prompt would take otherwise."""
        if look.session is not None:
            look.stored.hold(*look.session, waits=False)
            if look.request_id not in self._prompts:  # it has ended, and `_wait` may have been first
                look.stored.hold(*look.session, waits=True)
        if look.source:
            look.stored.comes_from(look.source)
        other = self.pace.receiving if look.receives else self.pace.computing
        timeout_s = self.source.lookup_timeout_s
        if self._load_if_faster:
            timeout_s = longest_look_s(timeout_s, other, look.stored.num_tokens - begin, time.monotonic())
        goes_on = look.stored.num_tokens - 1 if look.receives else None
        barred = look.caps.barred(self.source.store.places) if look.caps.tiers else frozenset[int]()
        look.stored.lookup(begin, timeout_s, goes_on, barred)
        look.chosen = look.stored.choose(begin, other, always=not self._load_if_faster)
        if not look.wanted or look.chosen.end <= begin:
            self._answer(look, begin, 0)
            return
        look.fetch = look.stored.fetch(begin, look.chosen.end)
        if self._recomputes or look.receives:  # chunks are copied while others are read
            self._answer(look, begin, look.chosen.end)
        look.fetch.done.add_done_callback(partial(self._fetched, look, look.fetch, begin))

    def _begun(self, look: _Look, begun: Future[None]) -> None:
        if begun.cancelled():  # closed meanwhile
            self._answer(look, 0, 0)
        elif (error := begun.exception()) is not None:
            log.error("request %s: the store cannot be asked", look.request_id, exc_info=error)
            self._answer(look, 0, 0)

    def _fetched(self, look: _Look, fetch: PromptFetch, begin: int, done: Future[int]) -> None:
        end = done.result()
        if look.source:
            self.source.copier.put(look.stored.announce)
        if look.wanted:
            self.source.copier.put(fetch.measure)
        if not look.answered:
            self._answer(look, begin, end if end > begin else 0)

    def _answer(self, look: _Look, begin: int, end: int) -> None:
        """What is loaded ends there; 0 for nothing."""
        stored, choice = look.stored, look.chosen
        places = tuple(stored.tokens_by_place(begin, end).items())
        found = stored.end
        chosen = Chosen("look_up_failed", found)
        if choice is not None:
            chosen = Chosen(choice.reason, found, choice.load_s, choice.other_s, places)
        with self._lock:
            look.answered = True
            if look.wanted:
                self._results.looked.append(Looked(look.request_id, look.turn, end, chosen))
                self._news.set()
        if not look.wanted or not end:  # not here: this may be the thread that hears the store's answer
            self._lookers.put(partial(_close, look))

    def _load(self, load: BlocksToLoad) -> None:
        if load.fails:
            self._drop(load.request_id)
            self._loaded(load, load.begin)
            return
        with self._lock:
            look = self._looks.pop(load.request_id)
        loading = look.stored.load(load.begin, load.end, self._cache.kernel_blocks(load.blocks))
        with self._lock:
            self._loads[load.request_id] = loading
        is_right = bool(self._adapters.has(self._prompts[load.request_id].adapter))
        if not is_right:
            loading.cancel()

        def ended(done: Future[int]) -> None:
            self._loaded(load, done.result() if is_right else load.begin)

        loading.done.add_done_callback(ended)

    def _loaded(self, load: BlocksToLoad, end: int) -> None:
        """In any thread. end: tokens before it are in the blocks, and of what vLLM computes with."""
        with self._lock:
            self._loads.pop(load.request_id, None)
            if end < load.end:
                self._results.short[load.request_id] = end
            if load.receives:  # what it did not bring is asked of the other server
                self._results.loaded.append((load.request_id, max(load.begin, end)))
                self._news.set()
                return
            self._results.received.add(load.request_id)
            if end < load.end:
                if load.request_id in self._prompts:  # else it was aborted
                    what = "request %s: KV of tokens %d to %d was lost on its way from the store"
                    log.warning(what, load.request_id, end, load.end - 1)
                lost = self._cache.blocks_from(end, load.blocks)
                if self._by_blocks:
                    self._results.lost_blocks.update(lost)
                else:
                    self._results.failed.add(load.request_id)
                    self._results.failed_blocks.update(lost)
            self._news.set()

    def _save(self, save: BlocksToSave) -> None:
        self._saved.add(save.request_id)
        saving = self._savings.get(save.request_id)
        kept_so_far = save.first or saving is not None
        if not (kept_so_far and self._adapters.has(self._prompts[save.request_id].adapter)):
            self._withdraw(save.request_id)
            return
        if saving is None:
            saving = self._savings[save.request_id] = _Saving(self._stored(save.request_id))
        if save.first:
            saving.tables = [[] for _ in self._planes]
        for table, more in zip(saving.tables, self._cache.kernel_blocks(save.blocks), strict=True):
            table += more
        self._spans.append(_Span(saving, save.start, save.end, save.stops))

    def _keep(self, keep: Keep) -> None:
        """Its blocks are reported with the end of the request, which is in this step."""
        request_id = keep.prompt.request_id
        self._prompts.setdefault(request_id, keep.prompt)
        self._saved.add(request_id)
        if not self._adapters.has(keep.prompt.adapter):
            return
        self._keys[request_id] = self._hashed(keep.prompt)
        stored = self._stored(request_id)
        tables = self._cache.kernel_blocks(keep.blocks)
        for group, (planes, table) in enumerate(zip(self._planes, tables, strict=True)):
            for layer in range(len(planes)):
                stored.store(0, keep.num_tokens, table, layer, group=group)
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

    def _wait(self, prompt: BookedPrompt, session: AskedSession, keys: PromptKeys | None) -> None:
        """The turn of a session has ended. In the copier's thread: a store in another process may not answer."""
        stored = self.source.prompt(prompt.request_id, keys or self._hashed(prompt))
        stored.hold(*session, waits=True)

    def _copied(self, request_id: str) -> None:
        """In the copier's thread, after all that was in line for the request."""
        with self._lock:
            self._results.sent.add(request_id)
            self._news.set()

    # -- small things ------------------------------------------------------------------------------------------------

    def _stored(self, request_id: str) -> Prompt:
        if request_id not in self._keys:
            self._keys[request_id] = self._hashed(self._prompts[request_id])
        return self.source.prompt(request_id, self._keys[request_id])

    def _hashed(self, prompt: BookedPrompt) -> PromptKeys:
        return self.source.keys(array("I", prompt.tokens), prompt.salt, lora=prompt.lora, media=prompt.media)

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


def _close(look: _Look) -> None:
    if look.fetch is not None:
        look.fetch.close()
