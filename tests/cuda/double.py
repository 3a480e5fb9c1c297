"""The mapped-cuda transport on the test double of the driver, with host buffers lent to it as device memory."""

from __future__ import annotations

from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.memory.buffers import AnyBuffer, Buffer
from pdlink.transport.mapped_cuda import MappedCudaTransport
from tests.cuda.fake import IMAGE, fake


class LentBuffer(DeviceBuffer):
    """A host buffer that the double takes for device memory; it stays its owner's."""

    def __init__(self, device: Device, buffer: Buffer) -> None:
        fake().lend(buffer.ptr, buffer.nbytes, buffer.fd)
        self.device, self.ptr, self.nbytes = device, buffer.ptr, buffer.nbytes
        self._closed = True  # not ours to free


class DoubleTransport(MappedCudaTransport):
    memory = ("host", "cuda")

    def __init__(self, slice_nbytes: int = 1 << 20) -> None:
        super().__init__(library=fake().path, image=IMAGE, slice_nbytes=slice_nbytes)
        self._lent: list[Buffer] = []

    def register(self, buffer: AnyBuffer) -> int:
        if not isinstance(buffer, Buffer) or hasattr(buffer, "device_ptr"):
            return super().register(buffer)
        self._lent.append(buffer)
        return super().register(LentBuffer(self._device, buffer))

    def close(self) -> None:
        super().close()
        while self._lent:
            fake().lend(self._lent.pop().ptr, 0, -1)
