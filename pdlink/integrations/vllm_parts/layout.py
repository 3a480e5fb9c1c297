"""vLLM's per-layer KV tensors as a `KVLayout`.

vLLM hands out one view per layer, in kernel blocks, which may be smaller than the blocks its scheduler counts in. A
layer becomes one or two *planes*, each a layer of the `KVLayout`: one for the ordinary forms, in which a token's head
vector is contiguous, and two for vLLM's CPU attention, which keeps K of a block transposed.

Forms (B blocks, H heads, N tokens of a block, D head size):
  [B, H, N, 2D]  K and V side by side in a token; strides tell the order of B, H and N      (0.26 and later)
  [B, 2, N, H, D], [2, B, N, H, D]  K and V apart                                           (earlier, some backends)
  [B, H, N, C], [B, N, C]  MLA: one latent
  [B, H, N, 2D] of CPU_ATTN with vector instructions: within (block, head) first K as [D, N], then V as [N, D]
CPU_ATTN on AMX, NEON and others packs K in its own ways: there a whole block of a layer is one unit, and both servers
must use the same block size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdlink.errors import LocalError
from pdlink.kv.layout import KVLayout, LayerLayout, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = "columns"
"""How CPU_ATTN lays out a block with plain vector instructions ("vec", "vec16")."""
PACKED = "packed"
"""A block whose inside only its kernel knows."""
ROWS = "rows"
"""A token's head vector is contiguous."""


class UnsupportedCache(LocalError):
    """A KV cache that cannot be described, or not be transferred yet."""

    code = "unsupported_cache"


@dataclass(frozen=True, slots=True)
class LayerView:
    """A layer's tensor: what torch says about it, and where its first element lies."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    itemsize: int
    region: int
    offset: int
    """Bytes from the start of the region."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A server's KV cache as pdlink sees it."""

    layout: KVLayout
    planes: dict[str, tuple[int, ...]]
    """Name of a layer to the layers of `layout` that it is; empty if it shares another layer's cache."""
    token_unit: int
    """Tokens to one position of `layout`: 1, or a whole block if that is what moves."""

    def shard(self, index: int, count: int) -> CacheLayout:
        """The part of the heads that is shard `index` of `count`; a single head belongs to all of them.

        Raises UnsupportedCache if the heads cannot be divided so.
        """
        layout = self.layout
        if count == 1 or (layout.num_heads == 1 and self.token_unit == 1):
            return self
        if layout.num_heads % count or self.token_unit > 1:
            raise UnsupportedCache(f"{layout.num_heads} KV heads of a rank cannot travel in {count} shards")
        heads = layout.num_heads // count
        layers = tuple(
            replace(
                layer,
                parts=tuple(
                    Part(part.region, part.offset + index * heads * layer.head_stride) for part in layer.parts
                ),
            )
            for layer in layout.layers
        )
        return replace(self, layout=replace(layout, num_heads=heads, layers=layers))


def of_rank(rank: int, num_ranks: int, num_shards: int) -> range:
    """The shards that a rank holds. Raises UnsupportedCache if they cannot be dealt out evenly."""
    each, left = divmod(num_shards, num_ranks)
    if left or not each:
        raise UnsupportedCache(f"{num_shards} shards cannot be dealt out to {num_ranks} ranks")
    return range(rank * each, (rank + 1) * each)


