"""KV that outlives its request."""

from __future__ import annotations

from pydantic import Field

from pdlink.config.section import Section


class TiersConfig(Section):
    """Where a worker keeps the KV of prompts when the blocks of its pool are needed for others."""

    max_local_cpu_size: float = Field(default=1.0, ge=0)
    """Memory for it, in GiB; taken as it is needed. 0 keeps nothing."""
    reserve_local_cpu_size: float = Field(default=0.0, ge=0)
    """Memory of the machine that it never takes, in GiB."""
    remote_url: str | None = None
    """A tier below memory that others may share: file:///DIRECTORY[?max_size=GIB], redis://[USER:PASSWORD@]HOST[:PORT]
    and its kin, s3://BUCKET and its kin, or path.to.module:name (`pdlink.store.tiers.opening`)."""
    chunk_size: int = Field(default=256, ge=1)
    """Tokens per record. A prompt is found again in whole chunks; shorter ones cost more look-ups."""
    cache_policy: str = "adaptive"
    """Which record goes first when memory is full: a name of `pdlink.store.policies`, or path.to.module:Class."""
