"""The transports the suite runs over. A new one joins by one more entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.transport.base import Probe, Transport
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.tcp import TcpTransport
from tests.loopback import LoopbackHub, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Entry:
    """One transport, and what may be asked of it."""

    name: str
    group: Callable[[], Callable[[], Transport]]
    """Returns a maker of transports (not yet open) that can reach each other."""
    probe: Callable[[], Probe]
    between_processes: bool = True
    native: bool = True
    """`submit` does its work outside Python."""
    needs_peer: bool = False
    """Bytes only land while the peer's process runs."""


def _loopback_group() -> Callable[[], Transport]:
    hub = LoopbackHub()
    return lambda: LoopbackTransport(hub)


def _ucx(tls: str, *, needs_peer: bool) -> Entry:
    def probe() -> Probe:
        try:
            from pdlink.transport.ucx import UcxTransport
        except ImportError as error:
            return Probe(f"ucx-{tls}", ok=False, reason=str(error))
        return UcxTransport.probe()

    def make() -> Transport:
        from pdlink.transport.ucx import UcxTransport

        return UcxTransport(tls=tls)

    return Entry(f"ucx-{tls}", lambda: make, probe, needs_peer=needs_peer)


def _cuda_double() -> Entry:
    """Mapped device memory over a test double of the driver: fences and reports, nothing about GPUs."""
    from tests.cuda.fake import COMPILER

    def make() -> Transport:
        from tests.cuda.double import DoubleTransport

        return DoubleTransport()

    def probe() -> Probe:
        return Probe(
            "mapped-cuda", ok=COMPILER is not None, reason="no C++ compiler for the test double of the driver"
        )

    return Entry("mapped-cuda-double", lambda: make, probe)


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("loopback", _loopback_group, LoopbackTransport.probe, between_processes=False, native=False),
        Entry("mapped", lambda: lambda: MappedTransport(threads=1, within_process=True), MappedTransport.probe),
        Entry("mapped-2", lambda: lambda: MappedTransport(threads=2, within_process=True), MappedTransport.probe),
        Entry("tcp", lambda: TcpTransport, TcpTransport.probe, needs_peer=True),
        Entry("tcp-2", lambda: lambda: TcpTransport(streams=2), TcpTransport.probe, needs_peer=True),
        _ucx("tcp", needs_peer=True),
        _ucx("shm", needs_peer=False),
        _cuda_double(),
    )
}
