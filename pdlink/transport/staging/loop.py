"""`StagingLoop`: what the stager is beside its work: a thread, its wakings, deadlines, reports, ends.

Callers of any thread put work into tables under one lock and wake the thread; only `close` waits for it. What is
begun is in flight on a stream until the event behind it is reached; the stream rings then, so nothing polls while
nothing happens. A peer fails as a whole: its open batches are reported, and it stays until `close_peer`.

After a failure in a kernel the context is dead, and with it every peer of the lane. Whether the stores of that kernel
have ended is not known then, so what it uses is never freed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from pdlink.cuda.driver import CudaFailure
from pdlink.errors import TransportFailure
from pdlink.transport.base import BatchDone, BatchStatus, PeerFailed
from pdlink.transport.staging.peers import StagingPeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.cuda.launches import Launches
    from pdlink.transport.base import Occurrence
    from pdlink.transport.staging.peers import StagedBatch

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
"""Poll interval of work in flight: after a failure no host function runs."""


_ABANDONED: list[dict[str, StagingPeer]] = []
"""Their memory stays mapped until the process ends: the GPU may still use it."""


class StagingLoop(ABC):
    def __init__(self) -> None:
        """Raises OSError. A subclass makes the streams and calls `_start`, or `_release` if that fails."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._peers: dict[str, StagingPeer] = {}
        self._reports: list[Occurrence] = []
        self._next = 1
        self._broken = ""
        self._died = ""
        """Why the thread has ended by itself."""
        self._give_up_s: float | None = None
        """Set once closing down: when to stop waiting for others."""
        self._streams: Sequence[Launches[Any]] = ()
        """What is in flight on them has a `peer`."""
        self._thread: threading.Thread | None = None
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._told)
            self._epoll = select.epoll()
            made.callback(self._epoll.close)
            self._epoll.register(self._wake, select.EPOLLIN)
            made.pop_all()
        weakref.finalize(self, os.close, self._told)  # what was not fetched before `close` can be fetched after it

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="pdlink-staging", daemon=True)
        self._thread.start()

    def _release(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    # -- Any thread --------------------------------------------------------------------------------------------------

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
        """Close every peer, wait at most `grace_s` for what is in flight and for others, end the thread.

        False if the GPU may still be copying: what it uses is not freed, and the device must stay open.
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
        self._on_end()
        self._epoll.close()
        if not self._is_quiet():
            for stream in self._streams:
                stream.abandon()
            _ABANDONED.append(self._peers)
            return False
        for peer in self._peers.values():
            if peer.writing is not None:
                peer.writing.unpin()
        for stream in self._streams:
            stream.close()
        self._release()
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
        """Raises ValueError for a name in use."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = StagingPeer(name, self._number())
        if peer.closing or peer.failure:
            raise ValueError(f"peer name {name} is used twice")
        return peer

    def _open_peer(self, name: str) -> StagingPeer:
        """Raises TransportFailure."""
        peer = self._peers.get(name)
        if peer is None or peer.closing:
            raise TransportFailure(f"no open peer {name}")
        if peer.failure:
            raise TransportFailure(f"peer {name} has failed: {peer.failure}")
        return peer

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    # -- The thread, and with the lock held any other ----------------------------------------------------------------

    @abstractmethod
    def _work(self, *, look: bool) -> None:
        """See what has run, if `look`, and begin what can be. Raises CudaFailure."""

    @abstractmethod
    def _on_ready(self, fd: int, mask: int) -> None:
        """A descriptor of the lane's own has something to say."""

    @abstractmethod
    def _stop_writing(self, peer: StagingPeer) -> None:
        """Nothing more of its batches is begun."""

    @abstractmethod
    def _begin_closing(self, peer: StagingPeer) -> None:
        """Safe to call twice."""

    @abstractmethod
    def _advance_closing(self) -> None:
        """Report the peers that are closed and quiet, and forget them."""

    @abstractmethod
    def _looks(self, now: float) -> list[float]:
        """Seconds until something else than a batch's deadline is to be looked at."""

    def _is_quiet(self) -> bool:
        """Whether what the GPU has used may be freed, when the thread has ended."""
        return not self._is_busy() and not any(peer.unfinished for peer in self._peers.values())

    @abstractmethod
    def _on_end(self) -> None:
        """The thread has been joined. Without the lock."""

    @abstractmethod
    def _on_death(self) -> None:
        """The thread ends, or has died: nobody may wait for it any more. With the lock held."""

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  the outermost frame: `poll` raises it
            log.exception("the thread of the staging lane has died")
            with self._lock:
                self._died = f"the thread of the staging lane has died: {type(error).__name__}: {error}"
                with contextlib.suppress(Exception):  # the same failure may come again
                    self._break(self._died)
                self._broken = self._died
                self._on_death()
                os.eventfd_write(self._told, 1)

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._go_on()
                self._expire()
                self._advance_closing()
                now = time.monotonic()
                if self._give_up_s is not None and (not self._peers or now >= self._give_up_s):
                    self._on_death()
                    return
                wait_s = self._next_look_s(now)
            for fd, mask in self._epoll.poll(wait_s):
                with self._lock:
                    if fd != self._wake:
                        self._on_ready(fd, mask)
                        continue
                    os.eventfd_read(self._wake)
                    for stream in self._streams:
                        stream.rung()

    def _go_on(self, *, look: bool = True) -> None:
        if self._broken:
            return
        try:
            self._work(look=look)
            for stream in self._streams:
                stream.ring_at_end()
        except (CudaFailure, OSError) as failure:
            self._break(str(failure))

    def _next_look_s(self, now: float) -> float | None:
        """Seconds to sleep at most; None until something happens."""
        looks = [batch.deadline_s - now for peer in self._peers.values() for batch in peer.open.values()]
        looks += self._looks(now)
        if self._is_busy():
            looks.append(_LOOK_S)
        if self._give_up_s is not None:
            looks.append(self._give_up_s - now)
        return max(0.0, min(looks)) if looks else None

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
            self._report(PeerFailed(peer.name, reason))
        for batch in list(peer.open.values()):
            other = status is BatchStatus.TIMEOUT and batch.deadline_s > now
            self._report_batch(peer, batch, BatchStatus.PEER_FAILED if other else status, reason)
        self._stop_writing(peer)

    def _break(self, reason: str) -> None:
        """The context is dead: nothing that is in flight will be reported."""
        self._broken = reason
        for peer in self._peers.values():
            peer.unfinished |= self._copies(peer)
        for stream in self._streams:
            stream.in_flight.clear()
        for peer in self._peers.values():
            self._fail(peer, f"the GPU has failed: {reason}", BatchStatus.PEER_FAILED)

    def _report_batch(self, peer: StagingPeer, batch: StagedBatch, status: BatchStatus, detail: str) -> None:
        del peer.open[batch.ticket]
        now = time.monotonic()
        self._report(BatchDone(batch.ticket, peer.name, status, batch.nbytes, batch.submitted_s, now, detail))

    def _report(self, occurrence: Occurrence) -> None:
        if not self._reports:
            os.eventfd_write(self._told, 1)
        self._reports.append(occurrence)
