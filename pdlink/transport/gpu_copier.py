"""What puts batches of runs into peers' device memory, one kernel launch each, and the thread that sees them end.

It is what `csrc/copy/copier.h` is for host memory, with two differences. A copy is not done when the call returns: a
launch is *in flight* until the event behind it is reached, and a kernel cannot be called off. And the data moves by
itself, so the thread has time to be Python. `submit` launches at once while a slot is free: one native call
(csrc/cuda/launcher.h), no change of threads. What is left is launched by the thread when a slot has become free.

Order. A batch is one launch, or several if it is larger than any layer. The gate of the destination
(csrc/common/gate.h) is entered before a launch and left when its event is reached: the owner's PeerClosed comes after
the last store of the last kernel. `cuda.launches` rings when the oldest launch in flight has run, and the thread
collects all that have ended. Nothing polls while nothing happens. Peers take turns, a launch each.

Faults. After a failure in a kernel the context is dead, and with it every peer of this transport; whether the stores
of that kernel have ended is not known then, so those gates stay entered until this process ends (a dead writer is
quiet).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from pdlink import _cuda
from pdlink.cuda.driver import CudaFailure
from pdlink.cuda.launches import Launches
from pdlink.errors import TransportFailure
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed
from pdlink.transport.gpu_batches import GpuBatch, GpuLaunch, GpuPeer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.transport.gpu_batches import PeerMemory

LAUNCH_NBYTES: Final = 256 << 20
"""Longer than a layer of any model, so that a layer is one launch. How long one takes is not measured."""

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
"""Poll interval of launches in flight: after a failure no host function runs."""
_QUIET_LOOKS_S: Final = (0.0005, 0.02)
"""Shortest and longest time between two looks at a gate that has to become quiet."""


class GpuCopier:
    """Callers of any thread put work into tables under one lock and wake the thread; only `close` waits for it."""

    def __init__(self, device: Device, kernels: Kernels, launch_nbytes: int = LAUNCH_NBYTES) -> None:
        """Starts the thread. Raises CudaFailure, CudaUnavailable, OSError."""
        self._launch_nbytes = launch_nbytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._peers: dict[str, GpuPeer] = {}
        self._turns: deque[GpuPeer] = deque()
        self._reports: list[Occurrence] = []
        self._next_ticket = 1
        self._broken = ""
        self._died = ""
        """Why the thread has ended by itself."""
        self._quiet_look_s = _QUIET_LOOKS_S[0]
        self._give_up_s: float | None = None
        """Set once closing down: when to stop waiting for others."""
        self._lives: dict[int, GpuPeer] = {}
        """By the descriptor of the peer's life."""
        self._thread: threading.Thread | None = None
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._told)
            self._epoll = select.epoll()
            made.callback(self._epoll.close)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._launches: Launches[GpuLaunch] = Launches(device, kernels, self._wake)
            made.pop_all()
        weakref.finalize(self, os.close, self._told)  # what was not fetched before `close` can be fetched after it
        self._thread = threading.Thread(target=self._run, name="pdlink-gpu-copy", daemon=True)
        self._thread.start()

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
            batch = GpuBatch(self._next_ticket, submitted_s, submitted_s + timeout_s, runs.nbytes, runs)
            self._next_ticket += 1
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

    def close_peer(self, name: str) -> None:
        if self._forked():
            return
        with self._lock:
            peer = self._peers.get(name)
            if peer is not None and self._thread is not None:
                self._begin_closing(peer)
                self._kick()

    def poll(self) -> list[Occurrence]:
        if self._forked():
            return []
        with self._lock:
            reports, self._reports = self._reports, []
            if self._died and not reports:
                raise TransportFailure(self._died)
            if reports and not self._died:
                os.eventfd_read(self._told)
            return reports

    def fileno(self) -> int:
        return self._told

    def close(self, grace_s: float) -> bool:
        """Close every peer, wait at most `grace_s` for launches in flight and for writers here, end the thread.

        False if a kernel may still be running: what it uses is not freed, and the device must stay open.
        """
        if self._forked():
            return False
        with self._lock:
            thread, self._thread = self._thread, None
            self._give_up_s = time.monotonic() + grace_s
            for peer in self._peers.values():
                self._begin_closing(peer)
            self._kick()
        if thread is None:
            return False
        thread.join()
        if self._launches.in_flight or any(peer.unfinished for peer in self._peers.values()):
            self._launches.abandon()
            return False
        self._launches.close()
        self._epoll.close()
        os.close(self._wake)
        return True

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        if self._forked():
            raise TransportFailure("this transport belongs to the parent of this forked process; open one here")
        with self._lock:
            if self._thread is None:
                raise TransportFailure("the transport is closed")
            if self._broken:
                raise TransportFailure(f"the GPU has failed: {self._broken}")
            yield

    def _peer_for(self, name: str) -> GpuPeer:
        peer = self._peers.setdefault(name, GpuPeer(name))
        if peer.closing or peer.failure:
            raise ValueError(f"peer name {name} is used twice")
        return peer

    def _writable(self, name: str) -> PeerMemory:
        peer = self._peers.get(name)
        if peer is None or peer.closing:
            raise TransportFailure(f"no open peer {name}")
        if peer.failure:
            raise TransportFailure(f"peer {name} has failed: {peer.failure}")
        if peer.memory is None:
            raise TransportFailure(f"not connected to peer {name}")
        return peer.memory

    def _begin_closing(self, peer: GpuPeer) -> None:
        if not peer.closing:
            peer.closing = True
            self._quiet_look_s = _QUIET_LOOKS_S[0]
            if peer.gate is not None:
                peer.gate.shut()

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    # -- The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  the outermost frame: `poll` raises it
            log.exception("the thread of the lane between GPUs has died")
            with self._lock:
                self._died = f"the thread of the lane between GPUs has died: {type(error).__name__}: {error}"
                with contextlib.suppress(Exception):  # the same failure may come again
                    self._break(self._died)
                self._broken = self._died
                os.eventfd_write(self._told, 1)

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._go_on(look=True)
                self._expire()
                self._advance_closing()
                now = time.monotonic()
                if self._give_up_s is not None and (not self._peers or now >= self._give_up_s):
                    return
                wait_s = self._next_look_s(now)
            for fd, _ in self._epoll.poll(wait_s):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    self._launches.rung()
                else:
                    with self._lock:
                        self._on_death(fd)

    def _go_on(self, *, look: bool) -> None:
        """See what has run, if `look`, launch what can be, and have the oldest launch in flight ring at its end."""
        try:
            if look:
                self._collect()
            self._launch()
            self._launches.ring_at_end()
        except (CudaFailure, OSError) as failure:
            self._break(str(failure))

    def _next_look_s(self, now: float) -> float | None:
        """Seconds to sleep at most; None until something happens."""
        looks = [peer_batch.deadline_s - now for peer in self._peers.values() for peer_batch in peer.open.values()]
        if self._launches.in_flight:
            looks.append(_LOOK_S)
        if any(peer.closing for peer in self._peers.values()):
            looks.append(self._quiet_look_s)
            self._quiet_look_s = min(2 * self._quiet_look_s, _QUIET_LOOKS_S[1])
        if self._give_up_s is not None:
            looks.append(self._give_up_s - now)
        return max(0.0, min(looks)) if looks else None

    def _collect(self) -> None:
        for work in self._launches.take_ended():
            if work.gated:
                work.memory.gate.leave()
            work.memory.in_flight -= 1
            if work.last and work.batch.ticket in work.peer.open:
                self._report_batch(work.peer, work.batch, BatchStatus.OK, "")
            self._close_unused(work.memory)

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if not peer.failure and any(batch.deadline_s <= now for batch in peer.open.values()):
                self._fail(peer, "batch deadline passed", BatchStatus.TIMEOUT)

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

    def _on_death(self, life_fd: int) -> None:
        peer = self._lives.get(life_fd)
        if peer is None or peer.memory is None:
            return
        self._unwatch(life_fd)
        if not peer.closing:
            self._fail(peer, f"process {peer.memory.pid} has ended", BatchStatus.PEER_FAILED)

    def _fail(self, peer: GpuPeer, reason: str, status: BatchStatus) -> None:
        """With TIMEOUT, only the batches that missed their own deadline are TIMEOUT."""
        now = time.monotonic()
        if not peer.closing:
            peer.failure = reason
            self._report(PeerFailed(peer.name, reason))
        for batch in list(peer.open.values()):
            other = status is BatchStatus.TIMEOUT and batch.deadline_s > now
            self._report_batch(peer, batch, BatchStatus.PEER_FAILED if other else status, reason)
        self._drop_memory(peer)

    def _break(self, reason: str) -> None:
        """The context is dead: no launch of ours will be reported."""
        self._broken = reason
        for launch in self._launches.in_flight:
            launch.work.peer.unfinished = True
        self._launches.in_flight.clear()
        for peer in self._peers.values():
            if not peer.failure and (peer.memory is not None or not peer.closing):
                self._fail(peer, f"the GPU has failed: {reason}", BatchStatus.PEER_FAILED)

    def _advance_closing(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.closing]:
            for batch in list(peer.open.values()):
                if not batch.launched:
                    self._report_batch(peer, batch, BatchStatus.CANCELLED, "closed by this side")
            peer.queue.clear()
            if peer.unfinished or any(launch.work.peer is peer for launch in self._launches.in_flight):
                continue
            self._drop_memory(peer)
            if peer.gate is None or peer.gate.quiet():
                del self._peers[peer.name]
                self._report(PeerClosed(peer.name))

    def _drop_memory(self, peer: GpuPeer) -> None:
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

    def _report_batch(self, peer: GpuPeer, batch: GpuBatch, status: BatchStatus, detail: str) -> None:
        del peer.open[batch.ticket]
        now = time.monotonic()
        self._report(BatchDone(batch.ticket, peer.name, status, batch.nbytes, batch.submitted_s, now, detail))

    def _report(self, occurrence: Occurrence) -> None:
        if not self._reports:
            os.eventfd_write(self._told, 1)
        self._reports.append(occurrence)
