"""`Holds`: what look-ups keep for a later load, by the id of the look-up."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pdlink.store.interface import AnyFetch


class Holds:
    """Thread-safe. A hold that nobody takes ends with its lease."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: OrderedDict[str, tuple[float, Future[AnyFetch]]] = OrderedDict()
        """With the end of the lease; oldest first. `_lock` guards it."""

    def add(self, lookup_id: str, fetch: Future[AnyFetch]) -> None:
        """Keep it, instead of an earlier one of that name."""
        now_s = time.monotonic()
        with self._lock:
            over = [name for name, _ in takewhile(lambda one: one[1][0] < now_s, self._held.items())]
            ended = [self._held.pop(name) for name in {lookup_id, *over} & self._held.keys()]
            self._held[lookup_id] = (now_s + self._lease_s, fetch)
        for _, old in ended:
            old.add_done_callback(_close)

    def take(self, lookup_id: str) -> AnyFetch | None:
        """What is kept by that name, which the caller closes now. Waits for its look-up."""
        with self._lock:
            held = self._held.pop(lookup_id, None)
        return None if held is None else held[1].result()

    def state(self, lookup_id: str) -> Literal["ongoing", "done", "not_found"]:
        with self._lock:
            held = self._held.get(lookup_id)
        if held is None:
            return "not_found"
        fetch = held[1]
        if not fetch.done() or not fetch.result().done.done():
            return "ongoing"
        return "done" if fetch.result().done.result() else "not_found"

    def drop(self, lookup_id: str) -> bool:
        """Nobody takes it, also if it is still on its way. Returns whether it was kept."""
        with self._lock:
            held = self._held.pop(lookup_id, None)
        if held is not None:
            held[1].add_done_callback(_close)
        return held is not None

    def close(self) -> None:
        for lookup_id in list(self._held):
            self.drop(lookup_id)


def _close(fetch: Future[AnyFetch]) -> None:
    if not fetch.cancelled() and fetch.exception() is None:
        fetch.result().close()
