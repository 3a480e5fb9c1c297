"""What a layer costs the engine's thread, and when it is reported: `layer_ready` of a node; a process receives.

A report is what the endpoint's thread gets from the transport. The first layer of each transfer does not count: it
may wait for the offer.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import paged_layout
from pdlink.node.node import Node
from pdlink.transport.base import BatchDone
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.mapped_cuda import MappedCudaTransport

from ..workers import WorkerProcess
from .figures import LAYER_CPU, ONE_LAYER, GpuFigure

if TYPE_CHECKING:
    from pdlink.transport.base import Occurrence, Transport

HEADS, HEAD_DIM, WAIT_S = 8, 128, 60.0


@dataclass(frozen=True, slots=True)
class LayerWork:
    on_gpu: bool = True
    """Else host memory over `mapped`: a rehearsal."""
    layers: int = 32
    tokens: int = 2048
    block_tokens: int = 16
    rounds: int = 12

    @property
    def num_blocks(self) -> int:
        return self.tokens // self.block_tokens

    @property
    def layer_nbytes(self) -> int:
        return 2 * self.tokens * HEADS * HEAD_DIM * 2

    def node(self, name: str) -> tuple[Node, Transport]:
        layout = paged_layout(
            dtype="bfloat16",
            itemsize=2,
            num_layers=self.layers,
            num_blocks=2 * self.num_blocks,
            block_tokens=self.block_tokens,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
        )
        transport: Transport = MappedCudaTransport() if self.on_gpu else MappedTransport(within_process=True)
        buffers = None
        if self.on_gpu:
            device = Device(0)
            device.open()
            buffers = [DeviceBuffer(device, layout.extent(0))]
        return Node(name, KVGroups((layout,)), buffers, transports=[transport]), transport


class LayerReceiver:
    """The other process; a `Role`."""

    def __init__(self, work: LayerWork) -> None:
        self._blocks = list(range(work.num_blocks, 2 * work.num_blocks))
        self._tokens = work.tokens
        self._node, _ = work.node("bench-decode")
        self._incoming: Any = None

    def start(self) -> None:
        """Made with the first question, which takes long."""

    def begin(self, transfer_id: str, address: str) -> None:
        self._incoming = self._node.receive(transfer_id, address, [self._blocks], range(self._tokens), by_layer=False)

    def end(self) -> None:
        self._incoming.wait(WAIT_S)
        self._incoming.released.wait(WAIT_S)

    def close(self) -> None:
        self._node.close()


class LayerReports:
    """Of a transport, as the endpoint's thread takes them."""

    def __init__(self, transport: Transport) -> None:
        self._poll = transport.poll
        self._came = threading.Condition()
        self._nbytes = 0
        self.last_s = 0.0
        transport.poll = self._noted  # type: ignore[method-assign]

    def _noted(self) -> list[Occurrence]:
        found = self._poll()
        with self._came:
            self.last_s = time.perf_counter()
            self._nbytes += sum(one.nbytes for one in found if isinstance(one, BatchDone))
            self._came.notify()
        return found

    def wait(self, nbytes: int) -> None:
        """Until so many bytes are reported that no `wait` has waited for yet."""
        with self._came:
            if not self._came.wait_for(lambda: self._nbytes >= nbytes, WAIT_S):
                raise TimeoutError(f"got reports of {self._nbytes} of {nbytes} bytes within {WAIT_S} s")
            self._nbytes -= nbytes


def measure(work: LayerWork) -> tuple[float, float]:
    """Median seconds: CPU of the calling thread for a layer, and from the call to the report of a layer alone.

    Raises WorkerFailed, TimeoutError, PdlinkError.
    """
    node, transport = work.node("bench-prefill")
    reports, other = LayerReports(transport), WorkerProcess("bench-decode", LayerReceiver, work)
    cpu, alone = list[float](), list[float]()
    with closing(node), closing(other):
        other.open()
        other.ask("start", timeout_s=WAIT_S)
        for number in range(2 * work.rounds):
            transfer_id, by_itself = f"layers-{number}", number % 2 == 0
            outgoing = node.send(transfer_id, [list(range(work.num_blocks))], work.tokens)
            other.ask("begin", transfer_id, node.address, timeout_s=WAIT_S)
            outgoing.layer_ready(0)
            reports.wait(work.layer_nbytes)
            before_s = time.thread_time()
            for layer in range(1, work.layers):
                began_s = time.perf_counter()
                outgoing.layer_ready(layer)
                if by_itself:
                    reports.wait(work.layer_nbytes)
                    alone.append(reports.last_s - began_s)
            if not by_itself:
                cpu.append((time.thread_time() - before_s) / (work.layers - 1))
                reports.wait((work.layers - 1) * work.layer_nbytes)
            outgoing.finish(1)
            other.ask("end", timeout_s=WAIT_S)
            outgoing.released.wait(WAIT_S)
    return statistics.median(cpu), statistics.median(alone)


def run() -> list[GpuFigure]:
    cpu_s, alone_s = measure(LayerWork())
    return [
        GpuFigure(LAYER_CPU, cpu_s, against="8 us", ratio=cpu_s / 8e-6),
        GpuFigure(ONE_LAYER, alone_s, against="35 us", ratio=alone_s / 35e-6),
    ]
