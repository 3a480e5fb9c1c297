"""`Endpoint`: the loop that runs the protocol. Receive, ask the machine, do its actions, poll the transports, tick.

Threads. One thread per endpoint owns the sockets and runs everything below `_loop`. Machines and peers are guarded
by one lock, because a forward pass may push a layer from its own thread (`Sender.layer_ready`); the lock is held for
short, non-blocking work only. Callbacks to the worker run in this thread without the lock. Liveness does not depend
on the engine: a long forward pass releases the GIL and delays a heartbeat by milliseconds.

A peer is one session with one life of a remote worker. A session ends by `lose`: its transfers stop at once, the
transport closes the data connection, and when it reports the fence (`PeerClosed`) the transfers end and their blocks
go back. There is no blacklist: the next request opens a new session.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from pdlink.endpoint.channel import Channel, Disconnected, Received, Refused
from pdlink.endpoint.link import now_s
from pdlink.endpoint.peer import Peer, PeerState
from pdlink.endpoint.receiver import Receiver
from pdlink.endpoint.sender import Sender
from pdlink.endpoint.tamper import TamperedChannel
from pdlink.errors import ConfigError, HandshakeRefused, LayoutMismatch, PdlinkError, ProtocolError
from pdlink.events import MessageDropped, PeerChanged, emit
from pdlink.kv.plan import template
from pdlink.protocol import auth, handshake, messages
from pdlink.transport.base import BatchDone, PeerClosed, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import ChaosConfig, TimeoutConfig
    from pdlink.endpoint.channel import Arrival
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.messages import Body, Identity
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

_MAX_HANDSHAKES = 1_000
"""Accepted connections whose handshake is under way; more have to try again."""


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
        self._require_lane = require_lane
        self.credentials = credentials
        self._num_refused = 0
        self._refusals_told_s = float("-inf")
        identified = f"{name}@{self.epoch}"
        faulty = chaos if chaos is not None and chaos.enabled else None
        self._channel = channel or (TamperedChannel(identified, name, faulty) if faulty else Channel(identified))
        self.sender = Sender(self, timeouts, batch_timeout_s, short_of_blocks)
        self.receiver = Receiver(self, timeouts)
        self._peers: dict[str, Peer] = {}
        """Live sessions by route."""
        self._dialed: dict[str, Peer] = {}
        """Live sessions that we opened, by address, from the moment somebody asks for one."""
        self._closing: dict[str, Peer] = {}
        """Lost sessions whose data connection is not fenced yet, by key."""
        self._num_sessions = 0
        self._commands: deque[Callable[[], None]] = deque()
        """Socket work asked for by other threads; run under the lock."""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
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
        self._stopping = True
        self._closing.clear()
        self._wake()
        thread.join(timeout_s)
        os.close(self._wake_fd)
        self._transports.clear()  # native engines are freed now, not at the end of the interpreter

    def leave(self) -> None:
        """End every session; the loop stops when the fences hold. For `close`, and for whoever calls `turn`."""

        def end() -> None:
            for peer in self.peers():
                self.lose(peer, "shutdown")
            self._stopping = True

        self._call(end)

    def allow(self, allowed: auth.AllowList) -> None:
        """Replace the allow-list. Sessions whose key is not on the new one end; nobody else notices."""

        def exchange() -> None:
            if self.credentials is None:
                return
            self.credentials = self._channel.credentials = replace(self.credentials, allowed=allowed)
            for peer in self.peers():
                if allowed.name_of(peer.public_key) is None:
                    self.lose(peer, "its key was taken off the allow-list")

        self._call(exchange)

    @property
    def transports(self) -> list[Transport]:
        """Those this endpoint offers, the preferred one first."""
        return list(self._transports.values())

    def peers(self) -> list[Peer]:
        """Live sessions, for reports."""
        with self.lock:
            return list({id(peer): peer for peer in (*self._peers.values(), *self._dialed.values())}.values())

    def num_closing(self) -> int:
        """Lost sessions whose fence does not hold yet."""
        return len(self._closing)

    # -- Link: for sender and receiver, under the lock ---------------------------------------------------------------

    def peer_at(self, address: str) -> Peer:
        """The live session with the worker at this address; opens one if there is none."""
        peer = self._dialed.get(address)
        if peer is None:
            self._num_sessions += 1
            now = self.now_s()
            peer = Peer("", self._num_sessions, dialed=True, since_s=now, heard_s=now, address=address)
            self._dialed[address] = peer
            self._call(lambda: self._dial(peer))
        return peer

    def send(self, peer: Peer, body: Body) -> None:
        """Send, or keep until the handshake is done; messages to a lost peer vanish."""
        if peer.state is PeerState.CONNECTING:
            peer.waiting.append(body)
        elif peer.state is PeerState.READY:
            self._call(lambda: self._transmit(peer, body))

    def lose(self, peer: Peer, reason: str) -> None:
        """End this session. Its transfers stop now, and end when the data connection is closed."""
        if peer.state is PeerState.LOST:
            return
        peer.state = PeerState.LOST
        reason = reason[: messages.MAX_TEXT]
        log.info("%s: peer %s lost: %s", self.name, peer.name or peer.address, reason)
        emit(PeerChanged(peer=peer.name or peer.address, state="lost", reason=reason))
        self._dialed.pop(peer.address, None)
        self._call(lambda: self._hang_up(peer, reason))
        half = self.receiver if peer.dialed else self.sender
        half.on_peer_lost(peer, reason)
        if peer.transport is None or not peer.opened:  # nothing can be in flight
            half.on_fenced(peer)
        else:
            self._closing[peer.key] = peer
            peer.transport.close_peer(peer.key)

    def defer(self, callback: Callable[[], None]) -> None:
        """Run in the endpoint's thread, without the lock, in order."""
        self._callbacks.append(callback)
        self._wake()

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
        while not (self._stopping and not self._closing and not self._callbacks and not self._commands):
            busy = bool(self._commands or self._callbacks)
            arrived, ready = self._channel.poll(0 if busy else max(0.0, self._next_tick_s - self.now_s()))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self.turn(arrived)

    def turn(self, arrived: Sequence[Arrival]) -> None:
        """Once round the loop, without waiting: what arrived, what the transports report, what is due."""
        with self.lock:
            for item in arrived:
                match item:
                    case Received():
                        self._on_frame(item)
                    case Disconnected():
                        self._on_disconnected(item)
                    case Refused():
                        self._on_refused(item)
            for transport in self._transports.values():
                for occurrence in transport.poll():
                    self._on_occurrence(transport, occurrence)
            while self._commands:
                self._commands.popleft()()
            self.ticked_s = self.now_s()
            if self.ticked_s >= self._next_tick_s:
                self._tick(self.ticked_s)
                self._next_tick_s = self.ticked_s + self._timeouts.heartbeat_s / 2
        while self._callbacks:
            self._callbacks.popleft()()

    def _tick(self, now: float) -> None:
        for peer in self.peers():
            if peer.state is PeerState.CONNECTING:
                if now - peer.since_s > self._timeouts.connect_s:
                    self.lose(peer, f"no answer to the handshake within {self._timeouts.connect_s} s")
            elif now - peer.heard_s > self._timeouts.peer_s:
                self.lose(peer, f"silent for {self._timeouts.peer_s} s")
            elif now - peer.beat_s >= self._timeouts.heartbeat_s:
                peer.beat_s = now
                self._transmit(peer, messages.Heartbeat())
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
                closed = self._closing.pop(key, None)
                if closed is not None:
                    (self.receiver if closed.dialed else self.sender).on_fenced(closed)
                    closed.transport = None

    # -- frames ------------------------------------------------------------------------------------------------------

    def _on_frame(self, item: Received) -> None:
        try:
            envelope = messages.decode(item.frame)
        except ProtocolError as error:
            log.debug("%s: %s", self.name, error)  # counted; a warning each would let anybody fill the disk
            emit(MessageDropped(reason="malformed"))
            return
        body = envelope.body
        peer = self._peers.get(item.route)
        if isinstance(body, messages.Hello) and (peer is None or not peer.dialed):
            self._on_hello(item, envelope, body)
            return
        if peer is not None and self._successor_says_bye(peer, item, envelope):
            self.lose(peer, f"{peer.name or peer.address} was restarted")
            return
        if peer is None or item.public_key != peer.public_key or not self._is_of(peer, envelope):
            emit(MessageDropped(reason="old_session"))
            if not isinstance(body, messages.Bye | messages.Refuse):
                self._post(item.route, envelope.src_epoch, envelope.session, messages.Bye("unknown session"))
            return
        peer.heard_s = self.now_s()
        match body:
            case messages.Welcome():
                self._on_welcome(peer, envelope, body)
            case messages.Invite():
                self._on_invite(peer, body)
            case messages.Refuse(factor=factor, local=local, remote=remote):
                refused = HandshakeRefused(factor, local=remote, remote=local)
                self.lose(peer, f"refused by {peer.name or peer.address}: {refused}")
            case messages.Bye(reason=reason):
                self.lose(peer, f"closed by {peer.name or peer.address}: {reason}")
            case messages.Heartbeat():
                pass
            case _ if peer.state is PeerState.READY:
                (self.receiver if peer.dialed else self.sender).on_message(peer, body)
            case _:
                emit(MessageDropped(reason="before_handshake"))
        if not peer.dialed and peer.state is not PeerState.LOST:
            self.sender.on_heard(peer, peer.heard_s)

    def _is_of(self, peer: Peer, envelope: messages.Envelope) -> bool:
        """Whether this frame belongs to this life of both sides and to this session."""
        return (
            envelope.session == peer.session
            and envelope.dst_epoch == self.epoch
            and (not peer.epoch or (envelope.src, envelope.src_epoch) == (peer.name, peer.epoch))
        )

    def _successor_says_bye(self, peer: Peer, item: Received, envelope: messages.Envelope) -> bool:
        """Whether a new life of a listener answers, on the connection we dialed, a frame meant for its old one."""
        return (
            peer.dialed
            and isinstance(envelope.body, messages.Bye)
            and peer.epoch not in ("", envelope.src_epoch)
            and item.public_key == peer.public_key
            and (envelope.session, envelope.dst_epoch) == (peer.session, self.epoch)
        )

    def _on_disconnected(self, item: Disconnected) -> None:
        peer = self._peers.get(item.route)
        if peer is not None:
            reason = "control connection cut" if peer.epoch else f"cannot connect to {peer.address}"
            self.lose(peer, f"{reason}: {item.reason}" if item.reason else reason)

    def _on_refused(self, item: Refused) -> None:
        """Count who was turned away. The log gets a line a second at most: whoever can connect could fill it."""
        emit(PeerChanged(peer=item.host, state="refused", reason=item.reason))
        self._num_refused += 1
        now = self.now_s()
        if now - self._refusals_told_s >= 1.0:
            self._refusals_told_s = now
            where = f" from {item.host}" if item.host else ""
            log.warning(
                "%s: turned away a connection%s: %s (%d so far)", self.name, where, item.reason, self._num_refused
            )

    # -- handshake ---------------------------------------------------------------------------------------------------

    def _dial(self, peer: Peer) -> None:
        if peer.state is PeerState.LOST:
            return
        try:
            peer.route = self._channel.dial(peer.address)
            if self.credentials is not None:
                peer.public_key = auth.ControlAddress.parse(peer.address).public_key
        except ConfigError as error:
            self.lose(peer, str(error))
            return
        self._peers[peer.route] = peer
        hello = messages.Hello(self.name, self.identity, tuple(self._transports))
        self._post(peer.route, "", peer.session, hello)

    def _on_hello(self, item: Received, envelope: messages.Envelope, hello: messages.Hello) -> None:
        """The listener's half: same factors, a common transport, a plan between the layouts; then Welcome."""
        route, now = item.route, self.now_s()
        peer = Peer(route, envelope.session, dialed=False, since_s=now, heard_s=now, public_key=item.public_key)
        peer.name, peer.epoch, peer.identity = hello.name, envelope.src_epoch, hello.identity
        not_theirs = auth.name_problem(self.credentials, item.public_key, hello.name)
        if not_theirs is not None:  # before anything is done in that name
            self._on_refused(Refused(f"the key of {not_theirs[0]} came with the name {hello.name[:64]!r}"))
            self._refuse(peer, auth.NAME_FACTOR, *not_theirs)
            return
        accepted = [p for p in self._peers.values() if not p.dialed]
        replaced = [p for p in accepted if p.name == hello.name or p.route == route]
        if any((p.name, p.epoch) == (peer.name, peer.epoch) and p.session >= peer.session for p in replaced):
            emit(MessageDropped(reason="old_session"))
            return
        if peer.key in self._closing:  # its transfers still wait for the fence under this key
            emit(MessageDropped(reason="old_session"))
            return
        if sum(p.state is PeerState.CONNECTING for p in accepted) >= _MAX_HANDSHAKES:
            emit(MessageDropped(reason="too_many_handshakes"))
            return
        try:
            handshake.compare(self.identity, hello.identity)
            name = handshake.choose_transport(
                hello.transports, tuple(self._transports), same_host=self.identity.host == hello.identity.host
            )
            peer.template = template(self.layout, hello.identity.layout)
        except HandshakeRefused as refusal:
            self._refuse(peer, refusal.factor, refusal.local, refusal.remote)
            return
        except LayoutMismatch as mismatch:
            self._refuse(peer, "layout", str(mismatch), "see local")
            return
        for old in replaced:  # only now: who is refused takes nobody's place
            self.lose(old, "replaced by a new session")
        peer.transport = self._transports[name]
        self._peers[route] = peer
        self._transmit(peer, messages.Welcome(self.name, self.identity, name))

    def _on_welcome(self, peer: Peer, envelope: messages.Envelope, welcome: messages.Welcome) -> None:
        """The dialer's half: check what the listener said, and open our pages to it."""
        if not peer.dialed or peer.state is not PeerState.CONNECTING:
            emit(MessageDropped(reason="unexpected_welcome"))
            return
        peer.name, peer.epoch, peer.identity = welcome.name, envelope.src_epoch, welcome.identity
        try:
            not_theirs = auth.name_problem(self.credentials, peer.public_key, welcome.name)
            if not_theirs is not None:
                raise HandshakeRefused(auth.NAME_FACTOR, *not_theirs)
            handshake.compare(self.identity, welcome.identity)
            transport = self._transports.get(welcome.transport)
            if transport is None:
                raise HandshakeRefused("transport", ", ".join(self._transports), welcome.transport)
        except HandshakeRefused as refusal:
            self._refuse(peer, refusal.factor, refusal.local, refusal.remote)
            return
        peer.transport = transport
        try:
            invitation = transport.invite(peer.key)
        except PdlinkError as error:  # out of descriptors, for one
            self._refuse(peer, "data connection", str(error), transport.name)
            return
        peer.opened = True
        self._transmit(peer, messages.Invite(invitation))
        self._become_ready(peer)

    def _on_invite(self, peer: Peer, invite: messages.Invite) -> None:
        if peer.dialed or peer.state is not PeerState.CONNECTING or peer.transport is None:
            emit(MessageDropped(reason="unexpected_invite"))
            return
        try:
            peer.transport.connect(peer.key, invite.invitation)
            peer.opened = True
            lane = peer.transport.lane(peer.key)
            if self._require_lane is not None and lane and lane != self._require_lane:
                raise HandshakeRefused("transport.require", self._require_lane, lane)
        except PdlinkError as error:
            log.warning("%s: no data connection to %s: %s", self.name, peer.name, error)
            self._refuse(peer, "data connection", str(error), peer.transport.name)
            return
        self._become_ready(peer)

    def _become_ready(self, peer: Peer) -> None:
        if peer.state is PeerState.LOST:  # while the last message of the handshake was sent
            return
        peer.state = PeerState.READY
        transport = peer.transport.name if peer.transport else ""
        log.info("%s: peer %s ready over %s", self.name, peer.name, transport)
        emit(PeerChanged(peer=peer.name, state="ready", reason=transport))
        waiting, peer.waiting = peer.waiting, []
        for body in waiting:
            self._transmit(peer, body)

    def _refuse(self, peer: Peer, factor: str, local: str, remote: str) -> None:
        local, remote = local[: messages.MAX_TEXT], remote[: messages.MAX_TEXT]
        self._transmit(peer, messages.Refuse(factor, local, remote))
        self.lose(peer, str(HandshakeRefused(factor, local, remote)))

    # -- frames out, in the endpoint's thread ------------------------------------------------------------------------

    def _hang_up(self, peer: Peer, reason: str) -> None:
        if peer.epoch:
            self._transmit(peer, messages.Bye(reason))
        if self._peers.get(peer.route) is peer:
            del self._peers[peer.route]
        self._channel.drop(peer.route)

    def _transmit(self, peer: Peer, body: Body) -> None:
        if not self._post(peer.route, peer.epoch, peer.session, body) and peer.state is not PeerState.LOST:
            self.lose(peer, "control connection is gone or full")

    def _post(self, route: str, dst_epoch: str, session: int, body: Body) -> bool:
        envelope = messages.Envelope(messages.VERSION, self.name, self.epoch, dst_epoch, session, body)
        return self._channel.send(route, messages.encode(envelope))

    def _call(self, command: Callable[[], None]) -> None:
        """Run in the endpoint's thread, under the lock, in order."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)
