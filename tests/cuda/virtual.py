"""Virtual memory of the double, made by the calls with which torch's expandable segments make theirs."""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from typing import Any

import numpy as np

from pdlink.cuda.buffers import BorrowedDeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.cuda.virtual import AccessDesc
from pdlink.memory.buffers import AnyBuffer, Bytes
from pdlink.transport.mapped_cuda import MappedCudaTransport
from tests import other_process
from tests.conformance.transports.side import Side
from tests.cuda.fake import IMAGE, fake

POSIX_FD, FABRIC = 1, 8


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", c_int * 2),
        ("windows", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Segment:
    """Chunks of physical memory at neighbouring addresses. The device must stay open until `close`."""

    def __init__(
        self, device: Device, nbytes: int, chunk_nbytes: int, *, handle_types: int = POSIX_FD, at: int = 0
    ) -> None:
        """at: memory of a test, which the segment takes the place of."""
        self.device, self.nbytes = device, nbytes
        self._chunks: list[tuple[int, int]] = []
        address = c_uint64()
        access = AccessDesc(1, 0, 3)
        with device.current() as driver:
            reserve = (c_size_t(nbytes), c_size_t(0), c_uint64(at), c_ulonglong(0))
            driver.call("cuMemAddressReserve", byref(address), *reserve)
            self.ptr = address.value
            for offset in range(0, nbytes, chunk_nbytes):
                start, size = self.ptr + offset, min(chunk_nbytes, nbytes - offset)
                handle, prop = c_ulonglong(), AllocationProp(1, handle_types, (1, 0))
                driver.call("cuMemCreate", byref(handle), c_size_t(size), byref(prop), c_ulonglong(0))
                driver.call("cuMemMap", c_uint64(start), c_size_t(size), c_size_t(0), handle, c_ulonglong(0))
                driver.call("cuMemRelease", handle)
                self._chunks.append((start, size))
            driver.call("cuMemSetAccess", address, c_size_t(nbytes), byref(access), c_size_t(1))
        self.array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.ptr))

    def close(self) -> None:
        with self.device.current() as driver:
            for start, size in self._chunks:
                driver.call("cuMemUnmap", c_uint64(start), c_size_t(size))
            driver.call("cuMemAddressFree", c_uint64(self.ptr), c_size_t(self.nbytes))


class VirtualTransport(MappedCudaTransport):
    """Takes host buffers of a test for virtual memory of a GPU, in chunks, as long as it is open."""

    def __init__(self, *, handle_types: int = POSIX_FD) -> None:
        super().__init__(library=fake().path, image=IMAGE, launch_nbytes=1 << 20)
        self._handle_types = handle_types
        self.chunk_nbytes = 0
        """0: a third of a buffer."""
        self._made = contextlib.ExitStack()

    def register(self, buffer: AnyBuffer) -> int:
        host: Any = buffer
        before = host.array.copy()
        device = Device(0, fake().path)
        device.open()
        self._made.callback(device.close)
        pages = -(-buffer.nbytes // 4096)
        chunk_nbytes = self.chunk_nbytes or max(1, pages // 3) * 4096
        segment = Segment(device, pages * 4096, chunk_nbytes, handle_types=self._handle_types, at=buffer.ptr)
        self._made.callback(segment.close)
        host.array[:] = before
        borrowed = BorrowedDeviceBuffer(Device(0, fake().path), buffer.ptr, buffer.nbytes, host)
        self._made.callback(borrowed.close)
        return super().register(borrowed)

    def close(self) -> None:
        super().close()
        self._made.close()


class VirtualSide(Side):
    transport: VirtualTransport

    def add_chunks(self, count: int, nbytes: int) -> None:
        """One buffer of so many."""
        self.transport.chunk_nbytes = nbytes
        self.add_buffer(count * nbytes, 1)

    def set_environment(self, name: str, value: str) -> None:
        os.environ[name] = value


def serve(arguments: list[str]) -> None:
    """A `VirtualSide` in a process of its own."""
    [handle_types] = arguments
    side = VirtualSide(VirtualTransport(handle_types=int(handle_types)))
    other_process.answer_calls(side)
    side.close()
