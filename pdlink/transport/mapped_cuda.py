"""`MappedCudaTransport`: a kernel of the sender stores straight into the device memory of a process on the same host.

The two may share a GPU or have one each with peer access (NVLink, PCIe). The invitation carries CUDA IPC handles of
the registered device buffers, or says where those of virtual memory are given out (`handle_door.py`). The writer maps
the memory once, and a push is a kernel launch, of strides and pairs of blocks: a layer of scattered pages costs what
one copy does, between any two layouts, and the owner's CPU and streams take no part.

What orders a write: `submit` means that the source bytes are there, `submit_plan` that they are behind these events,
for which the launch waits on the GPU. What orders a read: `BatchDone` follows the event behind the kernel, whose
stores are visible to every kernel launched after it.

The fence is the gate of `csrc/common/gate.h`, which stays entered while a kernel is in flight (`csrc/cuda/copier.h`).
If the writer is killed the driver tears its contexts down before the process is a zombie, which is what "a dead
writer is quiet" rests on here (seen on an H200, 10 of 10 kills). A writer can store anywhere in the regions it was
invited to: as with host memory, invite only peers that are trusted with the whole pool.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

import msgspec

from pdlink import _cuda
from pdlink.cuda.buffers import DeviceBuffer, Export, PeerBuffer
from pdlink.cuda.driver import CudaFailure, CudaStream, CudaUnavailable, Device
from pdlink.cuda.kernels import Kernels
from pdlink.cuda.launches import Launches
from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.memory.host import boot_id, pid_namespace
from pdlink.transport.base import Occurrence, PeerClosed, Probe, Site
from pdlink.transport.edge import decoded, require_this_host, translated
from pdlink.transport.handle_door import DoorPlace, HandleDoor, handles
from pdlink.transport.native import CLOSE_GRACE_S, NativeTransport, refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdlink.capabilities import MemoryKind
    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceMemory, PinnedBuffer
    from pdlink.cuda.virtual import Range, SharedMemory
    from pdlink.kv.plan import Plan
    from pdlink.memory.buffers import AnyBuffer

LAUNCH_NBYTES = 256 << 20
"""Longer than a layer of any model, so that a layer is one launch. How long one takes is not measured."""
NUM_STREAMS = 4
"""One for what waits for nothing, and for as many streams of the engine that are late at a time."""
_PROBE_NBYTES = 2 << 20
_MAP_S = 2.0
"""Time limit for fetching one peer's handles. Only its session waits."""

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


