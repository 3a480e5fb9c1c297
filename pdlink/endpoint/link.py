"""What `Sender` and `Receiver` ask of the driver that runs them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from pdlink.endpoint.peer import Peer
    from pdlink.kv.layout import KVLayout
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.messages import Body


class Link(Protocol):
    """The driver as its two halves see it. All of it may be used from any thread that holds `lock`."""

    lock: threading.RLock
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

    Bounded: the oldest are forgotten, and then count as unknown.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._capacity = capacity

    def add(self, transfer_id: str, reason: str) -> None:
        self._reasons[transfer_id] = reason[:_MAX_REASON]
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def get(self, transfer_id: str) -> str | None:
        """The reason ("" for success), or None if the id is not known."""
        return self._reasons.get(transfer_id)


now_s = time.monotonic
"""What endpoints take for their clock unless told otherwise."""
