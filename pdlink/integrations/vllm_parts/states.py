"""What is inside of a recurrent state of vLLM's, so that ranks of another number can have their parts of it.

A page holds the tensors of a layer's state one after the other (`MambaBase.bind_kv_cache`). Each is divided among the
ranks of a server along one axis:
  recurrent     [heads, ...]: by heads (by channels in Mamba 1)
  convolution   [k - 1, dim] ("SD") or [dim, k - 1] ("DS", VLLM_SSM_CONV_STATE_LAYOUT): dim is x, x|B|C, or q|k|v,
                and each of these *segments* is divided by itself
So to a rank of fewer, what ranks of more hold is a piece of every segment of every row. Sides that count in shards of
states describe each tensor as a group of layers of its own; they share the lists of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.integrations.vllm_parts.layout import CacheLayout, UnsupportedCache
from pdlink.kv.layout import LayerLayout, Part

if TYPE_CHECKING:
    from collections.abc import Sequence


class RowSegment(NamedTuple):
    """Of every row of a tensor."""

    nbytes: int
    heads: int
    """Into so many pieces it can be divided; 0 if every rank has all of it."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a rank's state, dense: rows that are alike."""

    what: str
    """Type and order of axes, to be equal on both sides."""
    offset: int
    """Bytes from the beginning of the state."""
    rows: int
    segments: tuple[RowSegment, ...]

    def part_of(self, page: CacheLayout, index: int, count: int, *, first: bool) -> CacheLayout:
        """Of the layers of `page` this tensor's shard `index` of `count`.

        A row is a head of the layout, and what is in it so many parts of one size. Raises UnsupportedCache.
        """
        runs: list[tuple[int, int]] = []
        """Offset in a row, and bytes."""
        begin = 0
        for nbytes, heads in self.segments:
            if heads % count:
                raise UnsupportedCache(
                    f"shards: got {count} of a rank's recurrent state ({self.what}), which has {heads} heads or "
                    f"groups; expected divisors of {heads}; choose other numbers of ranks"
                )
            size = nbytes // count if heads else nbytes
            runs.append((begin + (index * size if heads else 0), size))
            begin += nbytes
        unit = gcd(*(size for _, size in runs))
        places = [self.offset + at + step for at, size in runs for step in range(0, size, unit)]
        layers = tuple(
            LayerLayout(
                tuple(Part(base.region, base.offset + place) for place in places), layer.block_stride, 0, begin
            )
            for layer in page.layout.layers
            for base in layer.parts
        )
        layout = replace(
            page.layout,
            dtype=f"{self.what} {self.rows} x {[size for _, size in runs]} bytes",
            num_heads=self.rows,
            head_nbytes=unit,
            layers=layers,
        )
        return replace(page, layout=layout, inside=(), shares_blocks=not first)


def shard(cache: CacheLayout, index: int, count: int, *, opened: bool) -> list[CacheLayout]:
    """The part of a rank's cache that is shard `index` of `count`: one group of layers, or several for a state.

    opened: whether a state's inside is described if it is known, also where the rank has one shard: the peer may have
    more. Otherwise a state is one page, which servers of as many ranks have alike. Raises UnsupportedCache.
    """
    if not opened or not cache.inside:
        return [cache.shard(index, count)]
    return [tensor.part_of(cache, index, count, first=number == 0) for number, tensor in enumerate(cache.inside)]


def inside_of(spec: Any, layers: Sequence[Any]) -> tuple[StateTensor, ...]:
    """The tensors of the states of these layers, which have one `MambaSpec`; none if it is not known how ranks divide
    them: layers of other classes, and further tensors such as ReplaySSM's rings.
    """
    shapes = [tuple(shape) for shape in spec.shapes]
    dtypes = [f"{dtype}".removeprefix("torch.") for dtype in spec.dtypes]
    items = [dtype.itemsize for dtype in spec.dtypes]
    sizes = [prod(shape) * item for shape, item in zip(shapes, items, strict=True)]
    if getattr(spec, "tp_replicated", False):
        return (StateTensor(f"{dtypes} copied", 0, 1, (RowSegment(sum(sizes), 0),)),)
    kinds = {_kind_of(layer) for layer in layers}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if len(shapes) != _NUM_TENSORS.get(kind):
        return ()
    heads, *inner = shapes[-1]
    recurrent = StateTensor(f"{dtypes[-1]} recurrent", sum(sizes[:-1]), 1, (RowSegment(sizes[-1], heads),))
    if kind == "linear":
        return (recurrent,)
    first = _dim_first()
    dim, length = shapes[0] if first else reversed(shapes[0])
    widths = _widths(kind, dim, heads, inner)
    if not widths:
        return ()
    rows, item = (1, items[0] * length) if first else (length, items[0])
    segments = tuple(RowSegment(width * item, pieces) for width, pieces in widths)
    what = f"{dtypes[0]} convolution {'DS' if first else 'SD'}"
    if first:
        what += f" of {length}"
    return StateTensor(what, 0, rows, segments), *(() if kind == "conv" else (recurrent,))


_CLASSES = {
    "BailingMoeV3KimiDeltaAttention": "delta",
    "Glm5NextLinearAttention": "delta",
    "KimiGatedDeltaNetAttention": "delta",
    "KimiK3DeltaAttention": "delta",
    "OlmoHybridGatedDeltaNetAttention": "delta",
    "QwenGatedDeltaNetAttention": "delta",
    "LinearAttention": "linear",
    "MambaMixer": "mamba1",
    "MambaMixer2": "mamba2",
    "ShortConv": "conv",
}
"""Layers of vLLM (0.32) whose loaders of weights were read: which rank has what."""
_NUM_TENSORS = {"conv": 1, "linear": 1, "delta": 2, "mamba1": 2, "mamba2": 2}


def _kind_of(layer: Any) -> str:
    return next((_CLASSES[base.__name__] for base in type(layer).__mro__ if base.__name__ in _CLASSES), "")


def _widths(kind: str, dim: int, heads: int, inner: Sequence[int]) -> list[tuple[int, int]]:
    """Elements of each segment of a convolution's `dim`, and its pieces; none if `dim` is not made of them.

    heads, inner: shape of the recurrent state.
    """
    if kind in ("conv", "mamba1"):
        return [(dim, dim)]
    if kind == "delta":  # q|k|v beside [heads of v, size of v, size of k]
        value, size = heads * inner[0], inner[1]
        key, left = divmod(dim - value, 2)
        return [] if left or key <= 0 or key % size else [(key, key // size)] * 2 + [(value, heads)]
    x, size = heads * inner[0], inner[1]  # x|B|C beside [heads, size of x, size of a group]
    groups, left = divmod(dim - x, 2 * size)
    if left or groups <= 0:
        return []
    # Ranks that cannot divide the groups must be those of a model with one: each has a copy of it.
    return [(x, heads), *[(groups * size, groups if groups > 1 else 0)] * 2]


def _dim_first() -> bool:
    """Whether vLLM keeps states of convolutions as [dim, k - 1]."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())
