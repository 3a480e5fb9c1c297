"""Who may hold what, and until when: promises that end unless the other side shows that it is alive.

A lease is kept by whoever owns the memory, on its own clock (`now` is an argument), and never compared with another
host's. A sign of life of a holder renews all its leases at once, and whoever looks for ended ones looks at holders:
the cost of both does not grow with the number of transfers. A lease ends for good at its limit, however alive the
holder is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    holder: str
    """Empty while nobody has shown interest: then only time counts."""
    from_s: float
    limit_s: float


class LeaseTable:
    """Leases by key (a transfer id). All have the same length and limit, and `now` never falls from call to call."""

    def __init__(self, length_s: float, limit_s: float, unheld_s: float = math.inf) -> None:
        """length_s: silence after which a lease ends; limit_s: end of every lease, counted from its grant.

        unheld_s: end of one that nobody has shown interest in, if that is less than `length_s`.
        """
        self._length_s = length_s
        self._unheld_s = min(unheld_s, length_s)
        self._limit_s = limit_s
        self._leases: dict[str, _Lease] = {}
        """In the order of their grants, which is that of their limits."""
        self._held: dict[str, dict[str, _Lease]] = {}
        """By holder and key, in the order of `from_s`. Among those of one holder whoever began first ends first."""
        self._heard_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, key: str, now: float, holder: str = "") -> None:
        """Start a lease."""
        self.drop(key)
        self._leases[key] = _Lease(holder, now, now + self._limit_s)
        self._held.setdefault(holder, {})[key] = self._leases[key]

    def assign(self, key: str, holder: str, now: float) -> None:
        """From now on the signs of life of `holder` renew this lease."""
        lease = self._leases.get(key)
        if lease is not None:
            self._release(key, lease)
            lease.holder, lease.from_s = holder, now
            self._held.setdefault(holder, {})[key] = lease

    def heard(self, holder: str, now: float) -> None:
        """A sign of life: renews every lease of this holder."""
        self._heard_s[holder] = max(now, self._heard_s.get(holder, now))

    def drop(self, key: str) -> None:
        """The lease is not needed any more. Unknown keys are ignored."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._release(key, lease)

    def forget(self, holder: str) -> None:
        """The holder is gone: its leases run out from their last renewal."""
        self._heard_s.pop(holder, None)

    def expired(self, now: float) -> list[tuple[str, str]]:
        """(key, reason) of every lease that has ended; each stays until dropped.

        Stops at the first live lease only where order is certain, within those of one holder: elsewhere renewals make
        ends unordered, and dead ones would stay behind a live one for ever (vllm#58222).
        """
        ended = {}
        for key, lease in self._leases.items():
            if now < lease.limit_s:
                break
            ended[key] = "deadline"
        for holder, leases in self._held.items():
            heard_s = self._heard_s.get(holder)
            if heard_s is not None and now < heard_s + self._length_s:
                continue
            length_s = self._length_s if holder else self._unheld_s
            for key, lease in leases.items():
                if now < lease.from_s + length_s:
                    break
                ended.setdefault(key, "lease_expired")
        return list(ended.items())

    def _release(self, key: str, lease: _Lease) -> None:
        leases = self._held[lease.holder]
        del leases[key]
        if not leases:
            del self._held[lease.holder]
