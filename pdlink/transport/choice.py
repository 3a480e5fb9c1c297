"""Which transports a worker opens: from its settings, from where its KV is, and from what works here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from pdlink.errors import ConfigError, TransportUnavailable
from pdlink.transport.base import NotBuilt, Site
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.mapped_cuda import MappedCudaTransport
from pdlink.transport.staged import StagedMapped, StagedTcp, StagedUcx
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.memory.buffers import AnyBuffer
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

TRANSPORTS: tuple[type[Transport], ...] = (
    MappedTransport,
    MappedCudaTransport,
    StagedMapped,
    UcxTransport,
    StagedUcx,
    TcpTransport,
    StagedTcp,
)
"""Every transport there is, the preferred one first."""


def check_kinds(config: TransportConfig) -> None:
    """Raises ConfigError if the settings name a transport that is not there."""
    valid = ["auto", *sorted({one.kind for one in TRANSPORTS})]
    if config.kind not in valid:
        raise ConfigError(f"transport.kind: got {config.kind!r}; must be one of {', '.join(valid)}")


def candidates(config: TransportConfig, site: Site) -> list[type[Transport]]:
    """Transports that the settings allow and that move the site's memory, the preferred one first."""
    check_kinds(config)
    able = [one for one in TRANSPORTS if config.kind in ("auto", one.kind) and site.memory in one.memory]
    return sorted(able, key=lambda one: one.last_resort(config, site))


def open_transports(
    config: TransportConfig,
    buffers: Sequence[AnyBuffer],
    host: str = "127.0.0.1",
    advertise_host: str | None = None,
    *,
    this_host_only: bool = False,
) -> list[Transport]:
    """The transports a worker offers in the handshake, opened, the preferred one first.

    buffers: the memory that KV lives in, registered with each of them in this order: all of the host, or all of one
    GPU. The rest as in `Site`.
    Raises TransportUnavailable if the configured one, or with `auto` every one, cannot work here; ConfigError.
    """
    memories = {buffer.kind for buffer in buffers} or {"host"}
    if len(memories) > 1:
        raise TransportUnavailable(
            "buffers: got host memory and device memory; all of one KV cache must be of one kind"
        )
    memory = memories.pop()
    device_index = cast("DeviceMemory", buffers[0]).device.index if memory == "cuda" else 0
    site = Site(memory, device_index, host, advertise_host, this_host_only)
    opened: list[Transport] = []
    problems: dict[str, int] = {}
    """To the level of its line in the log."""
    for one in candidates(config, site):
        try:
            opened.append(_opened(one.configured(config, site), buffers))
        except TransportUnavailable as error:
            problems[f"{one.name}: {error}"] = logging.INFO if isinstance(error, NotBuilt) else logging.WARNING
    if not opened:
        why = "; ".join(problems) or f"it does not move {memory} memory; use auto"
        raise TransportUnavailable(f"transport.kind = {config.kind}, KV in {memory} memory: {why}")
    for problem, level in problems.items():  # not before: the error says the same
        log.log(level, "transport cannot be used: %s", problem)
    return opened


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
