"""`Copying`: what calls of `Cache` copy between its pages and slots of the store.

At once, in the calling thread, or layer by layer in the copier's thread while the caller computes or uses others.
"""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING

from pdlink import _copy
from pdlink.errors import TransferFailed
from pdlink.events import KVCopied, emit
from pdlink.store.blocks import RecordPlan
from pdlink.store.record import HEADER_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from concurrent.futures import Future

    from pdlink.store.blocks import AnyPlan
    from pdlink.store.handle import Chunk
    from pdlink.store.interface import AnyFetch
    from pdlink.store.slots import Slot
    from pdlink.store.source import StoreSource
    from pdlink.store.span import Span
    from pdlink.store.turns import Retention

    Chunks = list[tuple[int, Slot]]
    """Slots, by number of the chunk in the prompt."""


_MOST_RUNS = 1 << 16
"""That are copied in one call, of all layers: the list takes 24 bytes for each. Layers share the runs of more."""


class Copying:
    """Usable from any thread. Blocks are the caller's for the time of a call, or of a generator."""

    def __init__(self, source: StoreSource, lease_s: float) -> None:
        """lease_s: of fetches, for messages."""
        self._source, self._lease_s = source, lease_s
        self._store, self._shape, self._layout = source.store, source.shape, source.layout

    # --- Into the store

    def store(self, mine: Span, retention: Retention) -> int:
        """Keep what is not there yet; how many chunks that is."""
        slots = self._reserve(mine, retention)
        copied = False
        try:
            copied = self._copy(mine, slots, loading=False)
        finally:
            if not copied and self._quiet():
                self._store.abandon([slot for _, slot in slots])
        if not copied:
            return 0
        self._store.commit([slot for _, slot in slots], self._shape)
        return len(slots)

    def store_layers(self, mine: Span, retention: Retention) -> Generator[None]:
        """As `Cache.store_layers`."""
        slots = self._reserve(mine, retention)
        copies: list[Future[str]] = []
        whole = False
        try:
            yield
            plan = self._plan(mine, slots, loading=False) if slots else None
            num_layers = len(self._layout.layers)
            for layer in range(num_layers):
                if plan is not None:
                    copies.append(self._begin(plan, layer, loading=False))
                if layer + 1 == num_layers:
                    errors = [self._wait(copy) for copy in copies]
                    whole = not any(errors)
                    if whole:
                        self._store.commit([slot for _, slot in slots], self._shape)
                yield
        finally:
            if not whole and self._quiet():
                self._store.abandon([slot for _, slot in slots])

    def _reserve(self, mine: Span, retention: Retention) -> Chunks:
        number = {key: index for index, key in enumerate(mine.keys, mine.first)}
        slots = self._store.reserve(mine.keys, self._shape, retention=retention)
        return [(number[slot.key], slot) for slot in slots]

    # --- Out of it

    def arrived(self, mine: Span, fetch: AnyFetch | None) -> Chunks:
        """The leading chunks of the span that a fetch has brought. Waits for it."""
        slots = {} if fetch is None else {slot.key: slot for slot in fetch.done.result()}
        known = takewhile(slots.__contains__, mine.keys)
        return [(index, slots[key]) for index, key in enumerate(known, mine.first)]

    def load(self, mine: Span, fetch: AnyFetch | None) -> int:
        """Copy what a fetch has brought, and close it; the tokens that are right."""
        if fetch is None:
            return 0
        try:
            slots = self.arrived(mine, fetch)
            copied = self._copy(mine, slots, loading=True)
        finally:
            stood = fetch.close()
        return self._num_tokens(mine, slots) if stood and copied else 0

    def load_layers(self, mine: Span, begin: Callable[[], AnyFetch]) -> Generator[int | None]:
        """As `Cache.retrieve_layers`. begin: called at the first step."""
        fetch = begin()
        try:
            slots = self.arrived(mine, fetch)
            copies = self._copies(mine, slots)
            yield self._num_tokens(mine, slots)
            num_layers = len(self._layout.layers)
            for layer in range(num_layers):
                error = self._wait(copies[layer]) if copies else ""
                if error:
                    raise TransferFailed(f"layer {layer} was not copied: {error}")
                if layer + 1 == num_layers and not fetch.close():
                    raise TransferFailed(f"a lease of {self._lease_s} s ended before the last layer; raise lease_s")
                yield None
        finally:
            self._quiet()
            fetch.close()

    def _copies(self, mine: Span, slots: Chunks) -> list[Future[str]]:
        """All layers, one after the other in the copier's thread."""
        if not slots:
            return []
        plan = self._plan(mine, slots, loading=True)
        return [self._begin(plan, layer, loading=True) for layer in range(len(self._layout.layers))]

    def _num_tokens(self, mine: Span, slots: Chunks) -> int:
        """Unmasked ones that these leading chunks hold."""
        return (slots[-1][0] + 1) * self._source.chunk_tokens - mine.blocks.begin if slots else 0

    # --- Both ways

    def _begin(self, plan: AnyPlan, layer: int, *, loading: bool) -> Future[str]:
        """One layer, in the copier's thread: "" when it is over, or why it is not copied."""
        assert isinstance(plan, RecordPlan)

        def copy() -> str:
            self._source.copy(plan, layer, loading=loading)
            return ""

        return self._source.copier.submit(copy)

    def _wait(self, copy: Future[str]) -> str:
        return copy.result()

    def _quiet(self) -> bool:
        """Wait until nothing touches blocks and slots any more; whether that is so."""
        self._source.copier.wait()
        return True

    def chunk(self, slot: Slot) -> Chunk:
        """A record's KV: uint8 [layer, part, token, head, byte]."""
        layout, layers = self._layout, self._layout.layers
        shape = (len(layers), len(layers[0].parts), self._source.chunk_tokens, layout.num_heads, layout.head_nbytes)
        return slot.of(self._store.array)[HEADER_NBYTES : self._shape.nbytes].reshape(shape)

    def _copy(self, mine: Span, slots: Chunks, *, loading: bool) -> bool:
        """All layers, in this thread; whether they are copied."""
        if slots:
            began_s = time.monotonic()
            plan = self._plan(mine, slots, loading=loading)
            assert isinstance(plan, RecordPlan)
            if plan.plan.num_runs <= _MOST_RUNS:
                self._copy_whole(plan, loading=loading)
            else:
                for layer in range(len(self._layout.layers)):
                    self._source.copy(plan, layer, loading=loading)
            nbytes, took_s = len(slots) * self._shape.payload_nbytes, time.monotonic() - began_s
            emit(KVCopied(direction="load" if loading else "store", nbytes=nbytes, took_s=took_s))
        return True

    def _copy_whole(self, plan: RecordPlan, *, loading: bool) -> None:
        pages, arena = self._source.arrays, self._store.array
        for (src, dst), runs in plan.whole().items():
            _copy.nt_runs(pages[dst] if loading else arena, arena if loading else pages[src], runs)

    def _plan(self, mine: Span, slots: Chunks, *, loading: bool) -> AnyPlan:
        template = self._source.from_record if loading else self._source.to_record
        return self._source.plan(template, slots, mine.blocks, *self._tokens(mine, slots))

    def _tokens(self, mine: Span, slots: Chunks) -> tuple[int, int]:
        """Begin and end of what is copied."""
        chunk_tokens = self._source.chunk_tokens
        return max(slots[0][0] * chunk_tokens, mine.blocks.begin), (slots[-1][0] + 1) * chunk_tokens
