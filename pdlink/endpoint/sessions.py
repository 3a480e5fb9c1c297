"""`Sessions`: whom this worker talks to, from the first word to the fence; and the frames between.

A session is a `Peer`. One that we dial is here from the moment somebody asks for it, an accepted one from its hello.
It ends by `lose`, whatever the reason: its transfers stop at once, the transport closes the data connection, and when
that is fenced its transfers end, too.

What is to be said to a peer during one turn of the loop leaves at its end as one frame. Frames of a session are
numbered: a repeated one is dropped, a gap ends the session, so that nothing waits for a message that was lost.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from pdlink.endpoint.channel import QueueFull
from pdlink.endpoint.greeting import Greeter
from pdlink.endpoint.link import printable
from pdlink.endpoint.peer import Peer, PeerState, ends_session
from pdlink.errors import ConfigError, ProtocolError, TransferFailed, TransportFailure
from pdlink.events import MessageDropped, PeerChanged, emit
from pdlink.protocol import auth, messages
from pdlink.protocol.messages import MAX_HELLO_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdlink.endpoint.channel import Channel, Disconnected, Received
    from pdlink.endpoint.receiver import Receiver
    from pdlink.endpoint.sender import Sender
    from pdlink.protocol.messages import Body, Envelope, Identity
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

_ABOUT_THE_SESSION = (
    messages.Heartbeat,
    messages.Bye,
    messages.Hello,
    messages.Welcome,
    messages.Invite,
    messages.Ready,
    messages.Refuse,
)


MAX_DIALS = 500
"""Workers that we have called and that have not answered: who may name workers in requests cannot make us call any
number at once."""

MAX_QUEUED_NBYTES = 256 * 2**20
MAX_PEER_QUEUED_NBYTES = 16 * 2**20
"""Of frames that wait for one peer, and for all, to read what was sent before: that peer is lost, or of all the one
for which most waits. In libzmq wait 16 frames more of each, of `_FRAME_NBYTES` but for single long messages."""
_FRAME_NBYTES = 64 * 2**10
"""Of what is said together: longer frames are sent in several."""


class Owner(Protocol):
    """The endpoint, as its sessions see it."""

    name: str
    epoch: str
    address: str
    """Control address, with the key."""
    identity: Identity
    credentials: auth.Credentials | None
    sender: Sender
    receiver: Receiver
    now_s: Callable[[], float]

    def awake_s(self) -> float:
        """See `Link.awake_s`."""

    def call(self, command: Callable[[], None], cost: Callable[[str], None] | None = None) -> None:
        """Run in the endpoint's thread, under the lock, in order; `cost(reason)` if it raises."""

    def wake(self) -> None:
        """Let the loop go round once more."""


