"""Device memory of the transports' suite, of the double or of a GPU: made by the driver, and seen through copies."""

from __future__ import annotations

import functools

from pdlink.cuda.buffers import BorrowedDeviceBuffer, DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import CudaStream, Device
from pdlink.memory.buffers import Bytes
from tests.cuda.virtual import Segment


class _Copied:
    """Bytes of device memory, both ways by copies on a stream of its own: kernels beside it go on."""

    def __init__(self, device: Device, ptr: int, contents: Bytes) -> None:
        self._device, self._ptr, self._nbytes = device, ptr, len(contents)
        self._stream = CudaStream(device)
        self._host = PinnedBuffer(device, len(contents))
        self._host.array[: self._nbytes] = contents
        self._copy(ptr, self._host.device_ptr)

    @property
    def array(self) -> Bytes:
        """As they are now, while kernels may still write."""
        self._copy(self._host.device_ptr, self._ptr)
        return self._host.array[: self._nbytes].copy()

    def _copy(self, dst: int, src: int) -> None:
        self._device.copy(dst, src, self._nbytes, self._stream.handle)
        self._stream.synchronize()

    def close(self) -> None:
        self._host.close()
        self._stream.close()


class _Seen:
    """A buffer whose bytes are looked at."""

    _copied: _Copied

    @property
    def array(self) -> Bytes:
        return self._copied.array


class Area(_Seen, DeviceBuffer):
    """A whole allocation: cuMemAlloc."""

    def __init__(self, device: Device, contents: Bytes) -> None:
        super().__init__(device, len(contents))
        self._copied = _Copied(device, self.ptr, contents)

    def close(self) -> None:
        self._copied.close()
        super().close()


class VirtualArea(_Seen, BorrowedDeviceBuffer):
    """Chunks of physical memory at neighbouring addresses, as torch's expandable segments have them."""

    def __init__(self, device: Device, contents: Bytes, chunk_nbytes: int) -> None:
        nbytes = -(-len(contents) // chunk_nbytes) * chunk_nbytes
        self._segment = Segment(device, nbytes, chunk_nbytes)
        super().__init__(device, self._segment.ptr, len(contents), self._segment)
        self._copied = _Copied(device, self.ptr, contents)

    def close(self) -> None:
        self._copied.close()
        self._segment.close()


@functools.cache
def device(library: str | None) -> Device:
    """The first one of this driver, None being the real one, open as long as this process: contexts take long."""
    device = Device(0, library)
    device.open()
    return device
