"""`Ways`: which copies the copy engine makes and which a kernel, measured on this GPU when it is first asked.

Both move runs between pages and pinned memory. The engine leaves the multiprocessors to the model, but each run is a
command of its own; a kernel takes runs of any length, and a part of the GPU. From which length on the engine is not
slower depends on GPU, bus and driver, so it is measured: some megabytes each way, in some hundredths of a second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pdlink import _cuda
from pdlink.cuda.buffers import DeviceBuffer, PinnedBuffer
from pdlink.cuda.copies import ENGINE_RUN_NBYTES
from pdlink.cuda.driver import CudaFailure, CudaStream
from pdlink.cuda.launches import Launches
from pdlink.kv.layout import RunList

if TYPE_CHECKING:
    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.kv.layout import RunArray

log = logging.getLogger(__name__)

RUN_NBYTES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Lengths that are tried: half a block of a small model to a chunk of a large one."""
_MEASURED_NBYTES: Final = 4 << 20
_TIMES: Final = 3
"""The fastest counts: others may use the GPU meanwhile."""


_LOCK = threading.Lock()
_MEASURED: dict[tuple[str, str], Ways] = {}
"""By driver and GPU, for this process."""


class MeasuredWay(NamedTuple):
    run_nbytes: int
    to_device: bool
    engine_s: float
    kernel_s: float
    """For the same bytes, call and wait included."""


class Ways(NamedTuple):
    """From which mean length of runs on the copy engine takes them."""

    to_host_nbytes: int = ENGINE_RUN_NBYTES
    to_device_nbytes: int = ENGINE_RUN_NBYTES
    table: tuple[MeasuredWay, ...] = ()
    """What they were chosen by; nothing if they were not measured."""

    @classmethod
    def chosen(cls, table: tuple[MeasuredWay, ...]) -> Ways:
        """The engine takes a length if it was not slower at that one and every longer one."""
        return cls(_first(table, to_device=False), _first(table, to_device=True), table)


def _first(table: tuple[MeasuredWay, ...], *, to_device: bool) -> int:
    mine = sorted((row for row in table if row.to_device is to_device), reverse=True)
    first = 2 * mine[0].run_nbytes if mine else ENGINE_RUN_NBYTES
    for row in mine:
        if row.engine_s > row.kernel_s:
            break
        first = row.run_nbytes
    return first


def ways_of(device: Device, kernels: Kernels | None) -> Ways:
    """Of an open device, measured when first asked; unmeasured where the GPU has no memory left for that.

    Without kernels the engine takes all. Raises CudaFailure, OSError.
    """
    if kernels is None:
        return Ways(0, 0)
    of = device.driver.path, device.uuid
    with _LOCK:
        try:
            if of not in _MEASURED:
                _MEASURED[of] = measure(device, kernels)
        except CudaFailure as failure:
            if failure.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            log.warning("when the copy engine is faster than a kernel is not measured: %s", failure)
            return Ways()
        return _MEASURED[of]


def measure(device: Device, kernels: Kernels) -> Ways:
    """Now. Raises CudaFailure, OSError."""
    with contextlib.ExitStack() as made:
        pages = made.enter_context(contextlib.closing(DeviceBuffer(device, _MEASURED_NBYTES)))
        host = made.enter_context(contextlib.closing(PinnedBuffer(device, _MEASURED_NBYTES)))
        launches: Launches[object] = made.enter_context(
            contextlib.closing(Launches(device, kernels, -1, num_slots=1))
        )
        stream = made.enter_context(contextlib.closing(CudaStream(device)))
        table = []
        for run_nbytes in RUN_NBYTES:
            for to_device in (False, True):
                runs = _scattered(run_nbytes, pages.ptr, host.device_ptr, to_device=to_device)
                taken = (_engine_s(device, runs, stream), _kernel_s(launches, runs))
                table.append(MeasuredWay(run_nbytes, to_device, *taken))
    return Ways.chosen(tuple(table))


def _scattered(run_nbytes: int, pages: int, host: int, *, to_device: bool) -> RunArray:
    """Runs side by side in host memory, and in reverse order in pages, so that nobody joins them."""
    at = np.arange(0, _MEASURED_NBYTES, run_nbytes, dtype=np.int64)
    ends = (at + host, at[::-1] + pages) if to_device else (at[::-1] + pages, at + host)
    return np.stack([*ends, np.full_like(at, run_nbytes)], axis=1)


def _engine_s(device: Device, runs: RunArray, stream: CudaStream) -> float:
    taken = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        device.copy_runs(runs, stream.handle)
        stream.synchronize()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


def _kernel_s(launches: Launches[object], runs: RunArray) -> float:
    lists, world = [RunList(0, 0, 0, 0, runs)], [(0, 2**63 - 1)]
    taken = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        launches.launch(None, _cuda.Moves(lists, world, world))
        while launches.in_flight:
            list(launches.take_ended())
        taken.append(time.perf_counter() - began_s)
    return min(taken)
