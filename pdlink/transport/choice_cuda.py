"""Which transports a worker opens whose KV is in device memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdlink.errors import TransportUnavailable
from pdlink.transport.mapped_cuda import MappedCudaTransport, probe_mapped_cuda
from pdlink.transport.ucx import UcxTransport, probe_ucx

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceBuffer
    from pdlink.transport.base import Probe, Transport

log = logging.getLogger(__name__)


def device_probes(config: TransportConfig, device_index: int = 0) -> list[Probe]:
    """What the transports that move device memory say about this machine, the preferred one first.

    That UCX works does not say that it has a lane for device memory: that is seen when memory is registered.
    """
    found = [probe_mapped_cuda(device_index), probe_ucx(config.ucx_library)]
    return sorted(found, key=lambda probe: probe.transport.removesuffix("-cuda") != config.prefer)


def open_device_transports(
    config: TransportConfig, buffer: DeviceBuffer, *, this_host_only: bool = False
) -> list[Transport]:
    """The transports that move device memory, opened, with `buffer` registered as region 0; the preferred one first.

    On one host a kernel stores into the peer's pages ("mapped" in the settings); UCX carries CUDA IPC and RDMA. tcp
    moves host memory only. Raises TransportUnavailable if none of those that the settings allow can work here.
    """
    devices = "" if config.ucx_devices == "all" else config.ucx_devices
    if devices == "auto":
        devices = "lo" if this_host_only else ""
    make: dict[str, Callable[[], MappedCudaTransport | UcxTransport]] = {
        "mapped": lambda: MappedCudaTransport(buffer.device.index),
        "ucx": lambda: UcxTransport(config.ucx_tls, config.ucx_library, devices, stage_below_nbytes={}),
    }
    opened: list[Transport] = []
    problems = [] if config.kind != "tcp" else ["tcp: it cannot move device memory"]
    for kind in sorted(make, key=lambda kind: kind != config.prefer):
        if config.kind not in ("auto", kind):
            continue
        transport = make[kind]()
        try:
            transport.open()
            transport.register(buffer)
        except TransportUnavailable as error:
            log.warning("transport %s cannot be used: %s", kind, error)
            problems.append(f"{kind}: {error}")
            transport.close()
        else:
            opened.append(transport)
    if not opened:
        raise TransportUnavailable(f"transport.kind = {config.kind}, KV in device memory: {'; '.join(problems)}")
    return opened
