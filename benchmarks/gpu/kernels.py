"""The reshape kernels against the device-to-device copy of the same run, and the way to the host against one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdlink.cuda import ops

from .figures import Figure, median_s

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, TOKENS, BLOCK_TOKENS, HEADS, HEAD_DIM = 32, 8192, 16, 8, 128
POOL_BLOCKS = 2 * TOKENS // BLOCK_TOKENS
"""Twice what is used, so that the pages lie scattered."""


def run(device: torch.device) -> list[Figure]:
    pages = torch.randn(LAYERS, 2, POOL_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    planes = list(pages.flatten(0, 1))
    rows = torch.empty(2 * LAYERS, TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    row_planes = [row[:, None] for row in rows]
    slots = scattered_slots(device)
    nbytes = rows.nbytes

    source = torch.randn_like(rows)
    copy_s = median_s(lambda: rows.copy_(source))
    copy = 2 * nbytes / copy_s / 1e9
    figures = [Figure("device-to-device copy", copy_s, copy)]

    def add(name: str, work: Callable[[], object], moved: int, bar: float | None) -> None:
        seconds = median_s(work)
        speed = moved / seconds / 1e9
        figures.append(Figure(name, seconds, speed, "device-to-device copy", speed / copy, bar))

    add("gather, one launch", lambda: ops.reshape(planes, row_planes, slots, None), 2 * nbytes, 0.85)
    add("scatter, one launch", lambda: ops.reshape(row_planes, planes, None, slots), 2 * nbytes, 0.85)

    def layer_by_layer() -> None:
        for first in range(0, 2 * LAYERS, 2):
            ops.reshape(planes[first : first + 2], row_planes[first : first + 2], slots, None)

    add("gather, a launch per layer", layer_by_layer, 2 * nbytes, None)
    hnd = torch.empty_like(pages).view(2 * LAYERS, POOL_BLOCKS, HEADS, BLOCK_TOKENS, HEAD_DIM)
    hnd_planes = [plane.transpose(1, 2) for plane in hnd]
    other_slots = scattered_slots(device)
    add("NHD to HND", lambda: ops.reshape(planes, hnd_planes, slots, other_slots), 2 * nbytes, 0.75)
    fp8 = list(torch.empty(pages.flatten(0, 1).shape, device=device, dtype=torch.float8_e4m3fn))
    scales = torch.rand(2 * LAYERS, HEADS, device=device) + 0.5
    moved = nbytes * 3 // 2
    add("bf16 to fp8, scale per head", lambda: ops.reshape(planes, fp8, slots, other_slots, scales), moved, 0.75)
    add("fp8 to bf16, scale per head", lambda: ops.reshape(fp8, planes, other_slots, slots, scales), moved, None)
    return figures + to_host(planes, rows, slots)


def to_host(planes: list[torch.Tensor], rows: torch.Tensor, slots: torch.Tensor) -> list[Figure]:
    """A layer is gathered on one stream and copied on another, two layers under way; beside one large copy."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    whole_s = median_s(lambda: host.copy_(rows, non_blocking=True), repeats=7)
    figures = [Figure("device to pinned host, one copy", whole_s, rows.nbytes / whole_s / 1e9)]
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    staging = [torch.empty_like(rows[:2]) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def layered() -> None:
        compute = torch.cuda.current_stream()
        for layer in range(LAYERS):
            buffer, event = staging[layer % 2], copied[layer % 2]
            compute.wait_event(event)
            ops.reshape(planes[2 * layer : 2 * layer + 2], [part[:, None] for part in buffer], slots, None)
            copies.wait_stream(compute)
            with torch.cuda.stream(copies):
                host[2 * layer : 2 * layer + 2].copy_(buffer, non_blocking=True)
                event.record()
        compute.wait_stream(copies)

    def direct() -> None:
        for first in range(0, 2 * LAYERS, 2):
            ops.reshape(planes[first : first + 2], [row[:, None] for row in host[first : first + 2]], slots, None)

    for name, work, bar in (
        ("device to pinned host, layer by layer", layered, 0.95),
        ("device to pinned host, stored by the kernel", direct, None),
    ):
        seconds = median_s(work, repeats=7)
        speed = rows.nbytes / seconds / 1e9
        figures.append(Figure(name, seconds, speed, "one copy", whole_s / seconds, bar))
    return figures


def scattered_slots(device: torch.device) -> torch.Tensor:
    """Of TOKENS tokens, block by block, the blocks anywhere in the pool."""
    blocks = torch.randperm(POOL_BLOCKS)[: TOKENS // BLOCK_TOKENS]
    return (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten().to(device)
