"""`StoreSource`: the store as a source of KV for one engine, and the place where its KV is stored.

Copies between the engine's pages and slots of the arena are one pass of native non-temporal stores, made by one
thread, which also gives blocks back: it has a reference of its own to every block that it may still read or write. An
engine's thread only puts jobs into its line. Where the pages are on a GPU, the thread has the GPU copy
(`gpu_pages.py`), and hears later that it has.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from pdlink import _copy
from pdlink.errors import ConfigError
from pdlink.kv import hashing
from pdlink.kv.plan import Plan, bind, template
from pdlink.store.blocks import RecordPlan, SlotPlan
from pdlink.store.line import Line
from pdlink.store.prompt import StoredPrompt
from pdlink.store.record import SUM_LINE_NBYTES, layer_ranges, shape_of
from pdlink.store.slots import WHOLE, Share
from pdlink.store.turns import USUAL, tenant_of
from pdlink.store.worth import HALF_LIFE_S, Speed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.driver import CudaEvent
    from pdlink.kv.layout import KVLayout
    from pdlink.kv.plan import Template
    from pdlink.memory.buffers import AnyBuffer, HostBuffer
    from pdlink.store.blocks import AnyPlan, Blocks
    from pdlink.store.gpu_pages import GpuPages, Job
    from pdlink.store.interface import AnyStore
    from pdlink.store.record import Sums
    from pdlink.store.slots import Slot
    from pdlink.store.turns import Retention

_CLOSE_S = 10.0
TokenSpan = tuple[int, int]
"""Tokens [first, last) of a prompt, in positions."""


class BlockHolds(Protocol):
    """Whose blocks they are: a `BlockPool`, or an engine's own."""

    def share(self, blocks: Sequence[int]) -> None:
        """Keep them until `give_back`."""

    def give_back(self, blocks: Sequence[int]) -> None: ...


