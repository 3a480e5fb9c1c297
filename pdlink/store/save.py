"""`Save`: what an engine computes of one prompt, on its way into the records of one group, layer by layer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdlink.events import KVCopied, emit
from pdlink.store.groups import Blocks
from pdlink.store.record import said_sums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.driver import CudaEvent
    from pdlink.kv.hashing import Preimage
    from pdlink.store.groups import AnyPlan, RecordGroup
    from pdlink.store.record import Sums
    from pdlink.store.slots import Retention, Slot
    from pdlink.store.source import Source


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
    """Positions [begin, end) of the prompt, on their way into records, layer by layer."""

    blocks: Blocks
    begin: int
    end: int
    slots: list[tuple[int, Slot]] = field(default_factory=list)
    """By chunk. They and the plan come from the copier, at the first layer."""
    plan: AnyPlan | None = None
    took_s: float = 0.0
    """Copying the layers so far."""


class Save:
    """For one thread. Counts in positions."""

    def __init__(
        self,
        source: Source,
        group: RecordGroup,
        keys: Sequence[bytes],
        preimage: Callable[[int], Preimage | None],
        request_id: str,
        retention: Retention,
    ) -> None:
        """keys: of the prompt's full chunks. preimage: of the key of a chunk, for listeners of the store."""
        self._source, self._group, self._keys, self._preimage = source, group, keys, preimage
        self._request_id, self._retention = request_id, retention
        self.has_begun = self._withdrawn = False
        self._pass: _Pass | None = None
        self.before_commit: Callable[[], None] | None = None
        """Called before each commit."""
        # By the copier's thread:
        self.num_kept = 0
        """Records that are complete."""
        self._filling: dict[int, _Filling] = {}
        """By chunk."""
        self._summed: bool | None = None
        """Whether copies make sums; decided with the first reservation."""

    def begin(self, begin: int, end: int, blocks: Blocks) -> None:
        """Positions [begin, end) are about to be computed. Their blocks are held until the last layer is copied."""
        self.has_begun, self._pass = True, None
        block_tokens = self._group.layout.block_tokens
        last = min(end, len(self._keys) * self._group.chunk_tokens)
        if begin < last:
            first = begin // block_tokens
            mine = blocks.holding(begin, block_tokens)[: -(-last // block_tokens) - first]
            self._source.pool.share(mine)
            self._pass = _Pass(Blocks(mine, begin), begin, end)

    def layer(self, layer: int) -> None:
        """The next layer of what began is computed.

        On a GPU it is computed when what the calling thread has launched by now has run. Chunks that the store has
        already, or has no room for, are skipped. A chunk counts when all of it is there.
        """
        if self._pass is not None:
            self._source.copier.put(partial(self._copy_layer, self._pass, layer, self._source.mark()))

    def close(self) -> None:
        """Nothing more is stored, and chunks that are not complete are dropped."""
        self._source.copier.put(partial(self._source.settle, self._end))

    def withdraw(self) -> None:
        """The same, because others are about to write into its blocks: what is not copied by now is not kept."""
        self._withdrawn = True
        self.close()

    # --- The copier's thread

    def _reserve(self, part: _Pass) -> None:
        """Here, because a store in another process may not answer, and an engine must not wait for it."""
        source, group = self._source, self._group
        chunks = [chunk for chunk in group.chunks_of(part.begin, part.end) if chunk < len(self._keys)]
        fresh = [chunk for chunk in chunks if chunk * group.chunk_tokens >= part.begin]
        index_of = {self._keys[chunk]: chunk for chunk in fresh}
        reserve = partial(source.store.reserve, list(index_of), group.shape, self._request_id, group.share)
        for slot in reserve(self._retention) if fresh else ():
            chunk = index_of[slot.key]
            first, last = group.held_of(chunk)
            no_sums = np.zeros((group.num_layers, 2), np.uint64)
            self._filling[chunk] = _Filling(slot, (last - first) * group.num_layers, no_sums)
        if self._summed is None:
            self._summed = source.fuses(group) and source.store.wants_sums
        part.slots = [(chunk, self._filling[chunk].slot) for chunk in chunks if chunk in self._filling]

    def _planned(self, part: _Pass, layer: int) -> AnyPlan | None:
        """None if there is nothing to copy."""
        if layer == 0 and not self._withdrawn:
            self._reserve(part)
        if self._withdrawn or not part.slots:
            return None
        if part.plan is None:
            part.plan = self._source.plan(self._group, part.slots, part.blocks, part.begin, part.end, loading=False)
        return part.plan

    def _copy_layer(self, part: _Pass, layer: int, after: CudaEvent | None) -> None:
        plan, begun = None, False
        try:
            plan = self._planned(part, layer)
            if plan is not None:
                sums = np.zeros((len(part.slots), 2), np.uint64) if self._summed else None
                copied = partial(self._copied, part, layer, time.monotonic(), sums)
                self._source.move(plan, layer, loading=False, after=after, then=copied, sums=sums)
                begun = True
        finally:
            if plan is None:  # else `move` has the mark
                self._source.unmark(after)
            if not begun:
                self._drop(part)

    def _drop(self, part: _Pass) -> None:
        """Its chunks never become complete. Its blocks go back when copies that have begun are over."""
        part.slots = []
        if part.blocks.numbers:
            self._source.settle(partial(self._give_back, part))

    def _copied(self, part: _Pass, layer: int, began_s: float, sums: Sums | None, error: str) -> None:
        """The copy of a layer is over. error: nothing was copied, so its chunks never become complete."""
        source, group = self._source, self._group
        part.took_s += time.monotonic() - began_s
        done, copied = [], 0
        for row, (chunk, slot) in enumerate(part.slots if not error else ()):
            filling = self._filling[chunk]
            if sums is not None:
                filling.sums[layer] += sums[row]
            first, last = group.part_of(chunk, part.begin, part.end)
            filling.missing -= last - first
            copied += (last - first) * group.layout.token_nbytes
            if filling.missing == 0 and not self._withdrawn:
                done.append((chunk, slot))
                if sums is not None:
                    said_sums(source.store.array[slot.offset :], group.shape)[:] = filling.sums
        is_last = layer + 1 == group.num_layers
        try:
            if done:
                if self.before_commit is not None:
                    self.before_commit()
                preimages = [self._preimage(chunk) for chunk, _ in done]
                source.store.commit([slot for _, slot in done], group.shape, preimages, summed=sums is not None)
                self.num_kept += len(done)
                for chunk, _ in done:
                    del self._filling[chunk]
        finally:
            if is_last:
                self._give_back(part)
        if is_last:
            emit(KVCopied(direction="store", nbytes=copied, took_s=part.took_s))

    def _end(self) -> None:
        """No copy of it is under way."""
        self._source.store.abandon([filling.slot for filling in self._filling.values()])
        self._filling.clear()
        if self._pass is not None:
            self._give_back(self._pass)

    def _give_back(self, part: _Pass) -> None:
        """The blocks of a pass, once."""
        held, part.blocks = part.blocks.numbers, Blocks((), part.begin)
        if held:
            self._source.give_back(held)
