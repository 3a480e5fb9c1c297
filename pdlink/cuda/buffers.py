"""Memory for GPUs: device pools that peers can map, and host pools that a GPU reaches directly.

`DeviceBuffer` is a whole allocation of the driver, not a piece of torch's pool. Only a whole one can be exported, as
a CUDA IPC handle. Virtual memory, as of torch's expandable segments, has handles of another kind (`virtual.py`); for
it UCX leaves its CUDA lane silently, which is slower by orders of magnitude. torch uses the buffer through
`__cuda_array_interface__`, without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from pdlink.cuda.bells import Bells
from pdlink.cuda.driver import CudaUnavailable
from pdlink.cuda.virtual import PeerRange, Range
from pdlink.memory.buffers import Buffer
from pdlink.memory.numa import node_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdlink.cuda.driver import Device
    from pdlink.cuda.virtual import SharedMemory
    from pdlink.memory.buffers import StreamEvent


class Export(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How another process maps a device buffer."""

    device: str
    """UUID of the GPU that holds the memory."""
    nbytes: int
    handle: bytes
    """Of CUDA IPC; empty for virtual memory, whose handles are asked for (`transport/handle_door.py`)."""
    offset: int = 0
    """Of the buffer's first byte in the allocation that the handle names, or in the range."""
    range_nbytes: int = 0
    """Of the range of virtual memory that the buffer lies in."""