class MappedCudaTransport(NativeTransport[_cuda.GpuCopier, "AnyBuffer"]):
    """Peers on this host, through their device memory. Lane "mapped-cuda"."""

    name: ClassVar[str] = "mapped-cuda"
    kind: ClassVar[str] = "mapped"
    reach = "host"
    memory: tuple[MemoryKind, ...] = ("cuda",)
    trust = "pool"
    connects_aside = True
    follows_events = True

    def __init__(
        self,
        device_index: int = 0,
        *,
        library: str | None = None,
        image: bytes | None = None,
        launch_nbytes: int = LAUNCH_NBYTES,
        gpu_share: float = 1.0,
    ) -> None:
        """Retains the device's context for itself; the caller makes its buffers on a `Device` of its own.

        image: kernels other than the built-in ones, as `cuModuleLoadData` takes them.

        launch_nbytes: about the most bytes of one launch, and so of what has to be waited for when a peer is closed.
        gpu_share: as in the settings.
        """
        super().__init__()
        self._device, self._library = Device(device_index, library), library
        self._image, self._launch_nbytes, self._gpu_share = image, launch_nbytes, gpu_share
        self._launches: Launches[object] | None = None
        """Holds the slots of the copier, which uses them natively."""
        self._opened = contextlib.ExitStack()
        """What is closed when the GPU is quiet."""
        self._door: HandleDoor | None = None
        self._regions: list[_Region] = []
        self._mapped: dict[str, contextlib.ExitStack] = {}
        """Memory of each peer that we write to, until its PeerClosed."""

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> MappedCudaTransport:
        return cls(site.device_index, gpu_share=config.gpu_share)

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

    def _start(self) -> _cuda.GpuCopier:
        with contextlib.ExitStack() as made:
            try:
                self._device.open()
                made.callback(self._device.close)
                kernels = Kernels(self._device, self._image)
                made.callback(kernels.close)
                launches: Launches[object] = Launches(self._device, kernels, wake=-1, gpu_share=self._gpu_share)
                made.callback(launches.close)
                streams = [launches.streams]
                for _ in range(NUM_STREAMS - 1):
                    work, bell = CudaStream(self._device), CudaStream(self._device)
                    for one in (work, bell):
                        made.callback(one.close)
                        made.callback(one.synchronize)
                    streams.append((work.handle, bell.handle))
                copier = _cuda.GpuCopier(launches.launcher, launches.slots, streams, self._launch_nbytes)
            except (CudaUnavailable, CudaFailure, OSError) as error:
                raise TransportUnavailable(f"mapped-cuda does not work here: {error}") from error
            self._launches, self._opened = launches, made.pop_all()
        _OPEN_HERE.add(self)
        return copier

    def register(self, buffer: AnyBuffer) -> int:
        """Device memory as source and destination, a `PinnedBuffer` as source only: kernels read it in place."""
        if buffer.kind != "cuda" and not hasattr(buffer, "device_ptr"):
            raise TransportUnavailable("the mapped-cuda transport moves device memory and pinned host memory only")
        with self._registering:
            index = self._add(buffer)
            self._buffers.append(buffer)
        return index

    def _add(self, buffer: AnyBuffer) -> int:
        copier = self._engine
        if buffer.kind != "cuda":
            self._regions.append(_Region(0, 0, None))
            return copier.add_region(cast("PinnedBuffer", buffer).device_ptr, buffer.nbytes)
        export, memory = self._export(cast("DeviceMemory", buffer))
        if memory is not None:
            with translated("cannot hand out handles of device memory"):
                self._door = self._door or HandleDoor()
            self._door.add(len(self._regions), memory)
        self._regions.append(_Region(buffer.ptr, buffer.nbytes, export))
        return copier.add_region(buffer.ptr, buffer.nbytes)

    def submit_plan(
        self, peer: str, plan: Plan, layers: range, timeout_s: float, after: Sequence[tuple[int, int]] = ()
    ) -> int:
        template, unit_tokens = plan.template, plan.template.unit_tokens
        some = [layer.strided for layer in template.layers[layers.start : layers.stop]]
        tokens = unit_tokens, plan.start % unit_tokens, plan.end - plan.start
        try:
            return self._engine.submit_plan(peer, plan.pairs, *tokens, some, timeout_s, after)
        except (RuntimeError, TypeError) as error:
            raise refused(error) from error

    def invite(self, peer: str) -> bytes:
        copier = self._engine
        self._require_buffers()
        with self._registering:
            regions, door = tuple(self._regions), self._door
        with translated(f"cannot invite peer {peer}"):
            boot, namespace = boot_id(), pid_namespace()
            gate = copier.invite(peer)  # last: it is not to be made for an invitation that cannot be given
        return msgspec.msgpack.encode(
            _Invitation(boot, namespace, os.getpid(), regions, gate, None if door is None else door.place)
        )

    def connect(self, peer: str, invitation: bytes) -> None:
        """As in the contract, but for virtual memory: the peer's door is asked for handles, for 2 s at most."""
        copier = self._engine
        there = decoded(invitation, _Invitation, "mapped device memory")
        with translated(f"cannot map the device memory of peer {peer}"), contextlib.ExitStack() as mapped:
            require_this_host(peer, there.boot_id, there.pid_namespace)
            regions = self._map(peer, there, mapped)
            with self._registering:
                if peer in self._mapped:
                    raise ValueError(f"peer name {peer} is used twice")
                self._mapped[peer] = mapped  # first: what the copier may write to is never unmapped by an error here
                try:
                    copier.connect(peer, there.pid, regions, there.gate)
                except BaseException:
                    del self._mapped[peer]
                    raise
                self._mapped[peer] = mapped.pop_all()

    def poll(self) -> list[Occurrence]:
        """As in the contract; unmaps the memory of peers that are closed.

        Under the lock of `connect`: as soon as the copier has told of a peer's end, its name is free.
        """
        with self._registering:
            occurrences = super().poll()
            ended = [self._mapped.pop(one.peer, None) for one in occurrences if isinstance(one, PeerClosed)]
        for mapped in ended:
            _unmap(mapped)
        return occurrences

    def close(self) -> None:
        """As in the contract. Memory that a kernel may still use after the grace time is freed with the process."""
        closed, self._closed = self._closed, True
        if closed or self._native is None or self._launches is None:
            return
        if self._door is not None:
            self._door.close()
        if not self._native.close(CLOSE_GRACE_S):
            self._launches.abandon()
            return
        for mapped in self._mapped.values():
            _unmap(mapped)
        self._mapped.clear()
        with contextlib.suppress(CudaFailure):
            self._opened.close()
        _OPEN_HERE.discard(self)

    def holds(self, region: tuple[int, int]) -> bool:
        """Whether this is one of our device regions (address, nbytes)."""
        return not self._closed and any((own.address, own.nbytes) == region for own in self._regions)

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

    def _map(self, peer: str, there: _Invitation, mapped: contextlib.ExitStack) -> list[tuple[int, int]]:
        """Address here and bytes of each region of the peer's. mapped: unmaps them."""
        deadline_s = time.monotonic() + _MAP_S
        regions = []
        for index, region in enumerate(there.regions):
            if region.export is None:
                regions.append((0, 0))
            elif there.pid == os.getpid():
                # CUDA does not open a handle in the process that made it. Whether the memory is ours is looked up: an
                # invitation could name any address. Others open and close meanwhile.
                if not any(transport.holds((region.address, region.nbytes)) for transport in tuple(_OPEN_HERE)):
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
                mapped.callback(buffer.close)
                regions.append((buffer.ptr, buffer.nbytes))
        return regions


def _unmap(mapped: contextlib.ExitStack | None) -> None:
    if mapped is not None:
        with contextlib.suppress(CudaFailure):  # of a dead context: the mapping is gone with it
            mapped.close()


_OPEN_HERE: set[MappedCudaTransport] = set()
"""Transports of this process, which may be each other's peers; closed ones that a kernel may still use, too."""
