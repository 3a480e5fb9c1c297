"""`MappedCudaTransport`: a kernel of the sender stores straight into the device memory of a process on the same host.

The two may share a GPU or have one each with peer access (NVLink, PCIe). The invitation carries CUDA IPC handles of
the registered device buffers, or says where those of virtual memory are given out (`handle_door.py`). The writer maps
the memory once, and every batch is one kernel launch, whatever its number of runs: a layer of scattered pages costs
what one copy does, and the owner's CPU and streams take no part.

What orders a write: `submit` means that the source bytes are there. Who makes them on a stream submits after their
event is reached (`pdlink.node.layer_order`), so this transport needs to know no stream but its own. What orders a
read: `BatchDone` follows the event behind the kernel, whose stores are visible to every kernel launched after it.

The fence is the gate of `csrc/common/gate.h`, which stays entered while a kernel is in flight: see `gpu_copier`. If
the writer is killed the driver tears its contexts down before the process is a zombie, which is what "a dead writer
is quiet" rests on here (reasoned from the order of the kernel's do_exit, not measured). A writer can store anywhere
in the regions it was invited to: as with host memory, invite only peers that are trusted with the whole pool.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

import msgspec

from pdlink import _cuda
from pdlink.cuda.buffers import DeviceBuffer, Export, PeerBuffer
from pdlink.cuda.driver import CudaFailure, CudaUnavailable, Device
from pdlink.cuda.kernels import Kernels
from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.memory.host import boot_id, pid_namespace
from pdlink.transport.base import Occurrence, Probe, Site, Transport
from pdlink.transport.edge import decoded, require_this_host, translated
from pdlink.transport.gpu_batches import PeerMemory
from pdlink.transport.gpu_copier import LAUNCH_NBYTES, GpuCopier
from pdlink.transport.handle_door import DoorPlace, HandleDoor, handles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdlink.capabilities import MemoryKind
    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.cuda.virtual import Range, SharedMemory
    from pdlink.kv.layout import RunList
    from pdlink.memory.buffers import AnyBuffer

_CLOSE_GRACE_S = 1.0
_PROBE_NBYTES = 2 << 20
_MAP_S = 2.0
"""Time limit for fetching one peer's handles. This blocks the endpoint thread, so every session waits."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    address: _Number
    """In the inviting process; used as it is within that process."""
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    """0 for a region that only serves as a source."""
    export: Export | None


class _Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pdlink-mapped-cuda/4"):
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: _Number
    pid: _Pid
    regions: Annotated[tuple[_Region, ...], msgspec.Meta(min_length=1, max_length=4096)]
    gate: tuple[
        Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)],
        _Number,
        _Number,
        Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)],
    ]
    """Descriptor, device, inode, and the nonce in the page, which proves that this process made the invitation."""
    door: DoorPlace | None = None
    """If there is virtual memory among the regions."""


