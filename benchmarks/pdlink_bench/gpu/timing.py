"""How time is taken on a GPU."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 21


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
