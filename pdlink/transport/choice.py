"""Which transports a worker opens, from its settings and from what works here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdlink.errors import TransportUnavailable
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.ucx import UcxTransport, probe_ucx

if TYPE_CHECKING:
    from pdlink.config import TransportConfig
    from pdlink.transport.base import Probe, Transport

log = logging.getLogger(__name__)


def probes(config: TransportConfig) -> list[Probe]:
    """What each transport says about this machine, the preferred one first."""
    found = [MappedTransport.probe(), probe_ucx(config.ucx_library)]
    return sorted(found, key=lambda probe: probe.transport != config.prefer)


def open_transports(config: TransportConfig) -> list[Transport]:
    """The transports a worker offers in the handshake, opened, the preferred one first.

    Raises TransportUnavailable if the configured one, or with `auto` every one, cannot work here.
    """
    found = {probe.transport: probe for probe in probes(config)}
    wanted = list(found) if config.kind == "auto" else [config.kind]
    usable = [name for name in wanted if found[name].ok]
    for name in wanted:
        if not found[name].ok:
            log.warning("transport %s cannot be used: %s", name, found[name].reason)
    if not usable:
        reasons = "; ".join(f"{name}: {found[name].reason}" for name in wanted)
        raise TransportUnavailable(f"transport.kind = {config.kind}: {reasons}")
    transports: list[Transport] = [
        MappedTransport() if name == "mapped" else UcxTransport(tls=config.ucx_tls, library=config.ucx_library)
        for name in usable
    ]
    for transport in transports:
        transport.open()
    return transports
