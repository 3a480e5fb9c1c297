"""What receivers said about transfers whose request has not come here yet. Bounded in number and in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.endpoint.peer import Peer
    from pdlink.protocol.messages import Offer

MAX_TRANSFERS = 10_000
MAX_BLOCKS = 4_000_000
"""In all offers together (32 MB): the whole cache of sixty receivers with a million tokens each."""


@dataclass(frozen=True, slots=True)
class Early:
    peer: Peer
    offer: Offer | None
    """None if the receiver said only that it will offer blocks."""

    @property
    def num_blocks(self) -> int:
        return len(self.offer.blocks) if self.offer else 0


class EarlyInterest:
    """`Early` by transfer id."""

    def __init__(self) -> None:
        self._entries: dict[str, Early] = {}
        self.num_blocks = 0
        """Held in all entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, transfer_id: str) -> Early | None:
        return self._entries.get(transfer_id)

    def put(self, transfer_id: str, early: Early) -> str:
        """Keep what this peer says, or the reason why not. It may add an offer to its own entry, not replace one."""
        old = self._entries.get(transfer_id)
        if old is not None and old.peer is not early.peer:
            return "taken_by_another_receiver"
        if old is not None and (old.offer is not None or early.offer is None):
            return ""
        if old is None and len(self._entries) >= MAX_TRANSFERS:
            return "too_many_early_offers"
        if self.num_blocks + early.num_blocks > MAX_BLOCKS:
            return "too_many_early_blocks"
        self._entries[transfer_id] = early
        self.num_blocks += early.num_blocks
        return ""

    def pop(self, transfer_id: str) -> Early | None:
        """Forget it; None if there is nothing."""
        early = self._entries.pop(transfer_id, None)
        if early is not None:
            self.num_blocks -= early.num_blocks
        return early

    def of(self, peer: Peer) -> list[str]:
        """Transfer ids this peer spoke about."""
        return [transfer_id for transfer_id, early in self._entries.items() if early.peer is peer]
