"""Every deadline of an endpoint, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.config.timeouts import LEASES_PER_PEER
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from pdlink.config import TimeoutConfig


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; heartbeat < peer < lease < request. Raises ConfigError where they are not in this order."""

    heartbeat_s: float = 0.25
    """Time between two signs of life to a peer."""
    peer_s: float = 3.0
    """A peer that has not been heard for this long is lost."""
    connect_s: float = 5.0
    """Handshake, from the first message to the data connection."""
    lease_s: float = 10.0
    """How long a promise about memory holds without a sign of life from the other side."""
    other_leg_s: float = 10.0
    """How long a leg whose transfer the other leg has not begun waits for it; `lease_s`, if that is less."""
    offer_s: float = 5.0
    """While requests wait for blocks here, a finished prompt whose receiver offers nothing for this long is given up,
    so that two full workers that hold what the other waits for do not stand still; decode falls back."""
    request_s: float = 600.0
    """One transfer, however alive both sides are."""
    idle_s: float = 600.0
    """A session in which nothing was received for so long is closed by the side that dialed it; 0 keeps all."""

    def __post_init__(self) -> None:
        table = [(name, getattr(self, name)) for name in ("heartbeat_s", "peer_s", "lease_s", "request_s")]
        for (name, value), (later, bound) in zip(table, table[1:], strict=False):
            if value >= bound:
                raise ConfigError(f"{name} = {value} s must be below {later} = {bound} s; lower it, or raise {later}")

    @classmethod
    def of(cls, settings: TimeoutConfig) -> Deadlines:
        """The deadlines that follow from an operator's settings."""
        peer_s = settings.peer_s
        lease_s = peer_s * LEASES_PER_PEER
        return cls(
            heartbeat_s=peer_s / 12,
            peer_s=peer_s,
            connect_s=peer_s * 5 / 3,
            lease_s=lease_s,
            other_leg_s=settings.other_leg_s,
            offer_s=lease_s / 2,
            request_s=settings.request_s,
            idle_s=settings.idle_s,
        )
