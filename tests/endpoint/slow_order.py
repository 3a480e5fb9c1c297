"""`SlowOrder`: the policy of `pdlink.endpoint.order` once more, in the plainest way, to compare with.

It keeps no heap and no sums: every call looks at every entry, transfer and peer there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.endpoint.order import OVERDUE_S, QueuedPush

if TYPE_CHECKING:
    from pdlink.endpoint.sharing import Sharing


@dataclass(slots=True, eq=False)
class Asked(QueuedPush):
    """What a test knows of an entry."""

    transfer: str
    peer: str
    number: int = 0


@dataclass(eq=False)
class _Transfer:
    peer: str
    number: int
    arrived_at: int
    left_nbytes: int
    entries: list[Asked] = field(default_factory=list)


class SlowOrder:
    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.transfers: dict[str, _Transfer] = {}
        self.served: dict[str, int] = {}
        self.slow: set[str] = set()
        self.flying: list[tuple[float, Asked]] = []
        """With the time of release, oldest first."""
        self.virtual_time = self.moved = self.num_transfers = 0

    def add(self, entry: Asked, total_nbytes: int) -> None:
        peer, name = entry.peer, entry.transfer
        self.served.setdefault(peer, self.virtual_time)
        if self._first(peer) is None:
            self.served[peer] = max(self.served[peer], self.virtual_time)
        if name not in self.transfers:
            self.num_transfers += 1
            self.transfers[name] = _Transfer(peer, self.num_transfers, self.moved, total_nbytes)
        self.transfers[name].entries.append(entry)

    def next(self, now: float) -> Asked | None:
        able = [peer for peer in self.served if self._fits(peer)]
        if not able:
            return None
        self.virtual_time = max(self.virtual_time, min(self.served[peer] for peer in able))
        shared = [peer for peer in able if peer not in self.slow]
        alone = [peer for peer in able if peer in self.slow]
        first = min(shared, key=self._claim, default=None)
        if first is not None and not self._shared_fits(first):
            self.slow |= {peer for peer in self.served if self._overdue(peer, now)}
            if not self._shared_fits(first):
                first = None
        first = min([*alone, *([first] if first else [])], key=self._claim, default=None)
        return self._release(first, now) if first else None

    def ended(self, entry: Asked, now: float) -> None:
        peer = entry.peer
        blocked = self._first(peer) is not None and not self._fits(peer)
        self.flying = [(since, other) for since, other in self.flying if other is not entry]
        if not self._overdue(peer, now):
            self.slow.discard(peer)
        if blocked:
            self.served[peer] = max(self.served[peer], self.virtual_time)

    def drop(self, name: str) -> list[Asked]:
        transfer = self.transfers.pop(name, None)
        return transfer.entries if transfer else []

    def forget(self, peer: str) -> None:
        if not self._held(peer):
            self.served.pop(peer, None)
            self.slow.discard(peer)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _first(self, peer: str) -> _Transfer | None:
        """The one of a peer's transfers that goes next."""
        waiting = [transfer for transfer in self.transfers.values() if transfer.peer == peer and transfer.entries]
        return min(waiting, key=lambda transfer: (self._own(transfer), transfer.number), default=None)

    def _own(self, transfer: _Transfer) -> float:
        return transfer.left_nbytes + self.sharing.ageing * transfer.arrived_at

    def _claim(self, peer: str) -> tuple[float, int, int]:
        transfer = self._first(peer)
        assert transfer is not None
        served = self.served[peer]
        return self._own(transfer) + self.sharing.ageing * served, served, transfer.number

    def _held(self, peer: str) -> list[Asked]:
        return [entry for _, entry in self.flying if entry.peer == peer]

    def _fits(self, peer: str) -> bool:
        first, held = self._first(peer), sum(entry.nbytes for entry in self._held(peer))
        if first is None:
            return False
        return not held or held + first.entries[0].nbytes <= self.sharing.peer_window_nbytes

    def _shared_fits(self, peer: str) -> bool:
        first, held = self._first(peer), sum(entry.nbytes for _, entry in self.flying if entry.peer not in self.slow)
        assert first is not None
        return not held or held + first.entries[0].nbytes <= self.sharing.window_nbytes

    def _overdue(self, peer: str, now: float) -> bool:
        return any(now - since > OVERDUE_S for since, entry in self.flying if entry.peer == peer)

    def _release(self, peer: str, now: float) -> Asked:
        transfer = self._first(peer)
        assert transfer is not None
        entry = transfer.entries.pop(0)
        transfer.left_nbytes -= entry.nbytes
        self.served[peer] += entry.nbytes
        self.moved += entry.nbytes
        self.flying.append((now, entry))
        return entry
