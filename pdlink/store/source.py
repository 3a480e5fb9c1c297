"""`StoreSource`: the store as a source of KV for one engine, and the place where its KV is stored.

Copies between the engine's pages and slots of the arena are one pass of native non-temporal stores, made by one
thread, which also gives blocks back: it has a reference of its own to every block that it may still read or write. An
engine's thread only puts jobs into its line.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdlink import _copy
from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.kv import hashing
from pdlink.kv.plan import Plan, bind, template
from pdlink.kv.sources import TokenRange
from pdlink.store.line import Line
from pdlink.store.record import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.kv.layout import KVLayout
    from pdlink.kv.plan import Template
    from pdlink.memory.blocks import BlockPool
    from pdlink.memory.buffers import HostBuffer
    from pdlink.store.catalog import Slot
    from pdlink.store.fetch import Fetch
    from pdlink.store.store import Found, Store

_CLOSE_S = 10.0


class StoreSource:
    """What the prompts of one engine have in common."""

    def __init__(
        self,
        store: Store,
        layout: KVLayout,
        buffers: Sequence[HostBuffer],
        pool: BlockPool,
        *,
        model: str,
        revision: str,
        chunk_tokens: int,
        lookup_timeout_s: float = 1.0,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        """buffers: of the engine's cache, by region index of `layout`. lookup_timeout_s: for the tiers' answers.

        released: told, in any thread, that blocks were given back to `pool`.
        Raises ConfigError for a layout that no record describes.
        """
        self.store, self.layout, self.pool = store, layout, pool
        self.arrays = [buffer.array for buffer in buffers]
        self.chunk_tokens, self.lookup_timeout_s = chunk_tokens, lookup_timeout_s
        self.shape = shape_of(layout, chunk_tokens)
        self.shape.check()
        record = self.shape.layout(0)
        self.to_record, self.from_record = template(layout, record), template(record, layout)
        self._names = {"model": model, "revision": revision, "dtype": layout.dtype, "layout": self.shape.text}
        self.copier = Line("pdlink-store-copy")
        self._released = released

    def prompt(self, request_id: str, tokens: Sequence[int], salt: str = "") -> StoredPrompt:
        """The store for one request. Costs one hash of the prompt."""
        namespace = hashing.namespace(**self._names, chunk_tokens=self.chunk_tokens, salt=salt)
        keys = hashing.chain(namespace, tokens, self.chunk_tokens)
        return StoredPrompt(self, request_id, keys, len(tokens))

    def close(self) -> None:
        """After the engine has ended: finish what is in line."""
        self.copier.close(_CLOSE_S)

    def give_back(self, blocks: Sequence[int]) -> None:
        self.pool.give_back(blocks)
        self._released()

    def plan(self, shape: Template, slots: Sequence[tuple[int, Slot]], blocks: Blocks, begin: int, end: int) -> Plan:
        """The copies of tokens [begin, end) between blocks and slots of (chunk, slot), as one plan."""
        parts = []
        for chunk, slot in slots:
            first = max(begin, chunk * self.chunk_tokens)
            last = min(end, (chunk + 1) * self.chunk_tokens)
            loading = shape is self.from_record
            mine = blocks.holding(first, self.layout.block_tokens)
            bound = bind(shape, [0] if loading else mine, mine if loading else [0], first, last)
            place = np.array([slot.offset, 0, 0] if loading else [0, slot.offset, 0])
            parts.append([runs + place for runs in bound.runs])
        return Plan(shape, begin, end, tuple(np.concatenate(runs) for runs in zip(*parts, strict=True)))

    def copy(self, plan: Plan, layer: int, *, loading: bool) -> None:
        """One layer of a plan, in the calling thread, without the GIL."""
        arena = self.store.array
        for piece in plan.pieces(layer):
            runs = piece.runs + np.array([piece.src_base, piece.dst_base, 0])
            if loading:
                _copy.nt_runs(self.arrays[piece.dst_region], arena, runs)
            else:
                _copy.nt_runs(arena, self.arrays[piece.src_region], runs)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A part of a request's block table."""

    numbers: tuple[int, ...]
    begin: int
    """The token that the first one holds, perhaps not as its first."""

    def holding(self, token: int, block_tokens: int) -> tuple[int, ...]:
        """From the block on that holds `token`."""
        return self.numbers[token // block_tokens - self.begin // block_tokens :]


@dataclass(eq=False, slots=True)
class _Filling:
    """A record that the engine computes."""

    slot: Slot
    missing: int
    """Tokens times layers that are not copied."""


@dataclass(eq=False, slots=True)
class _Pass:
    """Tokens [begin, end) of the prompt, on their way into records, layer by layer."""

    blocks: Blocks
    begin: int
    end: int
    slots: list[tuple[int, Slot]]
    plan: Plan | None = None
    """Made by the copier, at the first layer."""


@dataclass(eq=False, slots=True)
class StoredPrompt:
    """Implements `pdlink.kv.sources.KVSource` for one request. `load` and `store` are for one thread."""

    source: StoreSource
    request_id: str
    keys: list[bytes]
    """Of the prompt's full chunks."""
    num_tokens: int
    found: tuple[TokenRange, ...] = ()
    """What the last look-up found: nothing, or one range from token 0 on."""
    _found: Found | None = None
    _filling: dict[int, _Filling] = field(default_factory=dict)
    _pass: _Pass | None = None
    _begun: bool = False

    def lookup(self, keys: Sequence[bytes] = ()) -> tuple[TokenRange, ...]:
        """What the store has of the prompt but for its last token, which somebody must compute. Ignores `keys`.

        Waits for the tiers' answers for `lookup_timeout_s` at most.
        """
        chunk_tokens = self.source.chunk_tokens
        useful = self.keys[: (self.num_tokens - 1) // chunk_tokens]
        self._found = self.source.store.lookup(useful, self.source.lookup_timeout_s)
        end = len(self._found.keys) * chunk_tokens
        self.found = (TokenRange(0, end, self),) if end else ()
        return self.found

    def load(self, wanted: TokenRange, blocks: Sequence[int]) -> StoreLoad:
        """Begin to fill `blocks`, of which the first one holds token `wanted.begin`. After `lookup`."""
        assert self._found is not None
        chunk_tokens = self.source.chunk_tokens
        first = wanted.begin // chunk_tokens
        last = -(-wanted.end // chunk_tokens)
        found = self._found._replace(keys=self._found.keys[first:last], places=self._found.places[first:last])
        fetch = self.source.store.fetch(found, self.source.shape, self.request_id)
        return StoreLoad(self.source, fetch, wanted, Blocks(tuple(blocks), wanted.begin))

    def store(self, begin: int, end: int, blocks: Sequence[int], layer: int) -> None:
        """Keep tokens [begin, end) of one layer, which the engine has computed; layers come in order, from the first.

        blocks: the request's, from token 0 on; they are held until the last layer has been copied. Chunks that the
        store has already, or has no room for, are skipped. A chunk counts when all of it is there.
        At the first call tokens before `begin` are in the blocks for all layers: they are kept, too.
        """
        if layer == 0:
            self._pass = self._begin(begin if self._begun else 0, end, blocks)
            self._begun = True
        if self._pass is not None:
            self.source.copier.put(partial(self._copy_layer, self._pass, layer))

    def close(self, *, forget: bool = False) -> None:
        """The request has ended: nothing more is stored, and chunks that are not complete are dropped.

        forget: its KV is not to be trusted, so what the store has of the prompt is dropped, too.
        """
        self.source.copier.put(partial(self._close, forget=forget))

    def _begin(self, begin: int, end: int, blocks: Sequence[int]) -> _Pass | None:
        source, chunk_tokens = self.source, self.source.chunk_tokens
        chunks = range(begin // chunk_tokens, min(len(self.keys), -(-end // chunk_tokens)))
        fresh = [chunk for chunk in chunks if chunk * chunk_tokens >= begin]
        index_of = {self.keys[chunk]: chunk for chunk in fresh}
        for slot in source.store.reserve(list(index_of), source.shape, self.request_id) if fresh else ():
            whole = chunk_tokens * len(source.layout.layers)
            self._filling[index_of[slot.key]] = _Filling(slot, whole)
        slots = [(chunk, self._filling[chunk].slot) for chunk in chunks if chunk in self._filling]
        if not slots:
            return None
        block_tokens = source.layout.block_tokens
        first = max(begin, slots[0][0] * chunk_tokens)
        last = min(end, (slots[-1][0] + 1) * chunk_tokens)
        mine = tuple(blocks[first // block_tokens : -(-last // block_tokens)])
        source.pool.share(mine)
        return _Pass(Blocks(mine, first), begin, end, slots)

    # --- The copier's thread

    def _copy_layer(self, part: _Pass, layer: int) -> None:
        source = self.source
        if part.plan is None:
            part.plan = source.plan(source.to_record, part.slots, part.blocks, part.begin, part.end)
        source.copy(part.plan, layer, loading=False)
        chunk_tokens = source.chunk_tokens
        done = []
        for chunk, slot in part.slots:
            filling = self._filling[chunk]
            first, last = max(part.begin, chunk * chunk_tokens), min(part.end, (chunk + 1) * chunk_tokens)
            filling.missing -= last - first
            if filling.missing == 0:
                done.append(slot)
                del self._filling[chunk]
        if done:
            source.store.commit(done, source.shape)
        if layer + 1 == len(source.layout.layers):
            self._give_back(part)

    def _close(self, *, forget: bool) -> None:
        self.source.store.abandon([filling.slot for filling in self._filling.values()])
        self._filling.clear()
        if self._pass is not None:
            self._give_back(self._pass)
        if forget:
            self.source.store.clear(self.keys)

    def _give_back(self, part: _Pass) -> None:
        """The blocks of a pass, once."""
        held, part.blocks = part.blocks.numbers, Blocks((), part.begin)
        self.source.give_back(held)


class StoreLoad:
    """KV on its way from the store into blocks. Implements `pdlink.kv.sources.Load`."""

    def __init__(self, source: StoreSource, fetch: Fetch, wanted: TokenRange, blocks: Blocks) -> None:
        self._source, self._fetch, self._wanted, self._blocks = source, fetch, wanted, blocks
        self.done: Future[int] = Future()
        """Tokens before this one are in the blocks, for all layers; what was wanted from there on does not come.

        Set in any thread, when nothing touches the blocks any more."""
        self._landed = threading.Condition()
        self._num_layers = 0
        self._failed = False
        self._cancelled = False
        source.pool.share(blocks.numbers)
        fetch.done.add_done_callback(lambda _: source.copier.put(self._copy))

    def has_layer(self, layer: int) -> bool:
        """Whether `layer` is in the blocks. It counts when `done` says so: a lease may have ended meanwhile."""
        if self._failed:
            raise TransferFailed(f"the store has lost a part of tokens [{self._wanted.begin}, {self._wanted.end})")
        return layer < self._num_layers

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        with self._landed:
            if not self._landed.wait_for(lambda: self._failed or layer < self._num_layers, timeout_s):
                raise DeadlineExceeded(f"layer {layer} is not here after {timeout_s} s")
        self.has_layer(layer)

    def cancel(self, reason: str = "aborted") -> None:
        self._cancelled = True
        self._fetch.finish()

    def _copy(self) -> None:
        """In the copier's thread, when all chunks are in the arena or will not come."""
        end = self._wanted.begin
        try:
            copied_end = self._copy_layers(self._fetch.done.result())
            if self._fetch.close():
                end = copied_end
        finally:
            self._fetch.close()
            self._source.give_back(self._blocks.numbers)
            with self._landed:
                self._failed = end < self._wanted.end
                self._landed.notify_all()
            self.done.set_result(end)

    def _copy_layers(self, slots: Sequence[Slot]) -> int:
        """Copy these leading chunks; the end of what is in the blocks then."""
        source, wanted = self._source, self._wanted
        numbered = list(enumerate(slots, wanted.begin // source.chunk_tokens))
        if not numbered:
            return wanted.begin
        end = min(wanted.end, (numbered[-1][0] + 1) * source.chunk_tokens)
        plan = source.plan(source.from_record, numbered, self._blocks, wanted.begin, end)
        for layer in range(len(source.layout.layers)):
            if self._cancelled:
                return wanted.begin
            source.copy(plan, layer, loading=True)
            if end == wanted.end:
                with self._landed:
                    self._num_layers = layer + 1
                    self._landed.notify_all()
        return end
