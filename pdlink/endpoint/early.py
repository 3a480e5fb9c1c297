"""Receivers' interest in transfers whose request has not come here yet; bounded in time, by peer and in all."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdlink.reasons import Code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.endpoint.peer import Peer
    from pdlink.protocol.messages import Offer

MAX_NBYTES = 256 * 2**20
MAX_PEER_NBYTES = 32 * 2**20
"""Of one session: 32,000 transfers, or offers of 4 million blocks (64 million tokens in blocks of 16). It takes eight
greedy peers to use up the room of all."""
ENTRY_NBYTES = 1024
"""Of one transfer besides its blocks: its id of up to 128 characters, and the entries here."""
_BLOCK_NBYTES = 8
_GROUP_NBYTES = 80
"""Of a list of blocks beside the first: an array of its own."""


@dataclass(frozen=True, slots=True)
class Early:
    peer: Peer
    since_s: float
    """When the receiver first showed interest."""
    _offer: Offer | None
    """Without its blocks."""
    _blocks: tuple[array[int], ...]
    """By group. A tuple of Python integers takes five times as much."""

    @property
    def offer(self) -> Offer | None:
        """None before the offer: the receiver has only sent *expect*."""
        return replace(self._offer, blocks=tuple(map(tuple, self._blocks))) if self._offer is not None else None

    @property
    def has_offer(self) -> bool:
        return self._offer is not None

    @property
    def nbytes(self) -> int:
        return _entry_nbytes(self._blocks)


def _entry_nbytes(blocks: Sequence[Sequence[int]]) -> int:
    """Of one transfer with these blocks."""
    return ENTRY_NBYTES + _BLOCK_NBYTES * sum(map(len, blocks)) + _GROUP_NBYTES * max(0, len(blocks) - 1)


class EarlyInterest:
    """`Early` by transfer id, the oldest first. Each is also in `Peer.early`, and counts there."""

    def __init__(self) -> None:
        self._entries: dict[str, Early] = {}
        self.nbytes = 0
        """Held in all entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, transfer_id: str) -> Early | None:
        return self._entries.get(transfer_id)

    def put(self, transfer_id: str, peer: Peer, offer: Offer | None, now: float) -> Code | None:
        """Keep it, or return why not. A peer may add an offer to its entry, but not replace one."""
        old = self._entries.get(transfer_id)
        if old is not None and old.peer is not peer:
            return Code.TAKEN_BY_ANOTHER_RECEIVER
        if old is not None and (old.has_offer or offer is None):
            return None
        given = offer.blocks if offer is not None else ()
        added = _entry_nbytes(given) - (old.nbytes if old is not None else 0)
        if peer.early_nbytes + added > MAX_PEER_NBYTES or self.nbytes + added > MAX_NBYTES:
            return Code.TOO_MANY_EARLY_OFFERS
        blocks = tuple(array("q", table) for table in given)
        since_s = old.since_s if old is not None else now
        kept = replace(offer, blocks=()) if offer is not None else None
        self._entries[transfer_id] = Early(peer, since_s, kept, blocks)
        peer.early[transfer_id] = None
        peer.early_nbytes += added
        self.nbytes += added
        return None

    def pop(self, transfer_id: str) -> Early | None:
        """Forget it; None if there is nothing."""
        early = self._entries.pop(transfer_id, None)
        if early is not None:
            del early.peer.early[transfer_id]
            early.peer.early_nbytes -= early.nbytes
            self.nbytes -= early.nbytes
        return early

    def older_than(self, since_s: float) -> list[str]:
        """Transfer ids that came then or earlier."""
        found = []
        for transfer_id, early in self._entries.items():
            if early.since_s > since_s:
                break
            found.append(transfer_id)
        return found
