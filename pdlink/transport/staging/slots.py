"""Pinned slots: as many to gather into as to receive in, one buffer that the transport below has as its region 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.cuda.buffers import PinnedBuffer
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part

if TYPE_CHECKING:
    from pdlink.cuda.driver import Device


class Slots:
    """Numbers 0 to count - 1 are gathered into; slot n of an owner is number count + n."""

    buffer: PinnedBuffer
    """Once made."""

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        """nbytes: of a slot."""
        self._device = device
        self.nbytes, self.count = nbytes, count
        self.made = False

    def make(self) -> None:
        """Pin 2 * count * nbytes of host memory. Raises OSError, CudaFailure."""
        self.buffer = PinnedBuffer(self._device, 2 * self.count * self.nbytes)
        self.made = True

    def close(self) -> None:
        """Safe to call twice, and before `make`."""
        if self.made:
            self.buffer.close()

    @property
    def first_nbytes(self) -> int:
        """Where those begin that writers fill."""
        return self.count * self.nbytes

    def offset(self, number: int) -> int:
        return number * self.nbytes

    def device_ptr(self, number: int) -> int:
        """The address for the GPU."""
        return self.buffer.device_ptr + number * self.nbytes

    def as_blocks(self) -> KVGroups:
        """Slots that writers fill as blocks, for a transport that checks what each of them may write."""
        layer = LayerLayout((Part(0, self.first_nbytes),), self.nbytes, self.nbytes, self.nbytes)
        return KVGroups((KVLayout("uint8", 1, self.count, 1, self.nbytes, (layer,)),))
