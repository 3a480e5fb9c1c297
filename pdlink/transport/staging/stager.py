"""`Stager`: moves batches through slots at both ends, in one thread that sleeps while nothing is to be done.

Writer (`writer.py`): a batch is cut into what a slot holds. That waits for a slot of the owner's (`credit.py`) and
for one of ours; then the GPU gathers its runs into our slot, and behind the event the transport below puts the slot
into the owner's. Owner (`owner.py`): told that a slot is filled, it checks every run, the GPU scatters them into the
pages, and behind the event the writer hears it and the slot is free. So several slots are on their way at once, and
only the gather of the first and the scatter of the last one do not overlap with the network. Nothing is gathered
before the owner has room: back-pressure.

The fence is here: no byte reaches a page but by a scatter of the owner's own. PeerClosed follows the end of the last
one, and the fence of the transport below, behind which no slot can be written any more. A writer's PeerClosed waits
for the owner to end the connection, which it does when it has placed all that it had begun to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from pdlink.cuda.copies import Copies
from pdlink.cuda.driver import CudaFailure
from pdlink.errors import ProtocolError, TransportFailure
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed
from pdlink.transport.staging import wire
from pdlink.transport.staging.door import Door
from pdlink.transport.staging.line import StagingLine
from pdlink.transport.staging.owner import Owner
from pdlink.transport.staging.peers import ArrivedSlot, FilledSlot, Owning, StagedBatch, StagingPeer, WritingTo
from pdlink.transport.staging.rest import RestOfBatch
from pdlink.transport.staging.writer import Writer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.cuda.ways import Ways
    from pdlink.kv.layout import RunList
    from pdlink.transport.base import Transport
    from pdlink.transport.staging.open_blocks import OpenBlocks
    from pdlink.transport.staging.slots import Slots

log = logging.getLogger(__name__)

CLOSE_WAIT_S: Final = 10.0
"""How long a writer waits for an owner to end the connection."""
PLACED_WAIT_S: Final = 0.5
"""How long `close_blocks` waits, in the endpoint's loop, for a copy of some megabytes."""
_LOOK_S: Final = 0.25
"""Poll interval of the GPU's work: after a failure no host function runs."""


