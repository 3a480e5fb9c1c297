"""What happened in this process since somebody last asked: for vLLM's connector statistics."""

from __future__ import annotations

import threading

from pdlink.events import Event, LayerLanded, TransferEnded
from pdlink.protocol import reasons

COUNTS = {
    "sent": ("Transfers whose KV arrived, by the lane it took", "lane"),
    "received": ("Requests whose KV arrived, by its transport", "lane"),
    "failed": ("Transfers that failed on this side, by reason (pdlink/protocol/reasons.py)", "reason"),
    "unneeded": ("Transfers of prompts that decode had in its own prefix cache", ""),
    "bytes": ("KV bytes visible at the receiver, by the lane they took", "lane"),
    "pushes": ("Layer pushes visible at the receiver, by the lane they took", "lane"),
}
"""What is counted: a sentence, and the one label that tells kinds of it apart, if there is one."""


def split(key: str) -> tuple[str, tuple[str, ...]]:
    """A name of `COUNTS`, and the value of its label."""
    name, mark, value = key.partition("|")
    return name, (value,) if mark else ()


class Counts:
    """Pass the instance to `pdlink.events.listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        """By name, or by `NAME|VALUE`: vLLM carries it from process to process as it is."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case LayerLanded():
                    lane = event.transport or "unknown"
                    self._add(f"bytes|{lane}", event.nbytes)
                    self._add(f"pushes|{lane}", 1)
                case TransferEnded(reason=reasons.NOT_NEEDED):
                    self._add("unneeded", 1)
                case TransferEnded(state="FAILED"):
                    self._add(f"failed|{reasons.code_of(event.reason)}", 1)
                case TransferEnded(side=side):
                    self._add(f"{'sent' if side == 'sender' else 'received'}|{event.transport or 'none'}", 1)

    def _add(self, key: str, value: float) -> None:
        self._counts[key] = self._counts.get(key, 0) + value

    def take(self) -> dict[str, float]:
        """The counts since the last call; empty if nothing happened."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts
