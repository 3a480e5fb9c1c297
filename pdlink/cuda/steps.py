"""`PinnedSteps`: host memory that grows, registered with a GPU a step at a time.

At the latest when a copy touches the step. Registering pins pages, which takes memory and time, so it cannot be done
ahead for a range of which a part may never get memory; who has given memory to a step may say so (`pin`).

Runs are cut where steps meet: each registration has its own address for the GPU (cuMemHostGetDevicePointer), and
memory of a copy "must be either entirely registered with CUDA, or ... not registered at all", else the call answers
CUDA_ERROR_INVALID_VALUE (CUDA Driver API 13.0, API synchronization behavior).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from pdlink.cuda.driver import CudaFailure

if TYPE_CHECKING:
    from pdlink.cuda.driver import Device
    from pdlink.kv.layout import RunArray
    from pdlink.kv.plan import IntArray as Offsets
    from pdlink.memory.buffers import Bytes


class PinnedSteps:
    """`pin` may be called by any thread, the rest by one."""

    def __init__(self, device: Device, memory: Bytes, step_nbytes: int) -> None:
        """memory: kept until `close`. A step of which one byte is used has memory in whole."""
        self._device, self._step_nbytes = device, step_nbytes
        self.memory = memory
        self._ptr, self._nbytes = memory.ctypes.data, len(memory)
        self._bases = np.zeros(-(-self._nbytes // step_nbytes), np.int64)
        """For the GPU: address less offset, by step; 0 for one that is not registered."""
        self._lock = threading.Lock()
        """Of registering a step."""
        self._closed = False
        self._others: set[int] = set()
        """Steps that somebody else in this process has registered, such as UCX, and keeps so."""

    def placed(self, runs: RunArray, column: int) -> RunArray:
        """The runs [n, 3] with addresses for the GPU instead of offsets in `column`, cut where steps meet.

        Registers what is not. Raises CudaFailure, ValueError for a run outside.
        """
        if len(runs) and (runs[:, column].min() < 0 or (runs[:, column] + runs[:, 2]).max() > self._nbytes):
            raise ValueError(f"a run is outside the {self._nbytes} bytes of host memory")
        runs = self._cut(runs, column)
        steps = runs[:, column] // self._step_nbytes
        for step in np.unique(steps[self._bases[steps] == 0]).tolist():
            self._register(step)
        runs[:, column] += self._bases[steps]
        return runs

    def one_base(self, offsets: Offsets, nbytes: int) -> int | None:
        """Address for the GPU less offset, if it is the same for all bytes of the ranges that begin at `offsets`.

        It is where the GPU uses the host's addresses (unified addressing). Registers what is not. Raises CudaFailure,
        ValueError for a range outside.
        """
        runs = np.zeros((len(offsets), 3), np.int64)
        runs[:, 0], runs[:, 2] = offsets, nbytes
        bases = self.placed(runs, 0)[:, 0] - self._cut(runs, 0)[:, 0]
        return int(bases[0]) if (bases == bases[0]).all() else None

    def pin(self, nbytes: int) -> None:
        """Register the whole steps among the first `nbytes`; nothing after `close`. Raises CudaFailure."""
        for step in np.flatnonzero(self._bases[: nbytes // self._step_nbytes] == 0).tolist():
            self._register(step)

    @property
    def pinned_nbytes(self) -> int:
        """At most: the last step may be shorter."""
        return int(np.count_nonzero(self._bases)) * self._step_nbytes

    def close(self) -> None:
        """No copy may be under way. Raises CudaFailure. Safe to call twice."""
        with self._lock:
            self._closed = True
            for step in np.flatnonzero(self._bases).tolist():
                self._bases[step] = 0
                if step not in self._others:
                    self._device.unpin(self._ptr + step * self._step_nbytes)

    def _register(self, step: int) -> None:
        begin = step * self._step_nbytes
        with self._lock:
            if not self._bases[step] and not self._closed:
                nbytes = min(self._step_nbytes, self._nbytes - begin)
                self._bases[step] = self._pin(step, self._ptr + begin, nbytes) - begin

    def _pin(self, step: int, ptr: int, nbytes: int) -> int:
        try:
            return self._device.pin(ptr, nbytes)
        except CudaFailure as failure:
            if failure.name != "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED":
                raise
        self._others.add(step)
        return self._device.mapped(ptr)

    def _cut(self, runs: RunArray, column: int) -> RunArray:
        """A copy of the runs, of which none goes beyond a step."""
        begins, ends = runs[:, column], runs[:, column] + runs[:, 2]
        firsts, lasts = begins // self._step_nbytes, (ends - 1) // self._step_nbytes
        counts = np.maximum(lasts - firsts, 0) + 1
        if (counts == 1).all():
            return runs.copy()
        of = np.repeat(np.arange(len(runs)), counts)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.maximum(begins[of], (firsts[of] + nth) * self._step_nbytes)
        stops = np.minimum(ends[of], (firsts[of] + nth + 1) * self._step_nbytes)
        cut: RunArray = runs[of]
        cut[:, :2] += (starts - begins[of])[:, None]
        cut[:, 2] = stops - starts
        return cut
