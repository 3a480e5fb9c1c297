"""Everything known about one remote worker in one session, in one object: forgetting a peer is dropping this."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.kv.plan import Template
    from pdlink.protocol.messages import Body, Identity
    from pdlink.transport.base import Transport


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    """Handshake done and the data connection opened; messages of transfers may be sent."""
    LOST = "lost"
    """Over; waiting for the transport to report that the fence holds."""


@dataclass(slots=True, eq=False)
class Peer:
    """One session. A restarted worker, or a second connection to the same one, is another `Peer`."""

    route: str
    session: int
    dialed: bool
    """True on the side that opened the connection, which receives KV; False on the side that sends it."""
    since_s: float
    heard_s: float
    """When the last frame came."""
    beat_s: float = 0.0
    """When we last sent a heartbeat."""
    address: str = ""
    """Control address, known on the dialing side."""
    public_key: str = ""
    """Proven by the other side of this session; empty without credentials."""
    name: str = ""
    epoch: str = ""
    state: PeerState = PeerState.CONNECTING
    identity: Identity | None = None
    transport: Transport | None = None
    """Carries the bytes of this session; None until chosen, and again after the fence."""
    opened: bool = False
    """Whether the transport knows this session, and so will report its fence."""
    template: Template | None = None
    """How our pages map to theirs; only on the sending side."""
    waiting: list[Body] = field(default_factory=list)
    """Messages of transfers to be sent once READY."""
    transfers: set[str] = field(default_factory=set)
    """Live transfers with this peer."""

    @property
    def key(self) -> str:
        """Unique name of this session for the transport and for leases."""
        return f"{self.name}@{self.epoch}#{self.session}{'<' if self.dialed else '>'}"

    def __repr__(self) -> str:
        return f"Peer({self.key or self.address}, {self.state.value}, {len(self.transfers)} transfers)"
