"""`Source`: the store as a source of KV for one engine, and the place where its KV is stored.

An engine's layers are in one group or in several that keep different tokens. Each group has records of its own shape,
under keys of its own (`groups.py`).

Copies between the engine's pages and slots of the arena are one pass of native non-temporal stores, made by one
thread, which also gives blocks back: it has a reference of its own to every block that it may still read or write. An
engine's thread only puts jobs into its line. Where the pages are on a GPU, the thread has the GPU copy
(`gpu_pages.py`), and hears later that it has.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

import numpy as np

from pdlink import _copy
from pdlink.cuda.driver import CudaFailure
from pdlink.errors import TransferFailed
from pdlink.events import KVCopied, emit
from pdlink.kv import hashing
from pdlink.store.groups import PairPlan, RecordPlan
from pdlink.store.line import Line
from pdlink.store.prompt import Prompt, PromptKeys
from pdlink.store.record import layer_ranges
from pdlink.store.scope import Scope, ScopeGroup
from pdlink.store.slots import USUAL, tenant_of
from pdlink.store.worth import HALF_LIFE_S, Speed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.driver import CudaEvent
    from pdlink.memory.buffers import AnyBuffer, HostBuffer
    from pdlink.store.gpu_pages import GpuPages, PageCopy
    from pdlink.store.groups import AnyPlan, Blocks, Chunks, RecordGroup
    from pdlink.store.interface import AnyStore
    from pdlink.store.record import Sums
    from pdlink.store.slots import Retention

_T = TypeVar("_T")

_CLOSE_S = 10.0
_LOOKUP_TIMEOUT_S = 1.0
"""For the tiers' answers."""
_LOOK_S = 0.25
"""A GPU that has failed says nothing of copies under way."""
LOST = "the GPU has failed with copies under way; end this process, which may still write to these blocks"
_MOST_RUNS = 1 << 16
"""That are copied in one call, of all layers: the list takes 24 bytes for each. Layers share the runs of more."""


class BlockHolds(Protocol):
    """Whose blocks they are: a `BlockPool`, or an engine's own."""

    def share(self, blocks: Sequence[int]) -> None:
        """Keep them until `give_back`."""

    def give_back(self, blocks: Sequence[int]) -> None: ...


class CallersBlocks:
    """Implements `BlockHolds` for callers who keep their blocks until their copies are over."""

    def share(self, blocks: Sequence[int]) -> None:
        pass

    def give_back(self, blocks: Sequence[int]) -> None:
        pass


