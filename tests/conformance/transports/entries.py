"""The transports the suite runs over. A new one joins by one more entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdlink.transport.base import Probe, Transport
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport
from tests.cuda.fake import COMPILER
from tests.loopback import LoopbackHub, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Entry:
    """One transport, and what may be asked of it."""

    name: str
    group: Callable[[], Callable[[], Transport]]
    """Returns a maker of transports (not yet open) that can reach each other."""
    between_processes: bool = True
    native: bool = True
    """`submit` does its work outside Python."""
    shorter: int = 1
    """Divides the rounds of batches that are to be in flight when something happens to them."""
    needs_peer: bool = False
    """Bytes only land while the peer's process runs."""
    unusable: str = ""
    """Why it cannot be made here."""

    def probe(self) -> Probe:
        return Probe(self.name, ok=False, reason=self.unusable) if self.unusable else self.group()().probe()


def _loopback_group() -> Callable[[], Transport]:
    hub = LoopbackHub()
    return lambda: LoopbackTransport(hub)


def _cuda_double() -> Transport:
    """Mapped device memory over a test double of the driver: fences and reports, nothing about GPUs."""
    from tests.cuda.double import DoubleTransport

    return DoubleTransport()


def _cuda_virtual() -> Transport:
    """The same of virtual memory: torch's expandable segments."""
    from tests.cuda.virtual import VirtualTransport

    return VirtualTransport()


def _staged(below: Callable[[], Transport]) -> Transport:
    """The same memory through pinned slots over another transport."""
    from tests.cuda.double import DoubleStaged

    return DoubleStaged(below())


def _mapped() -> Transport:
    return MappedTransport(threads=1, within_process=True)


def _ucx_tcp() -> Transport:
    return UcxTransport(tls="tcp")


NO_COMPILER = "" if COMPILER else "no C++ compiler for the test double of the driver"
ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("loopback", _loopback_group, between_processes=False, native=False),
        Entry("mapped", lambda: _mapped),
        Entry("mapped-2", lambda: lambda: MappedTransport(threads=2, within_process=True)),
        Entry("tcp", lambda: TcpTransport, needs_peer=True),
        Entry("tcp-2", lambda: lambda: TcpTransport(streams=2), needs_peer=True),
        Entry("ucx-tcp", lambda: lambda: UcxTransport(tls="tcp"), needs_peer=True),
        Entry("ucx-shm", lambda: lambda: UcxTransport(tls="shm")),
        Entry("mapped-cuda-double", lambda: _cuda_double, unusable=NO_COMPILER),
        Entry("mapped-cuda-virtual", lambda: _cuda_virtual, unusable=NO_COMPILER),
        Entry(
            "staged-tcp", lambda: partial(_staged, TcpTransport), shorter=16, needs_peer=True, unusable=NO_COMPILER
        ),
        Entry("staged-mapped", lambda: partial(_staged, _mapped), shorter=16, needs_peer=True, unusable=NO_COMPILER),
        Entry("staged-ucx", lambda: partial(_staged, _ucx_tcp), shorter=16, needs_peer=True, unusable=NO_COMPILER),
    )
}
