"""KV that outlives its request."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pdlink.config.section import Port, Seconds, Section, in_pairs, no_use

MAX_SESSION_CHARS, MAX_SESSION_TTL_S = 128, 86400.0
"""Of the id of an agent's session, and of its time to live: for requests that name one and stores that keep it."""
A_BYTE = 1e-9
"""In GiB, and a little more: int() of less is no quota at all."""
OF_A_WORKER = (
    "store_timeout_s",
    "store",
    "chunk_size",
    "load_if_faster",
    "save_decode_cache",
    "priority_limit",
)
"""Settings that a worker has wherever its store is; the others are the store's."""


class TiersConfig(Section):
    """Where a worker keeps the KV of prompts when the blocks of its pool are needed for others."""

    store: str | None = None
    """Unix socket of a `pdlink store` process on this host, which keeps KV for all its workers. None keeps it in the
    worker."""
    store_timeout_s: Seconds = 1.0
    """Longest wait for an answer of that process; then everything is a miss until it is back."""
    max_local_cpu_size: float = Field(default=1.0, ge=0)
    """Most memory for it, in GiB; taken ahead of need, twice what records fill. 0 keeps nothing."""
    reserve_local_cpu_size: float = Field(default=0.0, ge=0)
    """Memory of the machine that it never takes, in GiB."""
    numa_node: int | None = Field(default=None, ge=0, lt=1024)
    """NUMA node where its memory is preferred. None: that of the GPU whose KV a worker keeps, else the kernel's
    choice."""
    max_pinned_size: float | None = Field(default=None, ge=0)
    """What operators may pin of it, in GiB; None is a quarter of it."""
    session_quota: float | None = Field(default=None, ge=A_BYTE)
    """What the sessions of agents (`session_id`) with one `cache_salt` keep together, in GiB. All of them keep a
    quarter of the disk at most, or of memory without one; None allows that. Turns beyond it are served."""
    local_disk: str | tuple[str, ...] | None = None
    """Directory for a tier on this machine's disk, which one worker has at a time; {name} in it is the worker's name.
    Of several, one for each device, each has an equal part of the records. What is there is found again after a
    restart. Needs `max_local_disk_size`."""
    max_local_disk_size: float | None = Field(default=None, gt=0)
    """Space for all that is in it, in GiB; records of models that no worker runs any more go first."""
    state_dir: str | None = None
    """Directory for what was cleared while a tier was away, where there is no `local_disk`. None is
    $XDG_STATE_HOME/pdlink, or ~/.local/state/pdlink."""
    remote_url: str | tuple[str, ...] | None = Field(default=None, repr=False)
    """A tier below memory that others may share, or several, asked in this order: file:///DIRECTORY[?max_size=GIB], redis://[USER:PASSWORD@]HOST[:PORT]
    and its kin, s3://BUCKET and its kin, or path.to.module:name (`pdlink.store.tiers.opening`)."""
    peers: tuple[str, ...] = ()
    """Stores of other nodes, tcp://HOST:PORT[?key=PUBLIC_KEY] with their `peer_port`. What they have in memory is
    found, and pulled as `transport` says; they are asked after the disk. A proxy names them by itself."""
    peer_port: Port | None = None
    """Where stores of other nodes ask this one, on the host of `listen.control`; 0 takes a free one, which is
    printed. None is 0 where there are `peers`, and else lends to nobody and borrows from nobody."""
    ingestion: Literal["all", "second_sight"] = "all"
    """Which records go to the tiers below memory: all; or second_sight: a record goes when it is wanted a second
    time."""
    verify: bool = False
    """Check records when they are read from memory, too, by a checksum made when they are stored. What is read
    from below memory is always checked."""
    ttl_s: Seconds | None = None
    """How long KV is found, here and in the tiers, counted from when it is stored; a request may ask for less
    (`kv_retention`). Without it, until its room is needed."""
    quota_per_salt: float | None = Field(default=None, ge=A_BYTE)
    """Memory for the KV of requests with one `cache_salt`, in GiB; those without a salt have no quota."""
    priority_limit: int | None = None
    """Keep the KV of requests up to this `priority` only (lower is more urgent)."""
    codec: dict[str, Literal["raw", "zstd"]] = {}
    """How records are packed in a tier, by its name: {valkey: zstd}; raw where none is given."""
    chunk_size: int = Field(default=256, ge=1)
    """Tokens per record. A prompt is found again in whole chunks; shorter ones cost more look-ups."""
    load_if_faster: bool = True
    """Load no more of a prompt than takes less time than to compute or receive it, by what was measured lately. False
    loads all that is found."""
    save_decode_cache: bool = False
    """Keep the KV of answers, too, and on a decode worker that of prompts it received: what the next turn of a
    conversation begins with."""

    @property
    def disks(self) -> tuple[str, ...]:
        """The directories of `local_disk`, with {name} in them."""
        return (self.local_disk,) if isinstance(self.local_disk, str) else self.local_disk or ()

    @field_validator("local_disk", mode="after")
    @classmethod
    def _directories(cls, given: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for path in (given,) if isinstance(given, str) else given or ():
            if "://" in path:
                plain = path.removeprefix("file://")
                raise ValueError(f"tiers.local_disk: got {path!r}; expected a directory; write {plain!r}")
        return given

    @model_validator(mode="after")
    def _together(self) -> TiersConfig:
        if self.store is None:
            no_use(self, "tiers.", ("store_timeout_s",), "is of a store process, and tiers.store names none")
        else:
            no_use(self, "tiers.", of_a_store(), "is a setting of the store that tiers.store names")
        in_pairs(self, "tiers.", ("local_disk", "max_local_disk_size"))
        if self.local_disk == () or len(set(self.disks)) < len(self.disks):
            raise ValueError(
                f"tiers.local_disk: got {list(self.disks)}; expected one directory for each device; correct it"
            )
        below = self.local_disk, self.remote_url, self.peers or None, self.peer_port
        if self.max_local_cpu_size == 0 and any(setting is not None for setting in below):
            raise ValueError(
                "tiers.max_local_cpu_size: got 0; expected more, because records pass through memory on their way to "
                "other tiers; raise it"
            )
        return self


def of_a_store() -> list[str]:
    """Settings that belong to the process that keeps the KV."""
    return [name for name in TiersConfig.model_fields if name not in OF_A_WORKER]
