"""What puts batches of runs into peers' device memory, one kernel launch each, and the thread that sees them end.

It is what `csrc/copy/copier.h` is for host memory, with two differences. A copy is not done when the call returns: a
launch is *in flight* until the event behind it is reached, and a kernel cannot be called off. And the data moves by
itself, so the thread has time to be Python. `submit` launches at once while a slot is free: one native call
(csrc/cuda/launcher.h), no change of threads. What is left is launched by the thread when a slot has become free.

Order. A batch is one launch, or several if it is larger than any layer. The gate of the destination
(csrc/common/gate.h) is entered before a launch and left when its event is reached: the owner's PeerClosed comes after
the last store of the last kernel. Peers take turns, a launch each. After a failure of the GPU gates stay entered
until this process ends (a dead writer is quiet).
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final

from pdlink import _cuda
from pdlink.cuda.driver import CudaFailure
from pdlink.cuda.launches import Launches
from pdlink.errors import TransportFailure
from pdlink.transport.base import BatchStatus, PeerClosed
from pdlink.transport.gpu_batches import GpuBatch, GpuLaunch, GpuPeer
from pdlink.transport.gpu_lane import GpuLane

if TYPE_CHECKING:
    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.transport.gpu_batches import PeerMemory

LAUNCH_NBYTES: Final = 256 << 20
"""Longer than a layer of any model, so that a layer is one launch. How long one takes is not measured."""

_QUIET_LOOKS_S: Final = (0.0005, 0.02)
"""Shortest and longest time between two looks at a gate that has to become quiet."""


class GpuCopier(GpuLane[GpuPeer]):
    title: ClassVar[str] = "lane between GPUs"
    thread_name: ClassVar[str] = "pdlink-gpu-copy"

    def __init__(self, device: Device, kernels: Kernels, launch_nbytes: int = LAUNCH_NBYTES) -> None:
        """Starts the thread. Raises CudaFailure, CudaUnavailable, OSError."""
        super().__init__()
        self._launch_nbytes = launch_nbytes
        self._turns: deque[GpuPeer] = deque()
        self._quiet_look_s = _QUIET_LOOKS_S[0]
        self._lives: dict[int, GpuPeer] = {}
        """By the descriptor of the peer's life."""
        try:
            self._launches: Launches[GpuLaunch] = Launches(device, kernels, self._wake)
        except BaseException:
            self._release()
            raise
        self._streams = (self._launches,)
        self._start()

    # -- Any thread --------------------------------------------------------------------------------------------------

    def invite(self, name: str) -> _cuda.GateOwner:
        """Raises ValueError for a name in use."""
        gate = _cuda.GateOwner()
        with self._usable():
            peer = self._peer_for(name)
            if peer.gate is not None:
                raise ValueError(f"peer name {name} is used twice")
            peer.gate = gate
        return gate

    def connect(self, name: str, memory: PeerMemory) -> None:
        """The memory belongs to the copier from now on, unless it raises: ValueError for a name in use."""
        with self._usable():
            peer = self._peer_for(name)
            if peer.memory is not None:
                raise ValueError(f"peer name {name} is used twice")
            self._epoll.register(memory.life_fd, select.EPOLLIN)  # first: it may fail
            peer.memory = memory
            self._lives[memory.life_fd] = peer

    def regions(self, name: str) -> list[tuple[int, int]]:
        """Of the peer's memory: (address, nbytes). Raises TransportFailure if it cannot be written."""
        with self._usable():
            return self._writable(name).regions

    def submit(self, name: str, runs: _cuda.RunQueue, timeout_s: float) -> int:
        """The runs are inside `regions(name)` and belong to the copier from now on.

        While others are in flight the deadline is looked at every quarter of a second.
        """
        submitted_s = time.monotonic()
        with self._usable():
            self._writable(name)
            peer = self._peers[name]
            asleep = not self._launches.in_flight
            batch = GpuBatch(self._number(), runs.nbytes, submitted_s, submitted_s + timeout_s, runs)
            peer.queue.append(batch)
            peer.open[batch.ticket] = batch
            if peer not in self._turns:
                self._turns.append(peer)
            self._go_on(look=not self._launches.has_room)
            if asleep or self._broken:
                self._kick()
            return batch.ticket

    def connected(self, name: str) -> bool:
        if self._forked():
            return False
        with self._lock:
            peer = self._peers.get(name)
            return peer is not None and peer.memory is not None

    def _new_peer(self, name: str) -> GpuPeer:
        return GpuPeer(name)

    def _writable(self, name: str) -> PeerMemory:
        memory = self._open_peer(name).memory
        if memory is None:
            raise TransportFailure(f"not connected to peer {name}")
        return memory

    def _begin_closing(self, peer: GpuPeer) -> None:
        if not peer.closing:
            peer.closing = True
            self._quiet_look_s = _QUIET_LOOKS_S[0]
            if peer.gate is not None:
                peer.gate.shut()

    # -- The thread, and with the lock held any other ----------------------------------------------------------------

    def _work(self, *, look: bool) -> None:
        if look:
            self._collect()
        self._launch()

    def _looks(self, now: float) -> list[float]:  # noqa: ARG002
        if not any(peer.closing for peer in self._peers.values()):
            return []
        look_s, self._quiet_look_s = self._quiet_look_s, min(2 * self._quiet_look_s, _QUIET_LOOKS_S[1])
        return [look_s]

    def _collect(self) -> None:
        for work in self._launches.take_ended():
            if work.gated:
                work.memory.gate.leave()
            work.memory.in_flight -= 1
            if work.last and work.batch.ticket in work.peer.open:
                self._report_batch(work.peer, work.batch, BatchStatus.OK, "")
            self._close_unused(work.memory)

    def _launch(self) -> None:
        """A launch for each peer in turn, while there are slots."""
        while self._turns and self._launches.has_room:
            peer = self._turns.popleft()
            memory = peer.memory
            if memory is None or peer.closing or not peer.queue:
                continue
            batch = peer.queue[0]
            work = GpuLaunch(peer, batch, memory, gated=not batch.runs.empty)
            if work.gated and not memory.gate.enter():
                self._fail(peer, "peer closed", BatchStatus.CANCELLED)
                continue
            self._begin(work)
            if work.last:
                peer.queue.popleft()
            if peer.queue:
                self._turns.append(peer)
            if not work.gated:
                self._kick()  # nobody else will

    def _begin(self, work: GpuLaunch) -> None:
        """Launch what is next of its batch, whose gate is entered. Raises CudaFailure: the context is dead."""
        before = len(self._launches.in_flight)
        try:
            if work.gated:
                self._launches.launch_runs(work, work.batch.runs, self._launch_nbytes)
            else:
                self._launches.note(work)
        finally:
            if len(self._launches.in_flight) > before:
                work.memory.in_flight += 1
                work.last = work.batch.launched = work.batch.runs.empty
            elif work.gated:  # nothing is on its way
                work.memory.gate.leave()

    def _on_ready(self, fd: int, mask: int) -> None:  # noqa: ARG002
        """A peer's process has ended."""
        peer = self._lives.get(fd)
        if peer is None or peer.memory is None:
            return
        self._unwatch(fd)
        if not peer.closing:
            self._fail(peer, f"process {peer.memory.pid} has ended", BatchStatus.PEER_FAILED)

    def _advance_closing(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.closing]:
            for batch in list(peer.open.values()):
                if not batch.launched:
                    self._report_batch(peer, batch, BatchStatus.CANCELLED, "closed by this side")
            peer.queue.clear()
            if peer.unfinished or self._copies(peer):
                continue
            self._stop_writing(peer)
            if peer.gate is None or peer.gate.quiet():
                del self._peers[peer.name]
                self._report(PeerClosed(peer.name))

    def _stop_writing(self, peer: GpuPeer) -> None:
        memory, peer.memory = peer.memory, None
        peer.queue.clear()
        if memory is not None:
            self._unwatch(memory.life_fd)
            memory.unused = True
            self._close_unused(memory)

    def _unwatch(self, life_fd: int) -> None:
        if self._lives.pop(life_fd, None) is not None:
            self._epoll.unregister(life_fd)

    def _close_unused(self, memory: PeerMemory) -> None:
        if memory.unused and memory.in_flight == 0:
            with contextlib.suppress(CudaFailure):  # of a dead context: the mapping is gone with it
                memory.close()