class DeviceMemory:
    """The part of `pdlink.memory.buffers.AnyBuffer` that is common to GPU memory."""

    kind: ClassVar[Literal["cuda"]] = "cuda"
    device: Device
    ptr: int
    nbytes: int

    def export(self) -> Export:
        """For a process on this host. Raises CudaFailure."""
        raise NotImplementedError

    def virtual_range(self) -> Range | None:
        """What `export` is not for: the range of virtual memory that the buffer lies in; None elsewhere.

        Raises CudaFailure, CudaUnavailable for memory that no other process can map.
        """
        return None

    def require_shared(self) -> None:
        """Raises CudaUnavailable for memory that CUDA IPC does not share."""
        if not self.device.shares(self.ptr):
            raise CudaUnavailable(
                f"buffer: got memory of GPU {self.device.index} that CUDA IPC does not share: virtual memory "
                "(expandable_segments of torch, sleep mode of vLLM) or that of a pool. It travels through pinned "
                "slots, expandable_segments on one host over mapped-cuda; for this lane take expandable_segments out "
                "of PYTORCH_CUDA_ALLOC_CONF, or sleep mode off"
            )

    def make_event(self) -> StreamEvent:
        """As in the contract: torch's, so that it follows the stream that torch computes on."""
        return _TorchEvent(self.device.index)

    def make_bells(self) -> Bells:
        """What tells when such events are reached; its maker closes it. Raises CudaUnavailable, OSError."""
        return Bells(self.device)

    def compute_stream(self) -> int:
        """The stream that torch computes on in the calling thread, as the driver's handle; 0 is the default one."""
        import torch

        return int(torch.cuda.current_stream(self.device.index).cuda_stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As uint8 [nbytes]: `torch.as_tensor(buffer, device="cuda")` is a view. It does not keep the buffer open."""
        return _as_bytes(self.ptr, self.nbytes)


class _TorchEvent:
    """Of one GPU: a thread that never chose one has number 0 as its current one."""

    def __init__(self, index: int) -> None:
        import torch

        self._index = index
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.stream = 0

    @property
    def handle(self) -> int:
        """Of the last recording: torch makes the driver's event then."""
        return int(self._event.cuda_event)

    def record(self) -> None:
        import torch

        stream = torch.cuda.current_stream(self._index)
        self._event.record(stream)
        self.stream = int(stream.cuda_stream)

    def reached(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class DeviceBuffer(DeviceMemory):
    """A block of device memory. Its creator closes it, after the transports it is registered with."""

    borrowed: ClassVar[bool] = False

    def __init__(self, device: Device, nbytes: int) -> None:
        """Allocate; the contents are undefined. Raises CudaFailure (for example CUDA_ERROR_OUT_OF_MEMORY)."""
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        self.device, self.nbytes = device, nbytes
        self.ptr = device.allocate(nbytes)
        self._closed = False

    def export(self) -> Export:
        """For a process on this host. Raises CudaFailure."""
        return Export(self.device.uuid, self.nbytes, self.device.ipc_export(self.ptr))

    def close(self) -> None:
        """Free it. Peers that have mapped it must be closed before. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.device.free(self.ptr)

    def __repr__(self) -> str:
        return f"DeviceBuffer({self.nbytes} bytes on {self.device.index}, {'closed' if self._closed else 'open'})"


class BorrowedDeviceBuffer(DeviceMemory):
    """Borrowed device memory, such as a torch tensor, as a buffer."""

    borrowed: ClassVar[bool] = True

    def __init__(self, device: Device, ptr: int, nbytes: int, owner: object, *, stays: bool = True) -> None:
        """owner: kept, so that the memory stays. stays: False if other physical memory may come to these addresses.

        Opens the device. Raises CudaUnavailable, CudaFailure.
        """
        self.device, self.ptr, self.nbytes = device, ptr, nbytes
        self.device.open()
        self._owner, self._stays = owner, stays

    def virtual_range(self) -> Range | None:
        """As in the base. Raises CudaUnavailable for what does not stay, too: a peer would keep the old memory."""
        if self.device.shares(self.ptr):
            return None
        if not self._stays:
            raise CudaUnavailable(
                f"buffer: got memory of GPU {self.device.index} that sleep mode takes away and gives back as other "
                "memory at the same addresses, of which a peer would not hear. It travels through pinned slots; for "
                "a faster lane turn sleep mode off"
            )
        return Range.under(self.device, self.ptr, self.nbytes)

    def export(self) -> Export:
        """For a process on this host: the allocation, and where in it the buffer begins.

        Raises CudaFailure, and CudaUnavailable as `require_shared`.
        """
        self.require_shared()
        start, nbytes = self.device.extent(self.ptr)
        if self.ptr + self.nbytes > start + nbytes:
            raise CudaUnavailable(
                f"buffer: got {self.nbytes} bytes, which go beyond an allocation of {nbytes}; one allocation a buffer"
            )
        return Export(self.device.uuid, self.nbytes, self.device.ipc_export(start), self.ptr - start)

    def close(self) -> None:
        """Release the device's context; the memory is not ours. Safe to call twice."""
        self.device.close()


class PeerBuffer:
    """A peer's device buffer, mapped here."""

    def __init__(self, device: Device, export: Export, chunks: Iterable[SharedMemory] = ()) -> None:
        """device: its kernels will access the memory; the same GPU, or one with peer access to it.

        chunks: of virtual memory, as the peer hands them out.
        Raises CudaFailure if the peer is gone, is this process, or the two GPUs cannot reach each other; ValueError
        if the memory is smaller than announced: a kernel beyond its end would destroy this process's context. And
        what `chunks` raises.
        """
        self.nbytes = export.nbytes
        self._device = device
        self._closed = False
        self._range = PeerRange(device, export.range_nbytes, chunks) if export.range_nbytes else None
        self._mapped = device.ipc_open(export.handle) if self._range is None else self._range.ptr
        self.ptr = self._mapped + export.offset
        try:
            nbytes = device.extent(self._mapped)[1] if self._range is None else self._range.nbytes
            if export.offset < 0 or export.offset + self.nbytes > nbytes:
                raise ValueError(f"the peer's buffer: got {nbytes} bytes; its invitation says {self.nbytes}")
        except BaseException:
            self.close()
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As for `DeviceBuffer`: kernels and `pdlink.cuda.ops` reach a peer's pages like their own."""
        return _as_bytes(self.ptr, self.nbytes)

    def close(self) -> None:
        """Unmap. Nothing may be in flight there. Safe to call twice."""
        if not self._closed:
            self._closed = True
            if self._range is None:
                self._device.ipc_close(self._mapped)
            else:
                self._range.close()


class PinnedBuffer(Buffer):
    """Host memory as `Buffer`, on the GPU's NUMA node, that its copy engines and kernels reach directly."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises OSError, CudaFailure."""
        super().__init__(nbytes, name="pdlink-pinned", numa_node=node_of(device.pci_address))
        self._device = device
        try:
            self.device_ptr: int = device.pin(self.ptr, self.nbytes)
        except BaseException:
            super().close()
            raise
        self._pinned = True

    def close(self) -> None:
        """Unpins it, too. No copy may be in progress. Safe to call twice."""
        if self._pinned:
            self._pinned = False
            self._device.unpin(self.ptr)
        super().close()


def _as_bytes(ptr: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3}
