"""One line every few seconds under load, and none without: what a worker moved, and what of it failed."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import TYPE_CHECKING

from pdlink.events import Event, FallbackUsed, LayerLanded, TransferEnded
from pdlink.logs import summaries
from pdlink.observe.series import Busy

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S = 1.0
"""Without load: so soon is the first line after the first request."""


async def tell(take: Callable[[float], str], every_s: float) -> None:
    """Log what `take` says of the seconds since it was last asked, until cancelled; it is empty without load."""
    last_s, idle = time.monotonic(), True
    while True:
        await asyncio.sleep(min(_LOOK_S, every_s) if idle else every_s)
        now_s = time.monotonic()
        text = take(now_s - last_s)
        last_s, idle = now_s, not text
        if text:
            summaries.info("%s", text)


class WorkerSummary:
    """Counts since it was last asked. Pass the instance to `pdlink.events.listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._ended = {"sender": 0, "receiver": 0}
        self._received_nbytes = 0
        self._lanes: set[str] = set()
        self._exposed_s: list[float] = []
        self._busy, self._landed_nbytes = Busy(), 0
        self._failed = self._recomputed = 0

    def __call__(self, event: Event) -> None:
        match event:
            case LayerLanded():
                with self._lock:
                    self._busy.add(event.submitted_s, event.at_s)
                    self._landed_nbytes += event.nbytes
                    self._lanes.add(event.transport)
            case TransferEnded():
                with self._lock:
                    if event.reason:
                        self._failed += 1
                        return
                    self._ended[event.side] += 1
                    if event.side == "receiver":
                        self._received_nbytes += event.nbytes
                    if event.exposed_s is not None:
                        self._exposed_s.append(event.exposed_s)
            case FallbackUsed(kind="recompute"):
                with self._lock:
                    self._recomputed += 1

    def take(self, _span_s: float) -> str:
        """And begin again."""
        with self._lock:
            parts = []
            if self._landed_nbytes:
                parts.append(self._sent())
            if received := self._ended["receiver"]:
                parts.append(f"received {self._received_nbytes / 1e6:.1f} MB of KV in {_transfers(received)}")
            if parts or self._failed or self._recomputed:
                parts.append(f"failed {self._failed}, recomputed {self._recomputed}")
            self._clear()
        return "; ".join(parts)

    def _sent(self) -> str:
        lanes, nbytes = ", ".join(sorted(self._lanes)), self._landed_nbytes
        text = f"sent {nbytes / 1e6:.1f} MB of KV over {lanes}"
        if self._busy.total_s > 0:
            text += f" at {nbytes / self._busy.total_s / 1e9:.3g} GB/s while it moved"
        text += f", {_transfers(self._ended['sender'])} done"
        if self._exposed_s:
            text += f", {statistics.median(self._exposed_s) * 1e3:.1f} ms not hidden by prefill (median)"
        return text


def _transfers(count: int) -> str:
    return f"{count} transfer{'' if count == 1 else 's'}"