def describe(views: Sequence[LayerView], *, form: str, latent: bool, head_size: int, dtype: str) -> CacheLayout:
    """The layout of these layers, in the order of the model.

    form: COLUMNS, PACKED or ROWS. latent: MLA. head_size: elements of a K vector of one head (and of a V vector).
    Raises UnsupportedCache.
    """
    if not views:
        raise UnsupportedCache("the model has no KV cache")
    build = {COLUMNS: _columns, PACKED: _packed, ROWS: _rows}[form]
    layers: list[LayerLayout] = []
    planes: dict[str, tuple[int, ...]] = {}
    seen: set[tuple[int, int]] = set()
    sizes: set[tuple[int, int, int, int]] = set()
    for view in views:
        if (view.region, view.offset) in seen:
            planes[view.name] = ()
            continue
        seen.add((view.region, view.offset))
        size, built = build(view, latent=latent, head_size=head_size)
        sizes.add(size)
        planes[view.name] = tuple(range(len(layers), len(layers) + len(built)))
        layers += built
    if len(sizes) > 1:
        raise UnsupportedCache(f"layers of different geometry cannot be transferred: {sorted(sizes)}")
    num_blocks, block_tokens, num_heads, head_nbytes = sizes.pop()
    layout = KVLayout(
        f"{dtype}/{form}" if form == PACKED else dtype,
        block_tokens,
        num_blocks,
        num_heads,
        head_nbytes,
        tuple(layers),
    )
    unit = _block_tokens(views[0]) if form == PACKED else 1
    return CacheLayout(layout, planes, unit)


_Size = tuple[int, int, int, int]
"""num_blocks, block_tokens, num_heads, head_nbytes."""


def _rows(view: LayerView, *, latent: bool, head_size: int) -> tuple[_Size, list[LayerLayout]]:
    shape, item = view.shape, view.itemsize
    strides = tuple(stride * item for stride in view.strides)
    if latent or len(shape) == 4:
        if len(shape) == 3:  # [B, N, C]: a head axis of one
            shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
        if len(shape) != 4:
            raise _unknown(view)
        blocks, heads, tokens, content = shape
        block, head, token, _ = strides
        num_parts = 2 if not latent and content == 2 * head_size else 1
        part = content // num_parts * item
        offsets = [index * part for index in range(num_parts)]
    elif len(shape) == 5 and 2 in shape[:2]:
        axis = 1 if shape[1] == 2 else 0
        blocks, (tokens, heads, size) = shape[1 - axis], shape[2:]
        block, (token, head, _) = strides[1 - axis], strides[2:]
        part = size * item
        offsets = [0, strides[axis]]
    else:
        raise _unknown(view)
    if view.strides[-1] != 1:
        raise _unknown(view)
    parts = tuple(Part(view.region, view.offset + offset) for offset in offsets)
    return (blocks, tokens, heads, part), [LayerLayout(parts, block, token, head)]


def _columns(view: LayerView, *, latent: bool, head_size: int) -> tuple[_Size, list[LayerLayout]]:
    """K and V become planes of their own, because a token's step differs; every element is a part, of one element."""
    blocks, heads, tokens = _whole_blocks(view)
    if latent or view.shape[3] != 2 * head_size:
        raise _unknown(view)
    item = view.itemsize
    block, head = view.strides[0] * item, view.strides[1] * item
    matrix = tokens * head_size * item
    keys = tuple(Part(view.region, view.offset + index * tokens * item) for index in range(head_size))
    values = tuple(Part(view.region, view.offset + matrix + index * item) for index in range(head_size))
    return (blocks, tokens, heads, item), [
        LayerLayout(keys, block, item, head),
        LayerLayout(values, block, head_size * item, head),
    ]


def _packed(view: LayerView, *, latent: bool, head_size: int) -> tuple[_Size, list[LayerLayout]]:
    blocks, heads, tokens = _whole_blocks(view)
    nbytes = heads * tokens * view.shape[3] * view.itemsize
    part = Part(view.region, view.offset)
    return (blocks, 1, 1, nbytes), [LayerLayout((part,), view.strides[0] * view.itemsize, nbytes, nbytes)]


def _whole_blocks(view: LayerView) -> tuple[int, int, int]:
    """B, H, N of a view whose blocks are dense."""
    if len(view.shape) != 4:
        raise _unknown(view)
    blocks, heads, tokens, content = view.shape
    if view.strides[1:] != (tokens * content, content, 1):
        raise _unknown(view)
    return blocks, heads, tokens


def _block_tokens(view: LayerView) -> int:
    return view.shape[2]


def _unknown(view: LayerView) -> UnsupportedCache:
    return UnsupportedCache(
        f"the KV cache of {view.name} has a form that is not known: shape {view.shape}, strides {view.strides}"
    )
