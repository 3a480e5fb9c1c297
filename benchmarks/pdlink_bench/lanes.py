"""The two processes a transport connects, and the one that measures what a single core could do at best.

`LaneSender` and `LaneReceiver` play the roles of a prefill and a decode worker; `Ceiling` copies the same runs
between two buffers of its own. All times are taken in the process that waits for the bytes to have landed.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import DeadlineExceeded, TransportFailure
from pdlink.kv.groups import KVGroups
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import BatchDone, BatchStatus, PeerFailed

from .workload import check_and_clear, fill_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdlink.kv.layout import RunArray
    from pdlink.kv.plan import Plan
    from pdlink.transport.base import Probe, Transport

    from .workload import Workload

SENDER, RECEIVER = "bench-sender", "bench-receiver"


class _End:
    """One registered buffer behind one transport, large enough for the workload of each case."""

    def __init__(self, cases: Mapping[str, Workload], make_transport: Callable[[], Transport]) -> None:
        self.cases = cases
        self.case = ""
        self.transport = make_transport()
        self.buffer: Buffer | None = None

    def probe(self) -> Probe:
        return self.transport.probe()

    def array(self, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Open the transport with a buffer of this size."""
        self.transport.open()
        self.buffer = Buffer(nbytes)
        self.transport.register(self.buffer)
        return self.buffer.array

    @property
    def workload(self) -> Workload:
        return self.cases[self.case]

    def close(self) -> None:
        self.transport.close()
        if self.buffer is not None:
            self.buffer.close()


class LaneReceiver(_End):
    def invite(self) -> bytes:
        self.array(max(workload.dst.extent(0) for workload in self.cases.values()))
        layouts = {workload.dst for workload in self.cases.values()}
        if len(layouts) > 1:  # only one can be guarded; the others would be written without a check
            return self.transport.invite(SENDER)
        layout = layouts.pop()
        self.transport.guard(KVGroups((layout,)))
        invitation = self.transport.invite(SENDER)
        self.transport.open_blocks(SENDER, (tuple(range(layout.num_blocks)),))
        return invitation

    def take_up(self, case: str) -> None:
        """What is received from now on is of this case."""
        self.case = case

    def check_and_clear(self) -> str:
        if self.buffer is None:
            raise ValueError("nothing was received yet")
        return check_and_clear(self.buffer.array, self.workload)


class LaneSender(_End):
    def connect(self, invitation: bytes) -> None:
        from pdlink.kv.plan import warm_up

        warm_up()
        self.array(max(workload.src.extent(0) for workload in self.cases.values()))
        self.plans = {name: workload.plan() for name, workload in self.cases.items()}
        self.transport.connect(RECEIVER, invitation)

    def take_up(self, case: str) -> None:
        """Fill the pool with what this case sends."""
        if self.buffer is None:
            raise ValueError("not connected yet")
        if case != self.case:
            self.case = case
            fill_source(self.buffer.array, self.workload)

    @property
    def plan(self) -> Plan:
        return self.plans[self.case]

    def lane(self) -> str:
        """How the bytes really travelled."""
        return self.transport.lane(RECEIVER)

    def push_whole(self, timeout_s: float) -> float:
        """Seconds from one submit of everything to the moment all of it is known to have landed."""
        lists = [one for layer in range(self.workload.num_layers) for one in self.plan.run_lists(layer)]
        start_s = time.monotonic()
        ticket = self.transport.submit(RECEIVER, lists, timeout_s)
        self._wait({ticket}, start_s + timeout_s)
        return time.monotonic() - start_s

    def push_layers(self, timeout_s: float) -> float:
        """Seconds for all layers when each one waits for the one before to have landed."""
        start_s = time.monotonic()
        for layer in range(self.workload.num_layers):
            ticket = self.transport.submit(RECEIVER, self.plan.run_lists(layer), timeout_s)
            self._wait({ticket}, start_s + timeout_s)
        return time.monotonic() - start_s

    def push_during_prefill(self, layer_s: float, timeout_s: float) -> float:
        """Seconds from the last layer being ready to all having landed, when one gets ready every `layer_s`."""
        open_tickets: set[int] = set()
        start_s = ready_s = time.monotonic()
        for layer in range(self.workload.num_layers):
            ready_s = start_s + (layer + 1) * layer_s
            while (left_s := ready_s - time.monotonic()) > 0:
                self._collect(open_tickets, left_s)
            open_tickets.add(self.transport.submit(RECEIVER, self.plan.run_lists(layer), timeout_s))
        self._wait(open_tickets, ready_s + timeout_s)
        return time.monotonic() - ready_s

    def _wait(self, tickets: set[int], deadline_s: float) -> None:
        while tickets:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"{len(tickets)} batches were not reported before their deadline")
            self._collect(tickets, left_s)

    def _collect(self, tickets: set[int], wait_s: float) -> None:
        """Strike off the batches that have landed; waits until there is something to say, `wait_s` at most."""
        occurrences = self.transport.poll()
        if not occurrences:
            select.select([self.transport.fileno()], [], [], wait_s)
            occurrences = self.transport.poll()
        for occurrence in occurrences:
            if isinstance(occurrence, PeerFailed):
                raise TransportFailure(occurrence.reason)
            if isinstance(occurrence, BatchDone):
                if occurrence.status is not BatchStatus.OK:
                    raise TransportFailure(f"batch ended as {occurrence.status.value}: {occurrence.detail}")
                tickets.discard(occurrence.ticket)


class Ceiling:
    """The same runs, copied by one core inside one process: what no transport of one thread can beat."""

    def __init__(self, cases: Mapping[str, Workload]) -> None:
        from pdlink import _copy

        self._native = _copy
        self.cases = cases
        self.case = ""
        self.src = Buffer(max(workload.src.extent(0) for workload in cases.values()))
        self.dst = Buffer(max(workload.dst.extent(0) for workload in cases.values()))
        self.runs: RunArray

    def take_up(self, case: str) -> None:
        if case == self.case:
            return
        self.case = case
        workload = self.cases[case]
        fill_source(self.src.array, workload)
        plan = workload.plan()
        lists = (one for layer in range(workload.num_layers) for one in plan.run_lists(layer))
        self.runs = np.concatenate([one.runs + (one.src_base, one.dst_base, 0) for one in lists])

    def store_kind(self) -> str:
        """The instruction set of the non-temporal stores."""
        return self._native.store_kinds()[0]

    def copy_memcpy(self) -> float:
        """Seconds with memcpy per run."""
        start_s = time.monotonic()
        self._native.memcpy_runs(self.dst.array, self.src.array, self.runs)
        return time.monotonic() - start_s

    def copy_nt(self) -> float:
        """Seconds with non-temporal stores."""
        start_s = time.monotonic()
        self._native.nt_runs(self.dst.array, self.src.array, self.runs)
        return time.monotonic() - start_s

    def check_and_clear(self) -> str:
        return check_and_clear(self.dst.array, self.cases[self.case])

    def close(self) -> None:
        self.src.close()
        self.dst.close()
