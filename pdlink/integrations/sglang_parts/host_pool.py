"""SGLang's host pools (HiCache's second level) as layouts and byte runs.

The KV of plain attention has a `KVLayout`, read from the strides of the pool's tensor: its records have pdlink's
order of axes, whatever the pool's, and all heads of a layer, so servers with another host layout or number of ranks
share them. What else SGLang keeps (states of Mamba, sliding windows, indexers) is *segments*: the bytes of a page as
the pool says where they are, which only an equal pool can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.memory.borrowed import BorrowedBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.memory.buffers import HostBuffer

_AXES = {
    ("layer_first", 5): "PLSHD",
    ("page_first", 5): "PSLHD",
    ("page_first_direct", 6): "PBLTHD",
    ("page_head", 6): "PBHTLD",
    # A latent cache has one part, and one head as wide as the latent.
    ("layer_first", 4): "LSHD",
    ("page_first", 4): "SLHD",
    ("page_first_direct", 5): "BLTHD",
}
"""Axes of the pool's tensor by layout and their number: P(art), L(ayer), S(lot: page and token), B (page), T(oken of
a page), H(ead), D (element)."""


class Segments(NamedTuple):
    """Pages of bytes that only an equal pool can read."""

    nbytes: tuple[int, ...]
    """Of each segment of a page, in order."""
    buffers: list[HostBuffer]
    form: str
    """Equal for pools whose pages mean the same."""


def layout_of(pool: Any) -> KVLayout | None:
    """Where each byte of `pool` lies; region 0 is its tensor. None for a pool that is no plain KV cache."""
    tensor: Any = getattr(pool, "kv_buffer", None)
    axes = _AXES.get((pool.layout, getattr(tensor, "ndim", 0)))
    if axes is None or not tensor.is_contiguous() or getattr(pool, "dcp_size", 1) > 1:
        return None
    if "P" in axes and (tensor.shape[0] != 2 or getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim):
        return None
    step = {axis: stride * tensor.element_size() for axis, stride in zip(axes, tensor.stride(), strict=True)}
    size = dict(zip(axes, tensor.shape, strict=True))
    token = step["S" if "S" in axes else "T"]
    num_pages = size["S"] // pool.page_size if "S" in axes else size["B"]
    if size["H"] > 1 and "P" not in axes:
        return None
    layer = LayerLayout((), step["B"] if "B" in axes else token * pool.page_size, token, step["H"])
    return KVLayout(
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_tokens=pool.page_size,
        num_blocks=num_pages,
        num_heads=size["H"],
        head_nbytes=size["D"] * tensor.element_size(),
        layers=tuple(
            LayerLayout(
                tuple(Part(0, number * step["L"] + part * step.get("P", 0)) for part in range(size.get("P", 1))),
                layer.block_stride,
                layer.token_stride,
                layer.head_stride,
            )
            for number in range(size["L"])
        ),
    )


def borrowed(tensor: Any) -> HostBuffer:
    """The memory of a tensor of a host pool, which stays SGLang's."""
    if tensor.device.type != "cpu":
        raise UnsupportedSglang(f"host pool: got memory of {tensor.device}; expected the host's")
    return BorrowedBuffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def segments_of(pool: Any) -> Segments:
    """Raises UnsupportedSglang for a pool that does not say where its pages are."""
    import torch

    tensors = _tensors(pool)
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(page_tokens(pool)))
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise UnsupportedSglang(
            f"host pool {type(pool).__name__}: got {error}; expected pools that give the places of their pages; use "
            "another --hicache-mem-layout"
        ) from None
    shape = [(str(tensor.dtype), list(tensor.shape[1:])) for tensor in tensors]
    form = f"{type(pool).__name__} {pool.layout} {page_tokens(pool)} {shape} {list(sizes)}"
    return Segments(tuple(map(int, sizes)), [borrowed(tensor) for tensor in tensors], form)


def page_tokens(pool: Any) -> int:
    """Host indices for one page."""
    return int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)


def pages_at(indices: Any, tokens: int) -> list[int]:
    """The page numbers of host indices, `tokens` for each page. Raises ValueError for a page that is not whole."""
    flat = np.asarray(indices).reshape(-1)
    first = flat[::tokens]
    if len(flat) % tokens or (first % tokens).any():
        raise ValueError(f"host indices: got {len(flat)}; expected whole pages of {tokens}")
    return [int(page) for page in first // tokens]


def runs_of(segments: Segments, pointers: Sequence[int], offset: int) -> list[tuple[int, np.ndarray[Any, Any]]]:
    """(buffer, [n, 3] of place in it, place in the arena, nbytes) for a page whose payload is at `offset`."""
    runs = []
    for pointer, nbytes in zip(pointers, segments.nbytes, strict=True):
        for index, buffer in enumerate(segments.buffers):
            if buffer.ptr <= pointer and pointer + nbytes <= buffer.ptr + buffer.nbytes:
                runs.append((index, np.array([[pointer - buffer.ptr, offset, nbytes]], np.int64)))
                break
        else:
            raise UnsupportedSglang(f"host pool: got a page at {pointer:#x}, outside of the memory that it names")
        offset += nbytes
    return runs


def _tensors(pool: Any) -> list[Any]:
    if hasattr(pool, "get_hybrid_pool_buffer"):
        return list(pool.get_hybrid_pool_buffer())
    buffers = pool.kv_buffer
    return list(buffers) if isinstance(buffers, (list, tuple)) else [buffers]
