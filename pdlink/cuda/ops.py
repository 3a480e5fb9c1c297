"""`reshape`: paged KV from any layout to any other, in one launch.

A *plane* is one part (K, V, or MLA's latent) of one layer, given as a view [block, token, head, element] of any
strides but those of the elements, which are neighbours: the view expresses the layout.

    vLLM, fused [2, B, T, H, D]        cache[0], cache[1]
    vLLM 0.26+, [B, H, T, 2 * D]       cache[..., :D].transpose(1, 2), cache[..., D:].transpose(1, 2)
    FlashInfer HND, [B, 2, H, T, D]    cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)
    MLA, [B, T, C]                     cache[:, :, None]
    SGLang pools, [slot, H, D]         pool[:, None] (blocks of one token), one tensor per layer and part
    contiguous, [token, H, D]          rows[:, None]
    a slice of the heads               any of these, [:, :, start:end]

Token i is read from `src_slots[i]` and written to `dst_slots[i]`; a slot is block * block size + token inside the
block, and -1 skips the token. Different block sizes on the two sides are just different slots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from pdlink import _cuda
from pdlink.cuda import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def reshape(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_slots: Tensor | None = None,
    dst_slots: Tensor | None = None,
    refused: Tensor | None = None,
) -> None:
    """Copy tokens from the planes `src` to the planes `dst`, in one launch for all of them.

    src, dst: views [block, token, head, element], equally many, equal in shape and strides within each list; heads,
    elements and dtype are the same on both sides. src_slots, dst_slots: int64 [tokens]; None is 0, 1, 2, …
    refused: int32 [1], set to 1 if a slot was outside its planes (that token is skipped). Without it a CPU raises
    IndexError, and a GPU only skips the token.
    On a GPU one side may be pinned host memory. Planes that are not evenly spaced need a table in device memory,
    made at the first call with such a list: call once before capturing a graph.
    Raises ValueError for shapes, dtypes and devices that do not fit.
    """
    num_tokens = _check(src, dst, src_slots, dst_slots, refused)
    if num_tokens == 0 or src[0].numel() == 0:
        return
    device = _device(src, dst)
    flag = torch.zeros(1, dtype=torch.int32) if refused is None and device.type == "cpu" else refused
    num_layers, num_parts = _grouping(src, dst)
    num_heads, head_dim = src[0].shape[2:]
    launches = _cuda.plan_reshape(
        _rows(src, src_slots, device, num_parts),
        _rows(dst, dst_slots, device, num_parts),
        num_tokens=num_tokens,
        num_layers=num_layers,
        num_parts=num_parts,
        num_heads=num_heads,
        head_nbytes=head_dim * src[0].itemsize,
        refused=0 if flag is None else flag.data_ptr(),
    )
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        loaded = kernels.of_device(device.index)
        for launch in launches:
            loaded.launch(launch, stream)
        return
    for launch in launches:
        _cuda.run_on_cpu(launch)
    if refused is None and flag is not None and flag.item():
        raise IndexError(
            f"a slot is outside the planes: source {_num_slots(src)}, destination {_num_slots(dst)} slots"
        )


def _check(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_slots: Tensor | None,
    dst_slots: Tensor | None,
    refused: Tensor | None,
) -> int:
    """The number of tokens. Raises ValueError."""
    if not src or len(src) != len(dst):
        raise ValueError(f"source and destination need equally many planes, got {len(src)} and {len(dst)}")
    for side, planes in (("source", src), ("destination", dst)):
        first = planes[0]
        if first.dim() != 4:
            raise ValueError(f"a {side} plane has {first.dim()} axes; needed are block, token, head, element")
        if first.stride(3) != 1 and first.shape[3] > 1:
            raise ValueError(f"the elements of a {side} head lie {first.stride(3)} apart; they must be neighbours")
        for plane in planes:
            if (plane.shape, plane.stride(), plane.dtype) != (first.shape, first.stride(), first.dtype):
                raise ValueError(f"the {side} planes differ in shape, strides or dtype")
    if src[0].shape[2:] != dst[0].shape[2:]:
        raise ValueError(
            f"heads and elements differ: source {tuple(src[0].shape[2:])}, destination {tuple(dst[0].shape[2:])}"
        )
    if src[0].dtype != dst[0].dtype:
        raise ValueError(f"dtypes differ: source {src[0].dtype}, destination {dst[0].dtype}")
    if refused is not None and (refused.dtype != torch.int32 or refused.numel() != 1):
        raise ValueError("refused must be one int32")
    device = _device(src, dst)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no kernels for {device.type}")
    extras = [one for one in (src_slots, dst_slots, refused) if one is not None]
    for tensor in (*src, *dst, *extras):
        if tensor.device != device and not (
            device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        ):
            raise ValueError(f"a tensor is on {tensor.device}, not pinned, and the kernel would run on {device}")
    counts = []
    for slots in (src_slots, dst_slots):
        if slots is not None:
            if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
                raise ValueError(f"slots must be contiguous int64 [tokens], got {slots.dtype} {tuple(slots.shape)}")
            counts.append(slots.shape[0])
    counts = counts or [_num_slots(src), _num_slots(dst)]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise ValueError(f"the sides have {counts[0]} and {counts[1]} tokens")
    return counts[0]


def _device(src: Sequence[Tensor], dst: Sequence[Tensor]) -> torch.device:
    """The device of the kernel: the GPU if one side is there."""
    return src[0].device if src[0].device.type == "cuda" else dst[0].device


def _num_slots(planes: Sequence[Tensor]) -> int:
    return planes[0].shape[0] * planes[0].shape[1]


def _steps(planes: Sequence[Tensor], num_parts: int) -> tuple[int, int] | None:
    """Bytes from layer to layer and from part to part, if planes are evenly spaced in groups of `num_parts`."""
    if len(planes) % num_parts:
        return None
    at = [plane.data_ptr() for plane in planes]
    part = at[1] - at[0] if num_parts > 1 else 0
    layer = at[num_parts] - at[0] if len(at) > num_parts else 0
    even = all(a == at[0] + i // num_parts * layer + i % num_parts * part for i, a in enumerate(at))
    return (layer, part) if even else None


def _grouping(src: Sequence[Tensor], dst: Sequence[Tensor]) -> tuple[int, int]:
    """Layers and parts of the planes; a side that is not evenly spaced gets a table."""
    for num_parts in (1, 2):
        if _steps(src, num_parts) is not None and _steps(dst, num_parts) is not None:
            return len(src) // num_parts, num_parts
    return len(src), 1


def _rows(planes: Sequence[Tensor], slots: Tensor | None, device: torch.device, num_parts: int) -> _cuda.Rows:
    first = planes[0]
    block, token, head = (stride * first.itemsize for stride in first.stride()[:3])
    steps = _steps(planes, num_parts)
    base, table, alignment = first.data_ptr(), 0, 0
    if steps is None:
        addresses = tuple(plane.data_ptr() for plane in planes)
        table = _table(addresses, device).data_ptr()
        for address in addresses:
            alignment |= address
    layer_stride, part_stride = steps or (0, 0)
    return _cuda.Rows(
        base=base,
        table=table,
        alignment=alignment,
        layer_stride=layer_stride,
        part_stride=part_stride,
        block_stride=block,
        token_stride=token,
        head_stride=head,
        block_tokens=first.shape[1],
        slots=0 if slots is None else slots.data_ptr(),
        num_slots=_num_slots(planes),
    )


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """A cache has few lists of planes, which stay the same for its whole life."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)
