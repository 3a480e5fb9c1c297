"""Which transports a worker opens, from its settings and from what works here."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pdlink.errors import TransportUnavailable
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.staging import stage_below, stage_below_lanes
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport, probe_ucx

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import TransportConfig
    from pdlink.transport.base import Probe, Transport

log = logging.getLogger(__name__)


def probes(config: TransportConfig) -> list[Probe]:
    """What each transport says about this machine, the preferred one first."""
    sockets = [probe_ucx(config.ucx_library), TcpTransport.probe()]
    if not _rdma():
        sockets.reverse()  # over sockets ucx is the slower one, and checks nothing
    return sorted([MappedTransport.probe(), *sockets], key=lambda probe: probe.transport != config.prefer)


def open_transports(
    config: TransportConfig, host: str = "127.0.0.1", advertise: str | None = None, *, this_host_only: bool = False
) -> list[Transport]:
    """The transports a worker offers in the handshake, opened, the preferred one first.

    host: where tcp listens unless `config.tcp_host` says so; advertise: the address others reach that by.
    this_host_only: nobody else is to reach it, so UCX must not listen on more than loopback.
    Raises TransportUnavailable if the configured one, or with `auto` every one, cannot work here.
    """
    devices = "" if config.ucx_devices == "all" else config.ucx_devices
    if devices == "auto":
        devices = "lo" if this_host_only else ""
    make: dict[str, Callable[[], Transport]] = {
        "mapped": lambda: MappedTransport(config.mapped_threads),
        "ucx": lambda: UcxTransport(
            config.ucx_tls, config.ucx_library, devices, stage_below_lanes(config.staging.table, config.staging.ucx)
        ),
        "tcp": lambda: _tcp(config, host, advertise),
    }
    opened: list[Transport] = []
    problems: list[tuple[str, TransportUnavailable]] = []
    for probe in probes(config):
        if config.kind not in ("auto", probe.transport):
            continue
        transport = make[probe.transport]()
        try:
            if not probe.ok:
                raise TransportUnavailable(probe.reason)
            transport.open()
        except TransportUnavailable as error:
            problems.append((probe.transport, error))
        else:
            opened.append(transport)
    if not opened:
        reasons = "; ".join(f"{name}: {error}" for name, error in problems)
        raise TransportUnavailable(f"transport.kind = {config.kind}: {reasons}")
    for name, problem in problems:  # not before: the error says the same
        log.warning("transport %s cannot be used: %s", name, problem)
    return opened


def _tcp(config: TransportConfig, host: str, advertise: str | None) -> TcpTransport:
    """A host that can be told to peers is; for "listen everywhere" they need `advertise`."""
    listen = config.tcp_host or host
    told = advertise if config.tcp_host in (None, "0.0.0.0", "::") else listen
    packed = stage_below("tcp", config.staging.table, config.staging.tcp)
    return TcpTransport(listen, config.tcp_streams, config.tcp_congestion, told, stage_below_nbytes=packed)


def _rdma() -> bool:
    """Whether this host has RDMA devices. CUDA IPC is not asked for: buffers are host memory."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
