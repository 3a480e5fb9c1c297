"""`StoredPrompt`: the store for one request: what it has of the prompt, and where what is computed is kept."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdlink.events import KVCopied, emit
from pdlink.kv.sources import TokenRange
from pdlink.store.blocks import Blocks
from pdlink.store.interface import Found
from pdlink.store.loading import StoreLoad
from pdlink.store.record import said_sums
from pdlink.store.worth import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.driver import CudaEvent
    from pdlink.kv import hashing
    from pdlink.store.blocks import AnyPlan
    from pdlink.store.interface import AnyFetch
    from pdlink.store.record import Sums
    from pdlink.store.slots import Slot
    from pdlink.store.source import StoreSource
    from pdlink.store.turns import Retention
    from pdlink.store.worth import Choice, Speed


@dataclass(eq=False, slots=True)
class _Filling:
    """A record that the engine computes."""

    slot: Slot
    missing: int
    """Tokens times layers that are not copied."""
    sums: Sums
    """Of what is copied."""


@dataclass(eq=False, slots=True)
class _Pass:
    """Tokens [begin, end) of the prompt, on their way into records, layer by layer."""

    blocks: Blocks
    begin: int
    end: int
    slots: list[tuple[int, Slot]] = field(default_factory=list)
    """By chunk. They and the plan come from the copier, at the first layer."""
    plan: AnyPlan | None = None
    took_s: float = 0.0
    """Copying the layers so far."""


@dataclass(eq=False, slots=True)
class StoredPrompt:
    """Implements `pdlink.kv.sources.KVSource` for one request. `load` and `store` are for one thread."""

    source: StoreSource
    request_id: str
    keys: list[bytes]
    """Of the prompt's full chunks."""
    preimage: Callable[[int], hashing.Preimage | None]
    """Of the key of a chunk, for listeners of the store; None where they are not told."""
    num_tokens: int
    retention: Retention
    stores: bool = True
    """Whether `store` does anything."""
    found: tuple[TokenRange, ...] = ()
    """What the last look-up found: nothing, or one range from token 0 on."""
    _found: Found | None = None
    _fetched: tuple[int, AnyFetch] | None = None
    """What is brought into memory ahead of a load, and its first chunk."""
    _withdrawn: bool = False
    _filling: dict[int, _Filling] = field(default_factory=dict)
    _pass: _Pass | None = None
    _begun: bool = False
    _summed: bool | None = None
    """Whether copies make sums; decided with the first reservation."""

    def lookup(self, keys: Sequence[bytes] = (), timeout_s: float | None = None) -> tuple[TokenRange, ...]:
        """What the store has of the prompt but for its last token, which somebody must compute. Ignores `keys`.

        Waits for the tiers' answers for `timeout_s` at most, by default `lookup_timeout_s`.
        """
        timeout_s = self.source.lookup_timeout_s if timeout_s is None else timeout_s
        chunk_tokens = self.source.chunk_tokens
        useful = self.keys[: (self.num_tokens - 1) // chunk_tokens]
        self._found = self.source.store.lookup(useful, timeout_s)
        end = len(self._found.keys) * chunk_tokens
        self.found = (TokenRange(0, end, self),) if end else ()
        return self.found

    def look_up_each(self, num_chunks: int, timeout_s: float) -> list[bool]:
        """Of each of the first chunks whether the store has its record. `fetch` takes ranges of those that it has."""
        keys = self.keys[:num_chunks]
        places = self.source.store.known_at(keys, timeout_s)
        self._found = Found(tuple(keys), places)
        return [place >= 0 for place in places]

    def records_at(self, begin: int, end: int) -> list[tuple[int, int]]:
        """(place, bytes) of each record of what was found that holds some of tokens [begin, end)."""
        chunk_tokens = self.source.chunk_tokens
        places = self._found.places if self._found is not None else ()
        return [
            (place, self.source.shape.nbytes) for place in places[begin // chunk_tokens : -(-end // chunk_tokens)]
        ]

    def choose(self, cached: int, other: Speed, *, always: bool = False) -> Choice:
        """How much of what was found to load, where the engine's blocks have the first `cached` tokens.

        other: seconds for tokens that are not loaded. always: load all, whatever it takes. Counts in tokens.
        """
        source, found = self.source, self._found.places if self._found is not None else ()
        chunk_tokens = source.chunk_tokens * source.layout.position_tokens
        choice = choose(cached, found, chunk_tokens, source.shape.nbytes, source.speeds, other, time.monotonic())
        end = len(found) * chunk_tokens
        return choice._replace(end=end, reason="always") if always and end > cached else choice

    def tokens_by_place(self, begin: int, end: int) -> dict[str, int]:
        """Where tokens [begin, end) of what was found were: memory, or names of tiers. Counts in positions."""
        chunk_tokens, counts = self.source.chunk_tokens, Counter[str]()
        names, places = self.source.store.places, self._found.places if self._found is not None else ()
        for chunk, place in enumerate(places):
            tokens = min(end, (chunk + 1) * chunk_tokens) - max(begin, chunk * chunk_tokens)
            if tokens > 0:
                counts[names[place]] += tokens
        return dict(counts)

    def fetch(self, begin: int, end: int) -> AnyFetch:
        """Bring the chunks of tokens [begin, end) of what was found into memory, ahead of the load, which ends it.

        Or close it. `brought` is told how long it took. The records are checked before it is done, and not while they
        are copied: an engine that fetches ahead has promised what it got before it copies.
        """
        first = begin // self.source.chunk_tokens
        self._fetched = first, self._fetch(first, -(-end // self.source.chunk_tokens), checks=False)
        return self._fetched[1]

    def brought(self, begin: int, end: int, num_came: int, took_s: float) -> None:
        """Of the chunks of tokens [begin, end) the first `num_came` are in memory. In the copier's thread."""
        assert self._found is not None
        chunk_tokens = self.source.chunk_tokens
        self.source.brought(self._found.places[begin // chunk_tokens : -(-end // chunk_tokens)], num_came, took_s)

    def load(
        self,
        wanted: TokenRange,
        blocks: Sequence[int],
        landed: Callable[[int, int], None] | None = None,
    ) -> StoreLoad:
        """Begin to fill `blocks`, of which the first one holds token `wanted.begin`. After `lookup`.

        landed(layer, end): told in the copier's thread that tokens up to `end`, perhaps not all that are wanted, are
        in the blocks for `layer`; the last layer only when all of it counts.
        """
        chunk_tokens = self.source.chunk_tokens
        first = wanted.begin // chunk_tokens
        ahead, self._fetched = self._fetched, None
        began_s = time.monotonic()
        begun, fetch = ahead or (
            first,
            self._fetch(first, -(-wanted.end // chunk_tokens), checks=self.source.fuses),
        )
        assert begun <= first, "more is wanted than was fetched"
        assert self._found is not None
        places = () if ahead else self._found.places[first : -(-wanted.end // chunk_tokens)]
        mine = Blocks(tuple(blocks), wanted.begin)
        return StoreLoad(self.source, fetch, begun, wanted, mine, landed, places, began_s)

    def _fetch(self, first: int, last: int | None, *, checks: bool) -> AnyFetch:
        """checks: the load compares the sums of records while it copies."""
        assert self._found is not None
        found = self._found._replace(keys=self._found.keys[first:last], places=self._found.places[first:last])
        source = self.source
        return source.store.fetch(found, source.shape, self.request_id, retention=self.retention, checks=checks)

    def store(self, begin: int, end: int, blocks: Sequence[int], layer: int) -> None:
        """Keep tokens [begin, end) of one layer, which the engine has computed; layers come in order, from the first.

        On a GPU they are when what the calling thread has launched by now has run.
        blocks: the request's, from token 0 on; they are held until the last layer has been copied. Chunks that the
        store has already, or has no room for, are skipped. A chunk counts when all of it is there.
        At the first call tokens before `begin` are in the blocks for all layers: they are kept, too, unless the group
        is one that has given up some of them. Of a recurrent state the one after token `end` is in the blocks.
        """
        if layer == 0 and self.stores:
            self._pass = self._begin(begin if self._begun or not self.source.layout.keeps_all else 0, end, blocks)
            self._begun = True
        if self._pass is not None:
            self.source.copier.put(partial(self._copy_layer, self._pass, layer, self.source.mark()))

    def close(self, *, forget: bool = False) -> None:
        """The request has ended: nothing more is stored, and chunks that are not complete are dropped.

        forget: its KV is not to be trusted, so what the store has of the prompt is dropped, too.
        """
        self.source.copier.put(partial(self._close, forget=forget))

    def withdraw(self) -> None:
        """The same, because others are about to write into its blocks: what is not copied by now is not kept."""
        self._withdrawn = True
        self.close()

    def _begin(self, begin: int, end: int, blocks: Sequence[int]) -> _Pass | None:
        last = min(end, len(self.keys) * self.source.chunk_tokens)
        if begin >= last:
            return None
        block_tokens = self.source.layout.block_tokens
        mine = tuple(blocks[begin // block_tokens : -(-last // block_tokens)])
        self.source.pool.share(mine)
        return _Pass(Blocks(mine, begin), begin, end)

    # --- The copier's thread

    def _reserve(self, part: _Pass) -> None:
        """Here, because a store in another process may not answer, and an engine must not wait for it."""
        source, chunk_tokens = self.source, self.source.chunk_tokens
        chunks = range(part.begin // chunk_tokens, min(len(self.keys), -(-part.end // chunk_tokens)))
        fresh = [chunk for chunk in chunks if chunk * chunk_tokens >= part.begin]
        index_of = {self.keys[chunk]: chunk for chunk in fresh}
        reserve = partial(source.store.reserve, list(index_of), source.shape, self.request_id, source.share)
        for slot in reserve(self.retention) if fresh else ():
            layers, chunk = len(source.layout.layers), index_of[slot.key]
            held_begin, held_end = source.held_of(chunk)
            no_sums = np.zeros((layers, 2), np.uint64)
            self._filling[chunk] = _Filling(slot, (held_end - held_begin) * layers, no_sums)
        if self._summed is None:
            self._summed = source.fuses and source.store.wants_sums
        part.slots = [(chunk, self._filling[chunk].slot) for chunk in chunks if chunk in self._filling]

    def _copy_layer(self, part: _Pass, layer: int, after: CudaEvent | None) -> None:
        source = self.source
        if layer == 0 and not self._withdrawn:
            self._reserve(part)
        if self._withdrawn or not part.slots:
            source.unmark(after)
            if part.blocks.numbers:
                source.settle(partial(self._give_back, part))  # of layers that are on their way
            return
        if part.plan is None:
            part.plan = source.plan_move(part.slots, part.blocks, part.begin, part.end, loading=False)
        sums = np.zeros((len(part.slots), 2), np.uint64) if self._summed else None
        copied = partial(self._copied, part, layer, time.monotonic(), sums)
        source.move(part.plan, layer, loading=False, after=after, then=copied, sums=sums)

    def _copied(self, part: _Pass, layer: int, began_s: float, sums: Sums | None, error: str) -> None:
        """The copy of a layer is over. error: nothing was copied, so its chunks never become complete."""
        source = self.source
        part.took_s += time.monotonic() - began_s
        done, copied = [], 0
        for row, (chunk, slot) in enumerate(part.slots if not error else ()):
            filling = self._filling[chunk]
            if sums is not None:
                filling.sums[layer] += sums[row]
            held_begin, held_end = source.held_of(chunk)
            first, last = max(part.begin, held_begin), min(part.end, held_end)
            filling.missing -= last - first
            copied += (last - first) * source.layout.token_nbytes
            if filling.missing == 0 and not self._withdrawn:
                done.append((chunk, slot))
                if sums is not None:
                    said_sums(source.store.array[slot.offset :], source.shape)[:] = filling.sums
                del self._filling[chunk]
        if done:
            preimages = [self.preimage(chunk) for chunk, _ in done]
            source.store.commit([slot for _, slot in done], source.shape, preimages, summed=sums is not None)
        if layer + 1 == len(source.layout.layers):
            self._give_back(part)
            emit(KVCopied(direction="store", nbytes=copied, took_s=part.took_s))

    def _close(self, *, forget: bool) -> None:
        self.source.settle(partial(self._end, forget=forget))

    def _end(self, *, forget: bool) -> None:
        """No copy of it is under way."""
        self.source.store.abandon([filling.slot for filling in self._filling.values()])
        self._filling.clear()
        if self._pass is not None:
            self._give_back(self._pass)
        if forget:
            self.source.store.clear(self.keys)

    def _give_back(self, part: _Pass) -> None:
        """The blocks of a pass, once."""
        held, part.blocks = part.blocks.numbers, Blocks((), part.begin)
        if held:
            self.source.give_back(held)
