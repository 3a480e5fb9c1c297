"""How bytes travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from pdlink.config.section import Seconds, Section


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

    streams: int = Field(default=1, ge=1, le=16)
    """Connections to each peer."""


class TransportConfig(Section):
    """How bytes travel."""

    kind: str = "auto"
    """"mapped", "ucx", "tcp", or "auto": the first that works between two workers of mapped (on one host), ucx (where
    there is RDMA) and tcp. mapped is mapped-cuda where the KV is on a GPU, and staged-mapped where that does not
    work; tcp is staged-tcp there."""
    require: str | None = None
    """Lane that must really be used ("mapped", "mapped-cuda", "cma", "tcp", "rc", "staged-tcp"); connecting fails if
    it is another one."""
    ucx: UcxConfig = UcxConfig()
    """Of `kind: ucx`."""
    tcp: TcpConfig = TcpConfig()
    """Of `kind: tcp`."""
    gpu_share: float = Field(default=0.125, gt=0, le=1)
    """Of the threads that a GPU runs at a time, the most that a push of mapped-cuda takes from the model beside it.
    0.125 is a block of 256 on each multiprocessor of today's GPUs. Not measured."""
    verify: Literal["off", "sample", "all"] = "off"
    """Checksums of what decode receives, compared before a request may use it: of every pushed layer, of one in
    eight, or none."""
    batch_timeout_s: Seconds = 10.0
    """What was handed to the transport (mapped-cuda: and is written) and has not landed by then fails the peer. UCX
    itself never reports a stalled one."""
