"""Pinned slots: ours, to gather into or to receive in, and those of an owner on this host, reached straight."""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING

from pdlink.cuda.buffers import PinnedBuffer
from pdlink.cuda.driver import CudaFailure
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part

if TYPE_CHECKING:
    from pdlink._copy import PeerMemory
    from pdlink.cuda.driver import Device
    from pdlink.transport.base import Transport
    from pdlink.transport.staging.wire import Invitation

log = logging.getLogger(__name__)


class Slots:
    """One buffer, made when it is first needed."""

    buffer: PinnedBuffer
    """Once made."""
    region: int
    """Of the transport below, once made."""

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        """nbytes: of a slot."""
        self._device = device
        self.nbytes, self.count = nbytes, count
        self.made = False

    def hold(self, nbytes: int) -> None:
        """Be so large at least, and not more in all, where two are enough. Before `make`."""
        if nbytes > self.nbytes:
            self.count = max(2, self.count * self.nbytes // nbytes)
            self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def make(self, below: Transport) -> None:
        """Pin count * nbytes of host memory. Raises OSError, CudaFailure, TransportUnavailable."""
        buffer = PinnedBuffer(self._device, self.count * self.nbytes)
        try:
            self.region = below.register(buffer)
        except BaseException:
            buffer.close()
            raise
        self.buffer, self.made = buffer, True

    def close(self) -> None:
        """Safe to call twice, and before `make`."""
        if self.made:
            self.buffer.close()

    def offset(self, number: int) -> int:
        return number * self.nbytes

    def device_ptr(self, number: int) -> int:
        """The address for the GPU."""
        return self.buffer.device_ptr + number * self.nbytes

    def as_blocks(self) -> KVGroups:
        """For a transport that checks what each peer may write."""
        layer = LayerLayout((Part(self.region, 0),), self.nbytes, self.nbytes, self.nbytes)
        return KVGroups((KVLayout("uint8", 1, self.count, 1, self.nbytes, (layer,)),))


class OwnersSlots:
    """Slots of an owner, mapped and pinned here: the GPU gathers straight into them.

    Between `enter` and `leave` it may be doing so, and the owner's PeerClosed waits.
    """

    def __init__(self, device: Device, memory: PeerMemory, there: Invitation) -> None:
        """Raises ValueError if the owner has other memory than it says, CudaFailure if it cannot be pinned."""
        regions, nbytes = memory.regions, there.num_slots * there.slot_nbytes
        if there.region >= len(regions) or nbytes > regions[there.region][1]:
            raise ValueError(f"region {there.region} of the peer has no {there.num_slots} slots")
        self._device, self._memory, self._slot_nbytes = device, memory, there.slot_nbytes
        self._at = regions[there.region][0]
        self._device_ptr = device.pin(self._at, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._pinned = True
        self.enter, self.leave = memory.enter, memory.leave

    @classmethod
    def reached(cls, device: Device, below: Transport, peer: str, there: Invitation) -> OwnersSlots | None:
        """None where the lane reaches no memory of the peer's, or it cannot be pinned. Raises ValueError."""
        memory = below.memory_of(peer)
        try:
            return None if memory is None else cls(device, memory, there)
        except CudaFailure as failure:
            log.warning("slots of peer %s cannot be pinned here, so they are copied once more: %s", peer, failure)
            return None

    def device_ptr(self, number: int) -> int:
        """The address for the GPU."""
        return self._device_ptr + number * self._slot_nbytes

    def close(self) -> None:
        """Nothing may be in flight there. Safe to call twice."""
        if self._pinned:
            self._pinned = False
            self._device.unpin(self._at)
