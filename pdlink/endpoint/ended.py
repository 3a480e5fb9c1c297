"""`EndedTransfers`: ids of ended transfers, with the reason, to recognise late or repeated messages."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from pdlink.reasons import Reason

_MAX_REASON = 200
"""Characters kept of a reason's words, which may be a peer's."""


class EndedTransfers:
    """Reasons by transfer id.

    Bounded, in all and for each peer: the oldest are forgotten. A peer that ends many transfers pushes out its own.
    """

    def __init__(self, capacity: int = 40_000, share: int = 5_000) -> None:
        """share: the most ids of one peer."""
        self._entries: OrderedDict[str, tuple[Reason | None, str]] = OrderedDict()
        """Reason and peer by id, the oldest first."""
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._capacity, self._share = capacity, share

    def add(self, transfer_id: str, reason: Reason | None, peer: str = "") -> None:
        """reason: None for success. peer: its name, which outlives sessions; empty for this worker itself."""
        self._forget(transfer_id)
        if len(self._of.get(peer, ())) >= self._share:
            self._forget(next(iter(self._of[peer])))
        elif len(self._entries) >= self._capacity:
            self._forget(next(iter(self._entries)))
        if reason is not None and len(reason.words) > _MAX_REASON:
            reason = replace(reason, words=reason.words[:_MAX_REASON])
        self._entries[transfer_id] = (reason, peer)
        of_peer = self._of.get(peer)  # after the above, which may have forgotten its last one
        if of_peer is None:
            of_peer = self._of[peer] = OrderedDict()
        of_peer[transfer_id] = None

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._entries

    def get(self, transfer_id: str) -> Reason | None:
        """Why it failed; None if it did not, or the id is not known."""
        entry = self._entries.get(transfer_id)
        return entry[0] if entry is not None else None

    def _forget(self, transfer_id: str) -> None:
        entry = self._entries.pop(transfer_id, None)
        if entry is not None:
            of_peer = self._of[entry[1]]
            del of_peer[transfer_id]
            if not of_peer:
                del self._of[entry[1]]
