"""`Stager`: moves batches through slots at both ends. It has no thread: `poll` does what there is to be done.

    writer (`writer.py`)   WANTED -granted-> GATHERING -gathered-> PUTTING -put-> TOLD -placed-> done
    owner (`owner.py`)     GRANTED -filled-> ARRIVED -begun-> SCATTERING -scattered-> PLACED, and free again

A batch is cut into what a slot holds. That waits for a slot of the owner's (`credit.py`); then the GPU gathers that
into one of ours, and behind the event the transport below puts it into the owner's, or the GPU gathers into the
owner's at once. Told that a slot is filled, the owner checks it, the GPU scatters it into the pages, and behind the
event the writer hears it. So several slots are on their way at once, and only the gather of the first and
the scatter of the last one do not overlap with the network. Nothing is gathered before the owner has room:
back-pressure.

What the GPU has in flight rings a descriptor that `fileno` covers, as the transport below does; deadlines, and copies
whose end nobody rings for after a failure, are looked at in every `poll`.

The fence is here: no byte reaches a page but by a scatter of the owner's own. PeerClosed follows the end of the last
one, and the fence of the transport below, behind which no slot can be written any more. After a failure in a kernel
the context is dead, and with it every peer of the lane. Whether the stores of that kernel have ended is not known
then, so what it uses is never freed.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from pdlink.cuda.copies import Copies
from pdlink.cuda.driver import CudaFailure
from pdlink.errors import ProtocolError, TransportFailure
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed, TransportNote
from pdlink.transport.staging import wire
from pdlink.transport.staging.dense import Pages, cut
from pdlink.transport.staging.owner import Owner
from pdlink.transport.staging.peers import ArrivedSlot, OutgoingSlot, Owning, StagedBatch, StagingPeer, WritingTo
from pdlink.transport.staging.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.cuda.launches import Launches
    from pdlink.cuda.ways import Ways
    from pdlink.kv.groups import KVGroups
    from pdlink.kv.layout import KVLayout
    from pdlink.kv.plan import Plan, Template
    from pdlink.transport.base import Transport
    from pdlink.transport.staging.open_blocks import OpenBlocks
    from pdlink.transport.staging.slots import OwnersSlots, Slots

_CLOSE_LOOK_S = 0.01
_MOST_TEMPLATES = 64
"""Of a peer, which has one for each group."""

_ABANDONED: list[dict[str, StagingPeer]] = []
"""Their memory stays mapped until the process ends: the GPU may still use it."""


class Stager:
    def __init__(
        self,
        device: Device,
        kernels: Kernels | None,
        ways: Ways,
        gathered: Slots,
        received: Slots,
        below: Transport,
        regions: list[tuple[int, int]],
    ) -> None:
        """gathered, received: made before a peer needs them. below: open. regions: address and bytes of each device
        buffer. Raises CudaFailure, CudaUnavailable, OSError."""
        self._pid, self._below = os.getpid(), below
        self._lock = threading.Lock()
        self._peers: dict[str, StagingPeer] = {}
        self._lost_early: dict[str, str] = {}
        """Peers that `below` lost between its `connect` and ours, and why; until it has closed them."""
        self._reports: list[Occurrence] = []
        self._next = 1
        self._broken = ""
        self._closed = False
        self._streams: tuple[Launches[Any], ...] = ()
        """What is in flight on them has a `peer`."""
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._bell)
            self._epoll = select.epoll()
            made.callback(self._epoll.close)
            for fd in (self._wake, self._bell, below.fileno()):
                self._epoll.register(fd, select.EPOLLIN)
            gathers: Copies[OutgoingSlot] = Copies(device, kernels, self._bell, gathered.count, ways.to_host_nbytes)
            made.callback(gathers.close)
            scatters: Copies[ArrivedSlot] = Copies(device, kernels, self._bell, received.count, ways.to_device_nbytes)
            self._streams = (gathers, scatters)
            made.pop_all()
        self._gathered, self._regions = gathered, regions
        self._writer = Writer(gathers, gathered, below, regions, self._report_batch, self._fail, self._say)
        self._owner = Owner(scatters, received, below, regions, self._peers, self._say)

    # -- Any thread --------------------------------------------------------------------------------------------------

    def invite(self, name: str) -> None:
        """Raises ValueError for a name in use."""
        with self._usable():
            peer = self._peer_for(name)
            if peer.owning is not None:
                raise ValueError(f"peer name {name} is used twice")
            peer.owning = Owning()

    def connect(self, name: str, there: wire.Invitation, direct: OwnersSlots | None) -> None:
        """After `below` has begun to connect. direct: its owner's if this raises: ValueError for a name in use,
        TransportFailure if `below` has lost the peer since."""
        with self._usable():
            if name in self._lost_early:
                raise TransportFailure(self._lost_early[name])
            peer = self._peer_for(name)
            if peer.writing is not None:
                raise ValueError(f"peer name {name} is used twice")
            peer.writing = WritingTo(there, direct)

    def submit(self, name: str, plan: Plan, layers: range, timeout_s: float) -> int:
        """Raises ValueError for layouts that do not fit the regions or the slots."""
        submitted_s = time.monotonic()
        with self._usable():
            writing, peer = self._writable(name), self._peers[name]
            pages = self._pages_of(plan.template, writing)
            rest = cut(plan, layers, min(self._gathered.nbytes, writing.there.slot_nbytes))
            nbytes = sum(plan.layer_nbytes(layer) for layer in layers)
            by_s = submitted_s + timeout_s
            batch = StagedBatch(self._number(), nbytes, submitted_s, by_s, plan, pages, rest)
            peer.open[batch.ticket] = batch
            if rest:
                self._writer.add(peer, writing, batch)
            else:
                self._report_batch(peer, batch, BatchStatus.OK, "")
            self._kick()
            return batch.ticket

    def heard(self, name: str, data: bytes) -> None:
        """A note of the peer's: what it says is done in the next `poll`. Raises ProtocolError."""
        if self._forked():
            return
        with self._lock:
            peer = self._peers.get(name)
            if peer is None or not peer.usable or self._broken:
                return
            note = wire.decode(data)
            if isinstance(note, wire.Grant | wire.SlotPlaced):
                if peer.writing is None:
                    raise ProtocolError(f"{type(note).__name__} came from a peer that has not invited us")
                self._writer.on_note(peer, peer.writing, note)
            else:
                if peer.owning is None:
                    raise ProtocolError(f"{type(note).__name__} came from a peer that is not invited")
                self._owner.on_note(peer, peer.owning, note)
            self._kick()

    def guard(self, groups: KVGroups, open_blocks: OpenBlocks) -> None:
        """Once, before anybody is invited."""
        with self._lock:
            self._owner.guard(groups, open_blocks)

    def open_blocks(self, name: str, blocks: Sequence[Sequence[int]]) -> None:
        with self._lock:
            peer = self._peers.get(name)
            if self._owner.open_blocks is not None and peer is not None:
                self._owner.open_blocks.open(peer.number, blocks)

    def close_blocks(self, name: str, blocks: Sequence[Sequence[int]]) -> None:
        """Raises TransportFailure if something is being placed there."""
        with self._lock:
            peer = self._peers.get(name)
            if self._owner.open_blocks is not None and peer is not None:
                numbers = self._owner.open_blocks.close(peer.number, blocks)
                if peer.unfinished or self._owner.places(peer, numbers):
                    raise TransportFailure(f"the GPU copies into closed blocks{self._broken and ': '}{self._broken}")

    def connected(self, name: str) -> bool:
        with self._lock:
            peer = self._peers.get(name)
            return peer is not None and peer.writing is not None and not peer.failure

    def close_peer(self, name: str) -> None:
        if self._forked():
            return
        with self._lock:
            peer = self._peers.get(name)
            if peer is not None:
                self._begin_closing(peer)
                self._kick()

    def poll(self) -> list[Occurrence]:
        """Do what there is to be done."""
        if self._forked():
            return []
        with self._lock:
            if not self._closed:
                self._turn()
            reports, self._reports = self._reports, []
            return reports

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self, grace_s: float) -> bool:
        """Close every peer, and wait at most `grace_s` for what is in flight and for others.

        False if the GPU may still be copying: what it uses is not freed, and the device must stay open.
        """
        if self._forked():
            return False
        by_s = time.monotonic() + grace_s
        with self._lock:
            for peer in self._peers.values():
                self._begin_closing(peer)
        with contextlib.suppress(Exception):  # it is closed because it cannot be polled
            while True:
                with self._lock:
                    self._turn()
                    if not self._peers or time.monotonic() >= by_s:
                        break
                self._epoll.poll(_CLOSE_LOOK_S)
        with self._lock:
            self._closed = True
            self._kick()
            if self._broken or self._is_busy() or any(peer.unfinished for peer in self._peers.values()):
                for stream in self._streams:
                    stream.abandon()
                _ABANDONED.append(self._peers)
                return False
            self._epoll.unregister(self._below.fileno())
            for peer in self._peers.values():
                if peer.writing is not None:
                    peer.writing.unpin()
            for stream in self._streams:
                stream.close()
            weakref.finalize(self, _close, self._epoll, self._wake, self._bell)  # `fileno` is valid until then
            return True

    # -- With the lock held ------------------------------------------------------------------------------------------

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        if self._forked():
            raise TransportFailure("this transport belongs to the parent of this forked process; open one here")
        with self._lock:
            if self._closed:
                raise TransportFailure("the transport is closed")
            if self._broken:
                raise TransportFailure(f"the GPU has failed: {self._broken}")
            yield

    def _peer_for(self, name: str) -> StagingPeer:
        """Raises ValueError for a name in use."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = StagingPeer(name, self._number())
        if not peer.usable:
            raise ValueError(f"peer name {name} is used twice")
        return peer

    def _writable(self, name: str) -> WritingTo:
        """Raises TransportFailure."""
        peer = self._peers.get(name)
        if peer is None or peer.closing:
            raise TransportFailure(f"no open peer {name}")
        if peer.failure:
            raise TransportFailure(f"peer {name} has failed: {peer.failure}")
        if peer.writing is None:
            raise TransportFailure(f"not connected to peer {name}")
        return peer.writing

    def _pages_of(self, template: Template, writing: WritingTo) -> Pages:
        """Raises ValueError for a layout that is not inside its regions, or has too many positions."""
        found = writing.pages.get(id(template))
        if found is None:
            _require_inside("source", template.src, [nbytes for _, nbytes in self._regions])
            _require_inside("destination", template.dst, writing.there.regions)
            pages = Pages(template.src)
            pages.require_countable()  # now: in `poll` it would cost all peers
            if len(writing.pages) >= _MOST_TEMPLATES:
                writing.pages.clear()
            found = writing.pages[id(template)] = template, pages
        return found[1]

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _turn(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd in (self._wake, self._bell):
                os.eventfd_read(fd)
            if fd == self._bell:
                for stream in self._streams:
                    stream.rung()
        for one in self._below.poll():
            self._on_below(one)
        if not self._broken:
            try:
                self._writer.go_on()
                self._owner.go_on()
                for stream in self._streams:
                    stream.ring_at_end()
            except (CudaFailure, OSError) as failure:
                self._break(str(failure))
        self._expire()
        self._advance_closing()

    def _on_below(self, one: Occurrence) -> None:
        peer = self._peers.get(one.peer)
        if isinstance(one, BatchDone):
            self._writer.on_put(one)
        elif isinstance(one, PeerClosed):
            self._lost_early.pop(one.peer, None)
            if peer is not None:
                peer.closed_below = True
        elif isinstance(one, PeerFailed):
            if peer is not None:
                self._fail(peer, one.reason, BatchStatus.PEER_FAILED)
            else:
                self._lost_early[one.peer] = one.reason

    def _is_busy(self) -> bool:
        return any(stream.in_flight for stream in self._streams)

    def _copies(self, peer: StagingPeer) -> bool:
        """Whether the GPU copies for this peer."""
        return any(launch.work.peer is peer for stream in self._streams for launch in stream.in_flight)

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if not peer.failure and any(batch.deadline_s <= now for batch in peer.open.values()):
                self._fail(peer, "batch deadline passed", BatchStatus.TIMEOUT)

    def _fail(self, peer: StagingPeer, reason: str, status: BatchStatus) -> None:
        """With TIMEOUT, only the batches that missed their own deadline are TIMEOUT."""
        if peer.failure:
            return
        now = time.monotonic()
        if not peer.closing:
            peer.failure = reason
            self._reports.append(PeerFailed(peer.name, reason))
        for batch in list(peer.open.values()):
            other = status is BatchStatus.TIMEOUT and batch.deadline_s > now
            self._report_batch(peer, batch, BatchStatus.PEER_FAILED if other else status, reason)
        if peer.writing is not None:
            peer.writing.stop()

    def _break(self, reason: str) -> None:
        """The context is dead: nothing that is in flight will be reported."""
        self._broken = reason
        for peer in self._peers.values():
            peer.unfinished |= self._copies(peer)
        for stream in self._streams:
            stream.in_flight.clear()
        for peer in self._peers.values():
            self._fail(peer, f"the GPU has failed: {reason}", BatchStatus.PEER_FAILED)

    def _begin_closing(self, peer: StagingPeer) -> None:
        """Safe to call twice."""
        if peer.closing:
            return
        peer.closing = True
        for batch in list(peer.open.values()):
            self._report_batch(peer, batch, BatchStatus.CANCELLED, "closed by this side")
        if peer.writing is not None:
            peer.writing.stop()
        if peer.owning is not None:
            self._owner.stop(peer, peer.owning)
        self._below.close_peer(peer.name)

    def _advance_closing(self) -> None:
        """Report the peers that are closed and quiet, and forget them."""
        for peer in [peer for peer in self._peers.values() if peer.closing]:
            if peer.closed_below and not self._copies(peer) and not peer.unfinished:
                if peer.writing is not None:
                    peer.writing.unpin()
                del self._peers[peer.name]
                self._owner.forget(peer)
                self._reports.append(PeerClosed(peer.name))

    def _report_batch(self, peer: StagingPeer, batch: StagedBatch, status: BatchStatus, detail: str) -> None:
        del peer.open[batch.ticket]
        now = time.monotonic()
        self._reports.append(BatchDone(batch.ticket, peer.name, status, batch.nbytes, batch.submitted_s, now, detail))

    def _say(self, peer: StagingPeer, note: wire.Note) -> None:
        self._reports.append(TransportNote(peer.name, wire.encode(note)))


def _require_inside(side: str, layout: KVLayout, regions: Sequence[int]) -> None:
    for region in {part.region for layer in layout.layers for part in layer.parts}:
        if region >= len(regions) or layout.extent(region) > regions[region]:
            sizes = f"{layout.extent(region)} bytes of region {region}"
            raise ValueError(f"{side} layout takes {sizes}; regions have {[*regions][:8]}")


def _close(epoll: select.epoll, *fds: int) -> None:
    epoll.close()
    for fd in fds:
        os.close(fd)
