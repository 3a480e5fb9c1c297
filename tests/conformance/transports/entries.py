"""The transports the suite runs over. A new one joins by one more entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlink.transport.base import Probe, Transport
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.mapped_cuda import MappedCudaTransport
from pdlink.transport.staged import StagedMapped, StagedTcp
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport
from tests.conformance.transports.side import SeenBuffer, Side, host_memory
from tests.cuda.by_runs import ByRuns
from tests.cuda.fake import COMPILER
from tests.loopback import LoopbackHub, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Bytes


@dataclass(frozen=True)
class Entry:
    """One transport, and what may be asked of it."""

    name: str
    group: Callable[[], Callable[[], Transport]]
    """Returns a maker of transports (not yet open) that can reach each other."""
    memory: Callable[[Bytes], SeenBuffer] = host_memory
    between_processes: bool = True
    native: bool = True
    """`submit` does its work outside Python."""
    shorter: float = 1
    """Divides the bytes of batches that are to be in flight when something happens to them."""
    needs_peer: bool = False
    """Bytes only land while the peer's process runs."""
    owner_places: bool = False
    """What has arrived in slots may be placed after the writer has closed the peer, until its owner does."""
    on_gpu: bool = False
    unusable: str = ""
    """Why it cannot be made here."""

    def probe(self) -> Probe:
        if self.on_gpu and not (found := MappedCudaTransport().probe()).ok:
            return found  # UCX would go another way
        return Probe(self.name, ok=False, reason=self.unusable) if self.unusable else self.group()().probe()

    def side(self, make: Callable[[], Transport] | None = None) -> Side:
        """One end. make: of a group; None is for one alone in its process."""
        return Side((make or self.group())(), self.shorter, self.memory)


def _loopback_group() -> Callable[[], Transport]:
    hub = LoopbackHub()
    return lambda: LoopbackTransport(hub)


def _cuda_double() -> Transport:
    from tests.cuda.double import DoubleTransport

    return DoubleTransport()


def _staged(below: Callable[[], Transport]) -> Transport:
    from tests.cuda.double import DoubleStaged

    return ByRuns(DoubleStaged(below()))


def _mapped() -> Transport:
    return MappedTransport(threads=1, within_process=True)


def _ucx_tcp() -> Transport:
    return UcxTransport(tls="tcp")


def _areas(*, on_gpu: bool, chunk_nbytes: int = 0) -> Callable[[Bytes], SeenBuffer]:
    """Memory of a GPU or of the double. chunk_nbytes: of virtual memory; 0 for an allocation."""

    def make(contents: Bytes) -> SeenBuffer:
        from tests.cuda import areas
        from tests.cuda.fake import fake

        device = areas.device(None if on_gpu else fake().path)
        return areas.VirtualArea(device, contents, chunk_nbytes) if chunk_nbytes else areas.Area(device, contents)

    return make


def _virtual(chunk_nbytes: int, *, on_gpu: bool) -> dict[str, Any]:
    """chunk_nbytes: of which a GPU takes multiples of 2 MiB."""
    return {"memory": _areas(on_gpu=on_gpu, chunk_nbytes=chunk_nbytes)}


DOUBLE: dict[str, Any] = {
    "memory": _areas(on_gpu=False),
    "unusable": "" if COMPILER else "no C++ compiler for the test double of the driver",
}
"""Of device memory on a double of the driver: fences and reports, nothing about GPUs."""
GPU: dict[str, Any] = {"on_gpu": True, "memory": _areas(on_gpu=True)}
SLOW: dict[str, Any] = {"shorter": 16, "needs_peer": True, "owner_places": True}
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
        Entry("mapped-cuda-double", lambda: _cuda_double, **DOUBLE),
        Entry("mapped-cuda-virtual-double", lambda: _cuda_double, **(DOUBLE | _virtual(1 << 20, on_gpu=False))),
        Entry("staged-tcp-double", lambda: partial(_staged, TcpTransport), **SLOW, **DOUBLE),
        Entry("staged-mapped-double", lambda: partial(_staged, _mapped), **SLOW, **DOUBLE),
        Entry("staged-ucx-double", lambda: partial(_staged, _ucx_tcp), **SLOW, **DOUBLE),
        # A GPU writes 8 GiB in a few milliseconds: no test is as fast.
        Entry("mapped-cuda", lambda: MappedCudaTransport, shorter=1 / 16, **GPU),
        Entry(
            "mapped-cuda-virtual",
            lambda: MappedCudaTransport,
            shorter=1 / 16,
            **(GPU | _virtual(2 << 20, on_gpu=True)),
        ),
        Entry("staged-mapped", lambda: lambda: ByRuns(StagedMapped(_mapped())), **SLOW, **GPU),
        Entry("staged-tcp", lambda: lambda: ByRuns(StagedTcp(TcpTransport())), **SLOW, **GPU),
        Entry("ucx-cuda", lambda: lambda: UcxTransport(tls="cuda_ipc,cuda_copy,tcp"), shorter=16, **GPU),
    )
}
