"""What receivers said about transfers whose request has not come here yet: bounded in bytes, per peer and in all."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.endpoint.peer import Peer
    from pdlink.protocol.messages import Offer

MAX_NBYTES = 256 * 2**20
MAX_PEER_NBYTES = 32 * 2**20
"""Of one session: 32,000 transfers, or offers of 4 million blocks, which is 64 million tokens in blocks of 16. So one
peer that promises too much is refused alone; it takes eight to use up what there is for all."""
ENTRY_NBYTES = 1024
"""Of one transfer besides its blocks: the id of up to 128 characters, the entries here and in the table of leases."""
_BLOCK_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Early:
    peer: Peer
    _offer: Offer | None
    """Without its blocks."""
    _blocks: array[int]
    """A tuple of Python integers takes five times as much."""

    @property
    def offer(self) -> Offer | None:
        """None if the receiver said only that it will offer blocks."""
        return replace(self._offer, blocks=tuple(self._blocks)) if self._offer is not None else None

    @property
    def has_offer(self) -> bool:
        return self._offer is not None

    @property
    def nbytes(self) -> int:
        return ENTRY_NBYTES + _BLOCK_NBYTES * len(self._blocks)


class EarlyInterest:
    """`Early` by transfer id."""

    def __init__(self) -> None:
        self._entries: dict[str, Early] = {}
        self._of: dict[Peer, dict[str, None]] = {}
        self._nbytes_of: dict[Peer, int] = {}
        self.nbytes = 0
        """Held in all entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, transfer_id: str) -> Early | None:
        return self._entries.get(transfer_id)

    def put(self, transfer_id: str, peer: Peer, offer: Offer | None) -> str:
        """Keep what this peer says, or the reason why not. It may add an offer to its own entry, not replace one."""
        old = self._entries.get(transfer_id)
        if old is not None and old.peer is not peer:
            return "taken_by_another_receiver"
        if old is not None and (old.has_offer or offer is None):
            return ""
        num_blocks = len(offer.blocks) if offer is not None else 0
        added = ENTRY_NBYTES + _BLOCK_NBYTES * num_blocks - (old.nbytes if old is not None else 0)
        of_peer = self._nbytes_of.get(peer, 0) + added
        if of_peer > MAX_PEER_NBYTES or self.nbytes + added > MAX_NBYTES:
            return "too_many_early_offers"
        blocks = array("q", offer.blocks if offer is not None else ())
        self._entries[transfer_id] = Early(peer, replace(offer, blocks=()) if offer is not None else None, blocks)
        self._of.setdefault(peer, {})[transfer_id] = None
        self._nbytes_of[peer] = of_peer
        self.nbytes += added
        return ""

    def pop(self, transfer_id: str) -> Early | None:
        """Forget it; None if there is nothing."""
        early = self._entries.pop(transfer_id, None)
        if early is not None:
            peer = early.peer
            self.nbytes -= early.nbytes
            self._nbytes_of[peer] -= early.nbytes
            del self._of[peer][transfer_id]
            if not self._of[peer]:
                del self._of[peer], self._nbytes_of[peer]
        return early

    def of(self, peer: Peer) -> list[str]:
        """Transfer ids this peer spoke about."""
        return list(self._of.get(peer, ()))
