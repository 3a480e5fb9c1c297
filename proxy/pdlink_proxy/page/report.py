"""What one worker says of itself for page and `top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdlink.observe.timeline import EndedTransfer  # noqa: TC001  msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Mapping


class Live(msgspec.Struct, frozen=True):
    """A transfer that goes on; see `pdlink.endpoint.live`."""

    transfer_id: str
    side: str
    state: str
    peer: str
    lane: str
    num_tokens: int
    nbytes: int
    age_s: float
    layers: str


class PeerSession(msgspec.Struct, frozen=True):
    peer: str
    state: str
    transport: str
    lane: str


class Report(msgspec.Struct, frozen=True):
    """A worker's answer. A worker that answers with something else has none."""

    name: str
    requests: dict[str, int] = {}
    blocks: dict[str, int] = {}
    held: float | None = None
    """Share of its KV pool in use, of an engine that does not count blocks."""
    peers: list[PeerSession] = []
    live: list[Live] = []
    ended: list[EndedTransfer] = []
    sampled: float = 0.0
    """Tokens of answers made since its start."""
    totals: dict[str, dict[str, float]] = {}


class Rates(msgspec.Struct, frozen=True):
    """Of the last seconds, over all workers that were heard at their begin and at their end. Over one second alone a
    figure would come and go: a transfer takes milliseconds."""

    kv_bytes_per_s: dict[str, float]
    """By lane, of lanes on which something moved."""
    tokens_per_s: float
    """Of answers."""


def grown(
    now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]], name: str
) -> dict[str, float]:
    """Of one counter, by label. A counter that fell is of a new life: it counts from zero."""
    old = before.get(name, {})
    return {
        label: value - old.get(label, 0.0) if value >= old.get(label, 0.0) else value
        for label, value in now.get(name, {}).items()
    }
