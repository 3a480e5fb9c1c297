"""`RecordGroup`: the records of one group of an engine's layers, and plans of copies between them and its pages.

`Blocks` are some of a request's blocks. A `RecordPlan` says copies as runs, a `PairPlan` as pairs of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pdlink.errors import ConfigError
from pdlink.kv.hashing import Origin
from pdlink.kv.plan import bind, template
from pdlink.store.extents import ALIGNMENT_NBYTES
from pdlink.store.record import SUM_LINE_NBYTES, shape_of
from pdlink.store.slots import WHOLE, Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import KVLayout, RunArray
    from pdlink.kv.plan import Template
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Slot

    Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
    PairArray = np.ndarray[tuple[int, int], np.dtype[np.int64]]
    Chunks = Sequence[tuple[int, Slot]]
    """Slots, by number of the chunk in the prompt."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some of a request's blocks, side by side."""

    numbers: tuple[int, ...]
    begin: int
    """The token that the first one holds, perhaps not as its first."""

    def holding(self, token: int, block_tokens: int) -> tuple[int, ...]:
        """From the block on that holds `token`."""
        return self.numbers[token // block_tokens - self.begin // block_tokens :]


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """Copies between blocks and some records, whose runs follow each other."""

    template: Template
    runs: tuple[RunArray, ...]
    """Per class of the template."""
    shape: RecordShape
    starts: Numbers
    """Where each record begins in the arena."""
    ends: tuple[Numbers, ...]
    """Per class of the template: behind the last run of each record."""

    def of_layer(self, layer: int) -> list[tuple[int, int, RunArray]]:
        """Source region, destination region, runs."""
        shape = self.template.layers[layer]
        runs = self.runs[shape.class_index]
        return [(src.region, dst.region, runs + (src.offset, dst.offset, 0)) for src, dst in shape.bases]

    def ends_of(self, layer: int) -> Numbers:
        return self.ends[self.template.layers[layer].class_index]

    @property
    def num_runs(self) -> int:
        """Of all layers and parts."""
        return sum(len(self.runs[layer.class_index]) * len(layer.bases) for layer in self.template.layers)

    def whole(self) -> dict[tuple[int, int], RunArray]:
        """The runs of all layers, by (source region, destination region), in the order of their sources.

        That is how the CPU reads ahead best: of pages whose blocks hold all layers, runs of 32 KiB, into records took
        0.038 CPU seconds per GB instead of 0.047 layer by layer; back 0.041 instead of 0.045 (in the order of their
        destinations 0.041 and 0.047; two cores of an EPYC).
        """
        bases: defaultdict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for layer in self.template.layers:
            for src, dst in layer.bases:
                bases[layer.class_index, src.region, dst.region].append((src.offset, dst.offset, 0))
        parts: defaultdict[tuple[int, int], list[RunArray]] = defaultdict(list)
        for (index, src_region, dst_region), some in bases.items():
            based = self.runs[index] + np.array(some)[:, None]
            parts[src_region, dst_region].append(based.reshape(-1, 3))
        found = {}
        for regions, of_classes in parts.items():
            runs = np.concatenate(of_classes)
            found[regions] = runs[np.argsort(runs[:, 0], kind="stable")]
        return found


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The same copies as strides and pairs of blocks, for a kernel (`pdlink.cuda.strided`).

    A record is a block of the arena that begins at a multiple of `ALIGNMENT_NBYTES`, which is the stride of blocks.
    """

    template: Template
    pairs: PairArray
    """[units, 2], C-contiguous: of the source, of the destination, in units of `template.unit_tokens`."""
    skip: int
    """Tokens of the first unit that are not copied."""
    num_tokens: int
    begin: int
    """Where the first record begins in the arena."""


AnyPlan: TypeAlias = "RecordPlan | PairPlan"


class RecordGroup:
    """What the records of one group of layers look like. Counts in positions of `layout`."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        model: str,
        revision: str,
        chunk_tokens: int,
        orders: Sequence[str] = ("PTH",),
        heads: range | None = None,
        num_heads: int | None = None,
    ) -> None:
        """model, revision: KV of equal ones may be shared. Groups of one engine have different revisions or shapes.

        chunk_tokens: of the engine. orders: see `shape_of`.
        heads, num_heads: for a tensor parallel rank: which KV heads `layout` holds, of how many. Ranks of one store
        fill the same records, whatever the number of ranks, and find what all of them have stored.
        Raises ConfigError for a layout that no record describes.
        """
        unit = layout.position_tokens
        if chunk_tokens % unit:
            raise ConfigError(
                f"tiers.chunk_size: got {chunk_tokens} tokens; expected a multiple of {unit}, the tokens that "
                "only this engine can tell apart (a block of its kernel, an entry of a compressed cache); choose one"
            )
        self.layout, self.chunk_tokens, self.num_layers = layout, chunk_tokens // unit, len(layout.layers)
        self.shape = shape_of(layout, self.chunk_tokens, num_heads, orders)
        self.shape.check()
        self.share = _share(layout, heads, num_heads)
        is_whole = self.share.end - self.share.begin == self.share.total
        self.sums_fit = is_whole and all(group.head_nbytes % SUM_LINE_NBYTES == 0 for group in self.shape.groups)
        """Whether copies by the CPU can make the sums of records, and compare them."""
        record = self.shape.whole(heads)
        self._to_record, self._from_record = template(layout, record), template(record, layout)
        self.origin = self._loaded = Origin(model, revision, layout.dtype, self.shape.text, chunk_tokens)

    def rename(self, era: str) -> None:
        """As `Source.rename`."""
        self.origin = self._loaded._replace(revision=f"{self._loaded.revision} changed {era}")

    def template(self, *, loading: bool) -> Template:
        return self._from_record if loading else self._to_record

    def chunks_of(self, begin: int, end: int) -> range:
        """Numbers of the chunks that hold positions [begin, end)."""
        return range(begin // self.chunk_tokens, -(-end // self.chunk_tokens))

    def held_of(self, chunk: int) -> tuple[int, int]:
        """Positions whose KV the record of a chunk has: all of them, or the state after the last one."""
        end = (chunk + 1) * self.chunk_tokens
        return (end - 1 if self.layout.state else chunk * self.chunk_tokens), end

    def part_of(self, chunk: int, begin: int, end: int) -> tuple[int, int]:
        """Those of positions [begin, end)."""
        first, last = self.held_of(chunk)
        return max(begin, first), min(end, last)

    def plan(self, slots: Chunks, blocks: Blocks, begin: int, end: int, *, loading: bool) -> RecordPlan:
        """The copies of positions [begin, end) between blocks and slots, as one plan."""
        parts, shape = [], self.template(loading=loading)
        for chunk, slot in slots:
            first, last = self.part_of(chunk, begin, end)
            mine = blocks.holding(first, self.layout.block_tokens)
            bound = bind(shape, [0] if loading else mine, mine if loading else [0], first, last)
            place = np.array([slot.offset, 0, 0] if loading else [0, slot.offset, 0])
            parts.append([runs + place for runs in bound.runs])
        classes = list(zip(*parts, strict=True))
        whole = tuple(np.concatenate(runs) for runs in classes)
        ends = tuple(np.cumsum([len(of_record) for of_record in runs]) for runs in classes)
        return RecordPlan(shape, whole, self.shape, np.array([slot.offset for _, slot in slots]), ends)

    def pair_plan(self, slots: Chunks, blocks: Blocks, begin: int, end: int, *, loading: bool) -> PairPlan:
        """The same by pairs of blocks. Raises ValueError for blocks that do not exist."""
        template, pages = self.template(loading=loading), self.layout
        unit, record_tokens = template.unit_tokens, (template.src if loading else template.dst).block_tokens
        spans = [(slot, *self.part_of(chunk, begin, end)) for chunk, slot in sorted(slots, key=itemgetter(0))]
        whole = [(slot.offset, first // unit, -(-last // unit)) for slot, first, last in spans]
        units = np.concatenate([np.arange(first, last) for _, first, last in whole])
        begins = np.concatenate([np.full(last - first, offset) for offset, first, last in whole])
        numbers = np.array(blocks.numbers, np.int64)
        per_page, per_record = pages.block_tokens // unit, record_tokens // unit
        index = units // per_page - blocks.begin // pages.block_tokens
        if index.max() >= len(numbers) or numbers.min() < 0 or numbers.max() >= pages.num_blocks:
            raise ValueError(f"blocks {blocks} do not hold tokens up to {spans[-1][2]}: there are {pages.num_blocks}")
        page = numbers[index] * per_page + units % per_page
        record = begins // ALIGNMENT_NBYTES * per_record + units % per_record
        pairs = np.stack((record, page) if loading else (page, record), axis=1)
        num_tokens = sum(last - first for _, first, last in spans)
        return PairPlan(template, np.ascontiguousarray(pairs), spans[0][1] % unit, num_tokens, whole[0][0])


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