class MappedCudaTransport(Transport):
    """Peers on this host, through their device memory. Lane "mapped-cuda"."""

    name: ClassVar[str] = "mapped-cuda"
    kind: ClassVar[str] = "mapped"
    reach = "host"
    memory: tuple[MemoryKind, ...] = ("cuda",)
    trust = "pool"

    def __init__(
        self,
        device_index: int = 0,
        *,
        library: str | None = None,
        image: bytes | None = None,
        launch_nbytes: int = LAUNCH_NBYTES,
    ) -> None:
        """Retains the device's context for itself; the caller makes its buffers on a `Device` of its own.

        image: kernels other than the built-in ones, as `cuModuleLoadData` takes them.

        launch_nbytes: about the most bytes of one launch, and so of what has to be waited for when a peer is closed.
        """
        self._device, self._library = Device(device_index, library), library
        self._image, self._launch_nbytes = image, launch_nbytes
        self._kernels: Kernels | None = None
        self._copier: GpuCopier | None = None
        self._closed = False
        self._registering = threading.Lock()
        self._door: HandleDoor | None = None
        self._regions: list[_Region] = []
        self._sources: list[tuple[int, int]] = []
        """Address for kernels and bytes of each region."""

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> MappedCudaTransport:
        return cls(site.device_index)

    def probe(self) -> Probe:
        """As in the contract: holds the GPU's context for a moment, loads the kernels, exports memory.

        The reason of a refusal begins with the code of its error: `cuda_unavailable` where there is no driver, GPU of
        that number or kernel in this build, `cuda_failure` where the driver refuses (an old GPU; no CUDA IPC, as on
        WSL).
        """
        device = Device(self._device.index, self._library)
        facts: dict[str, str] = {}
        with contextlib.ExitStack() as made:
            try:
                device.open()
                made.callback(device.close)
                facts = {"device": device.name, "driver": device.driver.version}
                made.callback(Kernels(device, self._image).close)
                with contextlib.closing(DeviceBuffer(device, _PROBE_NBYTES)) as buffer:
                    buffer.export()
            except (CudaUnavailable, CudaFailure) as error:
                return Probe(self.name, ok=False, reason=f"{error.code}: {error}", facts=facts)
        return Probe(self.name, ok=True, facts=facts)

    def open(self) -> None:
        if self._closed:
            raise TransportUnavailable("the mapped-cuda transport was closed; make a new one")
        if self._copier is not None:
            return
        with contextlib.ExitStack() as made:
            try:
                self._device.open()
                made.callback(self._device.close)
                kernels = Kernels(self._device, self._image)
                made.callback(kernels.close)
                self._copier = GpuCopier(self._device, kernels, self._launch_nbytes)
            except (CudaUnavailable, CudaFailure, OSError) as error:
                raise TransportUnavailable(f"mapped-cuda does not work here: {error}") from error
            self._kernels = kernels
            made.pop_all()
        _OPEN_HERE.add(self)

    def register(self, buffer: AnyBuffer) -> int:
        """Device memory as source and destination, a `PinnedBuffer` as source only: kernels read it in place."""
        self._open_copier()
        ptr: int | None = getattr(buffer, "device_ptr", None)
        memory = None
        if buffer.kind == "cuda":
            export, memory = self._export(cast("DeviceMemory", buffer))
            region, ptr = _Region(buffer.ptr, buffer.nbytes, export), buffer.ptr
        elif ptr is not None:
            region = _Region(0, 0, None)
        else:
            raise TransportUnavailable("the mapped-cuda transport moves device memory and pinned host memory only")
        with self._registering:
            number = len(self._regions)
            if memory is not None:
                with translated("cannot hand out handles of device memory"):
                    self._door = self._door or HandleDoor()
                self._door.add(number, memory)
            self._regions.append(region)
            self._sources.append((ptr, buffer.nbytes))
            return number

    def invite(self, peer: str) -> bytes:
        copier = self._open_copier()
        with self._registering:
            regions, door = tuple(self._regions), self._door
        if not regions:
            raise TransportUnavailable("register a buffer before inviting a peer to it")
        with translated(f"cannot invite peer {peer}"):
            boot, namespace = boot_id(), pid_namespace()
            gate = copier.invite(peer).name()  # last: it is not to be made for an invitation that cannot be given
        return msgspec.msgpack.encode(
            _Invitation(boot, namespace, os.getpid(), regions, gate, None if door is None else door.place)
        )

    def connect(self, peer: str, invitation: bytes) -> None:
        """As in the contract, but for virtual memory: the peer's door is asked for handles, for 2 s at most."""
        copier = self._open_copier()
        there = decoded(invitation, _Invitation, "mapped device memory")
        with translated(f"cannot map the device memory of peer {peer}"):
            require_this_host(peer, there.boot_id, there.pid_namespace)
            memory = self._map(peer, there)
            try:
                copier.connect(peer, memory)
            except BaseException:
                memory.close()
                raise

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        copier = self._open_copier()
        return copier.submit(peer, _cuda.RunQueue(lists, self._sources, copier.regions(peer)), timeout_s)

    def poll(self) -> list[Occurrence]:
        return [] if self._copier is None else self._copier.poll()

    def fileno(self) -> int:
        return self._open_copier().fileno()

    def lane(self, peer: str) -> str:
        return self.name if self._copier is not None and self._copier.connected(peer) else ""

    def close_peer(self, peer: str) -> None:
        if self._copier is not None:
            self._copier.close_peer(peer)

    def close(self) -> None:
        """As in the contract. Memory that a kernel may still use after the grace time is freed with the process."""
        if self._closed or self._copier is None:
            self._closed = True
            return
        self._closed = True
        if self._door is not None:
            self._door.close()
        if self._copier.close(_CLOSE_GRACE_S) and self._kernels is not None:
            self._kernels.close()
            self._device.close()

    def holds(self, region: tuple[int, int]) -> bool:
        """Whether this is one of our device regions (address, nbytes)."""
        return not self._closed and any((own.address, own.nbytes) == region for own in self._regions)

    def _open_copier(self) -> GpuCopier:
        if self._copier is None or self._closed:
            raise TransportFailure(f"the mapped-cuda transport is {'closed' if self._closed else 'not open'}")
        return self._copier

    def _export(self, buffer: DeviceMemory) -> tuple[Export, Range | None]:
        """How peers map it, and what of it the door hands out."""
        try:
            memory = buffer.virtual_range()
            if memory is None:
                return buffer.export(), None
            offset = buffer.ptr - memory.start
            return Export(buffer.device.uuid, buffer.nbytes, b"", offset, memory.nbytes), memory
        except (CudaFailure, CudaUnavailable) as error:
            raise TransportUnavailable(f"device memory cannot be shared between processes here: {error}") from error

    def _map(self, peer: str, there: _Invitation) -> PeerMemory:
        deadline_s = time.monotonic() + _MAP_S
        with contextlib.ExitStack() as made:
            life_fd = os.pidfd_open(there.pid)
            made.callback(os.close, life_fd)
            regions, mapped = [], []
            for index, region in enumerate(there.regions):
                if region.export is None:
                    regions.append((0, 0))
                elif there.pid == os.getpid():
                    # CUDA does not open a handle in the process that made it. Whether the memory is ours is
                    # looked up: an invitation could name any address.
                    if not any(transport.holds((region.address, region.nbytes)) for transport in _OPEN_HERE):
                        raise ProtocolError(f"region {index} of peer {peer} is no device memory of this process")
                    regions.append((region.address, region.nbytes))
                else:
                    chunks: Iterable[SharedMemory] = ()
                    if region.export.range_nbytes:
                        if there.door is None:
                            raise ProtocolError(f"region {index} of peer {peer} is virtual memory without a door")
                        chunks = handles(there.door, there.pid, index, region.export.range_nbytes, deadline_s)
                    try:
                        buffer = PeerBuffer(self._device, region.export, chunks)
                    except CudaFailure as error:
                        raise TransportFailure(f"region {index} of peer {peer}: {error}") from error
                    made.callback(buffer.close)
                    mapped.append(buffer)
                    regions.append((buffer.ptr, buffer.nbytes))
            gate = _cuda.GateWriter(there.pid, there.gate)
            made.pop_all()
        return PeerMemory(there.pid, life_fd, gate, regions, mapped)


_OPEN_HERE: weakref.WeakSet[MappedCudaTransport] = weakref.WeakSet()
"""Transports of this process, which may be each other's peers."""
