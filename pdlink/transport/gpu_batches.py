"""What the GPU copier works with: a peer's memory, a batch, and the slot of one launch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdlink.cuda.buffers import PinnedBuffer
from pdlink.cuda.driver import Event

if TYPE_CHECKING:
    from pdlink import _cuda
    from pdlink.cuda.buffers import PeerBuffer
    from pdlink.cuda.driver import Device

SLOT_NBYTES: Final = 256 << 10
"""Room for 10,922 runs: a layer of 2,048 tokens takes 256 in blocks of 16, and 32,768 where every head goes alone."""


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
    rows: _cuda.RowQueue
    """Not launched yet."""
    launched: bool = False
    """All of it."""


class Slot:
    """What one launch needs until it has run: room for its list of runs, where the kernel reads it, an event."""

    def __init__(self, device: Device) -> None:
        self._list = PinnedBuffer(device, SLOT_NBYTES, name="pdlink-runs")
        self.place = (self._list.ptr, self._list.device_ptr, self._list.nbytes)
        """The list's address here and for kernels, and its size."""
        try:
            self.event = Event(device)
        except BaseException:
            self._list.close()
            raise

    def close(self) -> None:
        self._list.close()
        self.event.close()
