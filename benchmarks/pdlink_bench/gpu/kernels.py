"""The reshape kernels against the device-to-device copy of the same run, and the way to the host against one copy."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from pdlink.cuda import ops

from .figures import GpuFigure

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, TOKENS, BLOCK_TOKENS, HEADS, HEAD_DIM = 32, 8192, 16, 8, 128
POOL_BLOCKS = 2 * TOKENS // BLOCK_TOKENS
"""Twice what is used, so that the pages lie scattered."""
COPY = "device-to-device copy"
REPEATS = 21


def run() -> list[GpuFigure]:
    device = torch.device("cuda", 0)
    planes, rows, slots = pages(device)
    row_planes = [row[:, None] for row in rows]
    nbytes = rows.nbytes
    source = torch.randn_like(rows)
    copy_s = device_s(lambda: rows.copy_(source))
    copy = 2 * nbytes / copy_s / 1e9
    figures = [GpuFigure(COPY, copy_s, copy)]

    def add(name: str, work: Callable[[], object], moved: int) -> None:
        seconds = device_s(work)
        speed = moved / seconds / 1e9
        note = f"{host_s(work) * 1e6:.0f} us of CPU"
        figures.append(GpuFigure(name, seconds, speed, COPY, speed / copy, note))

    add("gather, one launch", lambda: ops.reshape(planes, row_planes, slots, None), 2 * nbytes)
    add("scatter, one launch", lambda: ops.reshape(row_planes, planes, None, slots), 2 * nbytes)

    def layer_by_layer() -> None:
        for first in range(0, 2 * LAYERS, 2):
            ops.reshape(planes[first : first + 2], row_planes[first : first + 2], slots, None)

    add("gather, a launch per layer", layer_by_layer, 2 * nbytes)
    shape = (2 * LAYERS, POOL_BLOCKS, HEADS, BLOCK_TOKENS, HEAD_DIM)
    hnd_planes = [plane.transpose(1, 2) for plane in torch.empty(shape, device=device, dtype=torch.bfloat16)]
    other_slots = scattered_slots(device)
    add("NHD to HND", lambda: ops.reshape(planes, hnd_planes, slots, other_slots), 2 * nbytes)
    return figures


def run_to_host() -> list[GpuFigure]:
    """A layer is gathered on one stream and copied on another, two layers under way; beside one large copy."""
    planes, rows, slots = pages(torch.device("cuda", 0))
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    whole_s = called_s(lambda: host.copy_(rows, non_blocking=True), repeats=7)
    figures = [GpuFigure("device to pinned host, one copy", whole_s, rows.nbytes / whole_s / 1e9)]
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    staging = [torch.empty_like(rows[:2]) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def layered() -> None:
        compute = torch.cuda.current_stream()
        for layer in range(LAYERS):
            buffer, event = staging[layer % 2], copied[layer % 2]
            if layer >= len(staging):
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

    for name, work in (
        ("device to pinned host, layer by layer", layered),
        ("device to pinned host, stored by the kernel", direct),
    ):
        host.zero_()
        seconds = called_s(work, repeats=7)
        expected = torch.stack([plane.flatten(0, 1)[slots] for plane in planes[-2:]]).cpu()
        if not torch.equal(host[-2:], expected):
            raise RuntimeError(f"{name}: other bytes arrived")
        figures.append(GpuFigure(name, seconds, rows.nbytes / seconds / 1e9, "one copy", whole_s / seconds))
    return figures


def pages(device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Planes of a pool, room for what is used of it side by side, and the slots of that."""
    shape = (2 * LAYERS, POOL_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
    planes = list(torch.randn(shape, device=device, dtype=torch.bfloat16))
    rows = torch.empty(2 * LAYERS, TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    return planes, rows, scattered_slots(device)


def scattered_slots(device: torch.device) -> torch.Tensor:
    """Of TOKENS tokens, block by block, the blocks anywhere in the pool."""
    blocks = torch.randperm(POOL_BLOCKS)[: TOKENS // BLOCK_TOKENS]
    return (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten().to(device)


def device_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds the device needs for `work`: it is captured once, and replays are timed by events around each.

    Timed call by call, the time that Python takes before a launch would be counted as the kernel's.
    """
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return called_s(graph.replay, repeats)


def called_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds between the device's beginning and end of `work`, with whatever the host does in between."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(float(before.elapsed_time(after)) / 1e3)
    return statistics.median(times)


def host_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds the host is busy with one call of `work`, which the device may finish later."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)
