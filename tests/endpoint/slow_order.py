"""`SlowOrder`: the policy of `pdlink.endpoint.order` once more, in the plainest way, to compare with.

It keeps nothing ranked and no sums: every call looks at every part, transfer and peer there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.endpoint.order import OVERDUE_S, Part

if TYPE_CHECKING:
    from pdlink.config import SharingConfig


@dataclass(eq=False)
class _Transfer:
    peer: str
    number: int
    born: int
    lacks: int
    parts: list[Part[int]] = field(default_factory=list)


class SlowOrder:
    def __init__(self, sharing: SharingConfig) -> None:
        self.sharing = sharing
        self.transfers: dict[str, _Transfer] = {}
        self.had: dict[str, int] = {}
        self.slow: set[str] = set()
        self.flying: list[tuple[float, Part[int]]] = []
        """With the time of release, oldest first."""
        self.level = self.moved = self.num_transfers = 0

    def add(self, part: Part[int], total_nbytes: int) -> None:
        self.had.setdefault(part.peer, self.level)
        if self._first(part.peer) is None:
            self.had[part.peer] = max(self.had[part.peer], self.level)
        if part.transfer_id not in self.transfers:
            self.num_transfers += 1
            self.transfers[part.transfer_id] = _Transfer(part.peer, self.num_transfers, self.moved, total_nbytes)
        self.transfers[part.transfer_id].parts.append(part)

    def next(self, now: float) -> Part[int] | None:
        able = [peer for peer in self.had if self._fits(peer)]
        if not able:
            return None
        self.level = max(self.level, min(self.had[peer] for peer in able))
        shared = [peer for peer in able if peer not in self.slow]
        own = [peer for peer in able if peer in self.slow]
        first = min(shared, key=self._claim, default=None)
        if first is not None and not self._shared_fits(first):
            self.slow |= {peer for peer in self.had if self._overdue(peer, now)}
            if not self._shared_fits(first):
                first = None
        first = min([*own, *([first] if first else [])], key=self._claim, default=None)
        return self._release(first, now) if first else None

    def ended(self, part: Part[int], now: float) -> None:
        blocked = self._first(part.peer) is not None and not self._fits(part.peer)
        self.flying = [(since, other) for since, other in self.flying if other is not part]
        if not self._overdue(part.peer, now):
            self.slow.discard(part.peer)
        if blocked:
            self.had[part.peer] = max(self.had[part.peer], self.level)

    def drop(self, transfer_id: str) -> list[Part[int]]:
        transfer = self.transfers.pop(transfer_id, None)
        return transfer.parts if transfer else []

    def forget(self, peer: str) -> None:
        if not self._held(peer):
            self.had.pop(peer, None)
            self.slow.discard(peer)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _first(self, peer: str) -> _Transfer | None:
        """The one of a peer's transfers that goes next."""
        waiting = [transfer for transfer in self.transfers.values() if transfer.peer == peer and transfer.parts]
        return min(waiting, key=lambda transfer: (self._own(transfer), transfer.number), default=None)

    def _own(self, transfer: _Transfer) -> float:
        if self.sharing.order == "fcfs":
            return transfer.number
        return transfer.lacks + self.sharing.ageing * transfer.born

    def _claim(self, peer: str) -> tuple[float, int, int]:
        transfer = self._first(peer)
        assert transfer is not None
        had = 0 if self.sharing.order == "fcfs" else self.had[peer]
        return self._own(transfer) + self.sharing.ageing * had, had, transfer.number

    def _held(self, peer: str) -> list[Part[int]]:
        return [part for _, part in self.flying if part.peer == peer]

    def _fits(self, peer: str) -> bool:
        first, held = self._first(peer), sum(part.nbytes for part in self._held(peer))
        if first is None:
            return False
        return not held or held + first.parts[0].nbytes <= self.sharing.peer_window_nbytes

    def _shared_fits(self, peer: str) -> bool:
        first, held = self._first(peer), sum(part.nbytes for _, part in self.flying if part.peer not in self.slow)
        assert first is not None
        return not held or held + first.parts[0].nbytes <= self.sharing.window_nbytes

    def _overdue(self, peer: str, now: float) -> bool:
        return any(now - since > OVERDUE_S for since, part in self.flying if part.peer == peer)

    def _release(self, peer: str, now: float) -> Part[int]:
        transfer = self._first(peer)
        assert transfer is not None
        part = transfer.parts.pop(0)
        transfer.lacks -= part.nbytes
        self.had[peer] += part.nbytes
        self.moved += part.nbytes
        self.flying.append((now, part))
        return part
