"""A store process, which the workers of one host share."""

from __future__ import annotations

from pydantic import model_validator

from pdlink.config.kv_events import KVEventsConfig
from pdlink.config.listen import ListenConfig
from pdlink.config.log import LogConfig
from pdlink.config.section import Section, in_pairs, no_use
from pdlink.config.tiers import OF_A_WORKER, TiersConfig
from pdlink.config.transport import TransportConfig

OF_PEERS = ("transport", "key_file", "allow_file", "insecure")
"""Settings of what a store says to stores of other nodes."""


class StoreConfig(Section):
    """`pdlink store`: keeps KV for all workers of this host, and outlives them."""

    name: str = "store"
    """In logs and metrics; {name} in `tiers.local_disk`."""
    socket: str = "ipc:///tmp/pdlink-{uid}/store.sock"
    """Unix socket for the workers, their `tiers.store`; {uid} is this user's number. Its directory is made if it is
    not there, and no other user may enter it: workers write into the store's memory."""
    listen: ListenConfig = ListenConfig()
    """Where others reach it: HTTP (/health, /metrics, what operators ask), and stores of other nodes."""
    http_key_file: str | None = None
    """Secret that callers send in X-Pdlink-Key, except for /health and /metrics; None lets everybody call."""
    log: LogConfig = LogConfig()
    """Lines on standard error."""
    tiers: TiersConfig = TiersConfig()
    """Its memory, and what is below it."""
    kv_events: KVEventsConfig = KVEventsConfig()
    """Whom it tells what KV it keeps. Workers say where, so that a proxy before them listens by itself."""
    transport: TransportConfig = TransportConfig()
    """How records travel between nodes."""
    key_file: str | None = None
    """This store's key pair, made by `pdlink keygen NAME`, for stores of other nodes; as `security.key_file` of a
    worker."""
    allow_file: str | None = None
    """Stores that may ask this one, and that it asks: lines `name public_key`. Read again on SIGHUP."""
    insecure: bool = False
    """Written out, it lets a store without keys be asked from other hosts, and ask any."""

    @model_validator(mode="after")
    def _used(self) -> StoreConfig:
        no_use(self.tiers, "tiers.", OF_A_WORKER, "is a setting of workers, and this is a store")
        in_pairs(self, "", ("key_file", "allow_file"))
        if not self.tiers.peers and self.tiers.peer_port is None:
            no_use(self, "", OF_PEERS, "is of stores of other nodes, and tiers.peers and tiers.peer_port are not set")
        return self
