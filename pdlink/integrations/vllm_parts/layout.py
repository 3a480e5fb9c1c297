"""vLLM's per-layer KV tensors as a `KVLayout`.

vLLM hands out one view per layer, in kernel blocks, which may be smaller than the blocks its scheduler counts in. A
layer becomes one or two *planes*, each a layer of the `KVLayout`: one for the ordinary forms, in which a token's head
vector is contiguous, and two for vLLM's CPU attention, which keeps K of a block transposed.

Forms (B blocks, H heads, N tokens of a block, D head size):
  [B, H, N, 2D]  K and V side by side in a token; strides tell the order of B, H and N      (0.26 and later)
  [B, 2, N, H, D], [2, B, N, H, D]  K and V apart                                           (earlier, some backends)
  [B, H, N, C], [B, N, C]  MLA: one latent
  [B, H, N, 2D] of CPU_ATTN with vector instructions: within (block, head) first K as [D, N], then V as [N, D]
CPU_ATTN on AMX, NEON and others packs K in its own ways, and some kernels of GPUs keep a block's scales together:
there a whole block of a layer is one position, and both servers must use the same kernel and block size. Compressed
caches have one entry for several tokens, which is a position then.
  [B, ...], dense within a block: a recurrent state; what is in it is only looked at where ranks differ (`states.py`)

Layers that vLLM gives different lists of blocks are different groups. Its allocator lays groups over each other in
memory: page b of the n-th layer of every group is the same page, and a block belongs to one group at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from pdlink.errors import LocalError
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from pdlink.integrations.vllm_parts.states import StateTensor
    from pdlink.kv.groups import BlockLists

COLUMNS = "columns"
"""How CPU_ATTN lays out a block with plain vector instructions ("vec", "vec16")."""
PACKED = "packed"
"""A block whose inside only its kernel knows."""
ROWS = "rows"
"""A token's head vector is contiguous."""
STATE = "state"
"""A block is the state of a recurrent layer."""


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
class GroupKind:
    """Layers that share lists of blocks, as vLLM describes them."""

    names: tuple[str, ...]
    form: str
    """COLUMNS, PACKED, ROWS or STATE."""
    latent: bool = False
    """MLA."""
    head_size: int = 0
    """Elements of a K vector of one head (and of a V vector)."""
    dtype: str = ""
    block_tokens: int = 0
    """Tokens to a block as vLLM's scheduler counts them."""
    window: int = 0
    """Tokens that a token attends to; 0 stands for all before it."""
    inside: tuple[StateTensor, ...] = ()
    """Of STATE: what its page holds, if that is known."""
    entry_tokens: int = 1
    """Tokens to an entry of a compressed cache."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One group of a server's KV cache as pdlink sees it."""

    layout: KVLayout
    planes: dict[str, tuple[int, ...]]
    """Name of a layer to the layers of `layout` that it is; empty if it shares another layer's cache."""
    record_orders: tuple[str, ...] = ("PTH",)
    """How the layers of `layout`, in turn, lie in records of a store (`store.record.shape_of`): as they do here where
    single elements would have to be moved otherwise."""
    inside: tuple[StateTensor, ...] = ()
    """Of recurrent states: what a page holds, if that is known."""
    shares_blocks: bool = False
    """Whether its lists of blocks are those of the cache before it."""
    is_latent: bool = False
    """Every rank has the same."""

    def of_layers(self, names: AbstractSet[str]) -> CacheLayout:
        """The part with these layers. Raises UnsupportedCache if there is none with a cache of its own."""
        if names >= self.planes.keys():
            return self
        planes: dict[str, tuple[int, ...]] = {}
        kept: list[int] = []
        for name, mine in self.planes.items():
            if name in names:
                planes[name] = tuple(range(len(kept), len(kept) + len(mine)))
                kept += mine
        if not kept:
            raise UnsupportedCache(
                f"stages: got one without layers of every group of KV caches ({sorted(self.planes)} are another's); "
                "use the same number of pipeline stages on both servers"
            )
        layout = replace(self.layout, layers=tuple(self.layout.layers[index] for index in kept))
        return replace(self, layout=layout, planes=planes)

    def shard(self, index: int, count: int) -> CacheLayout:
        """The part of the heads that is shard `index` of `count`; a single head belongs to all of them.

        Raises UnsupportedCache if the heads cannot be divided so.
        """
        layout = self.layout
        one_head = layout.num_heads == 1 and layout.position_tokens == 1 and not layout.state
        if count == 1 or self.is_latent or one_head:
            return self
        got = f"shards: got {count} for each rank"
        if layout.state:
            raise UnsupportedCache(
                f"{got}, of recurrent states whose inside is not known ({layout.dtype}); expected 1; take servers of "
                "as many ranks"
            )
        if layout.position_tokens > 1:
            raise UnsupportedCache(
                f"{got}, of blocks that only a kernel can read ({layout.dtype}); expected 1; use the same number of "
                "ranks"
            )
        if layout.num_heads % count:
            raise UnsupportedCache(
                f"{got}, which has {layout.num_heads} KV heads; expected divisors of that; choose servers of other "
                "numbers of ranks"
            )
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


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of a server's KV cache, or of one shard of it."""

    groups: KVGroups
    planes: dict[str, tuple[int, ...]]
    """As in `CacheLayout`, with the layers of all groups counted."""
    block_ratios: tuple[int, ...]
    """By group: its blocks to one block of vLLM's scheduler."""
    lists: tuple[int, ...] = ()
    """By group: which of the lists of vLLM's scheduler has its blocks; empty if each group has one."""

    @classmethod
    def of(cls, caches: Sequence[CacheLayout], num_blocks: int) -> CacheGroups:
        """num_blocks: of vLLM's scheduler."""
        planes: dict[str, tuple[int, ...]] = {}
        first = 0
        for cache in caches:
            for name, mine in cache.planes.items():
                planes[name] = planes.get(name, ()) + tuple(first + plane for plane in mine)
            first += len(cache.layout.layers)
        layouts = tuple(cache.layout for cache in caches)
        ratios = tuple(one.num_blocks // num_blocks for one in layouts)
        lists = accumulate((not cache.shares_blocks for cache in caches[1:]), initial=0)
        one_each = not any(cache.shares_blocks for cache in caches)
        return cls(KVGroups(layouts), planes, ratios, () if one_each else tuple(lists))

    def kernel_blocks(self, blocks: BlockLists) -> BlockLists:
        """Blocks of the layout, by group, for those of vLLM's scheduler."""
        if set(self.block_ratios) == {1} and not self.lists:
            return blocks
        lists = self.lists or range(len(self.block_ratios))
        return [_split(blocks[at], ratio) for at, ratio in zip(lists, self.block_ratios, strict=True)]

    def blocks_from(self, token: int, blocks: BlockLists) -> Sequence[int]:
        """Of vLLM's blocks of the only group those from `token` on, which up to 0.29 it asks for where a load has
        failed. None of several groups."""
        if len(self.block_ratios) > 1:
            return ()
        layout = self.groups.layouts[0]
        per_block = layout.block_tokens * layout.position_tokens * self.block_ratios[0]
        return blocks[0][token // per_block :]


def _split(blocks: Sequence[int], ratio: int) -> list[int]:
    return [block * ratio + part for block in blocks for part in range(ratio)]


def describe(views: Sequence[LayerView], kind: GroupKind) -> CacheLayout:
    """The layout of these layers of one group, in the order of the model. Raises UnsupportedCache."""
    if not views:
        raise UnsupportedCache("the model has no KV cache")
    form = kind.form
    build = {COLUMNS: _columns, PACKED: _packed, ROWS: _rows, STATE: _state}[form]
    layers: list[LayerLayout] = []
    planes: dict[str, tuple[int, ...]] = {}
    seen: set[tuple[int, int]] = set()
    sizes: set[tuple[int, int, int, int]] = set()
    for view in views:
        if (view.region, view.offset) in seen:
            planes[view.name] = ()
            continue
        seen.add((view.region, view.offset))
        size, built = build(view, kind)
        sizes.add(size)
        planes[view.name] = tuple(range(len(layers), len(layers) + len(built)))
        layers += built
    if len(sizes) > 1:
        raise UnsupportedCache(f"layers of different geometry cannot be transferred: {sorted(sizes)}")
    num_blocks, block_tokens, num_heads, head_nbytes = sizes.pop()
    layout = KVLayout(
        f"{kind.dtype}/{form}" if form == PACKED else kind.dtype,
        block_tokens,
        num_blocks,
        num_heads,
        head_nbytes,
        tuple(layers),
        window=kind.window,
        window_step=kind.block_tokens if kind.window else 1,
        state=form == STATE,
        position_tokens=kind.entry_tokens * (_block_tokens(views[0]) if form == PACKED else 1),
    )
    orders = ("HPT", "HTP") if form == COLUMNS else ("PTH",)
    return CacheLayout(layout, planes, orders, kind.inside, is_latent=kind.latent)


_Size = tuple[int, int, int, int]
"""num_blocks, block_tokens, num_heads, head_nbytes."""


def _rows(view: LayerView, kind: GroupKind) -> tuple[_Size, list[LayerLayout]]:
    shape, item = view.shape, view.itemsize
    strides = tuple(stride * item for stride in view.strides)
    if kind.latent or len(shape) == 4:
        if len(shape) == 3:  # [B, N, C]: a head axis of one
            shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
        if len(shape) != 4:
            raise _unknown(view)
        blocks, heads, tokens, content = shape
        block, head, token, _ = strides
        num_parts = 2 if not kind.latent and content == 2 * kind.head_size else 1
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


def _columns(view: LayerView, kind: GroupKind) -> tuple[_Size, list[LayerLayout]]:
    """K and V become planes of their own, because a token's step differs; every element is a part, of one element."""
    blocks, heads, tokens = _whole_blocks(view)
    head_size = kind.head_size
    if kind.latent or view.shape[3] != 2 * head_size:
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


def _packed(view: LayerView, kind: GroupKind) -> tuple[_Size, list[LayerLayout]]:
    """Axes inside a block may be in any order: the kernel is the same on both sides, and named."""
    blocks, nbytes = view.shape[0], view.itemsize
    if len(view.shape) not in (3, 4):
        raise _unknown(view)
    for stride, size in sorted(zip(view.strides[1:], view.shape[1:], strict=True)):
        if size > 1 and stride * view.itemsize != nbytes:
            raise _unknown(view)
        nbytes *= size
    part = Part(view.region, view.offset)
    return (blocks, 1, 1, nbytes), [LayerLayout((part,), view.strides[0] * view.itemsize, nbytes, nbytes)]


def _state(view: LayerView, kind: GroupKind) -> tuple[_Size, list[LayerLayout]]:
    """A page may be longer than the state in it, for the sake of other groups."""
    nbytes = view.itemsize
    for size, stride in zip(reversed(view.shape[1:]), reversed(view.strides[1:]), strict=True):
        if size > 1 and stride * view.itemsize != nbytes:
            raise _unknown(view)
        nbytes *= size
    part = Part(view.region, view.offset)
    block = view.strides[0] * view.itemsize
    return (view.shape[0], kind.block_tokens, 1, nbytes), [LayerLayout((part,), block, 0, nbytes)]


def _whole_blocks(view: LayerView) -> tuple[int, int, int]:
    """B, H, N of a view whose blocks are dense."""
    if len(view.shape) != 4:
        raise _unknown(view)
    blocks, heads, tokens, content = view.shape
    if view.strides[1:] != (tokens * content, content, 1):
        raise _unknown(view)
    return blocks, heads, tokens


def _block_tokens(view: LayerView) -> int:
    """Entries of [B, H, N, C], or [B, N, C]."""
    return view.shape[-2]


def _unknown(view: LayerView) -> UnsupportedCache:
    return UnsupportedCache(
        f"the KV cache of {view.name} has a form that is not known: shape {view.shape}, strides {view.strides}"
    )
