"""Where the KV of a worker's last prompts came from, and why, by the request ids of its callers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque

import msgspec

from pdlink.events import Event, PromptSourced

MAX_PROMPTS = 4000
_MAX_ID_CHARS = 256


class Sourced(msgspec.Struct, frozen=True):
    """One prompt, or one attempt at it. Counts tokens; every one of the prompt has one source."""

    leg: str
    """prefill, decode, or empty for a request that the worker serves alone."""
    at_s: float
    """Unix time."""
    cached: int
    """Were in the engine's blocks."""
    loaded: int
    places: dict[str, int]
    """Where the loaded ones were: memory, disk, a peer's store and so on."""
    received: int
    computed: int
    found: int
    reason: str
    load_s: float
    other_s: float
    """See `PromptSourced`."""


def sourced(event: PromptSourced, leg: str) -> Sourced:
    """What is told of it now."""
    fields = {name: getattr(event, name) for name in Sourced.__struct_fields__ if name not in ("leg", "at_s")}
    return Sourced(leg=leg, at_s=time.time(), **fields)


class Sources:
    """Keeps the newest. Pass the instance to `pdlink.events.listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """The caller's id and the leg, by the engine's id."""
        self._sourced: deque[tuple[str, Sourced]] = deque(maxlen=MAX_PROMPTS)
        """With the caller's id."""

    def named(self, request_id: str, caller_id: str, leg: str) -> None:
        """A request of this engine's id begins, which its caller calls `caller_id`."""
        if 0 < len(caller_id) <= _MAX_ID_CHARS:
            with self._lock:
                self._callers[request_id] = caller_id, leg
                if len(self._callers) > MAX_PROMPTS:
                    self._callers.popitem(last=False)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, PromptSourced):
            return
        with self._lock:
            caller_id, leg = self._callers.get(event.request_id, ("", ""))
            if caller_id:
                self._sourced.append((caller_id, sourced(event, leg)))

    def of(self, caller_id: str) -> list[Sourced]:
        """Oldest first."""
        with self._lock:
            return [each for known, each in self._sourced if known == caller_id]
