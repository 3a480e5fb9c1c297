"""`Sessions`: the peers of this worker, from the first frame to the fence, and the frames between.

A session is a `Peer`. A dialed session begins with the first request for it, an accepted one with its hello. Every
session ends in `lose`: its transfers stop, the transport closes the data connection, and after the fence the
transfers end.

This module knows no transfers: messages about them go to the half that the session belongs to, and `ended` queues
lost and fenced sessions for the driver.

Messages to a peer during one turn of the loop leave at its end as one frame. Frames of a session are numbered: a
repeated frame is dropped, a gap ends the session.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec.structs import replace

from pdlink import threads
from pdlink.endpoint.channel import QueueFull
from pdlink.endpoint.greeting import Greeter
from pdlink.endpoint.known import KnownPeers
from pdlink.endpoint.peer import Peer, PeerState, ends_session
from pdlink.errors import ConfigError, ProtocolError, TransferFailed, TransportFailure
from pdlink.events import MessageDropped, PeerChanged, emit
from pdlink.logs import printable
from pdlink.protocol import auth, messages
from pdlink.protocol.messages import MAX_HELLO_NBYTES
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdlink.endpoint.channel import Channel, Disconnected, Received
    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.peer import Local
    from pdlink.endpoint.work import Work
    from pdlink.protocol.messages import Body, Envelope
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

MAX_DIALS = 500
"""Dialed workers that have not answered yet: requests name the workers to dial, so clients could name any number."""

MAX_QUEUED_NBYTES = 256 * 2**20
MAX_PEER_QUEUED_NBYTES = 16 * 2**20
"""Back-pressure: bytes of frames that wait for one peer, and for all peers, to read earlier ones. Beyond it the slow
consumer loses its session; beyond the limit for all, the slowest does. libzmq holds 16 more frames for each."""
_FRAME_NBYTES = 64 * 2**10
"""Messages that leave together are split into frames of this size; a single message may be longer."""


class LostSession(NamedTuple):
    """This session is over: stop its transfers."""

    peer: Peer
    reason: Reason


class Fenced(NamedTuple):
    """The data connection of a lost session is closed: end its transfers."""

    peer: Peer


class TakesMessages(Protocol):
    """The half of the endpoint that a session belongs to: the receiving one if we dialed, else the sending one."""

    def on_message(self, peer: Peer, body: messages.OfTransfer) -> None: ...


class Sessions:
    """Used under the endpoint's lock; everything that touches the channel, in its thread."""

    def __init__(
        self,
        local: Local,
        work: Work,
        clock: Clock,
        channel: Channel,
        transports: Mapping[str, Transport],
        require_lane: str | None,
    ) -> None:
        self._local, self._work, self._clock = local, work, clock
        self._channel = channel
        self.known = KnownPeers(local.name, clock.now_s)
        self.greeter = Greeter(self, self.known, local, clock, transports, require_lane)
        self.sender: TakesMessages
        self.receiver: TakesMessages
        """Set before the first session."""
        self.refuses: Reason | None = None
        """Why no session is dialed any more; None while sessions are."""
        self.ended: deque[LostSession | Fenced] = deque()
        """For the driver, oldest first."""
        self.by_route: dict[str, Peer] = {}
        """Live sessions whose connection is open."""
        self.closing: dict[str, Peer] = {}
        """Lost sessions whose data connection is not fenced yet, by key."""
        self._num_dialed = 0
        self._num_sessions = 0
        self.unsent: dict[Peer, None] = {}
        """Peers with messages in their outbox that may leave."""
        self.waiting: dict[Peer, None] = {}
        """Peers with frames that their connection does not take now."""
        self.queued_nbytes = 0
        """Of all peers in `waiting`."""

    # -- begin and end -----------------------------------------------------------------------------------------------

    def at(self, address: str) -> Peer:
        """The live session with the worker at this address; opens one if there is none.

        Raises TransferFailed during a back-off, beyond `MAX_DIALS`, and if this endpoint is leaving, closed or dead.
        """
        if self.refuses is not None:
            raise TransferFailed(self.refuses.words, self.refuses)
        known = self.known.dialed.get(address)
        peer = known.session if known is not None else None
        if peer is None:
            self.known.check(address)
            connecting = [peer for peer in self.known.sessions(accepted=False) if peer.state is PeerState.CONNECTING]
            if len(connecting) >= MAX_DIALS:
                raise TransferFailed(f"{MAX_DIALS} dialed workers have not answered yet", Reason(Code.TOO_MANY_DIALS))
            self._num_dialed += 1
            now = self._clock.awake_s()
            number = self.next_number()
            peer = Peer(number, "", self._num_dialed, dialed=True, since_s=now, heard_s=now, address=address)
            self.known.begin(peer)
            self._work.call(lambda: self._dial(peer), lambda reason: self.lose(peer, reason))
        return peer

    def next_number(self) -> int:
        """A number for the next session, unique in this endpoint."""
        self._num_sessions += 1
        return self._num_sessions

    def aside(self, act: Callable[[], None], then: Callable[[Exception | None], None], peer: Peer) -> None:
        """Do `act`, which may take long, in a thread of its own, then call `then` with what it raised in this one."""

        def run() -> None:
            error: Exception | None = None
            try:
                act()
            except Exception as raised:  # noqa: BLE001  `then` has it
                error = raised
            self._work.call(lambda: then(error), lambda reason: self.lose(peer, reason))

        try:
            threads.guarded("pdlink-connect", run, lambda _: None).start()
        except RuntimeError as error:  # no thread is left
            then(TransportFailure(f"cannot start a thread: {error}; see ulimit -u"))

    def answers(self, peer: Peer) -> bool:
        """Whether the connection of an accepted session is still there; ends the session if not.

        The kernel ends the connections of a dead process at once. A vanished host shows only by its silence.
        """
        self.post(peer, messages.Heartbeat())
        return peer.state is not PeerState.LOST

    def _dial(self, peer: Peer) -> None:
        if peer.state is PeerState.LOST:
            return
        try:
            peer.route = self._channel.dial(peer.address)
            if self._local.credentials is not None:
                peer.public_key = auth.ControlAddress.parse(peer.address).public_key
        except (ConfigError, TransportFailure) as error:
            self.lose(peer, Reason(Code.NOT_CONNECTED, str(error)))
            return
        self.by_route[peer.route] = peer
        self.post(peer, self.greeter.hello())

    def become_ready(self, peer: Peer) -> None:
        """The handshake is over: messages of transfers may be sent."""
        if peer.state is PeerState.LOST:  # lost while it sent its last handshake message
            return
        peer.state = PeerState.READY
        transport = peer.transport.name if peer.transport else ""
        log.info("%s: peer %s ready over %s", self._local.name, peer.name, transport)
        emit(PeerChanged(peer=peer.name, state="ready", reason=transport))
        self.known.fits(peer)
        if peer.outbox:
            self.unsent[peer] = None

    def lose(self, peer: Peer, reason: Reason) -> None:
        """End this session."""
        if peer.state is PeerState.LOST:
            return
        if peer.state is PeerState.CONNECTING:
            peer.outbox.clear()
        peer.state = PeerState.LOST
        reason = replace(reason, words=printable(reason.words, messages.MAX_TEXT))
        log.info("%s: peer %s lost: %s", self._local.name, peer.name or peer.address, reason.sentence)
        emit(PeerChanged(peer=peer.name or peer.address, state="lost", reason=reason.words or reason.code))
        self.known.end(peer)
        self._work.call(lambda: self._hang_up(peer, reason))
        self.ended.append(LostSession(peer, reason))
        self.shut(peer)
        if peer.shutting:
            self.closing[peer.key] = peer
        else:  # nothing can be in flight
            self.ended.append(Fenced(peer))

    def shut(self, peer: Peer) -> None:
        """Close the data connection, if there is one."""
        if peer.opened and peer.transport is not None:
            peer.opened = False
            peer.shutting.append(peer.transport)
            peer.transport.close_peer(peer.key)

    def on_fenced(self, key: str, transport: Transport) -> None:
        """A data connection is closed. After the last one of a lost session, its quarantine ends."""
        peer = self.closing.get(key) or self.of_key(key)
        if peer is None or transport not in peer.shutting:
            return
        peer.shutting.remove(transport)
        if not peer.shutting and self.closing.pop(key, None) is not None:
            self.ended.append(Fenced(peer))

    def on_failed(self, key: str, transport: Transport, words: str) -> None:
        """A data connection has failed. Ignored if its session has given it up already."""
        peer = self.of_key(key)
        if peer is not None and peer.transport is transport:
            self.greeter.on_failed(peer, words)
            self.lose(peer, Reason(Code.PEER_LOST, words))

    def of_key(self, key: str) -> Peer | None:
        """The live session with this key."""
        return next((peer for peer in self.known.sessions() if peer.key == key), None)

    def _hang_up(self, peer: Peer, reason: Reason) -> None:
        self.unsent.pop(peer, None)
        if peer.epoch:
            self.flush(peer, messages.Bye(reason.words or reason.code))
        self._forget_queue(peer)
        if self.by_route.get(peer.route) is peer:
            del self.by_route[peer.route]
        self._channel.drop(peer.route)

    # -- in ----------------------------------------------------------------------------------------------------------

    def on_frame(self, item: Received) -> None:
        """Act upon the next frame of a session; drop and count any other."""
        peer, epoch = self.by_route.get(item.route), self._local.epoch
        if len(item.frame) > MAX_HELLO_NBYTES and (peer is None or peer.public_key != item.public_key):
            emit(MessageDropped(reason="too_long"))  # not decoded: without a session only hello is valid
            return
        try:
            envelope = messages.decode(item.frame)
        except ProtocolError as error:
            log.debug("%s: %s", self._local.name, error)  # counted; warnings would let anybody fill the disk
            emit(MessageDropped(reason="malformed"))
            return
        if isinstance(envelope.bodies[0], messages.Hello) and (peer is None or not peer.dialed):
            self.greeter.on_hello(item, envelope, envelope.bodies[0])
        elif peer is None or item.public_key != peer.public_key:
            self._disown(item.route, envelope)
        elif not peer.is_of(envelope, epoch):
            if peer.successor_says_bye(envelope, epoch):
                self.lose(peer, Reason(Code.PEER_LOST, f"{peer.name or peer.address} was restarted"))
            else:
                self._disown(item.route, envelope)
        else:
            next_one = envelope.number == peer.num_taken
            bodies = envelope.bodies if next_one else peer.out_of_turn(envelope)
            if bodies is None:
                who = peer.name or peer.address
                words = f"lost frame {peer.num_taken} of {who}, then came {envelope.number}"
                self.lose(peer, Reason(Code.PEER_LOST, words))
                return
            if not bodies:
                emit(MessageDropped(reason="repeated"))
                return
            peer.num_taken += next_one
            peer.heard_s = self._clock.awake_s()
            half = self.receiver if peer.dialed else self.sender
            for body in bodies:
                if peer.state is PeerState.READY and isinstance(body, messages.OfTransfer):
                    half.on_message(peer, body)
                elif peer.state is not PeerState.LOST:
                    self._on_session_message(peer, envelope, body)

    def _on_session_message(self, peer: Peer, envelope: Envelope, body: Body) -> None:
        match body:
            case messages.Welcome():
                self.greeter.on_welcome(peer, envelope, body)
            case messages.Invite():
                self.greeter.on_invite(peer, body)
            case messages.Ready():
                self.greeter.on_ready(peer)
            case messages.Refuse():
                self.greeter.on_refuse(peer, envelope, body)
            case messages.Bye(reason=reason):
                self.lose(peer, Reason(Code.PEER_LOST, f"closed by {peer.name or peer.address}: {reason}"))
            case messages.Hello():
                emit(MessageDropped(reason="wrong_direction"))
            case messages.Note(data=data) if peer.state is PeerState.READY and peer.transport is not None:
                try:
                    peer.transport.heard(peer.key, data)
                except ProtocolError as error:
                    self.lose(peer, Reason(Code.PEER_LOST, str(error)))
            case messages.Heartbeat():
                pass
            case _:
                emit(MessageDropped(reason="before_handshake"))

    def disown(self, item: Received) -> None:
        """Answer a frame of no session that could not be handled."""
        self._disown(item.route, messages.decode(item.frame))

    def _disown(self, route: str, envelope: Envelope) -> None:
        """Answer a frame of an unknown session with *bye*."""
        emit(MessageDropped(reason="old_session"))
        if not ends_session(envelope):
            local, bye = self._local, (messages.Bye("unknown session"),)
            answer = messages.Envelope(
                messages.VERSION, local.name, local.epoch, envelope.src_epoch, envelope.session, 0, bye
            )
            with contextlib.suppress(QueueFull):
                self._channel.send(route, messages.encode(answer))

    def on_disconnected(self, item: Disconnected) -> None:
        """The connection of a session has ended."""
        peer = self.by_route.get(item.route)
        if peer is None:
            return
        if item.refused:
            self.greeter.on_key_refused(peer, item.reason)
            return
        code, words = Code.PEER_LOST, "control connection cut"
        if not peer.epoch:
            code, words = Code.NOT_CONNECTED, f"cannot connect to {peer.address}"
        self.lose(peer, Reason(code, f"{words}: {item.reason}" if item.reason else words))

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, peer: Peer, body: Body) -> None:
        """Queue a message to leave at the end of the turn, or of the handshake. Ignored for a lost peer."""
        if peer.state is PeerState.LOST:
            return
        peer.outbox.append(body)
        if peer.state is PeerState.READY:
            self.unsent[peer] = None
            if self._work.asleep:
                self._work.wake()

    def say(self, key: str, data: bytes) -> None:
        """A note of a transport's. Ignored for a session that has ended."""
        peer = self.of_key(key)
        if peer is not None:
            self.send(peer, messages.Note(data))

    def post(self, peer: Peer, *bodies: Body) -> None:
        """Send these messages now, in as many frames as needed. Ends the session if the connection is gone."""
        local = self._local
        frame = messages.encode(
            messages.Envelope(
                messages.VERSION, local.name, local.epoch, peer.epoch, peer.session, peer.num_sent, bodies
            )
        )
        if len(bodies) > 1 and (len(frame) > _FRAME_NBYTES or len(bodies) > messages.MAX_BODIES):
            half = len(bodies) // 2
            self.post(peer, *bodies[:half])
            self.post(peer, *bodies[half:])
            return
        if isinstance(bodies[0], messages.Hello) and len(frame) > MAX_HELLO_NBYTES:
            words = f"hello: got {len(frame)} bytes; expected at most {MAX_HELLO_NBYTES}, a layout of 40,000 parts"
            self.lose(peer, Reason(Code.NOT_CONNECTED, words))
            return
        peer.num_sent += 1
        if peer.queued or not self._try(peer, frame):
            self._queue(peer, frame)

    def send_waiting(self) -> None:
        """Send queued frames as far as peers have read earlier ones."""
        for peer in list(self.waiting):
            while peer.queued and self._try(peer, peer.queued[0]):
                nbytes = len(peer.queued.popleft())
                peer.queued_nbytes -= nbytes
                self.queued_nbytes -= nbytes
            if not peer.queued:
                del self.waiting[peer]

    def _try(self, peer: Peer, frame: bytes) -> bool:
        """False if the queue is full; True if the frame has left or its session is over."""
        try:
            if not self._channel.send(peer.route, frame) and peer.state is not PeerState.LOST:
                self.lose(peer, Reason(Code.PEER_LOST, "control connection is gone"))
        except QueueFull:
            return False
        return True

    def _queue(self, peer: Peer, frame: bytes) -> None:
        if peer.state is PeerState.LOST:
            return
        peer.queued.append(frame)
        peer.queued_nbytes += len(frame)
        self.queued_nbytes += len(frame)
        self.waiting[peer] = None
        if peer.queued_nbytes > MAX_PEER_QUEUED_NBYTES:
            self._lose_slow(peer, MAX_PEER_QUEUED_NBYTES)
        elif self.queued_nbytes > MAX_QUEUED_NBYTES:
            self._lose_slow(max(self.waiting, key=lambda slow: slow.queued_nbytes), MAX_QUEUED_NBYTES)

    def _lose_slow(self, peer: Peer, limit_nbytes: int) -> None:
        nbytes = peer.queued_nbytes
        self._forget_queue(peer)
        words = f"slow consumer: {nbytes} bytes wait for it to read; expected at most {limit_nbytes}"
        self.lose(peer, Reason(Code.PEER_LOST, words))

    def _forget_queue(self, peer: Peer) -> None:
        self.waiting.pop(peer, None)
        self.queued_nbytes -= peer.queued_nbytes
        peer.queued.clear()
        peer.queued_nbytes = 0

    def flush(self, peer: Peer, *last: Body) -> None:
        """Send the messages of this turn, and let the peer write to the blocks that they offer."""
        bodies, peer.outbox = (*peer.outbox, *last), []
        if bodies:
            if peer.transport is not None and peer.opened:
                for body in bodies:
                    if isinstance(body, messages.Offer):
                        peer.transport.open_blocks(peer.key, body.blocks)
            self.post(peer, *bodies)
