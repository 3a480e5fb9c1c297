"""What may stand in vLLM's `kv_connector_extra_config`; unknown keys are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdlink.config import (
    PatientTimeouts,
    SecurityConfig,
    TiersConfig,
    TransportConfig,
    WorkerConfig,
)
from pdlink.config.admin import AdminConfig, check_admin
from pdlink.config.foreign.vllm import VLLM
from pdlink.config.listen import LinkListen
from pdlink.config.loading import explain
from pdlink.config.section import no_use
from pdlink.errors import ConfigError
from pdlink.protocol import auth
from pdlink.transport.choice import check_kinds

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConnectorSettings(BaseModel):
    """Of one vLLM server."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str | None = None
    """Unique in the deployment; None takes the engine id that vLLM makes. Data-parallel ranks after the first add
    `/dp1` and so on, shards their number."""
    listen: LinkListen = LinkListen()
    """Where other servers reach this one. Shard s (rank s, unless `shards` or `stages` say otherwise) listens on the
    port + s, and each further data-parallel engine behind the same HTTP port on the ports after those of the engine
    before; the proxy tells them to decode servers, so prefill servers need a port."""
    shards: int | None = Field(default=None, ge=1, le=1024)
    """Parts, by heads, in which the KV of a stage travels. None: one for each tensor parallel rank. With other
    numbers of ranks: the larger one, on both servers."""
    stages: int | None = Field(default=None, ge=1, le=1024)
    """Parts, by layers, in which the KV travels. None: one for each pipeline stage. With other numbers of stages: the
    larger one, on both servers."""
    context_shards: int | None = Field(default=None, ge=1, le=1024)
    """Parts, by tokens. None: one for each decode context parallel rank. A server without such ranks sets its peer's
    number."""
    context_interleave: int | None = Field(default=None, ge=1)
    """Tokens that each of these parts gets at a time, as `--cp-kv-cache-interleave-size` of the server with decode
    context parallel ranks says. None: as this server has it, 1 without such ranks."""
    layerwise: bool = True
    """Push every layer as soon as it is written. Has vLLM use piecewise graphs, between whose pieces it can tell us;
    off, a step's layers are pushed when the step ends."""
    transport: TransportConfig = TransportConfig()
    timeouts: PatientTimeouts = PatientTimeouts()
    tiers: TiersConfig | None = None
    """Where the KV of prompts is kept when vLLM needs its blocks for others; None: nowhere. Of each rank: {name} in
    `local_disk` is then the name and the rank."""
    admin: AdminConfig | None = None
    """Where operators see and change what `tiers` keep in this server's processes (`pdlink cache`): HOST:PORT, or
    `address` and `key_file`, the secret that they send; rank r listens on the port + r. None: nowhere."""
    security: SecurityConfig = SecurityConfig()
    """Key files may hold `{shard}`: every shard is a peer of its own and needs its own key."""
    timeline: str | None = None
    """File that a trace of the last transfers is kept in, for ui.perfetto.dev; or its events, for programs, if the
    name ends in .json. `{rank}` is replaced."""
    untested_vllm: Literal["refuse", "accept"] = "refuse"
    """What to do on a vLLM that is newer than those this connector is known to work with."""

    @model_validator(mode="after")
    def _locked(self) -> ConnectorSettings:
        """The rules of a worker hold here: who can be reached needs keys, and a name has no characters but some."""
        if self.name is not None and not auth.is_worker_name(f"{self.name}/dp1/0"):
            raise ValueError(f"name: got {self.name!r}; a name is {auth.NAME_RULE}, of which the last 2 are ours")
        disks = () if self.tiers is None else self.tiers.disks
        if self.name is None and any("{name}" in directory for directory in disks):
            raise ValueError("tiers.local_disk: got {name}, and vLLM makes up another name at every start; set name")
        if self.admin is not None and self.tiers is None:
            raise ValueError("admin: got one without tiers, and there is nothing to see; set tiers, or leave it out")
        check_admin(self.admin, self.tiers.store if self.tiers is not None else None)
        WorkerConfig(
            listen=self.listen.as_control(),
            transport=self.transport,
            security=self.security,
        )
        return self

    @property
    def reachable(self) -> bool:
        """Whether others than this host can reach this server's ports."""
        return bool(self.listen.reachable)

    def of_shard(self, shard: int, *, first_port: int = 0) -> ConnectorSettings:
        """The same settings with the places for the shard filled in. first_port: of its engine, from the port
        of `listen` on."""
        key_file = self.security.key_file
        if key_file is not None:
            key_file = key_file.replace("{shard}", str(shard))
        security = self.security.model_copy(update={"key_file": key_file})
        port = self.listen.control_port + first_port + shard if self.listen.control_port else 0
        return self.model_copy(update={"security": security, "listen": self.listen.on_port(port)})


class TierSettings(BaseModel):
    """Of one of the `secondary_tiers` of vLLM's OffloadingConnector, beside vLLM's own keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = "vllm"
    """Of this server, for {name} in `tiers.local_disk`. Data-parallel engines after the first add `-dp1`, ..."""
    tiers: TiersConfig = TiersConfig()
    """The store: a process (`tiers.store`), or one inside of the scheduler with a disk or a remote tier."""
    revision: str = ""
    """Of the model, where its name stands for several: what the server was given as `--revision`."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Where requests take this tier to be that name tiers to load from (`kv_load_tiers`). None: both."""
    untested_vllm: Literal["refuse", "accept"] = "refuse"
    """What to do on a vLLM that is newer than those this tier is known to work with."""

    @model_validator(mode="after")
    def _ours(self) -> TierSettings:
        of_ours = ("save_decode_cache", "load_if_faster", "chunk_size", "priority_limit")
        no_use(self.tiers, "tiers.", of_ours, "vLLM decides that")
        no_use(self.tiers, "tiers.", ("peers", "peer_port"), "is for workers, PDLinkConnector and store processes")
        no_use(self.tiers, "tiers.", ("session_quota", "quota_per_salt"), "vLLM names neither to a tier")
        if self.tiers.max_local_cpu_size == 0:
            raise ValueError("tiers.max_local_cpu_size: got 0; expected more; raise it")
        if not (self.tiers.store or self.tiers.disks or self.tiers.remote_url):
            raise ValueError(
                "tiers: got memory alone, which vLLM has above this tier; expected a disk, a remote tier or a store "
                "process; set tiers.local_disk, tiers.remote_url or tiers.store"
            )
        return self


def read_tier(given: Mapping[str, Any]) -> TierSettings:
    """Raises ConfigError naming every wrong key."""
    try:
        return TierSettings.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(f"secondary_tiers: {'; '.join(explain(TierSettings, error, VLLM))}") from None


def read(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ConfigError naming every wrong key."""
    try:
        settings = ConnectorSettings.model_validate(dict(extra))
    except ValidationError as error:
        problems = "; ".join(explain(ConnectorSettings, error, VLLM))
        raise ConfigError(f"kv_connector_extra_config: {problems}") from None
    check_kinds(settings.transport)
    return settings
