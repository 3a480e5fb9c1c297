"""KV that outlives its request."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdlink.config.section import Section, in_pairs


class TiersConfig(Section):
    """Where a worker keeps the KV of prompts when the blocks of its pool are needed for others."""

    max_local_cpu_size: float = Field(default=1.0, ge=0)
    """Memory for it, in GiB; taken as it is needed. 0 keeps nothing."""
    reserve_local_cpu_size: float = Field(default=0.0, ge=0)
    """Memory of the machine that it never takes, in GiB."""
    local_disk: str | None = None
    """Directory for a tier on this machine's disk, which one worker has at a time; {name} in it is the worker's name.
    What is there is found again after a restart. Needs `max_local_disk_size`."""
    max_local_disk_size: float | None = Field(default=None, gt=0)
    """Space for all that is in it, in GiB; records of models that no worker runs any more go first."""
    remote_url: str | None = None
    """A tier below memory that others may share: file:///DIRECTORY[?max_size=GIB], redis://[USER:PASSWORD@]HOST[:PORT]
    and its kin, s3://BUCKET and its kin, or path.to.module:name (`pdlink.store.tiers.opening`)."""
    ingestion: Literal["all", "hot", "second_sight"] = "all"
    """Which records go on to the tiers below memory: all; hot, used twice while in memory; or second_sight, wanted a
    second time, which spares a disk most of its writes and starves no tier."""
    chunk_size: int = Field(default=256, ge=1)
    """Tokens per record. A prompt is found again in whole chunks; shorter ones cost more look-ups."""
    cache_policy: str = "adaptive"
    """Which record goes first when memory is full: a name of `pdlink.store.policies`, or path.to.module:Class."""

    @model_validator(mode="after")
    def _together(self) -> TiersConfig:
        in_pairs(self, "tiers.", ("local_disk", "max_local_disk_size"))
        if self.max_local_cpu_size == 0 and (self.local_disk is not None or self.remote_url is not None):
            raise ValueError(
                "tiers.max_local_cpu_size: got 0; limit more, because records pass through memory on their way to "
                "other tiers; raise it"
            )
        return self
