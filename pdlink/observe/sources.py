"""Where the KV of a prompt came from, and why, as workers tell it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pdlink.events import PromptSourced


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