class Source:
    """What the prompts of one engine have in common. Counts in tokens; groups count in positions."""

    def __init__(
        self,
        store: AnyStore,
        groups: Sequence[RecordGroup],
        buffers: Sequence[AnyBuffer],
        pool: BlockHolds,
        *,
        own_places: Sequence[str] = (),
        released: Callable[[], None] = lambda: None,
        gpu: GpuPages | None = None,
        hashed_by: Literal["pdlink", "sglang"] = "pdlink",
    ) -> None:
        """buffers: of the engine's cache, by region index of the groups' layouts.

        own_places: of the store, where nobody but this engine keeps anything.
        released: told, in any thread, that blocks were given back to `pool`.
        gpu: copies for `buffers` that are a GPU's; closed here. None where they are the host's.
        hashed_by: as of `Scope`.
        """
        self.store, self.groups, self.pool, self.gpu = store, tuple(groups), pool, gpu
        self.arrays = [] if gpu is not None else [buffer.array for buffer in cast("Sequence[HostBuffer]", buffers)]
        self.chunk_tokens = groups[0].origin.chunk_tokens
        self.keeps_all = all(group.layout.keeps_all for group in groups)
        """Whether any part of a prefix is of use."""
        self.parts_chunks = not any(group.layout.state or group.layout.position_tokens > 1 for group in groups)
        """Whether a part of a chunk is of use: not of a state, which is the one after all of its tokens."""
        self.lookup_timeout_s = _LOOKUP_TIMEOUT_S
        self.copier = Line("pdlink-store-copy")
        self.speeds: defaultdict[int, Speed] = defaultdict(partial(Speed, HALF_LIFE_S))
        """Seconds for bytes, by place. Measured by the copier."""
        self._own_places, self._released = tuple(own_places), released
        self._hashed_by: Literal["pdlink", "sglang"] = hashed_by
        self._told: Scope | None = None
        self.tell_scope()
        if gpu is not None:
            store.memory_settled = lambda nbytes: gpu.pin_ahead(store.array, nbytes)

    def keys(
        self,
        tokens: Sequence[int],
        salt: str = "",
        *,
        lora: str = "",
        media: Sequence[tuple[int, str]] = (),
        chain: hashing.Chain | None = None,
    ) -> PromptKeys:
        """What the store calls the chunks of a prompt. Costs one hash of it. salt, lora, media: see `hashing`.

        chain: of this request, of the same namespace and chunks; what it has hashed is not hashed again.
        """
        origins = [group.origin for group in self.groups]
        by_group = hashing.chunk_keys(origins, tokens, self.chunk_tokens, salt, lora, media, chain)
        return PromptKeys(len(tokens), by_group, () if media else tokens, origins[0]._replace(lora=lora, salt=salt))

    def prompt(self, request_id: str, keys: PromptKeys, retention: Retention | None = USUAL) -> Prompt:
        """The store for one request. retention: of what is stored; its tenant is the salt. None stores nothing."""
        kept = (retention or USUAL)._replace(tenant=tenant_of(keys.origin.salt))
        return Prompt(self, request_id, keys, kept, stores=retention is not None)

    @property
    def scope(self) -> str:
        """What the events of a store that others share call the records of this engine's model."""
        return self.groups[0].origin.scope

    def rename(self, era: str) -> None:
        """KV that is computed from now on is other KV, because the weights have changed in place, and has other keys.

        era: names the change, on all ranks the same. What others keep of a model of these files stays theirs, and so
        does what a later life of this engine finds again: it loads the files.
        """
        for group in self.groups:
            group.rename(era)
        self.tell_scope()

    def tell_scope(self, change: str = "") -> None:
        """Tell the store whose prompts these are. change: as of `Scope`."""
        groups = [ScopeGroup(group.origin.revision, group.shape, group.layout.window_step) for group in self.groups]
        model, former = self.groups[0].origin.model, self._told
        self._told = Scope(model, self.chunk_tokens, tuple(groups), self._hashed_by, change)
        self.store.know(self._told, former)

    def drop_own(self) -> None:
        """Forget what lies where nobody else keeps anything. May wait for a disk."""
        if self._own_places:
            self.store.clear(places=self._own_places)

    def close(self) -> None:
        """After the engine has ended: finish what is in line."""
        if self.gpu is not None:
            over = threading.Event()
            self.when_settled(over.set)
            over.wait(0 if self.gpu.lost else _CLOSE_S)
        self.copier.close(_CLOSE_S)
        if self.gpu is not None:
            self.gpu.close()

    # --- Copies of requests. By the engine's thread: `mark`; by the copier's: `plan`, `move`, `settle`

    def mark(self) -> CudaEvent | None:
        """Stands for what the engine's thread has launched by now, on a GPU; for one `move`, or `unmark`."""
        return None if self.gpu is None else self.gpu.mark()

    def unmark(self, mark: CudaEvent | None) -> None:
        """It is not needed."""
        if self.gpu is not None and mark is not None:
            self.gpu.unmark(mark)

    def fuses(self, group: RecordGroup) -> bool:
        """Whether copies make the sums of records, and compare them."""
        return group.sums_fit and self.gpu is None

    def plan(
        self, group: RecordGroup, slots: Chunks, blocks: Blocks, begin: int, end: int, *, loading: bool
    ) -> AnyPlan:
        """For `move`: by pairs of blocks where a kernel of a GPU copies."""
        if self.gpu is not None and self.gpu.wants_pairs(group.template(loading=loading), loading=loading):
            begins = np.array([slot.offset for _, slot in slots])
            if self.gpu.one_base(self.store.array, begins, group.shape.nbytes):
                return group.pair_plan(slots, blocks, begin, end, loading=loading)
        return group.plan(slots, blocks, begin, end, loading=loading)

    def move(
        self,
        plan: AnyPlan,
        layer: int,
        *,
        loading: bool,
        after: CudaEvent | None,
        then: Callable[[str], None],
        sums: Sums | None = None,
        begun: Callable[[PageCopy], None] | None = None,
    ) -> None:
        """Copy a layer, and then(what went wrong, or "") in the copier's thread when it is over: for pages of the
        host now.

        after: on a GPU a mark that the copy follows. begun: told, on a GPU, when `GpuPages.precede` holds of the job.
        sums: as of `copy`.
        """
        if self.gpu is None:
            assert isinstance(plan, RecordPlan)
            self.copy(plan, layer, loading=loading, sums=sums)
            then("")
            return
        arena, told = self.store.array, partial(self._tell, then)
        if isinstance(plan, PairPlan):
            self.gpu.copy_pairs(plan, layer, arena, loading=loading, after=after, then=told, begun=begun)
            return
        lists = [(dst if loading else src, runs) for src, dst, runs in plan.of_layer(layer)]
        self.gpu.copy(lists, arena, loading=loading, after=after, then=told, begun=begun)

    def copy(self, plan: RecordPlan, layer: int, *, loading: bool, sums: Sums | None = None) -> None:
        """One layer of a plan between pages of the host and records, in the calling thread, without the GIL.

        sums: [records, 2]; those of what is copied are added. Only where the source `fuses`.
        """
        arena = self.store.array
        for src, dst, runs in plan.of_layer(layer):
            to = self.arrays[dst] if loading else arena
            of = arena if loading else self.arrays[src]
            if sums is None:
                _copy.nt_runs(to, of, runs)
            else:
                begins = plan.starts + layer_ranges(plan.shape)[layer][0]
                _copy.nt_runs_summed(to, of, runs, plan.ends_of(layer), begins, sums, not loading)

    def settle(self, then: Callable[[], None]) -> None:
        """Call it in the copier's thread when the copies begun before are over, and their callers were told: for
        pages of the host now; never if a GPU has failed with copies under way."""
        if self.gpu is None:
            then()
        else:
            self.gpu.settled(partial(self._later, then))

    def when_read_by(self, then: Callable[[], None]) -> None:
        """Call it when what is in the copier's line has been read from the pages; on a GPU, when a thread that calls
        `follow_stores` then launches nothing before it is read. By any thread; not called by a closed source."""

        def begun() -> None:
            if self.gpu is None:
                then()
            else:
                self.gpu.when_stores_begun(then)

        self.copier.put(begun)

    def follow_stores(self) -> None:
        """On a GPU: what this thread launches from now on runs behind the copies into the store that have begun."""
        if self.gpu is not None:
            self.gpu.follow_stores()

    def when_settled(self, then: Callable[[], None]) -> None:
        """As `settle`, of what is in the copier's line, too. By any thread. Of a closed source now."""

        def settle() -> None:
            self.settle(then)

        if not self.copier.put(settle):
            then()

    def _tell(self, then: Callable[[str], None], error: str) -> None:
        self._later(partial(then, error))

    def _later(self, job: Callable[[], None]) -> None:
        if not self.copier.put(job):  # closed: nobody else runs it
            job()

    def give_back(self, blocks: Sequence[int]) -> None:
        self.pool.give_back(blocks)
        self._released()

    def brought(self, wanted: Sequence[tuple[int, int]], num_came: int, took_s: float) -> None:
        """The first `num_came` of records that were wanted are in memory. wanted: (place, bytes) of each.

        In the copier's thread.
        """
        slow = {place for place, _ in wanted} - {0} or {0}
        if wanted and len(slow) == 1:  # else nobody knows whose time it was
            place = slow.pop()
            of_it = sum(nbytes for at, nbytes in wanted[:num_came] if at == place)
            self.speeds[place].measured(of_it, took_s, time.monotonic())

    # --- Copies that a caller waits for, in any thread but the copier's

    @property
    def lost(self) -> bool:
        """Whether copies were under way when the GPU failed: nobody knows what they still write to."""
        return self.gpu is not None and self.gpu.lost

    def copy_now(
        self,
        group: RecordGroup,
        slots: Chunks,
        blocks: Blocks,
        begin: int,
        end: int,
        *,
        loading: bool,
        after: CudaEvent | None = None,
    ) -> bool:
        """Copy all layers between blocks and slots; whether they are copied. In this thread; a GPU does it by itself.

        after: on a GPU the mark that it follows, by default one of now. When it raises, nothing touches blocks and
        slots any more, unless they are `lost`. Raises TransferFailed then.
        """
        if not slots:
            return True
        began_s = time.monotonic()
        if self.gpu is None:
            self._copy_whole(group.plan(slots, blocks, begin, end, loading=loading), loading=loading)
        else:
            plan = partial(self.plan, group, slots, blocks, begin, end, loading=loading)
            if not self._copy_by_gpu(plan, group.num_layers, after or self._mark_now(), loading=loading):
                return False
        nbytes, took_s = len(slots) * group.shape.payload_nbytes, time.monotonic() - began_s
        emit(KVCopied(direction="load" if loading else "store", nbytes=nbytes, took_s=took_s))
        return True

    def _copy_whole(self, plan: RecordPlan, *, loading: bool) -> None:
        arena = self.store.array
        if plan.num_runs > _MOST_RUNS:
            for layer in range(len(plan.template.layers)):
                self.copy(plan, layer, loading=loading)
            return
        for (src, dst), runs in plan.whole().items():
            _copy.nt_runs(self.arrays[dst] if loading else arena, arena if loading else self.arrays[src], runs)

    def _mark_now(self) -> CudaEvent:
        assert self.gpu is not None
        try:
            return self.gpu.mark()
        except CudaFailure as failure:
            raise TransferFailed(f"the GPU has failed: {failure}") from None

    def _copy_by_gpu(
        self, make_plan: Callable[[], AnyPlan], num_layers: int, after: CudaEvent, *, loading: bool
    ) -> bool:
        marks: list[CudaEvent | None] = [after, *[None] * (num_layers - 1)]  # they are in one stream
        try:
            plan = self._planned(make_plan)
            copies = [self._begin(plan, layer, loading=loading, after=marks[layer]) for layer in range(len(marks))]
            errors = [self.wait(copy) for copy in copies]
        except BaseException:
            self.quiet()  # others may be under way
            raise
        return not any(errors)

    def _planned(self, plan: Callable[[], _T]) -> _T:
        """What `plan` returns, called by the copier's thread, which pins the arena."""
        return self.copier.submit(plan).result()

    def _begin(self, plan: AnyPlan, layer: int, *, loading: bool, after: CudaEvent | None) -> Future[str]:
        """`move` a layer: "" when it is over, or why it is not copied."""
        over: Future[str] = Future()

        def move() -> None:
            try:
                self.move(plan, layer, loading=loading, after=after, then=over.set_result)
            except Exception as error:  # noqa: BLE001 - raised where the future is read
                over.set_exception(error)

        if not self.copier.put(move):
            over.set_result("the cache is closed")
        return over

    def wait(self, copy: Future[_T]) -> _T:
        """What becomes of copies. Raises TransferFailed if nobody can know any more whether they are over."""
        while True:
            try:
                return copy.result(_LOOK_S)
            except TimeoutError:
                if self.lost and not copy.done():
                    raise TransferFailed(LOST) from None

    def quiet(self) -> bool:
        """Wait until nothing touches blocks and slots any more; False if nobody can know that."""
        over = threading.Event()
        self.when_settled(over.set)
        while not over.wait(_LOOK_S):
            if self.lost:
                return False
        return True
