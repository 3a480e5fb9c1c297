"""The CUDA driver through ctypes: nothing is linked, and no toolkit is needed.

`Device` is one GPU with its primary context, which torch and every other user of the runtime share, so pointers,
streams and events are valid for all of them. A context is current per thread: every call here pushes the context,
works and pops it, so any thread may call, and keeps its own context. Every failure is a `CudaFailure` with the call
and the driver's name of the error.

Signatures: CUDA driver API 12 (https://docs.nvidia.com/cuda/cuda-driver-api). If the header renames a function to a
newer version (`cuMemAlloc` is `cuMemAlloc_v2`), the library's name is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.kv.layout import RunArray

LIBRARY: Final = "libcuda.so.1"
IPC_HANDLE_NBYTES: Final = 64

_NOT_READY: Final = 600
_EVENT_BLOCKING_SYNC: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_STREAM_NON_BLOCKING: Final = 1
_HOST_PORTABLE: Final = 1
_HOST_MAPPED: Final = 2
_IPC_LAZY_PEER_ACCESS: Final = 1
_SRC_ACCESS_ORDER_STREAM: Final = 1
_ATTRIBUTE_IPC_CAPABLE: Final = 10
_ATTRIBUTE_NUM_MULTIPROCESSORS: Final = 16
_ATTRIBUTE_THREADS_OF_EACH: Final = 39
_DEVICE_ATTRIBUTE_DMA_BUF: Final = 124


class CudaUnavailable(LocalError):
    """No driver, no GPU of that number, or a build without kernels; see the message."""

    code = "cuda_unavailable"


class CudaFailure(LocalError):
    """A driver call failed. `call` and `name` are the driver's names."""

    code = "cuda_failure"

    def __init__(self, call: str, number: int, name: str, text: str) -> None:
        super().__init__(f"{call} failed with {name} ({number}): {text}")
        self.call, self.number, self.name = call, number, name


class Driver:
    def __init__(self, path: str) -> None:
        """Raises CudaUnavailable without a driver, CudaFailure if it cannot be initialised (without a GPU)."""
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaUnavailable(f"no CUDA driver: {error}") from None
        self.path, self.pid = path, os.getpid()
        self.call("cuInit", c_uint(0))
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def call(self, name: str, *arguments: Any) -> None:
        """Arguments are ctypes values, or they would be cut to 32 bits. Raises CudaFailure."""
        number = self.status(name, *arguments)
        if number:
            raise self.failure(name, number)

    def status(self, name: str, *arguments: Any) -> int:
        """The driver's answer. Releases the GIL."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaUnavailable(f"this CUDA driver is too old: it has no {name}") from None
        return int(function(*arguments))

    def is_done(self, query: str, handle: int) -> bool:
        """Whether the work of an event or stream is done. Raises CudaFailure if some of it failed."""
        number = self.status(query, c_void_p(handle))
        if number not in (0, _NOT_READY):
            raise self.failure(query, number)
        return number == 0

    def has(self, name: str) -> bool:
        """Whether this driver knows a call."""
        return hasattr(self._library, name)

    def failure(self, call: str, number: int) -> CudaFailure:
        words = []
        for question in ("cuGetErrorName", "cuGetErrorString"):
            answer = c_char_p()
            known = self.status(question, c_int(number), byref(answer)) == 0 and answer.value
            words.append(answer.value.decode() if known and answer.value else "unknown error")
        return CudaFailure(call, number, *words)


@lru_cache(maxsize=8)
def load(path: str = LIBRARY) -> Driver:
    """The driver, loaded once per process. A failure is not remembered."""
    return Driver(path)


def moves_dma_buf(index: int, library: str = LIBRARY) -> bool:
    """Whether other devices get this GPU's memory as a dmabuf. Raises CudaUnavailable, CudaFailure."""
    driver, ordinal, answer = load(library), c_int(), c_int()
    driver.call("cuDeviceGet", byref(ordinal), c_int(index))
    driver.call("cuDeviceGetAttribute", byref(answer), c_int(_DEVICE_ATTRIBUTE_DMA_BUF), ordinal)
    return bool(answer.value)


