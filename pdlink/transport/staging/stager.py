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

import logging
import secrets
import select
import threading
import time
from typing import TYPE_CHECKING, Final

from pdlink.cuda.copies import Copies
from pdlink.errors import ProtocolError, TransportFailure
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed
from pdlink.transport.staging import wire
from pdlink.transport.staging.door import Door
from pdlink.transport.staging.line import StagingLine
from pdlink.transport.staging.loop import StagingLoop
from pdlink.transport.staging.owner import Owner
from pdlink.transport.staging.peers import ArrivedSlot, FilledSlot, Owning, StagedBatch, StagingPeer, WritingTo
from pdlink.transport.staging.rest import RestOfBatch
from pdlink.transport.staging.writer import Writer

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.cuda.ways import Ways
    from pdlink.kv.layout import RunList
    from pdlink.transport.base import Transport
    from pdlink.transport.staging.open_blocks import OpenBlocks
    from pdlink.transport.staging.slots import OwnersSlots, Slots

log = logging.getLogger(__name__)

CLOSE_WAIT_S: Final = 10.0
"""How long a writer waits for an owner to end the connection."""
PLACED_WAIT_S: Final = 0.5
"""How long `close_blocks` waits, in the endpoint's loop, for a copy of some megabytes."""


class Stager(StagingLoop):
    def __init__(
        self,
        device: Device,
        kernels: Kernels | None,
        ways: Ways,
        gathered: Slots,
        received: Slots,
        below: Transport,
        listen: socket.socket,
        regions: list[tuple[int, int]],
    ) -> None:
        """Starts the thread. gathered, received: made before a peer needs them. below: open. listen: is closed here.
        regions: address and bytes of each device buffer. Raises CudaFailure, CudaUnavailable, OSError."""
        super().__init__()
        self._below = below
        self._placed = threading.Condition(self._lock)
        """Notified when slots have been placed."""
        self._lines: dict[int, StagingPeer] = {}
        """By descriptor."""
        self._stopped = False
        """Nothing more will be placed."""
        try:
            gathers: Copies[FilledSlot] = Copies(device, kernels, self._wake, gathered.count, ways.to_host_nbytes)
            self._streams = (gathers,)
            scatters: Copies[ArrivedSlot] = Copies(device, kernels, self._wake, received.count, ways.to_device_nbytes)
            self._streams = (gathers, scatters)
            self._epoll.register(below.fileno(), select.EPOLLIN)
            self._door = Door(listen, self._epoll, self._peers)
        except BaseException:
            for stream in self._streams:
                stream.close()
            self._release()
            raise
        self._writer = Writer(gathers, gathered, below, regions, self._report_batch, self._fail)
        self._owner = Owner(scatters, received, below, regions, self._peers, self._on_placed)
        self._start()

    # -- Any thread --------------------------------------------------------------------------------------------------

    def invite(self, name: str) -> tuple[int, bytes]:
        """Session and token. Raises ValueError for a name in use."""
        with self._usable():
            peer = self._peer_for(name)
            if peer.owning is not None:
                raise ValueError(f"peer name {name} is used twice")
            peer.owning = Owning(self._number(), secrets.token_bytes(wire.TOKEN_NBYTES))
            return peer.owning.session, peer.owning.token

    def connect(self, name: str, there: wire.Invitation, direct: OwnersSlots | None) -> None:
        """After `below` has begun to connect. direct: its owner's if this raises ValueError, for a name in use, or
        OSError."""
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
            peer.writing = WritingTo(line, there, direct)
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
            batch = StagedBatch(self._number(), rest.nbytes, submitted_s, submitted_s + timeout_s, rest)
            peer.open[batch.ticket] = batch
            if batch.nbytes:
                self._writer.add(peer, writing, batch)
                self._go_on()
            else:
                self._report_batch(peer, batch, BatchStatus.OK, "")
            if all(batch.deadline_s <= other.deadline_s for other in peer.open.values()):
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

    def _writable(self, name: str) -> WritingTo:
        writing = self._open_peer(name).writing
        if writing is None:
            raise TransportFailure(f"not connected to peer {name}")
        return writing

    # -- The thread, and with the lock held any other ----------------------------------------------------------------

    def _work(self, *, look: bool) -> None:  # noqa: ARG002
        self._writer.go_on()
        self._owner.go_on()

    def _on_death(self) -> None:
        self._stopped = True
        self._placed.notify_all()

    def _is_quiet(self) -> bool:
        return super()._is_quiet() and not self._broken  # of a dead context nothing can be unloaded

    def _on_end(self) -> None:
        self._door.close()
        for peer in self._peers.values():
            for line in _lines_of(peer):
                line.close()

    def _on_ready(self, fd: int, mask: int) -> None:
        if fd == self._below.fileno():
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

    def _looks(self, now: float) -> list[float]:
        looks = [until_s - now for until_s in self._door.until_s]
        return looks + [
            peer.give_up_s - now for peer in self._peers.values() if peer.closing and peer.give_up_s > now
        ]

    def _expire(self) -> None:
        super()._expire()
        self._door.expire(time.monotonic())

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
        if peer.writing is not None:
            super()._fail(peer, reason, status)

    def _stop_writing(self, peer: StagingPeer) -> None:
        writing = peer.writing
        if writing is not None:
            writing.queue.clear()
            writing.staged.clear()
            writing.grants.clear()
            writing.line.end()

    def _break(self, reason: str) -> None:
        super()._break(reason)
        for peer in self._peers.values():
            if peer.owning is not None and peer.owning.line is not None:
                self._drop_line(peer.owning.line)
                peer.owning.line = None
        self._placed.notify_all()

    def _begin_closing(self, peer: StagingPeer) -> None:
        if peer.closing:
            return
        peer.closing, peer.give_up_s = True, time.monotonic() + CLOSE_WAIT_S
        for batch in list(peer.open.values()):
            self._report_batch(peer, batch, BatchStatus.CANCELLED, "closed by this side")
        self._stop_writing(peer)
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
                writing.unpin()
            del self._peers[peer.name]
            self._owner.forget(peer)
            self._report(PeerClosed(peer.name))


def _lines_of(peer: StagingPeer) -> list[StagingLine]:
    lines = [peer.writing.line if peer.writing is not None else None]
    lines.append(peer.owning.line if peer.owning is not None else None)
    return [line for line in lines if line is not None]
