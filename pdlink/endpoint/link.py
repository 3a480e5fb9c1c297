"""What `Sender` and `Receiver` ask of the driver that runs them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from pdlink.endpoint.hashing import Hashing
    from pdlink.endpoint.peer import Peer
    from pdlink.kv.layout import KVLayout
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.messages import Body


class Link(Protocol):
    """The driver as its two halves see it. All of it may be used from any thread that holds `lock`."""

    lock: threading.RLock
    hashing: Hashing
    """Where `checksums` are computed: not in the endpoint's thread, and not under its lock."""
    layout: KVLayout
    now_s: Callable[[], float]
    """The one clock of the endpoint: monotonic."""
    checksums: Checksums | None
    """Reads this worker's KV for transfers that are verified."""

    def awake_s(self) -> float:
        """As `now_s`, but it stands still while the endpoint's loop does. For deadlines that a peer's word moves."""

    def peer_at(self, address: str) -> Peer:
        """The live session with the worker at this control address; opens one if there is none.

        Raises TransferFailed if that worker refused us a moment ago.
        """

    def send(self, peer: Peer, body: Body) -> None:
        """Send at the end of this turn of the loop, or of the handshake. What is for a lost peer vanishes."""

    def lose(self, peer: Peer, reason: str) -> None:
        """End this session: its transfers stop now, and end when the data connection is closed."""

    def defer(self, callback: Callable[[], None]) -> None:
        """Run in the driver thread, without the lock, soon and in order."""


_MAX_REASON = 200
"""Characters kept of a reason, which may be a peer's words."""


def printable(text: str, max_chars: int) -> str:
    """A peer's words for a log or a report: one line without control characters, cut."""
    text = text[:max_chars]
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


class Ended:
    """Ids of transfers that are over, with the reason, so that late or repeated news of them is recognised.

    Bounded, in all and for each peer: the oldest are forgotten, and then count as unknown. What one peer ends makes
    room among its own.
    """

    def __init__(self, capacity: int = 40_000, share: int = 5_000) -> None:
        """share: most of one peer."""
        self._entries: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Reason and peer by id, the oldest first."""
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._capacity, self._share = capacity, share

    def add(self, transfer_id: str, reason: str, peer: str = "") -> None:
        """peer: its name, which outlives sessions; empty for this worker itself."""
        self._forget(transfer_id)
        of_peer = self._of.get(peer)
        if of_peer is not None and len(of_peer) >= self._share:
            self._forget(next(iter(of_peer)))
        elif len(self._entries) >= self._capacity:
            self._forget(next(iter(self._entries)))
        self._entries[transfer_id] = (reason[:_MAX_REASON], peer)
        self._of.setdefault(peer, OrderedDict())[transfer_id] = None

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


now_s = time.monotonic
"""What endpoints take for their clock unless told otherwise."""
