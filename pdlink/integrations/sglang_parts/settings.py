"""What may stand in SGLang's flags for us, beside its own keys; unknown keys are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdlink.config import TiersConfig
from pdlink.config.admin import AdminConfig, check_admin
from pdlink.config.foreign.hicache import HICACHE
from pdlink.config.loading import explain
from pdlink.config.section import no_use
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_SGLANG = ("backend_name", "module_path", "class_name", "allocator", "enable_storage_metrics")


class StoreSettings(BaseModel):
    """Of the store behind one SGLang server: `linker_extra_config` of --unified-cache-external-linker-config."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = "sglang"
    """Of this server, in the store's state and for {name} in `tiers.local_disk`."""
    tiers: TiersConfig = TiersConfig()
    """The store: a process (`tiers.store`), or one inside of the scheduler."""
    admin: AdminConfig | None = None
    """Where operators see and change what a store inside of the scheduler keeps (`pdlink cache`): HOST:PORT, or
    `address` and `key_file`, the secret that they send; rank r listens on the port + r. None: nowhere."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """KV heads of the model; None takes the model's config."""
    untested_sglang: Literal["refuse", "accept"] = "refuse"
    """What to do on an SGLang that is newer than those this was run with."""

    @model_validator(mode="after")
    def _ours(self) -> Self:
        reason = "a record is a page of SGLang's, and SGLang says what is kept and loaded"
        no_use(self.tiers, "tiers.", ("save_decode_cache", "load_if_faster", "chunk_size", "priority_limit"), reason)
        no_use(self.tiers, "tiers.", ("peers", "peer_port"), "is for workers, PDLinkConnector and store processes")
        if self.tiers.max_local_cpu_size == 0:
            raise ValueError("tiers.max_local_cpu_size: got 0; expected more; raise it")
        check_admin(self.admin, self.tiers.store)
        return self


class StorageSettings(StoreSettings):
    """Of the store behind HiCache: --hicache-storage-backend-extra-config."""

    interface_v1: Literal[1, True]
    """SGLang's key: 1 hands us the places of pages in the host pool, so that each is copied once."""


def read_storage(extra: Mapping[str, Any]) -> StorageSettings:
    """Raises ConfigError naming every wrong key."""
    ours = {key: value for key, value in extra.items() if key not in _OF_SGLANG}
    return _read(StorageSettings, ours, "hicache-storage-backend-extra-config")


def read_linker(extra: Mapping[str, Any]) -> StoreSettings:
    """Raises ConfigError naming every wrong key."""
    return _read(StoreSettings, extra, "unified-cache-external-linker-config: linker_extra_config")


Settings = TypeVar("Settings", bound=StoreSettings)


def _read(kind: type[Settings], given: Mapping[str, Any], flag: str) -> Settings:
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(f"{flag}: {'; '.join(explain(kind, error, HICACHE))}") from None
