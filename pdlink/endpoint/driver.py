"""`Endpoint`: the loop that runs the protocol. Receive, ask the machine, poll the transports, tick, send.

Threads. One thread per endpoint owns the sockets and runs everything below `_loop`. Machines and peers are guarded
by one lock, because a forward pass may push a layer from its own thread (`Sender.layer_ready`); the lock is held for
short, non-blocking work only. Callbacks to the worker run in this thread without the lock. Liveness does not depend
on the engine: a long forward pass releases the GIL and delays a heartbeat by milliseconds.

A peer is one session with one life of a remote worker (`sessions.py`). When it ends its transfers stop at once, the
transport closes the data connection, and when it reports the fence (`PeerClosed`) the transfers end and their blocks
go back. The next request opens a new session. Only a peer that refused the handshake is left alone for a while
(`refusals.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from pdlink.config import SharingConfig
from pdlink.endpoint.channel import Channel, Disconnected, Received, Refused
from pdlink.endpoint.link import now_s
from pdlink.endpoint.peer import Peer, PeerState
from pdlink.endpoint.receiver import Receiver
from pdlink.endpoint.sender import Sender
from pdlink.endpoint.sessions import Sessions
from pdlink.endpoint.tamper import TamperedChannel
from pdlink.protocol import auth, messages
from pdlink.transport.base import BatchDone, PeerClosed, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import ChaosConfig, TimeoutConfig
    from pdlink.endpoint.channel import Arrival
    from pdlink.endpoint.refusals import RefusedPeer
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.messages import Body, Identity
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

_FLUSH_S = 0.0005
"""What was said waits at most about this long for callbacks of the same turn; sending takes 0.02 ms. Were it all of
them, the other side would have nothing to do for as long as they take, and then this one."""


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
        self.address = ""
        """Control address that peers dial; set by `open`."""
        self._transports = {transport.name: transport for transport in transports}
        self._timeouts = timeouts
        self.credentials = credentials
        identified = f"{name}@{self.epoch}"
        faulty = chaos if chaos is not None and chaos.enabled else None
        self._channel = channel or (TamperedChannel(identified, name, faulty) if faulty else Channel(identified))
        self.sender = Sender(self, timeouts, batch_timeout_s, sharing or SharingConfig(), short_of_blocks)
        self.receiver = Receiver(self, timeouts)
        self.sessions = Sessions(self, self._channel, self._transports, require_lane)
        self._commands: deque[Callable[[], None]] = deque()
        """Socket work asked for by other threads; run under the lock."""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
        self._asleep = False
        """Whether the loop waits, or is about to, and has to be woken for what was added since."""
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._next_tick_s = 0.0
        self._on_death = on_death
        self.failure = ""
        """Why the loop died; empty while it runs."""
        self.ticked_s = 0.0
        """When the loop last went round (time.monotonic): the local data path is healthy while this moves."""

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self, host: str, port: int, advertise_host: str | None = None) -> None:
        """Bind the control port (0 takes a free one), publish `address`, start the thread."""
        bound = self._channel.bind(host, port, self.credentials)
        public_key = self.credentials.keys.public if self.credentials else ""
        self.address = str(auth.ControlAddress(advertise_host or host, bound, public_key))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel.watch(self._wake_fd)
        for transport in self._transports.values():
            self._channel.watch(transport.fileno())
        self.ticked_s = self.now_s()
        self._thread = threading.Thread(target=self._main, name=f"pdlink-endpoint-{self.name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """End every session, wait for the fences up to `timeout_s`, stop the thread and close the transports."""
        thread, self._thread = self._thread, None
        if thread is None:
            return

        self.leave()
        thread.join(timeout_s)
        for transport in self._transports.values():
            transport.close()
        with self.lock:
            self._stopping = True
            self.sessions.closing.clear()
            self.wake()
        thread.join(timeout_s)
        os.close(self._wake_fd)
        self._transports.clear()  # native engines are freed now, not at the end of the interpreter

    def leave(self) -> None:
        """End every session; the loop stops when the fences hold. For `close`, and for whoever calls `turn`."""

        def end() -> None:
            for peer in self.peers():
                self.lose(peer, "shutdown")
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

    def peers(self) -> list[Peer]:
        """Live sessions, for reports."""
        with self.lock:
            return self.sessions.all()

    def refused(self) -> list[RefusedPeer]:
        """Peers that this worker does not fit, for reports."""
        with self.lock:
            return self.sessions.greeter.refusals.all()

    def num_closing(self) -> int:
        """Lost sessions whose fence does not hold yet."""
        return len(self.sessions.closing)

    # -- Link: for sender and receiver, under the lock ---------------------------------------------------------------

    def peer_at(self, address: str) -> Peer:
        """The live session with the worker at this address; opens one if there is none.

        Raises TransferFailed if that worker refused us a moment ago.
        """
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
            self._channel.close()

    def _loop(self) -> None:
        while True:
            with self.lock:
                self._asleep = not (self._commands or self._callbacks or self.sessions.unsent)
                if self._asleep and self._stopping and not self.sessions.closing:
                    self._asleep = False
                    return
            arrived, ready = self._channel.poll(max(0.0, self._next_tick_s - self.now_s()) if self._asleep else 0)
            self._asleep = False
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self.turn(arrived)

    def turn(self, arrived: Sequence[Arrival]) -> None:
        """Once round the loop, without waiting: what arrived, what the transports report, what is due; then send."""
        with self.lock:
            for item in arrived:
                match item:
                    case Received():
                        self.sessions.on_frame(item)
                    case Disconnected():
                        self.sessions.on_disconnected(item)
                    case Refused():
                        self.sessions.greeter.turned_away(item)
            for transport in self._transports.values():
                for occurrence in transport.poll():
                    self._on_occurrence(transport, occurrence)
            while self._commands:
                self._commands.popleft()()
            self.ticked_s = self.now_s()
            if self.ticked_s >= self._next_tick_s:
                self._tick(self.ticked_s)
                self._next_tick_s = self.ticked_s + self._timeouts.heartbeat_s / 2
        flush_s = self.now_s() + _FLUSH_S
        while self._callbacks:
            self._callbacks.popleft()()
            if self.now_s() >= flush_s:
                self._flush()
                flush_s = self.now_s() + _FLUSH_S
        self._flush()  # last, so that what the worker says to what it has just heard leaves with it

    def _flush(self) -> None:
        with self.lock:
            self.sessions.flush()

    def _tick(self, now: float) -> None:
        for peer in self.peers():
            if peer.state is PeerState.CONNECTING:
                if now - peer.since_s > self._timeouts.connect_s:
                    self.lose(peer, f"no answer to the handshake within {self._timeouts.connect_s} s")
            elif now - peer.heard_s > self._timeouts.peer_s:
                self.lose(peer, f"silent for {self._timeouts.peer_s} s")
            elif now - peer.beat_s >= self._timeouts.heartbeat_s:
                peer.beat_s = now
                self.send(peer, messages.Heartbeat())
        self.sender.tick(now)
        self.receiver.tick(now)

    def _on_occurrence(self, transport: Transport, occurrence: BatchDone | PeerFailed | PeerClosed) -> None:
        match occurrence:
            case BatchDone():
                self.sender.on_batch(transport, occurrence)
            case PeerFailed(peer=key, reason=reason):
                for peer in self.peers():
                    if peer.key == key:
                        self.lose(peer, reason)
            case PeerClosed(peer=key):
                self.sessions.on_fenced(key)

    # -- for whatever has to be done in the endpoint's thread --------------------------------------------------------

    def call(self, command: Callable[[], None]) -> None:
        """Run in the endpoint's thread, under the lock, in order."""
        with self.lock:
            self._commands.append(command)
            self.wake()

    def wake(self) -> None:
        """Under the lock: let the loop go round once more."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)
