"""Where operators reach the KV that an engine's server keeps in its own process."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import model_validator

from pdlink.config.listen import Address, HostPort, place_of
from pdlink.config.section import Section, is_loopback


class AdminConfig(Section):
    """What `pdlink cache` asks, served by each rank."""

    short: ClassVar[str | None] = "address"

    address: Address = "127.0.0.1"
    """HOST[:PORT]; 0 or none takes a free one, which is logged. Rank r listens on the port + r."""
    key_file: str | None = None
    """Secret that operators send in X-Pdlink-Key; needed where other hosts reach the address."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {cls.short: given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _locked(self) -> AdminConfig:
        if self.key_file is None and not self.loopback:
            raise ValueError(
                f"admin: got {self.address!r} without a key, and who reaches it may clear what is kept; set "
                "admin.key_file, or listen on 127.0.0.1"
            )
        return self

    @property
    def loopback(self) -> bool:
        return is_loopback(place_of(self.address).host)

    def of_rank(self, rank: int) -> HostPort:
        host, port = place_of(self.address)
        return HostPort(host, port + rank if port else 0)


def check_admin(admin: AdminConfig | None, store: str | None) -> None:
    """store: `tiers.store`. Raises ValueError where another process keeps the KV."""
    if admin is not None and store is not None:
        raise ValueError(
            "admin: got one beside tiers.store; that process answers operators on its `listen`; leave it out"
        )
