"""A worker: the sections above it, and what they demand of each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdlink.config.cache import CacheConfig
from pdlink.config.engine import EngineConfig
from pdlink.config.kv_events import KVEventsConfig
from pdlink.config.listen import ListenConfig
from pdlink.config.log import LogConfig
from pdlink.config.model import ModelConfig
from pdlink.config.section import Role, Section, no_use
from pdlink.config.security import SecurityConfig
from pdlink.config.tiers import TiersConfig
from pdlink.config.timeouts import TimeoutConfig
from pdlink.config.transport import TransportConfig


class WorkerConfig(Section):
    """A prefill, decode or both-role worker."""

    role: Role = "both"
    """Which leg of a request it takes. `pdlink prefill`, `decode` and `both` set it."""
    name: str | None = None
    """Unique in the deployment; None takes role, host and HTTP port, or with keys the name of the key."""
    listen: ListenConfig = ListenConfig()
    """Where others reach it."""
    model: ModelConfig = ModelConfig()
    """Which model."""
    cache: CacheConfig = CacheConfig()
    """Its KV cache."""
    tiers: TiersConfig = TiersConfig()
    """Where KV stays when its blocks are needed for others."""
    kv_events: KVEventsConfig = KVEventsConfig()
    """Whom it tells what KV it keeps."""
    engine: EngineConfig = EngineConfig()
    """How requests are batched."""
    transport: TransportConfig = TransportConfig()
    """How bytes travel."""
    timeouts: TimeoutConfig = TimeoutConfig()
    """How long it waits for others."""
    security: SecurityConfig = SecurityConfig()
    """Who may talk to it."""
    log: LogConfig = LogConfig()
    """Lines on standard error."""
    summary_s: float = Field(default=10.0, ge=0)
    """Seconds between two lines of the log that sum up transfers; none is written while nothing
    happens. 0 writes none."""
    on_transfer_failure: Literal["recompute", "fail"] = "recompute"
    """What decode does when the KV does not arrive: compute the prompt itself, or answer 502."""

    @model_validator(mode="after")
    def _used(self) -> WorkerConfig:
        if self.model.path is None:
            no_use(self.model, "model.", ("revision",), "is of a model on the hub, and model.path is not set")
        else:
            no_use(self.model, "model.", ("seed", "num_layers"), "is of the built model, and model.path is set")
        if self.cache.memory_fraction is not None:
            no_use(self.cache, "cache.", ("num_blocks",), "is given by cache.memory_fraction")
        return self

    @model_validator(mode="after")
    def _fits_the_device(self) -> WorkerConfig:
        if self.engine.device == "cpu":
            if self.cache.memory_fraction is not None:
                raise ValueError("cache.memory_fraction: is of a GPU's memory; set engine.device or cache.num_blocks")
            return self
        if self.transport.verify != "off":
            raise ValueError(
                f"transport.verify: {self.transport.verify!r} reads host memory; with engine.device "
                f"{self.engine.device!r} it must be off"
            )
        return self

    @model_validator(mode="after")
    def _locked(self) -> WorkerConfig:
        reachable = self.listen.reachable
        if reachable and not self.security.insecure and not self.security.has_keys:
            setting, host = next(iter(reachable.items()))
            raise ValueError(
                f"{setting}: other hosts can reach {host}, and this worker has no keys; set security.token_file to a "
                "secret that all processes share, or make a key for each with `pdlink keygen NAME` and set "
                "security.key_file and security.allow_file, or write out security.insecure: true"
            )
        return self
