"""`LoopbackTransport`: the null transport. Copies inside one process, with every way to fail as public API.

All state is in a `LoopbackHub` that any number of transports join; there is no thread, and time moves only when the
hub is told so. A test therefore decides each step: which run lands next, which batch fails, who is stopped, who is
dead. The same sequence of calls gives the same sequence of occurrences.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed, Probe, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.capabilities import Reach
    from pdlink.kv.layout import RunArray, RunList
    from pdlink.memory.buffers import AnyBuffer, HostBuffer

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(eq=False)
class Link:
    """One direction: `writer` stores into memory of `owner`."""

    owner: LoopbackTransport
    owner_peer: str
    """The owner's name for the writer."""
    regions: tuple[_Bytes, ...]
    """What the owner had registered when it invited."""
    writer: LoopbackTransport | None = None
    writer_peer: str = ""
    """The writer's name for the owner."""
    shut: bool = False
    """The gate: nothing may be stored any more."""
    busy: bool = False
    """The writer was stopped in the middle of a run; the owner's PeerClosed waits."""


@dataclass(eq=False)
class OpenBatch:
    """One batch on its way."""

    link: Link
    ticket: int
    runs: list[tuple[_Bytes, _Bytes]]
    """(destination view, source view) of each run. The source is read when the run lands."""
    nbytes: int
    submitted_s: float
    deadline_s: float
    num_landed: int = 0
    """Runs that have landed."""
    reported: bool = False


