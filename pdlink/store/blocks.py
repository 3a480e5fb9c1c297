"""`Blocks`, `RecordPlan`, `SlotPlan`: what copies between an engine's pages and records are made from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pdlink.store.extents import ALIGNMENT_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import KVLayout, RunArray
    from pdlink.kv.plan import Plan, Template
    from pdlink.store.slots import Slot

    Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A part of a request's block table."""

    numbers: tuple[int, ...]
    begin: int
    """The token that the first one holds, perhaps not as its first."""

    def holding(self, token: int, block_tokens: int) -> tuple[int, ...]:
        """From the block on that holds `token`."""
        return self.numbers[token // block_tokens - self.begin // block_tokens :]


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """Copies between blocks and some records, whose runs follow each other."""

    plan: Plan
    starts: Numbers
    """Where each record begins in the arena."""
    ends: tuple[Numbers, ...]
    """Per class of the plan's template: behind the last run of each record."""

    def ends_of(self, layer: int) -> Numbers:
        return self.ends[self.plan.template.layers[layer].class_index]

    def whole(self) -> dict[tuple[int, int], RunArray]:
        """The runs of all layers, by (source region, destination region), in the order of their sources.

        That is how the CPU reads ahead best: of pages whose blocks hold all layers, runs of 32 KiB, into records took
        0.038 CPU seconds per GB instead of 0.047 layer by layer; back 0.041 instead of 0.045 (in the order of their
        destinations 0.041 and 0.047; two cores of an EPYC).
        """
        bases: defaultdict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for layer in self.plan.template.layers:
            for src, dst in layer.bases:
                bases[layer.class_index, src.region, dst.region].append((src.offset, dst.offset, 0))
        parts: defaultdict[tuple[int, int], list[RunArray]] = defaultdict(list)
        for (index, src_region, dst_region), some in bases.items():
            based = self.plan.runs[index] + np.array(some)[:, None]
            parts[src_region, dst_region].append(based.reshape(-1, 3))
        found = {}
        for regions, of_classes in parts.items():
            runs = np.concatenate(of_classes)
            found[regions] = runs[np.argsort(runs[:, 0], kind="stable")]
        return found


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The same copies as a slot for each token and strides, for a kernel (`pdlink.cuda.strided`).

    A record is a block of the arena that begins at a multiple of `ALIGNMENT_NBYTES`, which is the stride of blocks.
    """

    template: Template
    page_slots: Numbers
    record_slots: Numbers

    @classmethod
    def of(
        cls, template: Template, slots: Sequence[tuple[Slot, int, int]], blocks: Blocks, pages: KVLayout
    ) -> SlotPlan:
        """slots: and the tokens [first, last) that are copied of each. pages: the other side of `template`.

        Raises ValueError for blocks that do not exist.
        """
        record = template.dst if pages is template.src else template.src
        tokens = np.concatenate([np.arange(first, last) for _, first, last in slots])
        begins = np.concatenate([np.full(last - first, slot.offset) for slot, first, last in slots])
        numbers = np.array(blocks.numbers, np.int64)
        index = tokens // pages.block_tokens - blocks.begin // pages.block_tokens
        if index.max() >= len(numbers) or numbers.min() < 0 or numbers.max() >= pages.num_blocks:
            raise ValueError(f"blocks {blocks} do not hold tokens up to {tokens.max()}: there are {pages.num_blocks}")
        return cls(
            template,
            numbers[index] * pages.block_tokens + tokens % pages.block_tokens,
            begins // ALIGNMENT_NBYTES * record.block_tokens + tokens % record.block_tokens,
        )


AnyPlan: TypeAlias = "RecordPlan | SlotPlan"
