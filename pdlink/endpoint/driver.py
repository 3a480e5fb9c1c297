"""`Endpoint`: the loop that runs the protocol. Receive, ask the machine, poll the transports, tick, send.

Threads. One thread per endpoint owns the sockets and runs everything below `_loop`. Machines and peers are guarded
by one lock, because a forward pass may push a layer from its own thread (`Sender.layer_ready`); the lock is held for
short, non-blocking work only. Callbacks to the worker run in this thread without the lock. Liveness does not depend
on the engine: a long forward pass releases the GIL and delays a heartbeat by milliseconds.

A peer is one session with one life of a remote worker (`sessions.py`). When it ends its transfers stop at once, the
transport closes the data connection, and when it reports the fence (`PeerClosed`) the transfers end and their blocks
go back. The next request opens a new session. Only a peer that refused the handshake is left alone for a while
(`refusals.py`).

Blame. Whatever others can make fail (a frame, a command, a callback, what a transport reports) runs in `_guarded`,
and if it raises it costs the one it came from: a frame its peer, a command its caller, a callback a line in the log.
A transport that cannot be asked any more is closed, and its sessions end. What is left to raise is the loop's own:
its sockets, its clock, its books. That ends the loop, and with it the worker: if giving a peer up fails, nobody knows
any more which blocks somebody may still write to.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pdlink.config import SharingConfig
from pdlink.endpoint.channel import Channel, Disconnected, Received, Refused
from pdlink.endpoint.hashing import Hashing
from pdlink.endpoint.link import now_s
from pdlink.endpoint.peer import Peer, PeerState
from pdlink.endpoint.receiver import Receiver
from pdlink.endpoint.sender import Sender
from pdlink.endpoint.sessions import Sessions
from pdlink.endpoint.tamper import SlowLink, TamperedChannel
from pdlink.errors import ConfigError, PdlinkError, TransferFailed, TransportUnavailable
from pdlink.events import HandlingFailed, emit
from pdlink.protocol import auth, messages
from pdlink.transport.base import BatchDone, PeerClosed, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.config import ChaosConfig, TimeoutConfig
    from pdlink.endpoint.channel import Arrival
    from pdlink.endpoint.refusals import RefusedPeer
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.messages import Body, Identity
    from pdlink.transport.base import Occurrence, Transport

log = logging.getLogger(__name__)

_FLUSH_S = 0.0005
"""What was said waits at most about this long for callbacks of the same turn; sending takes 0.02 ms. Were it all of
them, the other side would have nothing to do for as long as they take, and then this one."""

_READ_S = 0.005
"""A turn takes frames for this long; what is left waits for the next one, after the clock and everybody else. One
frame of a session may take longer: decoding the largest takes 35 ms."""

_RETRY_S = 0.005
"""How soon a frame is tried again that a full queue did not take."""

_TELL_S = 1.0
"""The log hears of a failure this often at most: a peer that causes many could fill the disk. All are counted."""


class Endpoint:
    """One worker's end of every link: `sender` and `receiver` are what the worker talks to."""

    def __init__(
        self,
        name: str,
        identity: Identity,
        transports: Sequence[Transport],
        timeouts: TimeoutConfig,
        *,
        batch_timeout_s: float = 10.0,
        sharing: SharingConfig | None = None,
        require_lane: str | None = None,
        credentials: auth.Credentials | None = None,
        checksums: Checksums | None = None,
        chaos: ChaosConfig | None = None,
        channel: Channel | None = None,
        clock: Callable[[], float] = now_s,
        on_death: Callable[[], None] = lambda: None,
        short_of_blocks: Callable[[], bool] = lambda: False,
    ) -> None:
        """transports: opened, with the KV buffers registered, the preferred one first; the endpoint closes them.

        sharing: how transfers share a transport; None takes the defaults.
        credentials: who we are and whom we know; None has sessions with anybody who can reach the control port.
        short_of_blocks: whether requests of this worker wait for blocks.
        on_death: called in the endpoint's thread if its loop dies, which only a bug can do.
        channel, clock: for whoever calls `turn` himself, without sockets and real time.
        """
        self.name = name
        self.epoch = secrets.token_hex(8)
        """Names this life of the worker: a restarted one, on the same port too, is somebody else."""
        self.identity = identity
        self.layout = identity.layout
        self.checksums = checksums
        self.lock = threading.RLock()
        self.now_s = clock
        self.hashing = Hashing(self.call)
        self.address = ""
        """Control address that peers dial; set by `open`."""
        self._transports = {transport.name: transport for transport in transports}
        for transport in transports:
            transport.guard(identity.layout)
        self._opened = list(transports)
        """All transports, also the ones given up since."""
        self._watched: dict[str, int] = {}
        """Descriptors of those in `_transports`, by name."""
        self._timeouts = timeouts
        self.credentials = credentials
        identified = f"{name}@{self.epoch}"
        faulty = chaos if chaos is not None and chaos.enabled else None
        self._slow = SlowLink(chaos.link_nbytes_per_s) if chaos is not None and chaos.link_nbytes_per_s else None
        self._channel = channel or (TamperedChannel(identified, name, faulty) if faulty else Channel(identified))
        self.sender = Sender(self, timeouts, batch_timeout_s, sharing or SharingConfig(), self._short_of_blocks)
        self.receiver = Receiver(self, timeouts)
        self.sessions = Sessions(self, self._channel, self._transports, require_lane)
        self._commands: deque[tuple[Callable[[], None], Callable[[str], None] | None]] = deque()
        """Socket work asked for by other threads, with what it costs if it fails; run under the lock."""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
        self._asleep = False
        """Whether the loop waits, or is about to, and has to be woken for what was added since."""
        self._thread: threading.Thread | None = None
        self._stopping = False
        """No new sessions; the loop ends when those there were are fenced."""
        self._closed = False
        self._next_tick_s = 0.0
        self._on_death, self._ask_short_of_blocks = on_death, short_of_blocks
        self._num_failed, self._told_s = 0, float("-inf")
        self.failure = ""
        """Why the loop died; empty while it runs."""
        self.ticked_s = 0.0
        """When the loop last went round (time.monotonic): the local data path is healthy while this moves."""
        self._turned_s, self._awake_s = clock(), 0.0
        """When the last turn began, and how long the loop had been running then."""
        self.longest_absence_s = 0.0
        """Longest time for which the loop could not go round although it was its turn, since this was last taken."""

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self, host: str, port: int, advertise_host: str | None = None) -> None:
        """Bind the control port (0 takes a free one), publish `address`, start the thread.

        Raises ConfigError if that cannot be, and what a transport raises that is not open; `close` closes them then.
        """
        try:
            bound = self._channel.bind(host, port, self.credentials)
            public_key = self.credentials.keys.public if self.credentials else ""
            self.address = str(auth.ControlAddress(advertise_host or host, bound, public_key))
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._channel.watch(self._wake_fd)
            for name, transport in self._transports.items():
                self._watched[name] = transport.fileno()
                self._channel.watch(self._watched[name])
            self.ticked_s = self._turned_s = self.now_s()
            self._thread = threading.Thread(target=self._main, name=f"pdlink-endpoint-{self.name}", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError, PdlinkError) as error:
            self._thread = None
            self._hang_up()
            if isinstance(error, PdlinkError):
                raise
            raise ConfigError(f"the endpoint cannot be opened: {error}; see ulimit -n and ulimit -u") from error

    def close(self, timeout_s: float = 2.0) -> None:
        """End every session, wait for the fences up to `timeout_s`, stop the thread and close the transports.

        Safe to call twice, from any thread but the endpoint's own.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() waits for the endpoint's thread and cannot be called in it")
        with self.lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        thread = self._thread
        if thread is not None:
            self.leave()
            thread.join(timeout_s)
        self.hashing.close()
        for transport in self._opened:
            transport.close()
        if thread is not None:
            with self.lock:
                self._stopping = True
                self.sessions.closing.clear()
                self.wake()
            thread.join(timeout_s)
        self._transports.clear()  # native engines are freed now, not at the end of the interpreter
        self._opened.clear()

    def leave(self) -> None:
        """End every session; the loop stops when the fences hold. For `close`, and for whoever calls `turn`."""

        def end() -> None:
            for peer in self.peers():
                self.lose(peer, "shutdown")
            self.sender.give_up("shutdown")
            self._stopping = True

        self.call(end)

    def allow(self, allowed: auth.AllowList) -> None:
        """Replace the allow-list. Sessions whose key is not on the new one end; nobody else notices."""

        def exchange() -> None:
            if self.credentials is None:
                return
            self.credentials = self._channel.credentials = replace(self.credentials, allowed=allowed)
            self.sessions.greeter.refusals.forget_keys()
            for peer in self.peers():
                if allowed.name_of(peer.public_key) is None:
                    self.lose(peer, "its key was taken off the allow-list")

        self.call(exchange)

    @property
    def transports(self) -> list[Transport]:
        """Those this endpoint offers, the preferred one first."""
        return list(self._transports.values())

    def computing(self, on: bool) -> None:
        """This process begins (on) or has ended to compute a prefill: see `Transport.computing`. From any thread."""
        for transport in self.transports:
            transport.computing(on)

    def take_longest_absence_s(self) -> float:
        """`longest_absence_s`, and begin it anew."""
        absence_s, self.longest_absence_s = self.longest_absence_s, 0.0
        return absence_s

    def peers(self) -> list[Peer]:
        """Live sessions, for reports."""
        with self.lock:
            return self.sessions.all()

    def refused(self) -> list[RefusedPeer]:
        """Peers that this worker does not fit, for reports."""
        with self.lock:
            return self.sessions.greeter.refusals.all()

    def queued_nbytes(self) -> int:
        """Of frames that wait for peers to read those before."""
        return self.sessions.queued_nbytes

    def num_closing(self) -> int:
        """Lost sessions whose fence does not hold yet."""
        return len(self.sessions.closing)

    # -- Link: for sender and receiver, under the lock ---------------------------------------------------------------

    def awake_s(self) -> float:
        """A clock that stands still while the loop does: silence and leases are measured by it.

        From one turn to the next it goes on by a heartbeat at most, which is twice as long as the loop ever waits.
        What came during an absence waits to be read, so an absence says nothing about others.
        """
        return self._awake_s + min(self.now_s() - self._turned_s, self._timeouts.heartbeat_s)

    def peer_at(self, address: str) -> Peer:
        """The live session with the worker at this address; opens one if there is none.

        Raises TransferFailed if that worker refused us a moment ago, and if this endpoint is leaving, closed or dead:
        nobody would dial, and nobody would tell.
        """
        if self._stopping or self.failure:
            raise TransferFailed(f"this worker's link is {'down: ' + self.failure if self.failure else 'closed'}")
        return self.sessions.at(address)

    def send(self, peer: Peer, body: Body) -> None:
        """Send at the end of this turn, or keep until the handshake is done; messages to a lost peer vanish."""
        self.sessions.send(peer, body)

    def lose(self, peer: Peer, reason: str) -> None:
        """End this session. Its transfers stop now, and end when the data connection is closed."""
        self.sessions.lose(peer, reason)

    def defer(self, callback: Callable[[], None]) -> None:
        """Run in the endpoint's thread, without the lock, in order."""
        self._callbacks.append(callback)
        self.wake()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  the outermost frame: a dead loop is reported by /health, not hidden
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("%s: the endpoint's loop has died", self.name)
            self._on_death()
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the sockets; nobody is to be woken any more."""
        with self.lock:
            self._stopping, self._asleep = True, False
            wake_fd, self._wake_fd = self._wake_fd, -1
        self._channel.close()
        if wake_fd >= 0:
            os.close(wake_fd)

    def _loop(self) -> None:
        returned_s = self.now_s()
        while True:
            with self.lock:
                self._asleep = not (self._commands or self._callbacks or self.sessions.unsent)
                if self._asleep and self._stopping and not self.sessions.closing:
                    self._asleep = False
                    return
            polled_s = self.now_s()
            wait_s = max(0.0, self._next_tick_s - polled_s) if self._asleep else 0.0
            if self.sessions.waiting:
                wait_s = min(wait_s, _RETRY_S)
            absence_s = polled_s - returned_s
            arrived, ready = self._channel.poll(wait_s)
            returned_s = self.now_s()
            absence_s += max(0.0, returned_s - polled_s - wait_s)
            self.longest_absence_s = max(self.longest_absence_s, absence_s)
            self._asleep = False
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self.turn(arrived)

    def turn(self, arrived: Iterable[Arrival]) -> None:
        """Once round the loop, without waiting: what arrived, what the transports report, what is due; then send.

        arrived: taken one by one, no more of them once that has lasted `_READ_S`.
        """
        with self.lock:
            self._awake_s, self._turned_s = self.awake_s(), self.now_s()
            for item in arrived:
                match item:
                    case Received():
                        self._guarded("frame", partial(self.sessions.on_frame, item), partial(self._give_up, item))
                    case Disconnected():
                        self.sessions.on_disconnected(item)
                    case Refused():
                        self.sessions.greeter.turned_away(item)
                if self.now_s() - self._turned_s >= _READ_S:
                    break
            for transport in self.transports:
                self._poll(transport)
            until_s = self.now_s() + _READ_S
            while self._commands:
                command, cost = self._commands.popleft()
                self._guarded("command", command, cost)
                if self.now_s() >= until_s:  # dialing takes a millisecond; the others are run in the next turns
                    break
            self.ticked_s = self.now_s()
            if self.ticked_s >= self._next_tick_s:
                self._tick(self.ticked_s)
                self._next_tick_s = self.ticked_s + self._timeouts.heartbeat_s / 2
        flush_s = self.now_s() + _FLUSH_S
        while self._callbacks:
            self._guarded("callback", self._callbacks.popleft())
            if self.now_s() >= flush_s:
                self._flush()
                flush_s = self.now_s() + _FLUSH_S
        self._flush()  # last, so that what the worker says to what it has just heard leaves with it

    def _flush(self) -> None:
        with self.lock:
            while self.sessions.unsent:
                peer, _ = self.sessions.unsent.popitem()
                self._guarded("message", partial(self.sessions.flush, peer), partial(self.lose, peer))
            self.sessions.send_waiting()

    def _tick(self, now: float) -> None:
        awake_s = self.awake_s()
        for peer in self.peers():
            if peer.state is PeerState.CONNECTING:
                if awake_s - peer.since_s > self._timeouts.connect_s:
                    self.lose(peer, f"no answer to the handshake within {self._timeouts.connect_s} s")
                elif peer.dialed and peer.opened and now - peer.beat_s >= self._timeouts.heartbeat_s:
                    peer.beat_s = now
                    self.sessions.post(peer, messages.Heartbeat())  # shows a lost invitation by the gap before it
            elif awake_s - peer.heard_s > self._timeouts.peer_s:
                self.lose(peer, f"silent for {self._timeouts.peer_s} s")
            elif now - peer.beat_s >= self._timeouts.heartbeat_s:
                peer.beat_s = now
                self.send(peer, messages.Heartbeat())
        self.sender.tick(awake_s)
        self.receiver.tick(awake_s)

    def _short_of_blocks(self) -> bool:
        short = False

        def ask() -> None:
            nonlocal short
            short = self._ask_short_of_blocks()

        self._guarded("callback", ask)
        return short

    def _poll(self, transport: Transport) -> None:
        occurrences: list[Occurrence] = []
        self._guarded(
            "transport", lambda: occurrences.extend(transport.poll()), partial(self._give_up_transport, transport)
        )
        if self._slow is not None:
            occurrences = self._slow.passed(transport.name, occurrences)
        for occurrence in occurrences:
            self._guarded(
                "occurrence",
                partial(self._on_occurrence, transport, occurrence),
                partial(self._lose_by_key, occurrence.peer),
            )

    def _on_occurrence(self, transport: Transport, occurrence: Occurrence) -> None:
        match occurrence:
            case BatchDone():
                self.sender.on_batch(transport, occurrence)
            case PeerFailed(peer=key, reason=reason):
                self.sessions.on_failed(key, transport, reason)
            case PeerClosed(peer=key):
                self.sessions.on_fenced(key, transport)

    # -- blame -------------------------------------------------------------------------------------------------------

    def _guarded(self, what: str, act: Callable[[], object], cost: Callable[[str], None] | None = None) -> None:
        """Do what somebody else can make fail. If it does, they pay: `cost(reason)`. What that raises is our own."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  see Blame, above
            reason = f"{what} could not be handled: {type(error).__name__}"
            self._num_failed += 1
            now = self.now_s()
            if now - self._told_s >= _TELL_S:
                self._told_s = now
                log.exception("%s: a %s (%d failures so far)", self.name, reason, self._num_failed)
            emit(HandlingFailed(what=what, error=f"{type(error).__name__}: {error}"))
            if cost is not None:
                cost(reason)

    def _give_up(self, item: Received, reason: str) -> None:
        """A frame could not be handled: end its session. Who has none hears so, if it said who it is."""
        peer = self.sessions.by_route.get(item.route)
        if peer is not None and peer.public_key == item.public_key:
            self.lose(peer, reason)
        else:
            self._guarded("frame", partial(self.sessions.disown, item))

    def _lose_by_key(self, key: str, reason: str) -> None:
        peer = self.sessions.of_key(key)
        if peer is not None:
            self.lose(peer, reason)

    def _give_up_transport(self, transport: Transport, reason: str) -> None:
        """It cannot be asked any more: close it and end its sessions; others go on over what is left.

        Blocks whose fence it does not tell of now stay quarantined, for nobody else can. If it was the last one this
        worker is of no use, and its loop ends: its supervisor starts it again.
        """
        log.error("%s: transport %s is given up: %s", self.name, transport.name, reason)
        del self._transports[transport.name]
        if transport.name in self._watched:
            self._channel.unwatch(self._watched.pop(transport.name))
        self._guarded("transport", transport.close)
        for peer in self.peers():
            if peer.transport is transport:
                self._guarded("transport", partial(self.lose, peer, reason))
        last: list[Occurrence] = [] if self._slow is None else self._slow.all(transport.name)
        self._guarded("transport", lambda: last.extend(transport.poll()))
        for occurrence in last:
            self._on_occurrence(transport, occurrence)
        if not self._transports:
            raise TransportUnavailable(f"transport {transport.name} was the last one: {reason}")

    # -- for whatever has to be done in the endpoint's thread --------------------------------------------------------

    def call(self, command: Callable[[], None], cost: Callable[[str], None] | None = None) -> None:
        """Run in the endpoint's thread, under the lock, in order; `cost(reason)` if it raises."""
        with self.lock:
            self._commands.append((command, cost))
            self.wake()

    def wake(self) -> None:
        """Under the lock: let the loop go round once more."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)
