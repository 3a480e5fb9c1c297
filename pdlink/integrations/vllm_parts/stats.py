"""What happened in this process since somebody last asked: for vLLM's connector statistics."""

from __future__ import annotations

import threading

from pdlink.events import Event, LayerLanded, TransferEnded

COUNTS = {
    "sent": "Transfers whose KV arrived",
    "received": "Requests whose KV arrived",
    "failed": "Transfers that failed on this side",
    "bytes": "KV bytes visible at the receiver",
    "pushes": "Layer pushes visible at the receiver",
}


class Counts:
    """Pass the instance to `pdlink.events.listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case LayerLanded():
                    self._add("bytes", event.nbytes)
                    self._add("pushes", 1)
                case TransferEnded(state="FAILED"):
                    self._add("failed", 1)
                case TransferEnded(side=side):
                    self._add("sent" if side == "sender" else "received", 1)

    def _add(self, name: str, value: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """The counts since the last call; empty if nothing happened."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts
