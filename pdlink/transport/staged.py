"""`StagedTransport`: device memory over a transport of host memory, through pinned slots at both ends.

For GPUs that cannot reach each other: other hosts without GPUDirect RDMA, memory that CUDA IPC does not share
(`expandable_segments`), a build without kernels. A part of a layer is gathered into a slot, sent, and scattered by
the receiver (`staging/stager.py`); the copies of one slot run beside the sending of another. Over `mapped` the GPU
gathers straight into the receiver's slot. It costs one pass over PCIe at each end, slots of pinned memory, and for
each slot two notes each way in the session (`staging/wire.py`).

What the transport below cannot refuse, a peer can do: over `mapped` write to every slot, over `ucx` anywhere. Over
`tcp` a peer writes to slots granted to it, and the owner places only what lies in blocks offered to it. Slots to
receive in are made for the first invitation, others for the first owner that has to be put to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec

from pdlink.cuda.buffers import PinnedBuffer
from pdlink.cuda.copies import kernels_if_any
from pdlink.cuda.driver import CudaFailure, CudaUnavailable, Device
from pdlink.cuda.ways import ways_of
from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.transport.base import Occurrence, Probe, Site, Transport
from pdlink.transport.edge import decoded, translated
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.staging.open_blocks import OpenBlocks
from pdlink.transport.staging.slots import OwnersSlots, Slots
from pdlink.transport.staging.stager import Stager
from pdlink.transport.staging.wire import Invitation
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.capabilities import MemoryKind
    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.cuda.ways import Ways
    from pdlink.kv.groups import KVGroups
    from pdlink.kv.layout import RunList
    from pdlink.kv.plan import Plan
    from pdlink.memory.buffers import AnyBuffer

_CLOSE_GRACE_S = 1.0


class StagedTransport(Transport):
    """Peers that `below` reaches, to and from device memory. Lane "staged-" and the lane below."""

    memory: tuple[MemoryKind, ...] = ("cuda",)
    connects_aside = True  # it pins memory
    below_class: ClassVar[type[Transport]]
    _open_blocks: ClassVar[type[OpenBlocks]] = OpenBlocks

    def __init__(
        self,
        below: Transport,
        device_index: int = 0,
        *,
        slot_nbytes: int = 4 << 20,
        num_slots: int = 16,
        library: str | None = None,
        image: bytes | None = None,
        ways: Ways | None = None,
    ) -> None:
        """below: not open; opened and closed here. num_slots: for each direction. ways: measured once for this
        process if None."""
        self._ways = ways
        self._below = below
        self.reach = below.reach
        self._device, self._library, self._image = Device(device_index, library), library, image
        self._lock = threading.Lock()
        """Of opening, registering, the first peer and closing."""
        self._regions: list[tuple[int, int]] = []
        self._buffers: list[AnyBuffer] = []
        """Kept so that the memory stays."""
        self._to_guard: KVGroups | None = None
        self._stager: Stager | None = None
        self._gathered = Slots(self._device, slot_nbytes, num_slots)
        self._received = Slots(self._device, slot_nbytes, num_slots)
        self._opened = contextlib.ExitStack()
        """What is closed when the GPU is quiet."""
        self._closed = False

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> StagedTransport:
        below = cls.below_class.configured(config, dataclasses.replace(site, memory="host"))
        return cls(below, site.device_index)

    @classmethod
    def last_resort(cls, config: TransportConfig, site: Site) -> bool:
        return cls.below_class.last_resort(config, dataclasses.replace(site, memory="host"))

    def probe(self) -> Probe:
        """As in the contract: holds the GPU's context for a moment, and pins a page."""
        below = self._below.probe()
        if not below.ok:
            return Probe(self.name, ok=False, reason=below.reason)
        device = Device(self._device.index, self._library)
        with contextlib.ExitStack() as made:
            try:
                device.open()
                made.callback(device.close)
                kernels = made.enter_context(kernels_if_any(device, self._image))
                PinnedBuffer(device, 1).close()
                facts = {"device": device.name, "driver": device.driver.version}
            except (CudaUnavailable, CudaFailure, OSError) as error:
                reason = f"{error.code}: {error}" if isinstance(error, CudaUnavailable | CudaFailure) else str(error)
                return Probe(self.name, ok=False, reason=reason)
        facts["copies by"] = "copy engine" if kernels is None else "copy engine and kernels"
        facts["pins"] = f"{self._received.count * self._received.nbytes >> 20} MiB for each direction"
        return Probe(self.name, ok=True, facts={**facts, **below.facts})

    def open(self) -> None:
        """Also the one below; the slots are made with the first peer."""
        with self._lock, contextlib.ExitStack() as made:
            if self._closed:
                raise TransportUnavailable(f"the {self.name} transport was closed; make a new one")
            if self._stager is not None:
                return
            self._below.open()
            made.callback(self._below.close)
            try:
                self._device.open()
                made.callback(self._device.close)
                kernels = made.enter_context(kernels_if_any(self._device, self._image))
                ways = ways_of(self._device, kernels) if self._ways is None else self._ways
                slots = self._gathered, self._received
                self._stager = Stager(self._device, kernels, ways, *slots, self._below, self._regions)
            except (CudaUnavailable, CudaFailure, OSError) as error:
                raise TransportUnavailable(f"{self.name} does not work here: {error}") from error
            made.callback(self._gathered.close)
            made.callback(self._received.close)
            self._opened = made.pop_all()

    def register(self, buffer: AnyBuffer) -> int:
        if buffer.kind != "cuda":
            raise TransportUnavailable(f"buffer: got {buffer.kind} memory; {self.name} moves cuda memory only")
        self._running()
        with self._lock:
            self._regions.append((cast("DeviceMemory", buffer).ptr, buffer.nbytes))
            self._buffers.append(buffer)
            return len(self._regions) - 1

    def guard(self, groups: KVGroups) -> None:
        """Also where nobody is to be invited: slots hold what a position has in one layer."""
        self._to_guard = groups
        for slots in (self._gathered, self._received):
            slots.hold(max(groups.layer_nbytes))

    def open_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        if self._stager is not None:
            self._stager.open_blocks(peer, blocks)

    def close_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        if self._stager is not None:
            self._stager.close_blocks(peer, blocks)

    def invite(self, peer: str) -> bytes:
        stager = self._inviting()
        with translated(f"cannot invite peer {peer}"):
            below = self._below.invite(peer)
            try:
                stager.invite(peer)
            except BaseException:
                self._below.close_peer(peer)
                raise
        regions, slots = tuple(nbytes for _, nbytes in self._regions), self._received
        return msgspec.msgpack.encode(Invitation(regions, slots.region, slots.nbytes, slots.count, below))

    def connect(self, peer: str, invitation: bytes) -> None:
        there = decoded(invitation, Invitation, self.name)
        stager = self._running()
        with translated(f"cannot connect to peer {peer}"):
            self._below.connect(peer, there.below)
            direct = None
            try:
                direct = OwnersSlots.reached(self._device, self._below, peer, there)
                if direct is None:
                    self._make(self._gathered)
                stager.connect(peer, there, direct)
            except BaseException:
                self._below.close_peer(peer)
                if direct is not None:
                    direct.close()
                raise

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        raise ValueError(f"lists: {self.name} moves what plans say; call submit_plan")

    def submit_plan(
        self, peer: str, plan: Plan, layers: range, timeout_s: float, after: Sequence[tuple[int, int]] = ()
    ) -> int:
        return self._running().submit(peer, plan, layers, timeout_s)

    def heard(self, peer: str, data: bytes) -> None:
        if self._stager is not None:
            self._stager.heard(peer, data)

    def poll(self) -> list[Occurrence]:
        return [] if self._stager is None else self._stager.poll()

    def fileno(self) -> int:
        return self._running().fileno()

    def lane(self, peer: str) -> str:
        if self._stager is None or not self._stager.connected(peer):
            return ""
        below = self._below.lane(peer)
        return f"staged-{below}" if below else ""

    def computing(self, on: bool) -> None:
        self._below.computing(on)

    def close_peer(self, peer: str) -> None:
        if self._stager is not None:
            self._stager.close_peer(peer)

    def close(self) -> None:
        """As in the contract. Slots that the GPU may still use after the grace time are freed with the process."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._stager is None:
            return
        if self._stager.close(_CLOSE_GRACE_S):
            self._opened.close()
        else:
            self._below.close()
            _KEPT.append(self._opened.pop_all())

    def _running(self) -> Stager:
        if self._stager is None or self._closed:
            raise TransportFailure(f"the {self.name} transport is {'closed' if self._closed else 'not open'}")
        return self._stager

    def _make(self, slots: Slots) -> None:
        """Once. Raises TransportFailure without memory to pin."""
        with self._lock:
            if slots.made:
                return
            try:
                slots.make(self._below)
            except (CudaFailure, OSError) as error:
                raise TransportFailure(f"{self.name}: no slots: {error}; free pinned memory") from error
            if slots is self._received:
                self._below.guard(slots.as_blocks())

    def _inviting(self) -> Stager:
        """With slots to receive in. Raises TransportUnavailable without a buffer, TransportFailure."""
        stager = self._running()
        if not self._regions:
            raise TransportUnavailable("register a buffer before inviting a peer to it")
        self._make(self._received)
        with self._lock:
            if self._to_guard is not None:
                stager.guard(self._to_guard, self._open_blocks(self._to_guard))
                self._to_guard = None
        return stager


_KEPT: list[contextlib.ExitStack] = []
"""Until the process ends: the GPU may still use it."""


class StagedMapped(StagedTransport):
    """On one host, where CUDA IPC does not share the memory, or there are no kernels."""

    name = "staged-mapped"
    kind = "mapped"
    trust = "pool"
    below_class = MappedTransport


class StagedUcx(StagedTransport):
    """Between hosts with RDMA whose cards do not reach the GPU's memory."""

    name = "staged-ucx"
    kind = "ucx"
    trust = "process"
    below_class = UcxTransport


class StagedTcp(StagedTransport):
    """Between any hosts."""

    name = "staged-tcp"
    kind = "tcp"
    trust = "blocks"
    below_class = TcpTransport
