"""Which transports a worker opens: from its settings, from where its KV is, and from what works here."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, cast

from pdlink.errors import TransportUnavailable
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.mapped_cuda import MappedCudaTransport, probe_mapped_cuda
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport, probe_ucx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.memory.buffers import AnyBuffer
    from pdlink.transport.base import Probe, Transport

log = logging.getLogger(__name__)


def probes(config: TransportConfig) -> list[Probe]:
    """What each transport of host memory says about this machine, the preferred one first."""
    found = {"mapped": MappedTransport.probe(), "ucx": probe_ucx(config.ucx_library), "tcp": TcpTransport.probe()}
    return [found[kind] for kind in _order(config)]


def device_probes(config: TransportConfig, device_index: int = 0) -> list[Probe]:
    """What the transports that move device memory say about this machine, the preferred one first.

    That UCX works does not say that it has a lane for device memory: that is seen when memory is registered.
    """
    found = [probe_mapped_cuda(device_index), probe_ucx(config.ucx_library)]
    return sorted(found, key=lambda probe: probe.transport.removesuffix("-cuda") != config.prefer)


def open_transports(
    config: TransportConfig,
    buffers: Sequence[AnyBuffer],
    host: str = "127.0.0.1",
    advertise: str | None = None,
    *,
    this_host_only: bool = False,
) -> list[Transport]:
    """The transports a worker offers in the handshake, opened, the preferred one first.

    buffers: the memory that KV lives in, registered with each of them in this order. They are all of the host, or
    all of one GPU: there a kernel stores into the peer's pages ("mapped" in the settings) or UCX carries CUDA IPC and
    RDMA, and tcp cannot be used.
    host: where tcp listens unless `config.tcp_host` says so; advertise: the address others reach that by.
    this_host_only: nobody else is to reach it, so UCX must not listen on more than loopback.
    Raises TransportUnavailable if the configured one, or with `auto` every one, cannot work here.
    """
    kinds = {buffer.kind for buffer in buffers}
    if len(kinds) > 1:
        raise TransportUnavailable(
            "buffers: got host memory and device memory; all of one KV cache must be of one kind"
        )
    devices = "" if config.ucx_devices == "all" else config.ucx_devices
    if devices == "auto":
        devices = "lo" if this_host_only else ""
    on_device = kinds == {"cuda"}

    def mapped() -> Transport:
        if on_device:
            return MappedCudaTransport(cast("DeviceMemory", buffers[0]).device.index)
        return MappedTransport(config.mapped_threads)

    def tcp() -> Transport:
        if on_device:
            raise TransportUnavailable("it cannot move device memory")
        return _tcp(config, host, advertise)

    make: dict[str, Callable[[], Transport]] = {
        "mapped": mapped,
        "ucx": lambda: UcxTransport(config.ucx_tls, config.ucx_library, devices),
        "tcp": tcp,
    }
    opened: list[Transport] = []
    problems: list[str] = []
    for kind in _order(config):
        if config.kind not in ("auto", kind):
            continue
        try:
            opened.append(_opened(make[kind](), buffers))
        except TransportUnavailable as error:
            problems.append(f"{kind}: {error}")
    if not opened:
        where = ", KV in device memory" if on_device else ""
        raise TransportUnavailable(f"transport.kind = {config.kind}{where}: {'; '.join(problems)}")
    for problem in problems:  # not before: the error says the same
        log.warning("transport cannot be used: %s", problem)
    return opened


def _order(config: TransportConfig) -> list[str]:
    """Kinds, the preferred one first. Over sockets ucx is slower than tcp, and checks nothing."""
    kinds = ["mapped", "ucx", "tcp"] if _rdma() else ["mapped", "tcp", "ucx"]
    return sorted(kinds, key=lambda kind: kind != config.prefer)


def _opened(transport: Transport, buffers: Sequence[AnyBuffer]) -> Transport:
    """Raises TransportUnavailable; then it is closed."""
    try:
        transport.open()
        for buffer in buffers:
            transport.register(buffer)
    except BaseException:
        transport.close()
        raise
    return transport


def _tcp(config: TransportConfig, host: str, advertise: str | None) -> TcpTransport:
    """A host that can be told to peers is; for "listen everywhere" they need `advertise`."""
    listen = config.tcp_host or host
    told = advertise if config.tcp_host in (None, "0.0.0.0", "::") else listen
    packed = config.tcp_pack_below_nbytes
    return TcpTransport(listen, config.tcp_streams, config.tcp_congestion, told, pack_below_nbytes=packed)


def _rdma() -> bool:
    """Whether this host has RDMA devices. CUDA IPC is not asked for: buffers are host memory."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
