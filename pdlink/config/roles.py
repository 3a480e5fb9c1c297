"""When the proxy turns workers from one role to the other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdlink.config.section import Seconds, Section


class RolesConfig(Section):
    """A slow loop that turns a worker to the other role when the load has shifted; off by default. Best in one of
    the proxies that share workers, and not beside an autoscaler of the same pools."""

    mode: Literal["off", "dry_run", "on"] = "off"
    """`dry_run` decides, shows and counts, and turns nobody."""
    admin_key_file: str | None = None
    """The workers' `security.admin_key_file`: its first key is sent with POST /role."""
    token_s: Seconds = 0.05
    """Promised time between two tokens. It bounds the batch of a decode worker."""
    usable_load: float = Field(default=0.75, gt=0, le=1)
    """Share of a pool's work that it can have and keep the promises: the rest goes into queues."""
    window_s: Seconds = 10.0
    """What is measured is a mean over so long."""
    windows: int = Field(default=3, ge=1)
    """In so many of them in a row the same turn must be worth it."""
    margin: float = Field(default=0.05, gt=0, lt=1)
    """By this share more of the work must be done in time after the turn than before."""
    drain_s: Seconds = 60.0
    """Longest drain of a worker that turns. For as long after a turn no other one follows."""
    horizon_s: Seconds = 600.0
    """For how long a turn is expected to be of use; the drain is weighed against it."""
    min_prefill: int = Field(default=1, ge=1)
    """Prefill workers of a model, cell and fingerprint that are left, at least."""
    min_decode: int = Field(default=1, ge=1)
    """Decode workers likewise."""

    @model_validator(mode="after")
    def _complete(self) -> RolesConfig:
        if self.mode == "on" and self.admin_key_file is None:
            raise ValueError("roles.admin_key_file: missing, and roles.mode: on turns workers with its key")
        if self.drain_s >= self.horizon_s:
            raise ValueError(f"roles.drain_s = {self.drain_s} s must be below roles.horizon_s = {self.horizon_s} s")
        return self