@dataclass
class LoopbackHub:
    """Where loopback transports meet, and the panel of faults.

    Without any fault a batch is copied and reported inside `submit()`. The faults:

    hold        While `hold` is true, a submitted batch stays in `open_batches` and no byte of it moves. `step()`
                lands the next run of the oldest batch (its last one reports the batch OK), `land(batch, n)` the next
                n runs of any batch, `deliver_all()` everything.
    delay       `land(batch, report=False)` lands bytes without ever reporting; `report(batch)` does that later.
    fail_next   The next `n` batches submitted fail with nothing written, and their peer with them.
    tear        `tear(batch, n)` lands n runs, then fails the peer: a destination half old, half new.
    fail_peer   The connection of a transport to a peer breaks: PeerFailed, and every open batch is reported.
    advance     Time passes; a batch whose deadline is reached is a TIMEOUT and fails its peer.
    stop        A transport's process is stopped (SIGSTOP) in the middle of a run: its batches do not move, it reports
                nothing, and the owner's PeerClosed waits. `resume` lets the run that was under way land (into memory
                that the owner has closed but not yet been told it may reuse), then the gate blocks the rest.
    kill        A transport's process is gone: its writers see PeerFailed, it reports nothing any more, and owners it
                was writing to need not wait for it.
    stale_write A run of a batch is stored although that may long be over. A shut gate blocks it.
    """

    hold: bool = False
    fail_next: int = 0
    now_s: float = 0.0
    """The hub's clock, on which deadlines and the times in reports are."""
    open_batches: list[OpenBatch] = field(default_factory=list)
    """Batches that were submitted and not reported, oldest first."""
    _invitations: dict[bytes, Link] = field(default_factory=dict, init=False, repr=False)
    _num_invited: int = field(default=0, init=False, repr=False)
    _num_submitted: int = field(default=0, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def step(self) -> bool:
        """Land the next run of the oldest batch that can move; False if there is none."""
        with self._lock:
            for batch in self.open_batches:
                if self._moves(batch):
                    self.land(batch, 1)
                    return True
            return False

    def deliver_all(self) -> None:
        """Land and report everything that can move."""
        with self._lock:
            for batch in list(self.open_batches):
                self.land(batch)

    def land(self, batch: OpenBatch, num_runs: int | None = None, *, report: bool = True) -> None:
        """Store the next `num_runs` runs of a batch (None: the rest), and report it OK if that was the last one."""
        with self._lock:
            if not self._moves(batch):
                return
            end = len(batch.runs) if num_runs is None else min(len(batch.runs), batch.num_landed + num_runs)
            while batch.num_landed < end:
                if not self._store(batch, batch.num_landed):
                    self.fail_peer(batch.link, "peer closed", BatchStatus.CANCELLED)
                    return
                batch.num_landed += 1
            if report and batch.num_landed == len(batch.runs):
                self._finish(batch, BatchStatus.OK, "")

    def report(self, batch: OpenBatch) -> None:
        """Report a batch whose bytes have landed (see `land(report=False)`)."""
        self.land(batch, 0)

    def tear(self, batch: OpenBatch, num_runs: int, reason: str = "torn") -> None:
        with self._lock:
            self.land(batch, min(num_runs, len(batch.runs)), report=False)
            self.fail_peer(batch.link, reason)

    def fail_peer(self, link: Link, reason: str, status: BatchStatus = BatchStatus.PEER_FAILED) -> None:
        """Break a connection, as its writer sees it."""
        with self._lock:
            writer = link.writer
            if writer is None or writer._out.get(link.writer_peer) is not link:
                return
            if link.writer_peer in writer._failed or link.writer_peer in writer._closing:
                return
            writer._failed[link.writer_peer] = reason
            writer._tell(PeerFailed(link.writer_peer, reason))
            for batch in [batch for batch in self.open_batches if batch.link is link]:
                late = status is BatchStatus.TIMEOUT and batch.deadline_s > self.now_s
                self._finish(batch, BatchStatus.PEER_FAILED if late else status, reason)

    def advance(self, seconds: float) -> None:
        """Let time pass and deadlines with it."""
        with self._lock:
            self.now_s += seconds
            for batch in list(self.open_batches):
                if batch.deadline_s <= self.now_s and self._moves(batch):
                    self.fail_peer(batch.link, "batch deadline passed", BatchStatus.TIMEOUT)

    def stop(self, transport: LoopbackTransport) -> None:
        with self._lock:
            transport._stopped = True
            for batch in self.open_batches:
                if batch.link.writer is transport and not batch.link.shut:
                    batch.link.busy = True

    def resume(self, transport: LoopbackTransport) -> None:
        with self._lock:
            transport._stopped = False
            resumed: list[Link] = []
            for batch in list(self.open_batches):
                link = batch.link
                if link.writer is not transport or not link.busy or link in resumed:
                    continue
                resumed.append(link)
                if batch.num_landed < len(batch.runs):
                    self._copy(batch, batch.num_landed)
                    batch.num_landed += 1
            for link in resumed:
                link.busy = False
                self._settle(link.owner, link.owner_peer)
                if link.shut:
                    self.fail_peer(link, "peer closed", BatchStatus.CANCELLED)
            self.advance(0.0)
            for peer in list(transport._closing):
                transport._end_outgoing(peer)
                self._settle(transport, peer)
            if not self.hold:
                self.deliver_all()

    def kill(self, transport: LoopbackTransport) -> None:
        with self._lock:
            transport._dead = True
            self.open_batches = [batch for batch in self.open_batches if batch.link.writer is not transport]
            for link in list(transport._out.values()):
                link.busy = False
                self._settle(link.owner, link.owner_peer)
            for link in list(transport._in.values()):
                self.fail_peer(link, "process has ended")

    def stale_write(self, batch: OpenBatch, run: int = 0) -> bool:
        """Try to store a run once more, whatever became of its batch; True if it got through."""
        with self._lock:
            return self._store(batch, run)

    def links(self, transport: LoopbackTransport) -> dict[str, Link]:
        """What a transport may write through, by its name for the peer: the handles for `fail_peer`."""
        return dict(transport._out)

    # What the transports call, with the lock held.

    def _moves(self, batch: OpenBatch) -> bool:
        writer = batch.link.writer
        return not batch.reported and writer is not None and not writer._stopped and not writer._dead

    def _store(self, batch: OpenBatch, run: int) -> bool:
        if batch.link.shut:
            return False
        self._copy(batch, run)
        return True

    def _copy(self, batch: OpenBatch, run: int) -> None:
        if batch.link.owner._dead:
            return  # its memory went with it
        destination, source = batch.runs[run]
        destination[:] = source

    def _finish(self, batch: OpenBatch, status: BatchStatus, detail: str) -> None:
        """Report a batch, once."""
        if batch.reported:
            return
        batch.reported = True
        self.open_batches.remove(batch)
        link = batch.link
        if link.writer is not None:
            link.writer._tell(
                BatchDone(batch.ticket, link.writer_peer, status, batch.nbytes, batch.submitted_s, self.now_s, detail)
            )

    def _settle(self, transport: LoopbackTransport, peer: str) -> None:
        """Report PeerClosed if a closing peer is quiet by now."""
        link = transport._in.get(peer)
        if peer not in transport._closing or transport._stopped or (link is not None and link.busy):
            return
        transport._closing.discard(peer)
        transport._in.pop(peer, None)
        transport._out.pop(peer, None)
        transport._failed.pop(peer, None)
        transport._tell(PeerClosed(peer))


class LoopbackTransport(Transport):
    """A transport of the hub. The contract of `Transport`; what can go wrong is in `LoopbackHub`."""

    name: ClassVar[str] = "loopback"
    reach: Reach = "network"
    """The hub is a network: who has it is reached."""
    memory = ("host", "cuda")
    trust = "pool"

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        self._regions: list[_Bytes] = []
        self._in: dict[str, Link] = {}
        """By our name for the peer: who may write here."""
        self._out: dict[str, Link] = {}
        """By our name for the peer: where we may write."""
        self._failed: dict[str, str] = {}
        """Peer -> reason, until it is closed."""
        self._closing: set[str] = set()
        self._happened: list[Occurrence] = []
        self._event_fd: int | None = None
        """Made when somebody asks for it."""
        self._state = "not open"
        self._stopped = False
        self._dead = False

    def probe(self) -> Probe:
        return Probe(self.name, ok=True)

    def open(self) -> None:
        with self.hub._lock:
            if self._state == "closed":
                raise TransportUnavailable("the loopback transport was closed; make a new one")
            self._state = "open"

    def register(self, buffer: AnyBuffer) -> int:
        with self.hub._lock:
            self._require_open()
            self._regions.append(cast("HostBuffer", buffer).array)
            return len(self._regions) - 1

    def invite(self, peer: str) -> bytes:
        with self.hub._lock:
            self._require_open()
            if not self._regions:
                raise TransportUnavailable("register a buffer before inviting a peer to it")
            if peer in self._in or peer in self._closing:
                raise ProtocolError(f"peer name {peer} is used twice")
            link = Link(self, peer, tuple(self._regions))
            invitation = b"pdlink-loopback/1:%d" % self.hub._num_invited
            self.hub._num_invited += 1
            self.hub._invitations[invitation] = link
            self._in[peer] = link
            return invitation

    def connect(self, peer: str, invitation: bytes) -> None:
        with self.hub._lock:
            self._require_open()
            if not invitation.startswith(b"pdlink-loopback/1:") or not invitation[18:].isdigit():
                raise ProtocolError("invitation for loopback cannot be read")
            link = self.hub._invitations.get(invitation)
            if link is None or link.shut or link.owner._dead:
                raise TransportFailure("the invitation is not of this hub, used, closed, or its owner is gone")
            if peer in self._out or peer in self._closing:
                raise ProtocolError(f"peer name {peer} is used twice")
            del self.hub._invitations[invitation]
            link.writer, link.writer_peer = self, peer
            self._out[peer] = link

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        """As in the contract; copies and reports at once unless the hub says otherwise."""
        hub = self.hub
        with hub._lock:
            self._require_open()
            link = self._out.get(peer)
            if link is None or peer in self._closing:
                raise TransportFailure(f"no open peer {peer}")
            if peer in self._failed:
                raise TransportFailure(f"peer {peer} has failed: {self._failed[peer]}")
            runs = [run for run_list in lists for run in _views(run_list, self._regions, link.regions)]
            hub._num_submitted += 1
            nbytes = sum(len(destination) for destination, _ in runs)
            batch = OpenBatch(link, hub._num_submitted, runs, nbytes, hub.now_s, hub.now_s + timeout_s)
            hub.open_batches.append(batch)
            if hub.fail_next > 0:
                hub.fail_next -= 1
                hub.fail_peer(link, "injected failure")
            elif not hub.hold:
                hub.land(batch)
            return batch.ticket

    def poll(self) -> list[Occurrence]:
        with self.hub._lock:
            if self._stopped or self._dead:
                return []
            happened, self._happened = self._happened, []
            if happened and self._event_fd is not None:
                os.eventfd_read(self._event_fd)
            return happened

    def fileno(self) -> int:
        with self.hub._lock:
            self._require_open()
            if self._event_fd is None:
                self._event_fd = os.eventfd(1 if self._happened else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._event_fd

    def lane(self, peer: str) -> str:
        with self.hub._lock:
            return self.name if peer in self._out and peer not in self._failed else ""

    def close_peer(self, peer: str) -> None:
        with self.hub._lock:
            if (peer not in self._in and peer not in self._out) or peer in self._closing:
                return
            self._closing.add(peer)
            link = self._in.get(peer)
            if link is not None:
                link.shut = True
            if not self._stopped:
                self._end_outgoing(peer)
            self.hub._settle(self, peer)

    def close(self) -> None:
        """As in the contract; what was not fetched can still be fetched. Stopped peers are not waited for."""
        with self.hub._lock:
            for peer in [*self._in, *self._out]:
                self.close_peer(peer)
            self._state = "closed"
            if self._event_fd is not None:
                os.close(self._event_fd)
                self._event_fd = None

    def _end_outgoing(self, peer: str) -> None:
        for batch in [batch for batch in self.hub.open_batches if batch.link is self._out.get(peer)]:
            self.hub._finish(batch, BatchStatus.CANCELLED, "closed by this side")

    def _tell(self, occurrence: Occurrence) -> None:
        if not self._happened and self._event_fd is not None:
            os.eventfd_write(self._event_fd, 1)
        self._happened.append(occurrence)

    def _require_open(self) -> None:
        if self._state != "open":
            raise TransportFailure(f"the loopback transport is {self._state}")


LOOPBACK = LoopbackTransport(LoopbackHub()).capabilities
"""What a peer says of it."""


def _views(
    run_list: RunList, src_regions: Sequence[_Bytes], dst_regions: Sequence[_Bytes]
) -> list[tuple[_Bytes, _Bytes]]:
    """(destination, source) views of every run. Raises ValueError for one that is outside."""
    src = _region("source", src_regions, run_list.src_region)
    dst = _region("destination", dst_regions, run_list.dst_region)
    return [
        (
            _span("destination", dst, run_list.dst_base + dst_offset, nbytes),
            _span("source", src, run_list.src_base + src_offset, nbytes),
        )
        for src_offset, dst_offset, nbytes in _rows(run_list.runs)
    ]


def _rows(runs: RunArray) -> list[list[int]]:
    if runs.dtype != np.int64 or runs.ndim != 2 or runs.shape[1] != 3:
        raise ValueError(f"runs must be int64 [n, 3], got {runs.dtype} {runs.shape}")
    rows: list[list[int]] = runs.tolist()
    return rows


def _region(side: str, regions: Sequence[_Bytes], index: int) -> _Bytes:
    if not 0 <= index < len(regions):
        raise ValueError(f"no {side} region {index} among {len(regions)}")
    return regions[index]


def _span(side: str, region: _Bytes, start: int, nbytes: int) -> _Bytes:
    if start < 0 or nbytes < 0 or start + nbytes > len(region):
        raise ValueError(f"{side} run of {nbytes} bytes at {start} is outside its region of {len(region)} bytes")
    return region[start : start + nbytes]