class Stager:
    """Callers of any thread put work into tables under one lock; only `close` waits for the thread."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels | None,
        ways: Ways,
        slots: Slots,
        below: Transport,
        listen: socket.socket,
        regions: list[tuple[int, int]],
    ) -> None:
        """Starts the thread. below: open, its region 0 are the slots. listen: is closed here. regions: address and
        bytes of each device buffer. Raises CudaFailure, CudaUnavailable, OSError."""
        self._below = below
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._placed = threading.Condition(self._lock)
        """Notified when slots have been placed."""
        self._peers: dict[str, StagingPeer] = {}
        self._lines: dict[int, StagingPeer] = {}
        """By descriptor."""
        self._reports: list[Occurrence] = []
        self._next = 1
        self._broken = ""
        self._give_up_s: float | None = None
        self._stopped = False
        """Nothing more will be placed."""
        self._died = ""
        """Why the thread has ended by itself."""
        self._thread: threading.Thread | None = None
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._told)
            self._epoll = select.epoll()
            made.callback(self._epoll.close)
            for fd in (self._wake, below.fileno()):
                self._epoll.register(fd, select.EPOLLIN)
            gathers: Copies[FilledSlot] = Copies(device, kernels, self._wake, slots.count, ways.to_host_nbytes)
            made.callback(gathers.close)
            scatters: Copies[ArrivedSlot] = Copies(device, kernels, self._wake, slots.count, ways.to_device_nbytes)
            made.pop_all()
        self._door = Door(listen, self._epoll, self._peers)
        self._writer = Writer(gathers, slots, below, regions, self._report_batch, self._fail)
        self._owner = Owner(scatters, slots, below, regions, self._peers, self._on_placed)
        weakref.finalize(self, os.close, self._told)  # what was not fetched before `close` can be fetched after it
        self._thread = threading.Thread(target=self._run, name="pdlink-staging", daemon=True)
        self._thread.start()

    # -- Any thread --------------------------------------------------------------------------------------------------

    def invite(self, name: str) -> tuple[int, bytes]:
        """Session and token. Raises ValueError for a name in use."""
        with self._usable():
            peer = self._peer_for(name)
            if peer.owning is not None:
                raise ValueError(f"peer name {name} is used twice")
            peer.owning = Owning(self._number(), secrets.token_bytes(wire.TOKEN_NBYTES))
            return peer.owning.session, peer.owning.token

    def connect(self, name: str, there: wire.Invitation) -> None:
        """After `below` has begun to connect. Raises ValueError for a name in use, OSError."""
        with self._usable():
            peer = self._peer_for(name)
            if peer.writing is not None:
                raise ValueError(f"peer name {name} is used twice")
            try:
                line = StagingLine.dial(there.host, there.port, self._epoll)
            except BaseException:
                self._begin_closing(peer)
                self._kick()
                raise
            peer.writing = WritingTo(line, there)
            self._lines[line.fd] = peer
            line.send(wire.Hello(there.session, there.token))

    def extents(self, name: str) -> list[tuple[int, int]]:
        """Regions of the peer, counted from 0 each. Raises TransportFailure if it cannot be written."""
        with self._usable():
            return [(0, nbytes) for nbytes in self._writable(name).there.regions]

    def submit(self, name: str, lists: Sequence[RunList], timeout_s: float) -> int:
        """lists: inside the regions of both sides."""
        submitted_s, rest = time.monotonic(), RestOfBatch(lists)
        with self._usable():
            writing, peer = self._writable(name), self._peers[name]
            batch = StagedBatch(self._number(), rest, rest.nbytes, submitted_s, submitted_s + timeout_s)
            writing.open[batch.ticket] = batch
            if batch.nbytes:
                self._writer.add(peer, writing, batch)
                self._go_on()
            else:
                self._report_batch(peer, batch, BatchStatus.OK, "")
            if all(batch.deadline_s <= other.deadline_s for other in writing.open.values()):
                self._kick()  # its deadline is the next one; mostly that of an older batch is
            return batch.ticket

    def guard(self, open_blocks: OpenBlocks) -> None:
        """Once."""
        with self._lock:
            self._owner.guard = open_blocks

    def open_blocks(self, name: str, blocks: Sequence[Sequence[int]]) -> None:
        with self._lock:
            peer = self._peers.get(name)
            if self._owner.guard is not None and peer is not None:
                self._owner.guard.open(peer.number, blocks)

    def close_blocks(self, name: str, blocks: Sequence[Sequence[int]]) -> None:
        """Waits for what is being placed there. Raises TransportFailure if that takes too long, or never ends."""
        with self._lock:
            peer = self._peers.get(name)
            if self._owner.guard is not None and peer is not None:
                numbers = self._owner.guard.close(peer.number, blocks)

                def quiet() -> bool:
                    return self._stopped or bool(self._broken) or not self._owner.places(peer, numbers)

                if not self._placed.wait_for(quiet, PLACED_WAIT_S):
                    raise TransportFailure(f"the GPU still copies into closed blocks after {PLACED_WAIT_S} s")
                if peer.unfinished or self._owner.places(peer, numbers):  # the GPU may go on
                    raise TransportFailure(f"the GPU may still copy into closed blocks: {self._broken or 'closed'}")

    def connected(self, name: str) -> bool:
        with self._lock:
            peer = self._peers.get(name)
            return peer is not None and peer.writing is not None and not peer.failure

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
        """Close every peer, wait at most `grace_s`, end the thread.

        False if the GPU may still be copying: the slots are not freed, and the device must stay open.
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
        self._door.close()
        for peer in self._peers.values():
            for line in _lines_of(peer):
                line.close()
        self._epoll.close()
        both: tuple[Copies[FilledSlot] | Copies[ArrivedSlot], ...] = (self._writer.copies, self._owner.copies)
        if self._broken or any(one.in_flight for one in both):
            for one in both:
                one.abandon()
            return False
        for one in both:
            one.close()
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

    def _peer_for(self, name: str) -> StagingPeer:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = StagingPeer(name, self._number())
        if peer.closing or peer.failure:
            raise ValueError(f"peer name {name} is used twice")
        return peer

    def _writable(self, name: str) -> WritingTo:
        peer = self._peers.get(name)
        if peer is None or peer.closing:
            raise TransportFailure(f"no open peer {name}")
        if peer.failure:
            raise TransportFailure(f"peer {name} has failed: {peer.failure}")
        if peer.writing is None:
            raise TransportFailure(f"not connected to peer {name}")
        return peer.writing

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    # -- The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  the outermost frame: `poll` raises it
            log.exception("the thread of the staging lane has died")
            with self._lock:
                self._died = f"the thread of the staging lane has died: {type(error).__name__}: {error}"
                self._stopped = True
                with contextlib.suppress(Exception):  # the same failure may come again
                    self._break(self._died)
                self._broken = self._died
                self._placed.notify_all()
                os.eventfd_write(self._told, 1)

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._go_on()
                self._expire()
                self._advance_closing()
                now = time.monotonic()
                if self._give_up_s is not None and (not self._peers or now >= self._give_up_s):
                    self._stopped = True
                    self._placed.notify_all()
                    return
                wait_s = self._next_look_s(now)
            for fd, mask in self._epoll.poll(wait_s):
                with self._lock:
                    self._on_ready(fd, mask)

    def _on_ready(self, fd: int, mask: int) -> None:
        if fd == self._wake:
            os.eventfd_read(self._wake)
            self._writer.copies.rung()
            self._owner.copies.rung()
        elif fd == self._below.fileno():
            for one in self._below.poll():
                self._on_below(one)
        elif self._door.waits(fd):
            peer = self._door.hear(fd)
            if peer is not None and peer.owning is not None and peer.owning.line is not None:
                self._lines[fd] = peer
                self._on_line(peer, peer.owning.line)
        elif fd in self._lines:
            peer = self._lines[fd]
            line = next(one for one in _lines_of(peer) if one.fd == fd)
            if mask & select.EPOLLOUT:
                line.flush()
            if mask & ~select.EPOLLOUT:
                self._on_line(peer, line)
        else:
            self._door.accept(fd)

    def _on_below(self, one: Occurrence) -> None:
        peer = self._peers.get(one.peer)
        if isinstance(one, BatchDone):
            self._writer.on_put(one)
        elif peer is not None and isinstance(one, PeerClosed):
            peer.closed_below = True
        elif peer is not None and isinstance(one, PeerFailed):
            self._fail(peer, one.reason, BatchStatus.PEER_FAILED)

    def _next_look_s(self, now: float) -> float | None:
        looks = [
            batch.deadline_s - now
            for peer in self._peers.values()
            if peer.writing is not None
            for batch in peer.writing.open.values()
        ]
        looks += [until_s - now for until_s in self._door.until_s]
        looks += [peer.give_up_s - now for peer in self._peers.values() if peer.closing and peer.give_up_s > now]
        if self._writer.copies.in_flight or self._owner.copies.in_flight:
            looks.append(_LOOK_S)
        if self._give_up_s is not None:
            looks.append(self._give_up_s - now)
        return max(0.0, min(looks)) if looks else None

    def _go_on(self) -> None:
        """See what the GPU has copied, and begin what can be."""
        if self._broken:
            return
        try:
            self._writer.go_on()
            self._owner.go_on()
        except (CudaFailure, OSError) as failure:
            self._break(str(failure))

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            batches = peer.writing.open.values() if peer.writing is not None else ()
            if not peer.failure and any(batch.deadline_s <= now for batch in batches):
                self._fail(peer, "batch deadline passed", BatchStatus.TIMEOUT)
        self._door.expire(now)

    def _on_placed(self, peer: StagingPeer) -> None:
        self._end_owning(peer)
        self._placed.notify_all()

    def _end_owning(self, peer: StagingPeer) -> None:
        """End the connection of a writer that has ended it, or is closed, once nothing of it is being placed."""
        owning = peer.owning
        if owning is None or owning.line is None or self._copies(peer):
            return
        if owning.line.ended or peer.closing:
            self._drop_line(owning.line)
            owning.line = None

    def _copies(self, peer: StagingPeer) -> bool:
        """Whether the GPU copies for this peer."""
        return any(one.work.peer is peer for one in self._writer.copies.in_flight) or any(
            one.work.peer is peer for one in self._owner.copies.in_flight
        )

    def _on_line(self, peer: StagingPeer, line: StagingLine) -> None:
        writing, owning = peer.writing, peer.owning
        try:
            for frame in line.frames():
                if writing is not None and line is writing.line:
                    if not peer.closing and not peer.failure:
                        self._writer.on_frame(peer, writing, frame)
                elif owning is not None and not peer.closing:
                    self._owner.on_frame(peer, owning, frame)
        except ProtocolError as error:
            log.warning("staging lane of peer %s: %s", peer.name, error)
            if writing is not None and line is writing.line:
                self._fail(peer, str(error), BatchStatus.PEER_FAILED)
            else:
                line.stop()
        if line.ended:
            if writing is not None and line is writing.line:
                if not peer.failure and not peer.closing:
                    self._fail(peer, "peer closed", BatchStatus.PEER_FAILED)
            elif owning is not None:
                owning.arrived.clear()  # it is told of no failure by a writer that has left, and needs none
                self._placed.notify_all()
                self._end_owning(peer)

    def _drop_line(self, line: StagingLine) -> None:
        self._lines.pop(line.fd, None)
        line.close()

    def _fail(self, peer: StagingPeer, reason: str, status: BatchStatus) -> None:
        """With TIMEOUT, only the batches that missed their own deadline are TIMEOUT."""
        writing = peer.writing
        if peer.failure or writing is None:
            return
        if not peer.closing:
            peer.failure = reason
            self._report(PeerFailed(peer.name, reason))
        now = time.monotonic()
        for batch in list(writing.open.values()):
            other = status is BatchStatus.TIMEOUT and batch.deadline_s > now
            self._report_batch(peer, batch, BatchStatus.PEER_FAILED if other else status, reason)
        self._stop_writing(writing)

    @staticmethod
    def _stop_writing(writing: WritingTo) -> None:
        writing.queue.clear()
        writing.staged.clear()
        writing.grants.clear()
        writing.line.end()

    def _break(self, reason: str) -> None:
        """The context is dead: no copy will be reported."""
        self._broken = reason
        for peer in self._peers.values():
            peer.unfinished = self._copies(peer)
        self._writer.copies.in_flight.clear()
        self._owner.copies.in_flight.clear()
        for peer in self._peers.values():
            self._fail(peer, f"the GPU has failed: {reason}", BatchStatus.PEER_FAILED)
            if peer.owning is not None and peer.owning.line is not None:
                self._drop_line(peer.owning.line)
                peer.owning.line = None
        self._placed.notify_all()

    def _begin_closing(self, peer: StagingPeer) -> None:
        if peer.closing:
            return
        peer.closing, peer.give_up_s = True, time.monotonic() + CLOSE_WAIT_S
        if peer.writing is not None:
            for batch in list(peer.writing.open.values()):
                self._report_batch(peer, batch, BatchStatus.CANCELLED, "closed by this side")
            self._stop_writing(peer.writing)
        if peer.owning is not None:
            peer.owning.arrived.clear()
            self._placed.notify_all()
        self._below.close_peer(peer.name)

    def _advance_closing(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._peers.values() if peer.closing]:
            self._end_owning(peer)
            writing = peer.writing
            waits = writing is not None and not writing.line.ended and now < peer.give_up_s
            if not peer.closed_below or waits or self._copies(peer) or peer.unfinished:
                continue
            if writing is not None:
                self._drop_line(writing.line)
            del self._peers[peer.name]
            self._owner.forget(peer)
            self._report(PeerClosed(peer.name))

    def _report_batch(self, peer: StagingPeer, batch: StagedBatch, status: BatchStatus, detail: str) -> None:
        assert peer.writing is not None
        del peer.writing.open[batch.ticket]
        now = time.monotonic()
        self._report(BatchDone(batch.ticket, peer.name, status, batch.nbytes, batch.submitted_s, now, detail))

    def _report(self, occurrence: Occurrence) -> None:
        if not self._reports:
            os.eventfd_write(self._told, 1)
        self._reports.append(occurrence)


def _lines_of(peer: StagingPeer) -> list[StagingLine]:
    lines = [peer.writing.line if peer.writing is not None else None]
    lines.append(peer.owning.line if peer.owning is not None else None)
    return [line for line in lines if line is not None]
