"""What the GPU copier works with: its peers, their memory, and batches."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.transport.gpu_lane import LaneBatch, LanePeer

if TYPE_CHECKING:
    from pdlink import _cuda
    from pdlink.cuda.buffers import PeerBuffer


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
class GpuBatch(LaneBatch):
    runs: _cuda.RunQueue
    """Not launched yet."""
    launched: bool = False
    """All of it."""


@dataclass(eq=False)
class GpuLaunch:
    """One launch of a batch."""

    peer: GpuPeer
    batch: GpuBatch
    memory: PeerMemory
    gated: bool
    """It has entered the gate: it writes bytes."""
    last: bool = False
    """Of its batch."""


@dataclass(eq=False)
class GpuPeer(LanePeer[GpuBatch]):
    gate: _cuda.GateOwner | None = None
    """Invited."""
    memory: PeerMemory | None = None
    """Connected, and not failed."""
    queue: deque[GpuBatch] = field(default_factory=deque)
    """Not launched in full."""
