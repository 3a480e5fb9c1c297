"""Two layouts + two block lists → byte runs: the only place with offset arithmetic.

`template()` compares two layouts once per pair of peers and sorts their layers into classes of equal geometry.
`bind()` checks the blocks of a request once, for all layers: a plan for eighty layers costs as much as one for one.
What moves bytes takes from it what it needs: *pairs* of blocks, with the strides of a layer (a GPU), or *runs* of
bytes, one list for each class of layers, to which a layer adds only the bases of its parts (everybody else).

How the runs of a class come about:
  1. The token range is cut wherever a block ends on either side. What lies between two cuts is a *span*: tokens at a
     constant stride on both sides. Spans that go on where the last one ended (consecutive blocks) are joined.
  2. A span is a small box of copies over up to three axes (tokens, heads, parts), each with a count and a stride per
     side; one (token, head) vector is the unit. An axis whose stride equals the run's length on both sides only makes
     the run longer and is dropped.
  3. What is left of the box is written out in order of destination address, and neighbours that touch on both sides
     (a fused K+V block and the next one) are joined once more.

Block sizes, axis order, fused or separate K and V, MLA, slices of heads (a layout whose parts begin at the first
head) and partial blocks are only other numbers in it. Steps 1 and 3 are compiled; they hold no GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pdlink.compiled import compiled
from pdlink.errors import LayoutMismatch
from pdlink.kv.layout import MAX_OFFSET, KVLayout, LayerLayout, Part, RunList

if TYPE_CHECKING:
    from pdlink.kv.layout import RunArray

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
BlockIds = Sequence[int] | np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
"""In token order."""
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Pairs = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Strided: TypeAlias = "tuple[int, int, int, int, int, int, int, int, int, int]"
"""Heads and bytes of each; tokens of a block, strides of blocks, tokens and heads of the source, then of the
destination."""

_made = tuple.__new__
"""`_made(RunList, fields)` takes half the time of `RunList(*fields)`, and every layer of a request makes some."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Geometry shared by layers that can use the same runs."""

    src_strides: tuple[int, int]
    """Of blocks and tokens."""
    dst_strides: tuple[int, int]
    axes: tuple[tuple[int, int, int], ...]
    """Three (count, source stride, destination stride), by falling destination stride: tokens (count 0: it is the
    span's), heads, and parts (count 1 where K and V do not lie so that their runs could join)."""
    head_nbytes: int
    axes_table: Table = field(compare=False)
    """`axes` for the compiled loops."""
    strided: Strided = field(compare=False)
    """The same for kernels."""


@dataclass(frozen=True, slots=True)
class LayerTemplate:
    """Which runs a layer uses, and where they are based."""

    class_index: int
    bases: tuple[tuple[Part, Part], ...]
    """(source, destination) per list of runs: one for fused parts, otherwise one per part."""
    strided: tuple[Strided, list[tuple[int, int, int, int]]]
    """For kernels: of the class, and region and offset of the source and of the destination of each part."""
    token_nbytes: int