class Device:
    """One GPU. `open()` retains its primary context, `close()` releases it; any thread may call any method."""

    def __init__(self, index: int = 0, library: str | None = None) -> None:
        """library: the driver; None for LIBRARY."""
        self.index, self._path = index, LIBRARY if library is None else library
        self._context = c_void_p()
        self._ordinal = c_int()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Raises CudaUnavailable, CudaFailure."""
        with self._lock:
            if self.context:
                return
            driver = load(self._path)
            if driver.pid != os.getpid():
                raise CudaUnavailable("CUDA was initialised before this process was forked; start it with spawn")
            count = c_int()
            driver.call("cuDeviceGetCount", byref(count))
            if not 0 <= self.index < count.value:
                raise CudaUnavailable(f"there is no CUDA device {self.index}: the driver shows {count.value}")
            driver.call("cuDeviceGet", byref(self._ordinal), c_int(self.index))
            driver.call("cuDevicePrimaryCtxRetain", byref(self._context), self._ordinal)
            self.driver = driver

    def close(self) -> None:
        """Release the context. Its last user frees its allocations. Safe to call twice."""
        with self._lock:
            if self.context:
                self._context = c_void_p()
                self.driver.call("cuDevicePrimaryCtxRelease_v2", self._ordinal)

    @contextlib.contextmanager
    def current(self) -> Iterator[Driver]:
        """Make the device's context current in this thread; restore the former one afterwards."""
        if not self.context:
            raise CudaUnavailable(f"CUDA device {self.index} is not open")
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield self.driver
        finally:
            self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    @property
    def context(self) -> int:
        """The handle, for libraries that make it current in their own threads."""
        return self._context.value or 0

    @property
    def ordinal(self) -> int:
        """The driver's number of the device in this process. Open."""
        return self._ordinal.value

    # -- Facts -------------------------------------------------------------------------------------------------------

    @cached_property
    def num_threads(self) -> int:
        """That it runs at a time."""
        answers = []
        for attribute in (_ATTRIBUTE_NUM_MULTIPROCESSORS, _ATTRIBUTE_THREADS_OF_EACH):
            answer = c_int()
            self.driver.call("cuDeviceGetAttribute", byref(answer), c_int(attribute), self._ordinal)
            answers.append(answer.value)
        return answers[0] * answers[1]

    @cached_property
    def name(self) -> str:
        text = (c_char * 256)()
        self.driver.call("cuDeviceGetName", text, c_int(len(text)), self._ordinal)
        return text.value.decode()

    @cached_property
    def uuid(self) -> str:
        """Names the GPU in every process of this host, independent of CUDA_VISIBLE_DEVICES."""
        raw = (c_char * 16)()
        self.driver.call("cuDeviceGetUuid_v2", raw, self._ordinal)
        return raw.raw.hex()

    @cached_property
    def pci_address(self) -> str:
        """As in /sys, except for upper and lower case: "0000:81:00.0"."""
        text = (c_char * 32)()
        self.driver.call("cuDeviceGetPCIBusId", text, c_int(len(text)), self._ordinal)
        return text.value.decode()

    # -- Memory ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Device memory; its address. Not from a pool, so that it can be exported (`ipc_export`)."""
        ptr = c_uint64()
        with self.current() as driver:
            driver.call("cuMemAlloc_v2", byref(ptr), c_size_t(nbytes))
        return ptr.value

    def free(self, ptr: int) -> None:
        """Waits for work that uses the memory (the driver does)."""
        with self.current() as driver:
            driver.call("cuMemFree_v2", c_uint64(ptr))

    def pin(self, ptr: int, nbytes: int) -> int:
        """Register host memory; the address that kernels use for it. Undone by `unpin`."""
        with self.current() as driver:
            driver.call(
                "cuMemHostRegister_v2", c_void_p(ptr), c_size_t(nbytes), c_uint(_HOST_PORTABLE | _HOST_MAPPED)
            )
            try:
                return self.mapped(ptr)
            except CudaFailure:
                driver.call("cuMemHostUnregister", c_void_p(ptr))
                raise

    def mapped(self, ptr: int) -> int:
        """The address that kernels use for registered host memory."""
        there = c_uint64()
        with self.current() as driver:
            driver.call("cuMemHostGetDevicePointer_v2", byref(there), c_void_p(ptr), c_uint(0))
        return there.value

    def unpin(self, ptr: int) -> None:
        with self.current() as driver:
            driver.call("cuMemHostUnregister", c_void_p(ptr))

    def ipc_export(self, ptr: int) -> bytes:
        """A handle to open this allocation in another process of this host; only for a whole one of `allocate`."""
        handle = (c_char * IPC_HANDLE_NBYTES)()
        with self.current() as driver:
            driver.call("cuIpcGetMemHandle", handle, c_uint64(ptr))
        return handle.raw

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; undone by `ipc_close`. Enables peer access between the two GPUs.

        Raises CudaFailure, also for a handle of this process.
        """
        ptr = c_uint64()
        with self.current() as driver:
            driver.call("cuIpcOpenMemHandle_v2", byref(ptr), IpcHandle(handle), c_uint(_IPC_LAZY_PEER_ACCESS))
        return ptr.value

    def ipc_close(self, ptr: int) -> None:
        with self.current() as driver:
            driver.call("cuIpcCloseMemHandle", c_uint64(ptr))

    def shares(self, ptr: int) -> bool:
        """Whether the allocation that an address is in can be exported (`ipc_export`).

        Memory of `cuMemAlloc` can; virtual memory (`pdlink.cuda.virtual`) and that of a pool (`cuMemAllocAsync`)
        cannot: CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
        """
        capable = c_int()
        with self.current() as driver:
            driver.call("cuPointerGetAttribute", byref(capable), c_int(_ATTRIBUTE_IPC_CAPABLE), c_uint64(ptr))
        return bool(capable.value)

    def extent(self, ptr: int) -> tuple[int, int]:
        """Start and bytes of the allocation that an address is in; a mapped one of another process, too."""
        start, nbytes = c_uint64(), c_size_t()
        with self.current() as driver:
            driver.call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), c_uint64(ptr))
        return start.value, nbytes.value

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy between any two addresses, in order with `stream`; asynchronous (host memory: if pinned)."""
        with self.current() as driver:
            driver.call("cuMemcpyAsync", c_uint64(dst), c_uint64(src), c_size_t(nbytes), c_void_p(stream))

    def copy_runs(self, runs: RunArray, stream: int) -> None:
        """`copy` for each run, which are independent of each other; in one call where the driver has one (CUDA 13).

        runs: source address, destination address, nbytes. stream: not the default one, which batches refuse.
        """
        with self.current() as driver:
            if len(runs) > 1 and driver.has("cuMemcpyBatchAsync_v2"):
                src, dst, nbytes = (np.ascontiguousarray(runs[:, axis]) for axis in range(3))
                attributes, first = MemcpyAttributes(_SRC_ACCESS_ORDER_STREAM), c_size_t(0)
                driver.call(
                    "cuMemcpyBatchAsync_v2",
                    *(c_void_p(one.ctypes.data) for one in (dst, src, nbytes)),
                    c_size_t(len(runs)),
                    byref(attributes),
                    byref(first),
                    c_size_t(1),
                    c_void_p(stream),
                )
                return
            for src_ptr, dst_ptr, length in runs.tolist():
                arguments = (c_uint64(dst_ptr), c_uint64(src_ptr), c_size_t(length), c_void_p(stream))
                driver.call("cuMemcpyAsync", *arguments)

    def wait(self, stream: int, event: CudaEvent) -> None:
        """What is given to this stream (0: the default one) from now on runs behind what `event` stands for now."""
        with self.current() as driver:
            driver.call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event.handle), c_uint(0))

    def synchronize(self) -> None:
        """Wait for all work that this process has given to the device."""
        with self.current() as driver:
            driver.call("cuCtxSynchronize")


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: how the copies of a batch read their sources. The hints are for managed memory only."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_hint", c_int * 2),
        ("dst_hint", c_int * 2),
        ("flags", c_uint),
    )


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: the only struct that the driver takes by value."""

    _fields_ = (("reserved", c_char * IPC_HANDLE_NBYTES),)

    def __init__(self, handle: bytes) -> None:
        if len(handle) != IPC_HANDLE_NBYTES:
            raise ValueError(f"an IPC handle has {IPC_HANDLE_NBYTES} bytes, got {len(handle)}")
        super().__init__()
        ctypes.memmove(byref(self), handle, IPC_HANDLE_NBYTES)


class CudaStream:
    """A stream that is not synchronised with the default one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        handle = c_void_p()
        with device.current() as driver:
            driver.call("cuStreamCreate", byref(handle), c_uint(_STREAM_NON_BLOCKING))
        self.handle: int = handle.value or 0

    def synchronize(self) -> None:
        with self._device.current() as driver:
            driver.call("cuStreamSynchronize", c_void_p(self.handle))

    def is_idle(self) -> bool:
        """Whether all that it was given has run. Raises CudaFailure if some of it failed."""
        with self._device.current() as driver:
            return driver.is_done("cuStreamQuery", self.handle)

    def close(self) -> None:
        """Work in the stream still runs. Safe to call twice."""
        handle, self.handle = self.handle, 0
        if handle:
            with self._device.current() as driver:
                driver.call("cuStreamDestroy_v2", c_void_p(handle))


class CudaEvent:
    def __init__(self, device: Device) -> None:
        self._device = device
        handle = c_void_p()
        with device.current() as driver:
            driver.call("cuEventCreate", byref(handle), c_uint(_EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING))
        self.handle: int = handle.value or 0

    def record(self, stream: CudaStream | int) -> None:
        """Stand for what is in the stream by now; of others' streams the driver's handle, 0 for the default one."""
        handle = stream if isinstance(stream, int) else stream.handle
        with self._device.current() as driver:
            driver.call("cuEventRecord", c_void_p(self.handle), c_void_p(handle))

    def done(self) -> bool:
        """Whether the recorded work is done. Raises CudaFailure if some of it failed."""
        with self._device.current() as driver:
            return driver.is_done("cuEventQuery", self.handle)

    def close(self) -> None:
        """Safe to call twice, and before it is done."""
        handle, self.handle = self.handle, 0
        if handle:
            with self._device.current() as driver:
                driver.call("cuEventDestroy_v2", c_void_p(handle))
