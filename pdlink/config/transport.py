"""How bytes travel, and who goes first."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pdlink.config.section import Seconds, Section


class SharingConfig(Section):
    """How the transfers of one transport share it; see `pdlink/endpoint/order.py`."""

    order: Literal["shortest", "fcfs"] = "shortest"
    """Which transfer goes next: the one with the fewest bytes left, with ageing, or the oldest one. The second is for
    comparison (`pdlink bench sharing`)."""
    window_nbytes: int = Field(default=64 * 2**20, ge=1)
    """In-flight limit over all peers that are not slow consumers."""
    peer_window_nbytes: int = Field(default=32 * 2**20, ge=1)
    """In-flight limit per peer. Too small and the link idles between completions: keep it above 5 ms of bandwidth
    (32 MiB at 6 GB/s), because Python code may delay a completion by that much (`sys.getswitchinterval`). Too large
    and new transfers to the peer queue behind it."""
    part_nbytes: int = Field(default=4 * 2**20, ge=1)
    """Larger pushes are cut, between blocks, into parts of about this size."""
    ageing: float = Field(default=0.05, gt=0, le=1)
    """Bytes of advantage for every byte that the link moves while a transfer waits: a transfer of S bytes is
    overtaken only by smaller ones that come while the link moves the next S / ageing. Less ageing favours small
    transfers, and lets large ones wait longer. Simulated, lognormal lengths, 80 % load: the mean time to ready is
    30 % of that of first come, first served without ageing and with 0.05, 36 % with 0.2, 73 % with 1."""

    @model_validator(mode="after")
    def _nested(self) -> SharingConfig:
        sizes = [(name, getattr(self, name)) for name in ("part_nbytes", "peer_window_nbytes", "window_nbytes")]
        for (name, value), (later, limit) in zip(sizes, sizes[1:], strict=False):
            if value > limit:
                raise ValueError(f"transport.sharing: {name} = {value} must be at most {later} = {limit}")
        return self


class MappedConfig(Section):
    """Shared pages on one host, or the memory of its GPUs."""

    threads: int = Field(default=2, ge=1, le=2)
    """Threads that copy host memory. The second one helps with more than a megabyte at once, and not while this
    worker computes a prefill. With it 268 MB took 10.0 instead of 14.2 ms, with one of the two cores busy 10.4
    instead of 14.8 (best of 25 and 15 turns, AMD EPYC, Zen 5)."""


class UcxConfig(Section):
    """RDMA, CUDA IPC, cross-memory attach and sockets through UCX."""

    tls: str = "auto"
    """UCX transports: "tcp", "shm" (same host, cross-memory attach), or any UCX_TLS list. auto leaves it to UCX."""
    devices: str = "auto"
    """Devices that UCX may use, and listens on without asking anybody for a key: "eth1", "mlx5_0:1", a list of them,
    or "all". auto takes "lo" for a worker that only this host can reach, else "all". See docs/security.md."""
    library: str | None = None
    """Path of libucp.so.0 to load instead of the one found; "off" runs without UCX."""

    @field_validator("library", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads off as a boolean


class TcpConfig(Section):
    """Sockets, without RDMA; bytes are sent in the clear."""

    host: str | None = None
    """Address to listen on; None uses `control_host`."""
    streams: int = Field(default=1, ge=1, le=16)
    """Connections to each peer."""
    congestion: str | None = None
    """Their congestion control ("cubic", "bbr", …); None takes cubic on one host, else the system's."""
    pack_below_nbytes: int = Field(default=1024, ge=0, le=131072)
    """Shorter runs are packed on their way, 0 packs none: an entry of sendmsg and recvmsg costs 0.1 us. The default
    was measured on two cores of an AMD EPYC; `pdlink bench tune` measures it here."""


class StagingConfig(Section):
    """Pinned host memory that KV of a GPU passes through where no GPU or network card reaches the peer's."""

    slot_nbytes: int = Field(default=4 * 2**20, ge=65536, le=2**30)
    """Bytes of a slot: what is copied and sent at a time. As `sharing.part_nbytes`: a part of a push fills one."""
    num_slots: int = Field(default=16, ge=2, le=1024)
    """Slots to send from, and as many to receive in. A peer gets half of them at most: 32 MiB in flight, which is
    `sharing.peer_window_nbytes`. They are pinned with the first peer: 128 MiB for each transport that is used."""


class TransportConfig(Section):
    """How bytes travel."""

    kind: str = "auto"
    """"mapped", "ucx", "tcp", or "auto": whatever works between two workers, `prefer` first. mapped is mapped-cuda
    where the KV is on a GPU, and staged-mapped where that does not work; tcp is staged-tcp there."""
    prefer: str = "mapped"
    """The kind to try first. Mapped memory is the fastest where it can work, which is on one host. Then comes ucx
    where there is RDMA, then tcp."""
    require: str | None = None
    """Lane that must really be used ("mapped", "mapped-cuda", "cma", "tcp", "rc", "staged-tcp"); connecting fails if
    it is another one."""
    mapped: MappedConfig = MappedConfig()
    """Of `kind: mapped`."""
    ucx: UcxConfig = UcxConfig()
    """Of `kind: ucx`."""
    tcp: TcpConfig = TcpConfig()
    """Of `kind: tcp`."""
    staging: StagingConfig = StagingConfig()
    """For KV on a GPU."""
    verify: Literal["off", "sample", "all"] = "off"
    """Checksums of what decode receives, compared before a request may use it: of every pushed layer, of one in
    eight, or none. A difference fails the transfer. Costs one more read of the bytes on each side."""
    batch_timeout_s: Seconds = 10.0
    """What was handed to the transport and has not landed by then fails the peer. UCX itself never reports a stalled
    one."""
    sharing: SharingConfig = SharingConfig()
    """Who goes first."""
