"""`Ended`: ids of ended transfers, with the reason, to recognise late or repeated messages."""

from __future__ import annotations

from collections import OrderedDict

_MAX_REASON = 200
"""Characters kept of a reason, which may be a peer's words."""


class Ended:
    """Reasons by transfer id.

    Bounded, in all and for each peer: the oldest are forgotten. A peer that ends many transfers pushes out its own.
    """

    def __init__(self, capacity: int = 40_000, share: int = 5_000) -> None:
        """share: the most ids of one peer."""
        self._entries: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Reason and peer by id, the oldest first."""
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._capacity, self._share = capacity, share

    def add(self, transfer_id: str, reason: str, peer: str = "") -> None:
        """peer: its name, which outlives sessions; empty for this worker itself."""
        self._forget(transfer_id)
        if len(self._of.get(peer, ())) >= self._share:
            self._forget(next(iter(self._of[peer])))
        elif len(self._entries) >= self._capacity:
            self._forget(next(iter(self._entries)))
        self._entries[transfer_id] = (reason[:_MAX_REASON], peer)
        of_peer = self._of.get(peer)  # after the above, which may have forgotten its last one
        if of_peer is None:
            of_peer = self._of[peer] = OrderedDict()
        of_peer[transfer_id] = None

    def get(self, transfer_id: str) -> str | None:
        """The reason ("" for success), or None if the id is not known."""
        entry = self._entries.get(transfer_id)
        return entry[0] if entry is not None else None

    def _forget(self, transfer_id: str) -> None:
        entry = self._entries.pop(transfer_id, None)
        if entry is not None:
            of_peer = self._of[entry[1]]
            del of_peer[transfer_id]
            if not of_peer:
                del self._of[entry[1]]