class Sessions:
    """Used under the endpoint's lock; what touches the channel, in its thread."""

    def __init__(
        self, owner: Owner, channel: Channel, transports: Mapping[str, Transport], require_lane: str | None
    ) -> None:
        self._owner = owner
        self._channel = channel
        self.greeter = Greeter(self, owner, transports, require_lane)
        self.by_route: dict[str, Peer] = {}
        """Live sessions whose connection has been opened."""
        self.dialed: dict[str, Peer] = {}
        """Live sessions that we opened, by address, from the moment somebody asks for one."""
        self.closing: dict[str, Peer] = {}
        """Lost sessions whose data connection is not fenced yet, by key."""
        self._num_dialed = 0
        self._num_sessions = 0
        self.unsent: dict[Peer, None] = {}
        """Those with something in their outbox that may leave."""
        self.waiting: dict[Peer, None] = {}
        """Those with frames that their connection does not take now."""
        self.queued_nbytes = 0
        """Of all of these."""

    def all(self) -> list[Peer]:
        """Live sessions."""
        return list(dict.fromkeys((*self.by_route.values(), *self.dialed.values())))

    def accepted(self) -> list[Peer]:
        """Live sessions that others have opened."""
        return [peer for peer in self.by_route.values() if not peer.dialed]

    # -- begin and end -----------------------------------------------------------------------------------------------

    def at(self, address: str) -> Peer:
        """The live session with the worker at this address; opens one if there is none.

        Raises TransferFailed if that worker refused us a moment ago, or if too many others have not answered yet.
        """
        peer = self.dialed.get(address)
        if peer is None:
            self.greeter.refusals.check(address)
            if sum(other.state is PeerState.CONNECTING for other in self.dialed.values()) >= MAX_DIALS:
                raise TransferFailed(f"too_many_dials: {MAX_DIALS} workers have not answered yet, limit {MAX_DIALS}")
            self._num_dialed += 1
            now = self._owner.awake_s()
            number = self.next_number()
            peer = Peer(number, "", self._num_dialed, dialed=True, since_s=now, heard_s=now, address=address)
            self.dialed[address] = peer
            self._owner.call(lambda: self._dial(peer), lambda reason: self.lose(peer, reason))
        return peer

    def next_number(self) -> int:
        """Of the next session: no two have one, so transports and leases can tell them apart by it."""
        self._num_sessions += 1
        return self._num_sessions

    def answers(self, peer: Peer) -> bool:
        """Whether a session that somebody opened has its connection still; ends it if not.

        The kernel ends the connections of a process that has died, at once. A host that has vanished is noticed by
        its silence.
        """
        self.post(peer, messages.Heartbeat())
        return peer.state is not PeerState.LOST

    def _dial(self, peer: Peer) -> None:
        if peer.state is PeerState.LOST:
            return
        try:
            peer.route = self._channel.dial(peer.address)
            if self._owner.credentials is not None:
                peer.public_key = auth.ControlAddress.parse(peer.address).public_key
        except (ConfigError, TransportFailure) as error:
            self.lose(peer, str(error))
            return
        self.by_route[peer.route] = peer
        self.post(peer, self.greeter.hello())

    def become_ready(self, peer: Peer) -> None:
        """The handshake is over: messages of transfers may be sent."""
        if peer.state is PeerState.LOST:  # while the last message of the handshake was sent
            return
        peer.state = PeerState.READY
        transport = peer.transport.name if peer.transport else ""
        log.info("%s: peer %s ready over %s", self._owner.name, peer.name, transport)
        emit(PeerChanged(peer=peer.name, state="ready", reason=transport))
        self.greeter.refusals.fits(peer)
        if peer.outbox:
            self.unsent[peer] = None

    def lose(self, peer: Peer, reason: str) -> None:
        """End this session."""
        if peer.state is PeerState.LOST:
            return
        if peer.state is PeerState.CONNECTING:
            peer.outbox.clear()
        peer.state = PeerState.LOST
        reason = printable(reason, messages.MAX_TEXT)
        log.info("%s: peer %s lost: %s", self._owner.name, peer.name or peer.address, reason)
        emit(PeerChanged(peer=peer.name or peer.address, state="lost", reason=reason))
        self.dialed.pop(peer.address, None)
        self._owner.call(lambda: self._hang_up(peer, reason))
        half = self._half(peer)
        half.on_peer_lost(peer, reason)
        self.shut(peer)
        if peer.shutting:
            self.closing[peer.key] = peer
        else:  # nothing can be in flight
            half.on_fenced(peer)

    def shut(self, peer: Peer) -> None:
        """Close the data connection, if the transport knows of one."""
        if peer.opened and peer.transport is not None:
            peer.opened = False
            peer.shutting.append(peer.transport)
            peer.transport.close_peer(peer.key)

    def on_fenced(self, key: str, transport: Transport) -> None:
        """A data connection is closed for good. The last one of a lost session was what its blocks waited for."""
        peer = self.closing.get(key) or self.of_key(key)
        if peer is None or transport not in peer.shutting:
            return
        peer.shutting.remove(transport)
        if not peer.shutting and self.closing.pop(key, None) is not None:
            self._half(peer).on_fenced(peer)
            peer.transport = None

    def on_failed(self, key: str, transport: Transport, reason: str) -> None:
        """A data connection is unusable. If it is one that a session has given up, nobody minds."""
        peer = self.of_key(key)
        if peer is not None and peer.transport is transport:
            self.greeter.on_failed(peer, reason)
            self.lose(peer, reason)

    def of_key(self, key: str) -> Peer | None:
        """The live session that transports know by this key."""
        return next((peer for peer in self.all() if peer.key == key), None)

    def _half(self, peer: Peer) -> Sender | Receiver:
        return self._owner.receiver if peer.dialed else self._owner.sender

    def _hang_up(self, peer: Peer, reason: str) -> None:
        self.unsent.pop(peer, None)
        if peer.epoch:
            self.flush(peer, messages.Bye(reason))
        self._forget_queue(peer)
        if self.by_route.get(peer.route) is peer:
            del self.by_route[peer.route]
        self._channel.drop(peer.route)

    # -- in ----------------------------------------------------------------------------------------------------------

    def on_frame(self, item: Received) -> None:
        """Act upon a frame if it is of a session and the next one of it; count it if not."""
        peer, epoch = self.by_route.get(item.route), self._owner.epoch
        if len(item.frame) > MAX_HELLO_NBYTES and (peer is None or peer.public_key != item.public_key):
            emit(MessageDropped(reason="too_long"))  # undecoded: all that a stranger has to say is hello
            return
        try:
            envelope = messages.decode(item.frame)
        except ProtocolError as error:
            log.debug("%s: %s", self._owner.name, error)  # counted; a warning each would let anybody fill the disk
            emit(MessageDropped(reason="malformed"))
            return
        if isinstance(envelope.bodies[0], messages.Hello) and (peer is None or not peer.dialed):
            self.greeter.on_hello(item, envelope, envelope.bodies[0])
        elif peer is None or item.public_key != peer.public_key:
            self._disown(item.route, envelope)
        elif peer.successor_says_bye(envelope, epoch):
            self.lose(peer, f"{peer.name or peer.address} was restarted")
        elif not peer.is_of(envelope, epoch):
            self._disown(item.route, envelope)
        else:
            self._on_frame_of(peer, envelope)

    def _on_frame_of(self, peer: Peer, envelope: Envelope) -> None:
        bodies = peer.take(envelope)
        if bodies is None:
            who = peer.name or peer.address
            self.lose(peer, f"lost frame {peer.num_taken} of {who}, then came {envelope.number}")
            return
        if not bodies:
            emit(MessageDropped(reason="repeated"))
            return
        peer.heard_s = self._owner.awake_s()
        half = self._half(peer)
        for body in bodies:
            if peer.state is PeerState.READY and not isinstance(body, _ABOUT_THE_SESSION):
                half.on_message(peer, body)
            elif peer.state is not PeerState.LOST:
                self._on_session_message(peer, envelope, body)
        if not peer.dialed and peer.state is not PeerState.LOST:
            self._owner.sender.on_heard(peer, peer.heard_s)

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
                self.lose(peer, f"closed by {peer.name or peer.address}: {reason}")
            case messages.Hello():
                emit(MessageDropped(reason="wrong_direction"))
            case messages.Heartbeat():
                pass
            case _:
                emit(MessageDropped(reason="before_handshake"))

    def disown(self, item: Received) -> None:
        """A frame of no session, which could not be handled."""
        self._disown(item.route, messages.decode(item.frame))

    def _disown(self, route: str, envelope: Envelope) -> None:
        """A frame of no session that we know: whoever believes in it shall hear that it is over."""
        emit(MessageDropped(reason="old_session"))
        if not ends_session(envelope):
            bye = self._envelope(envelope.src_epoch, envelope.session, 0, messages.Bye("unknown session"))
            with contextlib.suppress(QueueFull):
                self._channel.send(route, messages.encode(bye))

    def on_disconnected(self, item: Disconnected) -> None:
        """The connection of a session has ended."""
        peer = self.by_route.get(item.route)
        if peer is None:
            return
        if item.refused:
            self.greeter.on_key_refused(peer, item.reason)
            return
        reason = "control connection cut" if peer.epoch else f"cannot connect to {peer.address}"
        self.lose(peer, f"{reason}: {item.reason}" if item.reason else reason)

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, peer: Peer, body: Body) -> None:
        """Let this leave at the end of the turn, or of the handshake; messages to a lost peer vanish."""
        if peer.state is PeerState.LOST:
            return
        peer.outbox.append(body)
        if peer.state is PeerState.READY:
            self.unsent[peer] = None
            self._owner.wake()

    def post(self, peer: Peer, *bodies: Body) -> None:
        """Send a frame of this session now, in several if need be; ends the session if that cannot be."""
        frame = messages.encode(self._envelope(peer.epoch, peer.session, peer.num_sent, *bodies))
        if len(bodies) > 1 and (len(frame) > _FRAME_NBYTES or len(bodies) > messages.MAX_BODIES):
            half = len(bodies) // 2
            self.post(peer, *bodies[:half])
            self.post(peer, *bodies[half:])
            return
        if isinstance(bodies[0], messages.Hello) and len(frame) > MAX_HELLO_NBYTES:
            self.lose(peer, f"our hello has {len(frame)} bytes, a listener takes {MAX_HELLO_NBYTES} at most")
            return
        peer.num_sent += 1
        if peer.queued or not self._try(peer, frame):
            self._queue(peer, frame)

    def send_waiting(self) -> None:
        """What waits for peers to read leaves as far as they have."""
        for peer in list(self.waiting):
            while peer.queued and self._try(peer, peer.queued[0]):
                nbytes = len(peer.queued.popleft())
                peer.queued_nbytes -= nbytes
                self.queued_nbytes -= nbytes
            if not peer.queued:
                del self.waiting[peer]

    def _try(self, peer: Peer, frame: bytes) -> bool:
        """Whether this frame is on its way, or will never have to be; False if its queue is full."""
        try:
            if not self._channel.send(peer.route, frame) and peer.state is not PeerState.LOST:
                self.lose(peer, "control connection is gone")
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
        self.lose(peer, f"slow consumer: {nbytes} bytes wait for it to read, limit {limit_nbytes}")

    def _forget_queue(self, peer: Peer) -> None:
        self.waiting.pop(peer, None)
        self.queued_nbytes -= peer.queued_nbytes
        peer.queued.clear()
        peer.queued_nbytes = 0

    def flush(self, peer: Peer, *last: Body) -> None:
        """Send what was said to it since the last time."""
        bodies, peer.outbox = (*peer.outbox, *last), []
        if bodies:
            peer.open_offered(bodies)
            self.post(peer, *bodies)

    def _envelope(self, dst_epoch: str, session: int, number: int, *bodies: Body) -> Envelope:
        owner = self._owner
        return messages.Envelope(messages.VERSION, owner.name, owner.epoch, dst_epoch, session, number, bodies)