class StoreSource:
    """What the prompts of one engine have in common."""

    def __init__(
        self,
        store: AnyStore,
        layout: KVLayout,
        buffers: Sequence[AnyBuffer],
        pool: BlockHolds,
        *,
        model: str,
        revision: str,
        chunk_tokens: int,
        orders: Sequence[str] = ("PTH",),
        heads: range | None = None,
        num_heads: int | None = None,
        lossy: str = "",
        lookup_timeout_s: float = 1.0,
        own_places: Sequence[str] = (),
        released: Callable[[], None] = lambda: None,
        gpu: GpuPages | None = None,
        beside: StoreSource | None = None,
    ) -> None:
        """buffers: of the engine's cache, by region index of `layout`. lookup_timeout_s: for the tiers' answers.

        All but `chunk_tokens` and prompts is counted in positions of `layout`.
        orders, lossy: see `shape_of`.
        heads, num_heads: for a tensor parallel rank: which KV heads `layout` holds, of how many. Ranks of one store
        fill the same records, whatever the number of ranks, and find what all of them have stored.
        own_places: of the store, where nobody but this engine keeps anything.
        released: told, in any thread, that blocks were given back to `pool`.
        gpu: copies for `buffers` that are a GPU's; closed here. None where they are the host's.
        beside: of another group of the same engine's layers: its copier is shared, and closed by it alone, and so are
        its measurements. No one is told the tokens of these records: the other group's say them.
        Raises ConfigError for a layout that no record describes.
        """
        self.store, self.layout, self.pool = store, layout, pool
        self.gpu = gpu
        self.arrays = [] if gpu is not None else [buffer.array for buffer in cast("Sequence[HostBuffer]", buffers)]
        token_unit = layout.position_tokens
        if chunk_tokens % token_unit:
            raise ConfigError(
                f"tiers.chunk_size: got {chunk_tokens} tokens; expected a multiple of {token_unit}, the tokens that "
                "only this engine can tell apart (a block of its kernel, an entry of a compressed cache); choose one"
            )
        self.chunk_tokens, self.lookup_timeout_s = chunk_tokens // token_unit, lookup_timeout_s
        self.shape = shape_of(layout, self.chunk_tokens, num_heads, orders, lossy)
        self.shape.check()
        self.share = _share(layout, heads, num_heads)
        whole_lines = all(group.head_nbytes % SUM_LINE_NBYTES == 0 for group in self.shape.groups)
        self.fuses = self.share.end - self.share.begin == self.share.total and whole_lines and gpu is None
        """Whether copies make the sums of records, and compare them."""
        record = self.shape.whole(heads)
        self.to_record, self.from_record = template(layout, record), template(record, layout)
        tokens = self.chunk_tokens * token_unit
        self._origin = self._loaded = hashing.Origin(model, revision, layout.dtype, self.shape.text, tokens)
        self._own_places = tuple(own_places)
        self._beside = beside
        self.copier: Line = Line("pdlink-store-copy") if beside is None else beside.copier
        self.speeds: defaultdict[int, Speed] = (
            defaultdict(partial(Speed, HALF_LIFE_S)) if beside is None else beside.speeds
        )
        """Seconds for bytes, by place. Measured by the copier."""
        self._released = released

    def prompt(
        self,
        request_id: str,
        tokens: Sequence[int],
        salt: str = "",
        *,
        lora: str = "",
        media: Sequence[tuple[int, str]] = (),
        retention: Retention | None = USUAL,
    ) -> StoredPrompt:
        """The store for one request. Costs one hash of the prompt. salt, lora, media: see `pdlink.kv.hashing`.

        retention: of what it stores; its tenant is the salt. None: nothing is stored.
        """
        origin = self._origin._replace(lora=lora, salt=salt)
        chunk_tokens = origin.chunk_tokens
        keys = hashing.chain(origin.namespace, tokens, chunk_tokens, media)
        told = () if media else tokens  # placeholders do not say what is in an image

        def preimage(chunk: int) -> hashing.Preimage | None:
            if self._beside is not None:
                return None
            return hashing.preimage(keys, chunk, told, chunk_tokens, lora=lora, salt=salt, origin=origin)

        num_tokens = self.layout.positions(0, len(tokens))[1]
        kept = (retention or USUAL)._replace(tenant=tenant_of(salt))
        return StoredPrompt(self, request_id, keys, preimage, num_tokens, kept, retention is not None)

    @property
    def scope(self) -> str:
        """What the events of a store that others share call the records of this engine's model."""
        return self._origin.scope

    def rename(self, era: str) -> None:
        """KV that is computed from now on is other KV, because the weights have changed in place, and has other keys.

        era: names the change, on all ranks the same. What others keep of a model of these files stays theirs, and so
        does what a later life of this engine finds again: it loads the files.
        """
        self._origin = self._loaded._replace(revision=f"{self._loaded.revision} changed {era}")

    def drop_own(self) -> None:
        """Forget what lies where nobody else keeps anything. May wait for a disk."""
        if self._own_places:
            self.store.clear(places=self._own_places)

    def close(self) -> None:
        """After the engine has ended: finish what is in line."""
        if self._beside is not None:
            return
        if self.gpu is not None:
            over = threading.Event()
            self.when_settled(over.set)
            over.wait(0 if self.gpu.lost else _CLOSE_S)
        self.copier.close(_CLOSE_S)
        if self.gpu is not None:
            self.gpu.close()

    # --- Copies of requests. By the engine's thread: `mark`; by the copier's: `move`, `settle`

    def mark(self) -> CudaEvent | None:
        """Stands for what the engine's thread has launched by now, on a GPU; for one `move`, or `unmark`."""
        return None if self.gpu is None else self.gpu.mark()

    def unmark(self, mark: CudaEvent | None) -> None:
        """It is not needed."""
        if self.gpu is not None and mark is not None:
            self.gpu.unmark(mark)

    def move(
        self,
        plan: AnyPlan,
        layer: int,
        *,
        loading: bool,
        after: CudaEvent | None,
        then: Callable[[str], None],
        sums: Sums | None = None,
        begun: Callable[[Job], None] | None = None,
    ) -> Job | None:
        """`copy`, and then(what went wrong, or "") in the copier's thread when it is over: for pages of the host now.

        after: on a GPU a mark that the copy follows. begun: told, on a GPU, when `GpuPages.precede` holds of the job.
        """
        if self.gpu is None:
            assert isinstance(plan, RecordPlan)
            self.copy(plan, layer, loading=loading, sums=sums)
            then("")
            return None
        if isinstance(plan, SlotPlan):
            told = partial(self._tell, then)
            arena = self.store.array
            return self.gpu.copy_slots(plan, layer, arena, loading=loading, after=after, then=told, begun=begun)
        pieces = []
        for piece in plan.plan.pieces(layer):
            runs = piece.runs + np.array([piece.src_base, piece.dst_base, 0])
            pieces.append((piece.dst_region if loading else piece.src_region, runs))
        told = partial(self._tell, then)
        return self.gpu.copy(pieces, self.store.array, loading=loading, after=after, then=told, begun=begun)

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
        """The same of what is in the copier's line, too. By any thread. Of a closed source now."""

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

    def brought(self, places: Sequence[int], num_came: int, took_s: float) -> None:
        """The first `num_came` of chunks that were in these places are in memory. In the copier's thread."""
        self.brought_bytes([(place, self.shape.nbytes) for place in places], num_came, took_s)

    def brought_bytes(self, wanted: Sequence[tuple[int, int]], num_came: int, took_s: float) -> None:
        """The same of (place, bytes) of each record, which need not all be of this group."""
        slow = {place for place, _ in wanted} - {0} or {0}
        if wanted and len(slow) == 1:  # else nobody knows whose time it was
            place = slow.pop()
            of_it = sum(nbytes for at, nbytes in wanted[:num_came] if at == place)
            self.speeds[place].measured(of_it, took_s, time.monotonic())

    def held_of(self, chunk: int) -> TokenSpan:
        """Tokens whose KV the record of a chunk has: all of them, or the state after the last one."""
        end = (chunk + 1) * self.chunk_tokens
        return (end - 1 if self.layout.state else chunk * self.chunk_tokens), end

    def plan_move(
        self, slots: Sequence[tuple[int, Slot]], blocks: Blocks, begin: int, end: int, *, loading: bool
    ) -> AnyPlan:
        """`plan` for `move`: by slots of tokens where a GPU copies and runs are short. In the copier's thread."""
        shape = self.from_record if loading else self.to_record
        if self.gpu is not None and self.gpu.wants_slots(shape, loading=loading):
            held = [(slot, *self.held_of(chunk)) for chunk, slot in slots]
            spans = [(slot, max(begin, first), min(end, last)) for slot, first, last in held]
            begins = np.array([slot.offset for _, slot in slots])
            if self.gpu.one_base(self.store.array, begins, self.shape.nbytes):
                return SlotPlan.of(shape, spans, blocks, self.layout)
        return self.plan(shape, slots, blocks, begin, end)

    def plan(
        self, shape: Template, slots: Sequence[tuple[int, Slot]], blocks: Blocks, begin: int, end: int
    ) -> RecordPlan:
        """The copies of tokens [begin, end) between blocks and slots of (chunk, slot), as one plan."""
        parts = []
        for chunk, slot in slots:
            held_begin, held_end = self.held_of(chunk)
            first, last = max(begin, held_begin), min(end, held_end)
            loading = shape is self.from_record
            mine = blocks.holding(first, self.layout.block_tokens)
            bound = bind(shape, [0] if loading else mine, mine if loading else [0], first, last)
            place = np.array([slot.offset, 0, 0] if loading else [0, slot.offset, 0])
            parts.append([runs + place for runs in bound.runs])
        classes = list(zip(*parts, strict=True))
        plan = Plan(shape, begin, end, tuple(np.concatenate(runs) for runs in classes))
        ends = tuple(np.cumsum([len(of_record) for of_record in runs]) for runs in classes)
        return RecordPlan(plan, np.array([slot.offset for _, slot in slots]), ends)

    def copy(self, plan: RecordPlan, layer: int, *, loading: bool, sums: Sums | None = None) -> None:
        """One layer of a plan, in the calling thread, without the GIL.

        sums: [records, 2]; those of what is copied are added. Only where the source `fuses`.
        """
        arena = self.store.array
        for piece in plan.plan.pieces(layer):
            runs = piece.runs + np.array([piece.src_base, piece.dst_base, 0])
            to = self.arrays[piece.dst_region] if loading else arena
            of = arena if loading else self.arrays[piece.src_region]
            if sums is None:
                _copy.nt_runs(to, of, runs)
            else:
                begins = plan.starts + layer_ranges(self.shape)[layer][0]
                _copy.nt_runs_summed(to, of, runs, plan.ends_of(layer), begins, sums, not loading)


def _share(layout: KVLayout, heads: range | None, num_heads: int | None) -> Share:
    if heads is None and num_heads is None:
        return WHOLE
    mine, total = heads or range(0), num_heads or 0
    if len(mine) != layout.num_heads or mine.step != 1 or not 0 <= mine.start < mine.stop <= total:
        raise ConfigError(
            f"heads: got {heads} of {num_heads} for pages of {layout.num_heads}; expected that many adjacent heads "
            "of the model's; pass both, or neither"
        )
    return Share(mine.start, mine.stop, total)
