"""What a worker says of itself: the body of its GET /health."""

from __future__ import annotations

from typing import Any

import msgspec

from pdlink.api.fields import Count  # noqa: TC001  (msgspec reads the annotation at run time)

UNTOLD = "the reason is shown with the key only"
"""Stands for the reasons in `Health.problems`, which may name paths and hosts."""


class WorkerRefusal(msgspec.Struct, frozen=True):
    """A worker of the other side that this worker reports as refused."""

    peer: str = ""
    """Its name; empty if unknown."""
    address: str = ""
    """Its control address, if it was dialed."""
    factor: str = ""
    """The property that differs; its two values follow."""
    local: str = ""
    remote: str = ""
    retry_s: float = 0.0
    """Until the next try; 0 if it is due, or not this worker's to make."""
    count: int = 0
    """Refused handshakes."""


class Health(msgspec.Struct, frozen=True):
    """A worker's health: the body of a pdlink worker's GET /health. None for values that it does not report."""

    status: str
    name: str
    epoch: str
    role: str | None
    model: str
    control: str | tuple[str, ...] | None
    running: Count | None = None
    waiting: Count | None = None
    load_tokens: Count | None = None
    """Of prompts that it has yet to compute, and for decode of all it holds: what requests of others weigh."""
    free_blocks: Count | None = None
    num_blocks: Count | None = None
    block_tokens: Count | None = None
    refused: tuple[WorkerRefusal, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other valid model names, of adapters for example."""
    kv_events: tuple[str, ...] = ()
    """Where it publishes which KV it has: ENDPOINT or ENDPOINT,REPLAY of each source."""
    fingerprint: str = ""
    """Of all that must be equal for its KV to be of use elsewhere; empty if it does not say."""
    link: dict[str, Any] = {}
    """What its dialect must know to reach its KV: names and ports, by the engine's own words."""
    problems: dict[str, str] = {}
    """By place (`memory`, a tier): why it keeps less KV than its settings say; in full for holders of a key."""
    reason: str = ""
    """Why it takes no new request; empty while it does."""
    version: str = ""
    """For people: what software it runs. Empty where it does not say."""
    revision: str = ""
    """For people: of its model. Empty where it does not say."""
    store: str = ""
    """Control address by which other stores borrow KV from its own, or from the one that it shares."""
    store_stays: bool = False
    """That store is a process of its own, which stays when the worker ends."""
    peers: tuple[dict[str, Any], ...] = ()
    """Sessions of its link, for people."""

    def serves(self, model: str | None) -> bool:
        """Whether it serves this model; None is any model."""
        return model is None or model == self.model or model in self.aliases