@dataclass(frozen=True, slots=True)
class Template:
    """What can be known about copying from one layout to another before any request is seen."""

    src: KVLayout
    dst: KVLayout
    classes: tuple[LayerClass, ...]
    layers: tuple[LayerTemplate, ...]
    group: int = 0
    """Of both caches."""

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit: the most that lie in one block on both sides, wherever they are. A state is one place."""
        return 1 if self.src.state else gcd(self.src.block_tokens, self.dst.block_tokens)

    def run_nbytes(self) -> int:
        """Bytes of the longest run of blocks that do not join."""
        span_tokens = min(self.src.block_tokens, self.dst.block_tokens)
        return max(int(_box(shape.axes_table, span_tokens, shape.head_nbytes)[3]) for shape in self.classes)


@dataclass(frozen=True)
class Plan:
    """The copies of one request."""

    template: Template
    start: int
    end: int
    src_blocks: IntArray
    """From the one on that holds `start`; all exist. Those of the destination are distinct, too."""
    dst_blocks: IntArray

    def run_lists(self, layer: int, count: int = 1) -> list[RunList]:
        """What to submit for `count` layers from this one on, by runs; empty if the range of tokens is."""
        if self.start == self.end:
            return []
        found, runs = [], self.runs
        for shape in self.template.layers[layer : layer + count]:
            of_class = runs[shape.class_index]
            for src, dst in shape.bases:
                found.append(_made(RunList, (src.region, src.offset, dst.region, dst.offset, of_class)))
        return found

    @cached_property
    def runs(self) -> tuple[RunArray, ...]:
        """Per class of `template.classes`; shared by the layers of a class, read-only, made when first asked for."""
        src, dst = self.template.src, self.template.dst
        tokens, block_tokens = (self.start, self.end), (src.block_tokens, dst.block_tokens)
        found = []
        for shape in self.template.classes:
            strides = shape.src_strides, shape.dst_strides
            blocks = self.src_blocks, self.dst_blocks
            runs = _runs(*blocks, tokens, block_tokens, *strides, shape.axes_table, shape.head_nbytes)
            runs.flags.writeable = False  # layers share them
            found.append(runs)
        return tuple(found)

    @cached_property
    def pairs(self) -> Pairs:
        """[units, 2], C-contiguous: source unit and destination unit, the same for all layers. Read-only.

        Unit n of a side begins at token n * `unit_tokens`, counted through its blocks. Of the first unit
        `start % unit_tokens` tokens are not copied. Made when it is first asked for.
        """
        unit, state = self.template.unit_tokens, self.template.src.state
        num_blocks = len(self.src_blocks), len(self.dst_blocks)
        if state and num_blocks not in ((0, 0), (1, 1)):
            raise ValueError(
                f"[{self.start}, {self.end}) of a state is in {num_blocks} blocks; expected one at each end"
            )
        start, end = (0, num_blocks[0]) if state else (self.start, self.end if self.end > self.start else 0)
        units = np.arange(start // unit, -(-end // unit))
        pairs = np.empty((len(units), 2), np.int32)
        sides = (self.template.src, self.src_blocks), (self.template.dst, self.dst_blocks)
        for column, (layout, blocks) in enumerate(sides):
            block_tokens = 1 if state else layout.block_tokens
            per_block = block_tokens // unit
            if len(blocks) and (int(blocks.max()) + 1) * per_block > 2**31:
                raise ValueError(f"block {blocks.max()} of {block_tokens} tokens, in units of {unit}, is beyond 2^31")
            index = units // per_block - start // block_tokens
            pairs[:, column] = blocks[index] * per_block + units % per_block
        pairs.flags.writeable = False
        return pairs

    def layer_nbytes(self, layer: int) -> int:
        return (self.end - self.start) * self.template.layers[layer].token_nbytes

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.template.src.token_nbytes

    @property
    def num_runs(self) -> int:
        """Copies over all layers and parts."""
        return sum(len(self.runs[layer.class_index]) * len(layer.bases) for layer in self.template.layers)


def template(src: KVLayout, dst: KVLayout, group: int = 0) -> Template:
    """Everything about copying from `src` to `dst` that does not depend on a request; made once per pair of peers.

    Raises LayoutMismatch, naming the factor and both values, if the layouts do not hold the same KV, and naming the
    layer if one of them is malformed (see `KVLayout.check`).
    """
    for factor, ours, theirs in (
        ("dtype", src.dtype, dst.dtype),
        ("number of KV heads", src.num_heads, dst.num_heads),
        ("bytes per head", src.head_nbytes, dst.head_nbytes),
        ("number of layers", len(src.layers), len(dst.layers)),
    ):
        if ours != theirs:
            raise LayoutMismatch(f"{factor} differs: source {ours}, destination {theirs}")
    src.check("source")
    dst.check("destination")
    dst.check_writable("destination")
    classes: dict[LayerClass, int] = {}
    layers = []
    for index, (src_layer, dst_layer) in enumerate(zip(src.layers, dst.layers, strict=True)):
        if len(src_layer.parts) != len(dst_layer.parts):
            raise LayoutMismatch(
                f"parts of layer {index} differ: source {len(src_layer.parts)}, destination {len(dst_layer.parts)}"
            )
        shape, bases = _classify(src, dst, src_layer, dst_layer)
        pairs_of_parts = zip(src_layer.parts, dst_layer.parts, strict=True)
        parts = [(of.region, of.offset, to.region, to.offset) for of, to in pairs_of_parts]
        layers.append(
            LayerTemplate(
                class_index=classes.setdefault(shape, len(classes)),
                bases=bases,
                strided=(shape.strided, parts),
                token_nbytes=len(src_layer.parts) * src.num_heads * src.head_nbytes,
            )
        )
    return Template(src, dst, tuple(classes), tuple(layers), group)


def bind(template: Template, src_blocks: BlockIds, dst_blocks: BlockIds, start: int, end: int) -> Plan:
    """The plan that copies tokens [start, end) of a sequence.

    src_blocks, dst_blocks: block ids in token order (a list or an integer array); the first one holds token `start`
    on its side, and blocks beyond the last one needed are ignored. Positions count from the start of the sequence,
    so both sides agree where inside a block a token lies whatever their block sizes.
    Raises ValueError if a list is too short for the range, names a block that does not exist, or would write a
    destination block twice.
    Cost: O(blocks); runs and pairs are made when they are asked for, the runs without the GIL.
    """
    if not 0 <= start <= end < MAX_OFFSET:
        raise ValueError(f"token range [{start}, {end}) is not a range of positions")
    src = _needed("source", template.src, src_blocks, start, end)
    dst = _needed("destination", template.dst, dst_blocks, start, end)
    if len(dst) > 1 and len(set(dst.tolist())) != len(dst):
        raise ValueError("destination blocks are not distinct: two ranges of tokens would be written to one block")
    return Plan(template, start, end, src, dst)


def warm_up() -> None:
    """Compile (or load from the cache) what `bind` needs, so that no request pays for it. Call once at start."""
    layer = LayerLayout(parts=(Part(0, 0),), block_stride=1, token_stride=1, head_stride=1)
    tiny = KVLayout("uint8", block_tokens=1, num_blocks=1, num_heads=1, head_nbytes=1, layers=(layer,))
    bind(template(tiny, tiny), [0], [0], 0, 1).runs  # noqa: B018


def _classify(
    src: KVLayout, dst: KVLayout, src_layer: LayerLayout, dst_layer: LayerLayout
) -> tuple[LayerClass, tuple[tuple[Part, Part], ...]]:
    """The class of a layer and the bases of its lists."""
    bases = tuple(sorted(zip(src_layer.parts, dst_layer.parts, strict=True), key=lambda pair: pair[0].offset))
    tokens = (0, src_layer.token_stride, dst_layer.token_stride)
    heads = (src.num_heads, src_layer.head_stride, dst_layer.head_stride)
    parts = (1, 0, 0)
    distance = _common_distance(bases)
    if distance:
        fused = (len(bases), distance, distance)
        span_tokens = min(src.block_tokens, dst.block_tokens)
        if _absorbs((span_tokens, *tokens[1:]), heads, fused, head_nbytes=src.head_nbytes):
            parts, bases = fused, bases[:1]
    axes = tuple(sorted((tokens, heads, parts), key=lambda axis: axis[2], reverse=True))
    shape = LayerClass(
        src_strides=(src_layer.block_stride, src_layer.token_stride),
        dst_strides=(dst_layer.block_stride, dst_layer.token_stride),
        axes=axes,
        head_nbytes=src.head_nbytes,
        axes_table=np.array(axes, dtype=np.int64),
        strided=(src.num_heads, src.head_nbytes, *_strides(src, src_layer), *_strides(dst, dst_layer)),
    )
    return shape, bases


def _strides(layout: KVLayout, layer: LayerLayout) -> tuple[int, int, int, int]:
    tokens = 1 if layout.state else layout.block_tokens
    return tokens, layer.block_stride, layer.token_stride, layer.head_stride


def _common_distance(bases: tuple[tuple[Part, Part], ...]) -> int:
    """Bytes from one part to the next, if they are the same between all parts and on both sides; otherwise 0."""
    if len({(src.region, dst.region) for src, dst in bases}) != 1:
        return 0
    steps = {
        after.offset - before.offset
        for pair, next_pair in zip(bases, bases[1:], strict=False)
        for before, after in zip(pair, next_pair, strict=True)
    }
    return steps.pop() if len(steps) == 1 else 0


def _absorbs(*axes: tuple[int, int, int], head_nbytes: int) -> bool:
    """Whether the last axis becomes part of a longer run when a whole block is copied.

    If not, its parts are better kept as lists of their own, which share runs half as long.
    """
    run = head_nbytes
    for axis in sorted(axes, key=lambda axis: axis[2]):
        count, src_stride, dst_stride = axis
        if count > 1 and src_stride == dst_stride == run:
            if axis is axes[-1]:
                return True
            run *= count
    return False


def _needed(side: str, layout: KVLayout, blocks: BlockIds, start: int, end: int) -> IntArray:
    """The blocks of one side that [start, end) touches, as a fresh array (one type for the compiled loops)."""
    count = -(-end // layout.block_tokens) - start // layout.block_tokens if end > start else 0
    if len(blocks) < count:
        raise ValueError(
            f"{side} blocks do not cover tokens [{start}, {end}): "
            f"{count} blocks of {layout.block_tokens} tokens needed, {len(blocks)} given"
        )
    if count == 0:
        return np.empty(0, dtype=np.int64)
    given = np.asarray(blocks[:count])
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError(f"{side} blocks must be a list of integers, got {given.dtype} of {given.ndim} dimensions")
    needed = given.astype(np.int64)
    missing = _first_missing(needed, layout.num_blocks)
    if missing >= 0:
        raise ValueError(f"{side} block {needed[missing]} does not exist: there are {layout.num_blocks}")
    return needed


@compiled
def _first_missing(blocks: IntArray, num_blocks: int) -> int:
    """Index of the first block that does not exist; -1 if all do."""
    for index in range(len(blocks)):
        if not 0 <= blocks[index] < num_blocks:
            return index
    return -1


@compiled
def _box(axes: Table, tokens: int, run: int) -> tuple[int, int, int, int]:
    """Counts of the three axes that remain for a span of `tokens` (1: absorbed), and the length of its runs."""
    counts = [1, 1, 1]
    for axis in range(2, -1, -1):
        count = axes[axis, 0]
        if count == 0:
            count = tokens
        if count > 1 and axes[axis, 1] == run and axes[axis, 2] == run:
            run *= count
        else:
            counts[axis] = count
    return counts[0], counts[1], counts[2], run


@compiled
def _expand(spans: Table, axes: Table, head_nbytes: int) -> Table:
    """[n, 3]: the runs of `spans`, neighbours joined."""
    bound = 0
    for span in range(len(spans)):
        count0, count1, count2, _ = _box(axes, spans[span, 2], head_nbytes)
        bound += count0 * count1 * count2
    runs = np.empty((bound, 3), dtype=np.int64)
    src_next = dst_next = -1
    count = 0
    for span in range(len(spans)):
        count0, count1, count2, nbytes = _box(axes, spans[span, 2], head_nbytes)
        for i in range(count0):
            for j in range(count1):
                src = spans[span, 0] + i * axes[0, 1] + j * axes[1, 1]
                dst = spans[span, 1] + i * axes[0, 2] + j * axes[1, 2]
                for _ in range(count2):
                    if src == src_next and dst == dst_next:
                        runs[count - 1, 2] += nbytes
                    else:
                        runs[count, 0], runs[count, 1], runs[count, 2] = src, dst, nbytes
                        count += 1
                    src_next = src + nbytes
                    dst_next = dst + nbytes
                    src += axes[2, 1]
                    dst += axes[2, 2]
    return runs[:count]


@compiled
def _runs(
    src_blocks: IntArray,
    dst_blocks: IntArray,
    tokens: tuple[int, int],
    block_tokens: tuple[int, int],
    src_strides: tuple[int, int],
    dst_strides: tuple[int, int],
    axes: Table,
    head_nbytes: int,
) -> Table:
    """[n, 3]: the runs of tokens [begin, end), as `RunArray`.

    All in one call: for a few blocks, calls are what takes time. `spans` is [n, 3]: source offset, destination
    offset and number of tokens, in token order.
    """
    position, end = tokens
    src_block_tokens, dst_block_tokens = block_tokens
    src_block_stride, src_token_stride = src_strides
    dst_block_stride, dst_token_stride = dst_strides
    spans = np.empty((len(src_blocks) + len(dst_blocks), 3), dtype=np.int64)
    src_first = position // src_block_tokens
    dst_first = position // dst_block_tokens
    src_next = dst_next = -1
    count = 0
    while position < end:
        src_block = position // src_block_tokens
        dst_block = position // dst_block_tokens
        src_token = position - src_block * src_block_tokens
        dst_token = position - dst_block * dst_block_tokens
        length = min(src_block_tokens - src_token, dst_block_tokens - dst_token, end - position)
        src = src_blocks[src_block - src_first] * src_block_stride + src_token * src_token_stride
        dst = dst_blocks[dst_block - dst_first] * dst_block_stride + dst_token * dst_token_stride
        if src == src_next and dst == dst_next:
            spans[count - 1, 2] += length
        else:
            spans[count, 0], spans[count, 1], spans[count, 2] = src, dst, length
            count += 1
        src_next = src + length * src_token_stride
        dst_next = dst + length * dst_token_stride
        position += length
    return _expand(spans[:count], axes, head_nbytes)
