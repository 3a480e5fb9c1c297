"""Virtual memory of a GPU: chunks of physical memory, each made by itself and mapped at neighbouring addresses.

CUDA IPC shares no such memory. A chunk is exported by itself, in the form that its maker has asked for: as a file
descriptor, or as a fabric handle, which is bytes. Another process maps all chunks side by side: its range.

torch's expandable segments are of this kind, 20 MiB a chunk: with fabric handles where the machine has an IMEX
channel, else with descriptors (pytorch#130890, pytorch#156074; `ExpandableSegment::map` in
c10/cuda/CUDACachingAllocator.cpp). vLLM's sleep mode is, too, but a server that wakes up has other chunks at the same
addresses.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pdlink.cuda.driver import CudaUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdlink.cuda.driver import Device

FABRIC_HANDLE_NBYTES: Final = 64
_POSIX_FD: Final = 1
_FABRIC: Final = 8
_ATTRIBUTE_HANDLE_TYPES: Final = 14
_ATTRIBUTE_MAPPING_NBYTES: Final = 18
_ATTRIBUTE_MAPPING_START: Final = 19
_ON_DEVICE: Final = 1
_READ_AND_WRITE: Final = 3


class MappedMemory(NamedTuple):
    """Physical memory as it is mapped here."""

    start: int
    nbytes: int


class SharedMemory(NamedTuple):
    """A chunk on its way to another process."""

    nbytes: int
    handle: int | bytes
    """A descriptor, which belongs to the holder of this; or a fabric handle."""


@dataclass(frozen=True, slots=True)
class Range:
    """Chunks that follow each other without a gap."""

    device: Device
    chunks: tuple[MappedMemory, ...]
    is_fabric: bool
    """How they can be exported; else as descriptors."""

    @classmethod
    def under(cls, device: Device, ptr: int, nbytes: int) -> Range:
        """The chunks that these bytes lie in.

        Raises CudaFailure, CudaUnavailable for memory that no other process can map.
        """
        chunks: list[MappedMemory] = []
        allowed, at = _POSIX_FD | _FABRIC, ptr
        while at < ptr + nbytes:
            allowed &= _attribute(device, _ATTRIBUTE_HANDLE_TYPES, at)
            if not allowed:
                raise CudaUnavailable(
                    f"buffer: got memory of GPU {device.index} that no other process can map: neither CUDA IPC nor a "
                    "shareable handle exports it (a pool, or virtual memory that was made without one). It travels "
                    "through pinned slots; for a faster lane use torch's own allocator"
                )
            chunk = MappedMemory(
                _attribute(device, _ATTRIBUTE_MAPPING_START, at), _attribute(device, _ATTRIBUTE_MAPPING_NBYTES, at)
            )
            chunks.append(chunk)
            at = chunk.start + chunk.nbytes
        return cls(device, tuple(chunks), not allowed & _POSIX_FD)

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def nbytes(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].nbytes - self.start

    def export(self, chunk: MappedMemory) -> SharedMemory:
        """Raises CudaFailure."""
        handle = c_ulonglong()
        with self.device.current() as driver:
            driver.call("cuMemRetainAllocationHandle", byref(handle), c_void_p(chunk.start))
            try:
                if self.is_fabric:
                    exported = (c_char * FABRIC_HANDLE_NBYTES)()
                    driver.call("cuMemExportToShareableHandle", exported, handle, c_int(_FABRIC), c_ulonglong(0))
                    return SharedMemory(chunk.nbytes, exported.raw)
                descriptor = c_int(-1)
                driver.call(
                    "cuMemExportToShareableHandle", byref(descriptor), handle, c_int(_POSIX_FD), c_ulonglong(0)
                )
                return SharedMemory(chunk.nbytes, descriptor.value)
            finally:
                driver.call("cuMemRelease", handle)


class PeerRange:
    """Chunks of another process, mapped here side by side."""

    def __init__(self, device: Device, nbytes: int, chunks: Iterable[SharedMemory]) -> None:
        """device: the GPU that will access them. Closes the descriptors, also of chunks that it could not map.

        Raises CudaFailure, ValueError for chunks that are not of `nbytes` together, and what `chunks` raises.
        """
        self.nbytes, self._device = nbytes, device
        self._mapped: list[MappedMemory] = []
        address = c_uint64()
        with device.current() as driver:
            nothing = (c_size_t(0), c_uint64(0), c_ulonglong(0))
            driver.call("cuMemAddressReserve", byref(address), c_size_t(nbytes), *nothing)
        self.ptr: int = address.value
        try:
            left = nbytes
            for one in chunks:
                self._map(one, self.ptr + nbytes - left, left)
                left -= one.nbytes
            if left:
                raise ValueError(f"the peer's chunks: got {nbytes - left} bytes; its invitation says {nbytes}")
            access = AccessDesc(_ON_DEVICE, device.ordinal, _READ_AND_WRITE)
            with device.current() as driver:
                driver.call("cuMemSetAccess", address, c_size_t(nbytes), byref(access), c_size_t(1))
        except BaseException:
            self.close()
            raise

    def _map(self, one: SharedMemory, at: int, left: int) -> None:
        handle = c_ulonglong()
        try:
            if not 0 < one.nbytes <= left:
                raise ValueError(
                    f"the peer's chunks: got one of {one.nbytes} bytes; expected the {left} that are left"
                )
            with self._device.current() as driver:
                given = c_void_p(one.handle) if isinstance(one.handle, int) else ctypes.c_char_p(one.handle)
                kind = _POSIX_FD if isinstance(one.handle, int) else _FABRIC
                driver.call("cuMemImportFromShareableHandle", byref(handle), given, c_int(kind))
                try:
                    size = c_size_t(one.nbytes)
                    driver.call("cuMemMap", c_uint64(at), size, c_size_t(0), handle, c_ulonglong(0))
                finally:
                    driver.call("cuMemRelease", handle)  # the mapping keeps the memory
        finally:
            if isinstance(one.handle, int):
                os.close(one.handle)
        self._mapped.append(MappedMemory(at, one.nbytes))

    def close(self) -> None:
        """Unmap. Nothing may be in flight there. Safe to call twice."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            with self._device.current() as driver:
                for start, nbytes in self._mapped:
                    driver.call("cuMemUnmap", c_uint64(start), c_size_t(nbytes))
                driver.call("cuMemAddressFree", c_uint64(ptr), c_size_t(self.nbytes))


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc: who may access a range, and how."""

    _fields_ = (("location_type", c_int), ("location_id", c_int), ("flags", c_int))


def _attribute(device: Device, number: int, ptr: int) -> int:
    """Raises CudaFailure for an address that CUDA does not know."""
    value = c_uint64()
    with device.current() as driver:
        driver.call("cuPointerGetAttribute", byref(value), c_int(number), c_uint64(ptr))
    return value.value
