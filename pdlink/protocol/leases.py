"""Who may hold what, and until when: promises that end unless the other side shows that it is alive.

A lease is kept by whoever owns the memory, on its own clock (`now` is an argument), and never compared with another
host's. A sign of life of a holder renews all its leases at once, so the cost of a heartbeat does not grow with the
number of transfers; a lease ends for good at its limit, however alive the holder is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    holder: str
    """Empty while nobody has shown interest: then only time counts."""
    from_s: float
    limit_s: float


class LeaseTable:
    """Leases by key (a transfer id). All have the same length."""

    def __init__(self, length_s: float, limit_s: float) -> None:
        """length_s: silence after which a lease ends; limit_s: end of every lease, counted from its grant."""
        self._length_s = length_s
        self._limit_s = limit_s
        self._leases: dict[str, _Lease] = {}
        self._heard_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, key: str, now: float, holder: str = "") -> None:
        """Start a lease."""
        self._leases[key] = _Lease(holder, now, now + self._limit_s)

    def assign(self, key: str, holder: str, now: float) -> None:
        """From now on the signs of life of `holder` renew this lease."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.holder, lease.from_s = holder, now

    def heard(self, holder: str, now: float) -> None:
        """A sign of life: renews every lease of this holder."""
        self._heard_s[holder] = max(now, self._heard_s.get(holder, now))

    def drop(self, key: str) -> None:
        """The lease is not needed any more. Unknown keys are ignored."""
        self._leases.pop(key, None)

    def forget(self, holder: str) -> None:
        """The holder is gone: its leases run out from their last renewal."""
        self._heard_s.pop(holder, None)

    def expired(self, now: float) -> list[tuple[str, str]]:
        """(key, reason) of every lease that has ended; each stays until dropped.

        Visits every entry: renewals make ends unordered, so a sweep that stops at the first live one would keep dead
        ones behind it for ever (vllm#58222).
        """
        ended = []
        for key, lease in self._leases.items():
            if now >= lease.limit_s:
                ended.append((key, "deadline"))
            elif now >= max(lease.from_s, self._heard_s.get(lease.holder, lease.from_s)) + self._length_s:
                ended.append((key, "lease_expired"))
        return ended
