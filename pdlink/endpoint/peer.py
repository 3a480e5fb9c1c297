"""The two ends of a session: `Local`, who this worker is, and `Peer`, all that is known of the other one."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.protocol.messages import Bye, Offer, Refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.endpoint.early import Early
    from pdlink.endpoint.order import Flow
    from pdlink.endpoint.pushing import Job
    from pdlink.endpoint.transfers import Incoming, Outgoing
    from pdlink.kv.plan import Template
    from pdlink.protocol.auth import Credentials
    from pdlink.protocol.messages import Body, Envelope, Identity
    from pdlink.transport.base import Transport


@dataclass(slots=True)
class Local:
    """Who this worker is, as its peers see it."""

    name: str
    epoch: str
    """Names this life of the worker: a restarted worker, on the same port too, is another peer."""
    identity: Identity
    credentials: Credentials | None
    """Our keys and whom we know; None has sessions with everybody who can reach the control port."""
    address: str = ""
    """Control address that peers dial, with the key; empty until the port is bound."""


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    """Handshake done and the data connection opened; messages of transfers may be sent."""
    LOST = "lost"
    """Over; waiting for the transport to report that the fence holds."""


@dataclass(slots=True, eq=False)
class Peer:
    """One session, in one object: forgetting it is dropping this. A restarted worker, or a second connection to the
    same one, is another `Peer`."""

    number: int
    """Of this session among all of this endpoint's, dialed and accepted."""
    route: str
    session: int
    dialed: bool
    """True on the side that opened the connection, which receives KV; False on the side that sends it."""
    since_s: float
    heard_s: float
    """When the last frame came, which renews the leases of this peer; both times are of `Clock.awake_s`."""
    beat_s: float = 0.0
    """When we last sent a heartbeat."""
    address: str = ""
    """Control address that we dialed; empty on the side that was dialed."""
    listens_at: str = ""
    """Where it can be dialed itself, as it says; known on the side that was dialed."""
    public_key: str = ""
    """Proven by the other side of this session; empty without credentials."""
    name: str = ""
    epoch: str = ""
    key: str = ""
    """Unique name of this session for the transport and for leases, once it is known whose it is."""
    state: PeerState = PeerState.CONNECTING
    identity: Identity | None = None
    transport: Transport | None = None
    """Carries the bytes of this session; None until chosen."""
    untried: list[str] = field(default_factory=list)
    """Transports left to choose from, should this one not connect; on the side that was dialed."""
    tried: set[str] = field(default_factory=set)
    """Names of transports that the listener told us to use; on the dialing side."""
    shutting: list[Transport] = field(default_factory=list)
    """Transports closed for this session whose fence is not reported yet."""
    lane: str = ""
    """How bytes to it travel (`Transport.lane`); known, on the sending side, once some have landed."""
    opened: bool = False
    """Whether the transport knows this session, and so will report its fence."""
    template: Template | None = None
    """How our pages map to theirs; only on the sending side."""
    outbox: list[Body] = field(default_factory=list)
    """Messages of transfers that leave together at the end of the loop's turn, once READY."""
    queued: deque[bytes] = field(default_factory=deque)
    """Frames that leave when it has read some of those before."""
    queued_nbytes: int = 0
    num_sent: int = 0
    """Frames of this session that we sent: the number of our next one."""
    num_taken: int = 0
    """Frames of theirs that we took: the number that their next one must have."""
    flow: Flow[Job] | None = None
    """What goes to it, in the order of its transport; only on the sending side, from its first push on."""
    outgoing: dict[str, Outgoing] = field(default_factory=dict)
    """Live transfers to it, by id."""
    incoming: dict[str, Incoming] = field(default_factory=dict)
    """Live transfers from it, by id."""
    early: dict[str, Early] = field(default_factory=dict)
    """Its interest in transfers whose request has not come here yet, by id."""
    early_nbytes: int = 0

    def introduce(self, name: str, epoch: str, identity: Identity) -> None:
        """Now it is known who this is."""
        self.name, self.epoch, self.identity = name, epoch, identity
        self.key = f"{name}#{self.number}"

    def is_life_of(self, name: str, epoch: str, session: int) -> bool:
        """Whether this is the session that a worker opened under this number in this life."""
        return not self.dialed and (self.name, self.epoch, self.session) == (name, epoch, session)

    def is_of(self, envelope: Envelope, epoch: str) -> bool:
        """Whether this frame belongs to this life of both sides and to this session. epoch: ours."""
        return (
            envelope.session == self.session
            and envelope.dst_epoch == epoch
            and (not self.epoch or (envelope.src, envelope.src_epoch) == (self.name, self.epoch))
        )

    def successor_says_bye(self, envelope: Envelope, epoch: str) -> bool:
        """Whether a new life of a listener answers, on the connection we dialed, a frame meant for its old one."""
        return (
            self.dialed
            and ends_session(envelope)
            and self.epoch not in ("", envelope.src_epoch)
            and (envelope.session, envelope.dst_epoch) == (self.session, epoch)
        )

    def take(self, envelope: Envelope) -> Sequence[Body] | None:
        """What counts of a frame of this session: nothing if it was here before; None if one before it was lost."""
        if envelope.number == self.num_taken:
            self.num_taken += 1
            return envelope.bodies
        if ends_session(envelope):
            return envelope.bodies[-1:]
        return () if envelope.number < self.num_taken else None

    def open_offered(self, bodies: Sequence[Body]) -> None:
        """Let the peer write to what is offered in messages that are about to leave."""
        if self.transport is not None and self.opened:
            for body in bodies:
                if isinstance(body, Offer):
                    self.transport.open_blocks(self.key, body.blocks)

    def __repr__(self) -> str:
        return f"Peer({self.key or self.address}, {self.state.value})"


def printable(text: str, max_chars: int) -> str:
    """A peer's words for a log or a report: one line without control characters, cut."""
    text = text[:max_chars]
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def ends_session(envelope: Envelope) -> bool:
    """Whether this is the last frame of its session, whatever its number."""
    return isinstance(envelope.bodies[-1], Bye | Refuse)
