"""What the GPU copier works with: a peer's memory, a batch and its slices, and the slot of one launch."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pdlink.cuda.buffers import DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import Event

if TYPE_CHECKING:
    from pdlink import _cuda
    from pdlink.cuda.buffers import PeerBuffer
    from pdlink.cuda.driver import Device, Stream

_FIRST_RUNS_NBYTES: Final = 64 << 10

Runs = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
"""[n, 3]: source address, destination address, nbytes."""


class PeerMemory:
    """What a peer has opened to us: its regions, mapped here, its gate, and a descriptor of its life."""

    def __init__(
        self, pid: int, life_fd: int, gate: _cuda.GateWriter, regions: list[tuple[int, int]], mapped: list[PeerBuffer]
    ) -> None:
        """regions: (address, nbytes). The descriptor and `mapped` belong to this object from now on."""
        self.pid, self.life_fd, self.gate, self.regions = pid, life_fd, gate, regions
        self._mapped = mapped
        self.in_flight = 0
        """Launches that may still write there."""
        self.unused = False
        """To be closed as soon as nothing is in flight."""

    def close(self) -> None:
        for buffer in self._mapped:
            buffer.close()
        os.close(self.life_fd)


@dataclass(eq=False)
class Batch:
    ticket: int
    submitted_s: float
    deadline_s: float
    nbytes: int
    runs: Runs
    """Not launched yet."""
    cuts: deque[int]
    """Runs in each slice of them."""
    launched: bool = False
    """All of it."""

    def next_slice(self) -> Runs:
        count = self.cuts.popleft()
        runs, self.runs = self.runs[:count], self.runs[count:]
        return runs


class Slot:
    """What one launch needs until it has run."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._make(_FIRST_RUNS_NBYTES)
        try:
            self.event = Event(device)
        except BaseException:
            self._free()
            raise

    def upload(self, runs: Runs, stream: Stream) -> int:
        """Put the list where the kernel reads it; its address. The slot's last launch has run."""
        if runs.nbytes > self._pinned.nbytes:
            self._free()
            self._make(2 * runs.nbytes)
        self._pinned.array[: runs.nbytes] = runs.reshape(-1).view(np.uint8)
        self._device.copy(self._runs.ptr, self._pinned.ptr, runs.nbytes, stream.handle)
        return self._runs.ptr

    def close(self) -> None:
        self._free()
        self.event.close()

    def _make(self, nbytes: int) -> None:
        self._pinned = PinnedBuffer(self._device, nbytes, name="pdlink-runs")
        try:
            self._runs = DeviceBuffer(self._device, nbytes)
        except BaseException:
            self._pinned.close()
            raise

    def _free(self) -> None:
        self._runs.close()
        self._pinned.close()


def cut(runs: Runs, slice_nbytes: int) -> tuple[Runs, deque[int]]:
    """The runs, none of them longer than a slice, and how many of them make one slice after the other.

    A slice is shorter than two of `slice_nbytes`.
    """
    pieces = -(-runs[:, 2].astype(np.int64) // slice_nbytes)
    if len(runs) and pieces.max() > 1:
        index = np.repeat(np.arange(len(runs)), pieces)
        within = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = (within * slice_nbytes).astype(np.uint64)
        whole = runs[index]
        nbytes = np.minimum(whole[:, 2] - offset, np.uint64(slice_nbytes))
        runs = np.stack([whole[:, 0] + offset, whole[:, 1] + offset, nbytes], axis=1)
    number = np.cumsum(runs[:, 2]) // np.uint64(slice_nbytes)
    ends = np.append(np.flatnonzero(np.diff(number)) + 1, len(runs))
    return runs, deque(count for count in np.diff(ends, prepend=0).tolist() if count)
