"""`Bells`: let an eventfd tell when events of a GPU are reached, whatever the stream that they are recorded in.

A host function behind the event rings, in a stream of its own: what follows it there would wait. So there are as many
streams as there are events which are waited for at a time.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from pdlink import _cuda
from pdlink.cuda.driver import CudaFailure, CudaStream, CudaUnavailable

if TYPE_CHECKING:
    from pdlink.cuda.driver import Device
    from pdlink.memory.buffers import StreamEvent

_ABANDONED: list[Bells] = []
"""Kept until the process ends: their descriptors may still be written to."""


class Bells:
    """For one thread."""

    def __init__(self, device: Device) -> None:
        """device: open until `close`. Raises CudaUnavailable, OSError."""
        self._device = device
        self._streams: list[CudaStream] = []
        try:
            self._launcher = _cuda.KernelLauncher(device.driver.path, device.context, [])
        except RuntimeError as error:
            raise CudaUnavailable(str(error)) from None
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable after an event was reached."""
        return self._fd

    def ring_after(self, event: StreamEvent) -> None:
        """When it is reached; after a fault nothing rings. Raises CudaFailure."""
        stream = next((one for one in self._streams if one.is_idle()), None)
        if stream is None:
            stream = CudaStream(self._device)
            self._streams.append(stream)
        call, number = self._launcher.ring_after(event.handle, self._fd, stream.handle)
        if number:
            raise self._device.driver.failure(call, number)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Leaves what may still ring. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            idle = all(one.is_idle() for one in self._streams)
        except CudaFailure:
            idle = False
        if not idle:
            _ABANDONED.append(self)
            return
        for one in self._streams:
            one.close()
        os.close(fd)
