"""The two ends of a session: `Local` is this worker, `Peer` the other one."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdlink.kv.groups import KVGroups
from pdlink.protocol.messages import Bye, Refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.endpoint.order import PeerQueue
    from pdlink.kv.plan import Template
    from pdlink.protocol.auth import Credentials
    from pdlink.protocol.messages import Body, Envelope, Identity
    from pdlink.transport.base import Transport

NO_GROUPS = KVGroups(())


@dataclass(slots=True)
class Local:
    """This worker, as its peers see it."""

    name: str
    epoch: str
    """Names this life of the worker: after a restart it is another peer, also on the same port."""
    identity: Identity
    credentials: Credentials | None
    """Our keys and allow-list; None has sessions with everybody who can reach the control port."""
    address: str = ""
    """Control address that peers dial, with the key; empty until the port is bound."""


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    """Handshake done and the data connection opened; messages of transfers may be sent."""
    LOST = "lost"
    """Over; waits for the fence."""


@dataclass(slots=True, eq=False)
class Peer:
    """One session, with its transfers and byte counts. A second connection to the same worker is another `Peer`."""

    number: int
    """Unique among the sessions of this endpoint."""
    route: str
    session: int
    dialed: bool
    """True on the side that opened the connection, which receives KV; False on the side that sends it."""
    since_s: float
    heard_s: float
    """When the last frame came; renews the leases of this peer. Both times are `Clock.awake_s`."""
    idle_since_s: float | None = None
    """`Clock.awake_s` since which it has no transfer; None while it has, and on the side that was dialed."""
    beat_s: float = 0.0
    """When we last sent a heartbeat."""
    address: str = ""
    """Control address that we dialed; empty on the side that was dialed."""
    listens_at: str = ""
    """Its own control address, as it says; known on the side that was dialed."""
    public_key: str = ""
    """Proven by the other side of this session; empty without credentials."""
    name: str = ""
    epoch: str = ""
    key: str = ""
    """Unique name of this session for the transport, once `introduce` has been called."""
    state: PeerState = PeerState.CONNECTING
    groups: KVGroups = NO_GROUPS
    """Of its layers, once the handshake has told them."""
    transport: Transport | None = None
    """Carries the bytes of this session; None until chosen."""
    untried: list[str] = field(default_factory=list)
    """Common transports that follow if this one does not connect; on the side that was dialed."""
    invited: bool = False
    """Whether it has answered our last welcome; on the side that was dialed."""
    tried: set[str] = field(default_factory=set)
    """Transports that the listener asked for so far; on the dialing side."""
    shutting: list[Transport] = field(default_factory=list)
    """Transports closed for this session whose fence is not reported yet."""
    lane: str = ""
    """How bytes to it travel (`Transport.lane`); known on the sending side once some have landed."""
    opened: bool = False
    """Whether the transport has a data connection for this session, so it will report the fence."""
    templates: tuple[Template, ...] = ()
    """By group, how our pages map to theirs; only on the sending side."""
    outbox: list[Body] = field(default_factory=list)
    """Messages of transfers that leave together at the end of the turn, once READY."""
    queued: deque[bytes] = field(default_factory=deque)
    """Frames that wait until it has read earlier ones."""
    queued_nbytes: int = 0
    num_sent: int = 0
    """Frames sent in this session; the number of our next one."""
    num_taken: int = 0
    """Frames taken in this session; the number that their next one must have."""
    flow: PeerQueue[Any] | None = None
    """Its place in the order of the transport; only on the sending side, from the first push on."""
    transfers: dict[str, None] = field(default_factory=dict)
    """Ids of live ones: from it if we dialed, else to it."""
    early: dict[str, None] = field(default_factory=dict)
    """Ids of transfers that it has shown interest in and whose request has not come here yet."""
    early_nbytes: int = 0

    def introduce(self, name: str, epoch: str, identity: Identity) -> None:
        """The handshake has named the other side."""
        self.name, self.epoch, self.groups = name, epoch, identity.groups
        self.key = f"{name}#{self.number}"

    def is_life_of(self, name: str, epoch: str, session: int) -> bool:
        """Whether a worker opened this session, under this number in this life."""
        return not self.dialed and (self.name, self.epoch, self.session) == (name, epoch, session)

    def is_of(self, envelope: Envelope, epoch: str) -> bool:
        """Whether this frame belongs to this session, and to this life of both sides. epoch: ours."""
        return (
            envelope.session == self.session
            and envelope.dst_epoch == epoch
            and (not self.epoch or (envelope.src, envelope.src_epoch) == (self.name, self.epoch))
        )

    def successor_says_bye(self, envelope: Envelope, epoch: str) -> bool:
        """Whether a restarted listener answers, on the connection we dialed, a frame for its former life."""
        return (
            self.dialed
            and ends_session(envelope)
            and self.epoch not in ("", envelope.src_epoch)
            and (envelope.session, envelope.dst_epoch) == (self.session, epoch)
        )

    def out_of_turn(self, envelope: Envelope) -> Sequence[Body] | None:
        """The messages to act upon of a frame that is not the next one.

        None of them if it is a repeat; None if a frame before it was lost.
        """
        if ends_session(envelope):
            return envelope.bodies[-1:]
        return () if envelope.number < self.num_taken else None

    def __repr__(self) -> str:
        return f"Peer({self.key or self.address}, {self.state.value})"


def ends_session(envelope: Envelope) -> bool:
    """Whether this is the last frame of its session, whatever its number."""
    return isinstance(envelope.bodies[-1], Bye | Refuse)
