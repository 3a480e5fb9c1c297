"""Borrowed memory as a buffer that transports can register: numpy, torch, DLPack, bytearray.

A borrowed buffer copies and frees nothing; it keeps its owner alive. Peers on this host cannot map borrowed host
memory, because it has no descriptor; they write to it over another transport. Borrowed device memory can be exported
(`pdlink.cuda.buffers`).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pdlink.errors import InvalidRequest, LayoutMismatch
from pdlink.memory.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from pdlink.kv.groups import KVGroups
    from pdlink.memory.buffers import AnyBuffer, Bytes

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
"""DLDeviceType of DLPack's C header."""


class BorrowedBuffer:
    """Host memory of somebody else, from address `ptr` on. Implements `pdlink.memory.buffers.HostBuffer`."""

    kind: Literal["host"] = "host"
    borrowed = True
    fd = -1

    def __init__(self, ptr: int, nbytes: int, owner: object) -> None:
        """owner: kept, so that the memory stays."""
        self.ptr, self.nbytes = ptr, nbytes
        self.array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))
        self._owner = owner

    def make_event(self) -> None:
        """None: a store is visible when it returns."""

    def close(self) -> None:
        """Nothing: it is not ours."""


class BorrowedPlace(NamedTuple):
    ptr: int
    nbytes: int
    device: int | None
    """Number of the GPU; None on the host."""
    owner: object
    """What must stay alive as long as the bytes are used."""
    stays: bool = True
    """False on a GPU if other physical memory may come to these addresses: no other process maps it then."""


def borrow(source: Any, what: str) -> AnyBuffer:
    """The memory of `source` as a buffer, without a copy.

    source: a contiguous torch tensor or numpy array, an object with `__dlpack__`, or a writable exporter of the
    buffer protocol (bytearray, mmap, memoryview). what: begins the messages of errors.
    Raises InvalidRequest for another object, and for memory that is read-only or not contiguous.
    """
    place = _place(source, what)
    if place.nbytes <= 0:
        raise InvalidRequest(f"{what}: got {place.nbytes} bytes, a buffer must have at least 1")
    return borrow_place(place)


def borrow_place(place: BorrowedPlace) -> AnyBuffer:
    """Memory as a buffer. Opens the GPU that it is on. Raises CudaUnavailable, CudaFailure."""
    if place.device is None:
        return BorrowedBuffer(place.ptr, place.nbytes, place.owner)
    from pdlink.cuda.buffers import BorrowedDeviceBuffer
    from pdlink.cuda.driver import Device

    return BorrowedDeviceBuffer(Device(place.device), place.ptr, place.nbytes, place.owner, stays=place.stays)


def buffers_of(layout: KVGroups, given: Sequence[Any] | None, opened: ExitStack) -> list[AnyBuffer]:
    """A buffer for each region of `layout`: those `given`, borrowed, or shared memory. `opened` closes them.

    Raises LayoutMismatch (a buffer is too small), InvalidRequest (an object cannot be borrowed), OSError (no memory).
    """
    num_regions = layout.num_regions
    buffers: list[AnyBuffer] = []
    for region in range(num_regions) if given is None else range(len(given)):
        if given is None:
            buffers.append(opened.enter_context(Buffer(max(1, layout.extent(region)))))
        elif hasattr(given[region], "make_event"):
            buffers.append(given[region])
        else:
            buffers.append(borrow(given[region], f"buffers[{region}]"))
            opened.callback(buffers[-1].close)
    for region in range(num_regions):
        has, needs = buffers[region].nbytes if region < len(buffers) else 0, layout.extent(region)
        if has < needs:
            raise LayoutMismatch(f"buffers[{region}]: got {has} bytes, the layout reaches to byte {needs}")
    return buffers


def _place(source: Any, what: str) -> BorrowedPlace:
    if hasattr(source, "untyped_storage") and hasattr(source, "data_ptr"):
        return _of_tensor(source, what)
    if isinstance(source, np.ndarray):  # its dtype may be one that memoryview does not know, as bfloat16
        _check(what, contiguous=source.flags.c_contiguous, writable=source.flags.writeable)
        return BorrowedPlace(source.ctypes.data, source.nbytes, None, source)
    if hasattr(source, "__dlpack__"):
        return _of_dlpack(source, what)
    try:
        view = memoryview(source)
    except TypeError:
        raise InvalidRequest(
            f"{what}: got {type(source).__name__}; it must be a torch tensor or a numpy array, or offer __dlpack__ "
            "or the buffer protocol"
        ) from None
    _check(what, contiguous=view.c_contiguous, writable=not view.readonly)
    return BorrowedPlace(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes, None, view)


def _of_tensor(tensor: Any, what: str) -> BorrowedPlace:
    _check(what, contiguous=tensor.is_contiguous(), writable=True)
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise InvalidRequest(f"{what}: got a tensor on {tensor.device}; it must be on the CPU or a CUDA device")
    device = tensor.device.index if kind == "cuda" else None
    return BorrowedPlace(tensor.data_ptr(), tensor.nbytes, device, tensor.untyped_storage())


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _of_dlpack(source: Any, what: str) -> BorrowedPlace:
    """Read the capsule and keep it: nobody takes it over, so its own destructor gives the memory back."""
    capsule = source.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    _check(what, contiguous=not tensor.strides or _is_dense(shape, tensor.strides[: tensor.ndim]), writable=True)
    if tensor.device_type not in (_CPU, _CUDA, _CUDA_HOST):
        raise InvalidRequest(
            f"{what}: got memory of DLPack device type {tensor.device_type}; it must be 1 (CPU) or 2"
        )
    nbytes = int(np.prod(shape, dtype=np.int64)) * tensor.bits * tensor.lanes // 8
    device = tensor.device_id if tensor.device_type == _CUDA else None
    return BorrowedPlace((tensor.data or 0) + tensor.byte_offset, nbytes, device, (source, capsule))


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _check(what: str, *, contiguous: bool, writable: bool) -> None:
    if not contiguous:
        raise InvalidRequest(
            f"{what}: got memory with gaps between its elements; pass the contiguous array that it is a view of, and "
            "describe the gaps by the strides of the layout"
        )
    if not writable:
        raise InvalidRequest(f"{what}: got read-only memory; peers write to it, so it must be writable")
