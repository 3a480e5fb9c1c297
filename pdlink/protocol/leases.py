"""A lease: the promise to keep memory for a peer while it gives signs of life, up to a limit.

The owner of the memory keeps the lease on its own clock (`now` is an argument), never on that of another host. A sign
of life of a peer renews all its leases. At its limit a lease ends for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.reasons import Code


@dataclass(slots=True)
class Lease:
    """The lease of one transfer. Until a peer holds it, nothing renews it."""

    limit_s: float
    """The lease ends then in any case."""
    length_s: float
    """The lease ends after this much silence."""
    from_s: float
    """Silence counts from here, or from the peer's last sign of life if that is later."""

    def hold(self, length_s: float, now: float) -> None:
        """From now on a peer holds this lease: its signs of life renew it."""
        self.length_s, self.from_s = length_s, now

    def ended(self, now: float, heard_s: float | None) -> Code | None:
        """Why the lease is over: DEADLINE, LEASE_EXPIRED, or None. heard_s: last sign of life of its peer."""
        if now >= self.limit_s:
            return Code.DEADLINE
        renewed_s = self.from_s if heard_s is None else max(self.from_s, heard_s)
        return Code.LEASE_EXPIRED if now >= renewed_s + self.length_s else None
