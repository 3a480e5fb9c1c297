"""Device memory with a fabric handle: what other processes map over NVLink, also on other hosts of one domain.

Such memory is made with the driver's virtual memory calls (create, reserve an address, map, allow access), and CUDA
IPC does not know it. A GPU says whether it has fabric handles; whether they work is up to the machine's IMEX service,
which only the attempt shows (`CUDA_ERROR_NOT_PERMITTED`, `CUDA_ERROR_NOT_SUPPORTED`).
"""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.cuda.driver import Device, Driver

HANDLE_NBYTES: Final = 64

# Values of cuda.h, CUDA 13.0.
_ATTRIBUTE_FABRIC_SUPPORTED: Final = 128
_HANDLE_TYPE_FABRIC: Final = 8
_ALLOCATION_PINNED: Final = 1
_LOCATION_DEVICE: Final = 1
_GRANULARITY_MINIMUM: Final = 0
_ACCESS_READ_WRITE: Final = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


def supported(device: Device) -> bool:
    """Whether the GPU has fabric handles at all."""
    return device.attribute(_ATTRIBUTE_FABRIC_SUPPORTED) == 1


class FabricMemory:
    """A piece of device memory, made here (`make`) or by a peer (`open_handle`), mapped here."""

    def __init__(self, device: Device, nbytes: int, obtain: Callable[[Driver, c_uint64], None]) -> None:
        """obtain: fills in the handle of the allocation. Raises CudaFailure and leaves nothing then."""
        self._device, self.nbytes = device, nbytes
        handle, address, size = c_uint64(), c_uint64(), c_size_t(nbytes)
        access = _Access(_Location(_LOCATION_DEVICE, device.index), _ACCESS_READ_WRITE)
        with device.current() as driver, contextlib.ExitStack() as made:
            obtain(driver, handle)
            made.callback(driver.call, "cuMemRelease", handle)
            driver.call("cuMemAddressReserve", byref(address), size, c_size_t(0), c_uint64(0), c_uint64(0))
            made.callback(driver.call, "cuMemAddressFree", address, size)
            driver.call("cuMemMap", address, size, c_size_t(0), handle, c_uint64(0))
            made.callback(driver.call, "cuMemUnmap", address, size)
            driver.call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
            self._undo = made.pop_all()
        self._handle = handle
        self.ptr: int = address.value

    @classmethod
    def make(cls, device: Device, nbytes: int) -> FabricMemory:
        """Allocate, rounded up to what the device maps at once."""
        properties = _Properties(
            type=_ALLOCATION_PINNED,
            handle_types=_HANDLE_TYPE_FABRIC,
            location=_Location(_LOCATION_DEVICE, device.index),
            gpu_direct_rdma=1,
        )
        grain = c_size_t()
        with device.current() as driver:
            driver.call("cuMemGetAllocationGranularity", byref(grain), byref(properties), c_int(_GRANULARITY_MINIMUM))
        rounded = -(-nbytes // grain.value) * grain.value

        def create(driver: Driver, handle: c_uint64) -> None:
            driver.call("cuMemCreate", byref(handle), c_size_t(rounded), byref(properties), c_uint64(0))

        return cls(device, rounded, create)

    @classmethod
    def open_handle(cls, device: Device, exported: bytes, nbytes: int) -> FabricMemory:
        """Map what `export` named, `nbytes` of it: all of it or less, else the driver refuses."""
        if len(exported) != HANDLE_NBYTES:
            raise ValueError(f"a fabric handle has {HANDLE_NBYTES} bytes, got {len(exported)}")
        named = (c_char * HANDLE_NBYTES).from_buffer_copy(exported)

        def open_it(driver: Driver, handle: c_uint64) -> None:
            driver.call("cuMemImportFromShareableHandle", byref(handle), named, c_int(_HANDLE_TYPE_FABRIC))

        return cls(device, nbytes, open_it)

    def export(self) -> bytes:
        """What another process passes to `open_handle`."""
        named = (c_char * HANDLE_NBYTES)()
        with self._device.current() as driver:
            driver.call("cuMemExportToShareableHandle", named, self._handle, c_int(_HANDLE_TYPE_FABRIC), c_uint64(0))
        return named.raw

    def close(self) -> None:
        """Unmap and release; the memory is gone with its last mapping. Nothing may use it. Safe to call twice."""
        with self._device.current():
            self._undo.close()
