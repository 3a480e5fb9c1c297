"""A deployment on this machine, and the injection of each fault.

The processes are those of `pdlink up`, with short deadlines. A killed process is restarted on the same ports. A
process that ends unasked, cannot be restarted, or does not drain in time is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdlink import logs
from pdlink.config import ProxyConfig
from pdlink.fleet.child import Child, ChildFailed, start, stop
from pdlink.fleet.post import delay_s
from pdlink_bench.chaos.ledger import ProcessResources, port_of, process
from pdlink_bench.chaos.schedule import PROXY, Fault, Kind
from pdlink_bench.chaos.tamper import FAULTS, LAYER_S, LinkFaults

if TYPE_CHECKING:
    from pdlink.config import WorkerConfig

WORKER = "pdlink_bench.chaos.worker"
_LAYER_S = 0.005
"""The small model is so fast that few faults would hit a transfer."""
READY_S = 120.0
_TICK_S = 0.1
_MAX_STARTS = 5
"""Tries to restart a process; each failed one is a finding."""
_DRAIN_SLACK_S = 8.0
"""A stopping process may take this much longer than its drain time."""


@dataclass(slots=True)
class _Slot:
    """The place of one process, over its restarts."""

    child: Child
    up: bool = True
    """Ready, and without a fault now."""
    baseline: ProcessResources = field(default_factory=ProcessResources)


class LocalDeployment:
    """Workers and a proxy as child processes. `open` acquires, `close` ends every one of them."""

    def __init__(
        self,
        prefill: WorkerConfig,
        decode: WorkerConfig,
        num_prefill: int,
        num_decode: int,
        faults: LinkFaults = LinkFaults(),  # noqa: B008  (frozen)
    ) -> None:
        """faults: of the links of all workers."""
        os.environ |= {FAULTS: json.dumps(asdict(faults)), LAYER_S: str(_LAYER_S)}
        self._settings = {
            f"{config.role}-{index}": config.model_dump(mode="json") | {"name": f"{config.role}-{index}"}
            for config, count in ((prefill, num_prefill), (decode, num_decode))
            for index in range(count)
        }
        self._drain_s = max(prefill.timeouts.drain_s, decode.timeouts.drain_s)
        self._request_s = max(prefill.timeouts.request_s, decode.timeouts.request_s)
        self._slots: dict[str, _Slot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self.absences: list[tuple[float, float]] = []
        """Absences of the proxy: from, until (time.monotonic)."""
        self.outages: list[tuple[float, float]] = []
        """Times without any possible answer: the proxy, or every worker of one role, was away."""
        self.findings: list[str] = []
        self.done: dict[str, int] = {}
        """Injected faults by kind, and `skipped` ones, whose target was away."""
        self.last_fault_s = 0.0
        """Time of the last fault's beginning, or of the last SIGCONT."""
        self.last_ready_s = 0.0
        """Time when the last restarted process was ready."""

    @property
    def workers(self) -> list[str]:
        """Labels of the workers, in the order of the schedule."""
        return list(self._settings)

    @property
    def deadline_s(self) -> float:
        """Deadline of a request: the proxy's own, and a little more for the end of the answer."""
        return self._request_s * 1.4 + 4.0

    @property
    def url(self) -> str:
        return str(self._slots[PROXY].child.facts["url"])

    def url_of(self, label: str) -> str:
        return str(self._slots[label].child.facts["url"])

    def states(self) -> dict[str, str]:
        return {label: "up" if slot.up else "away" for label, slot in self._slots.items()}

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start everything. Raises ChildFailed."""
        for label, settings in self._settings.items():
            self._slots[label] = _Slot(start(label, settings["role"], {**settings, **self._logs()}, WORKER))
        for slot in self._slots.values():
            await asyncio.to_thread(slot.child.wait_ready, READY_S)
        prefill, decode = (
            tuple(str(slot.child.facts["url"]) for slot in self._slots.values() if slot.child.role == role)
            for role in ("prefill", "decode")
        )
        config = ProxyConfig(
            listen="127.0.0.1:0",
            health_interval_s=0.2,
            drain_s=2.0,
            first_byte_timeout_s=self._request_s * 1.2,
            request_timeout_s=self._request_s * 1.4,
            prefill=prefill,
            decode=decode,
        )
        self._slots[PROXY] = _Slot(start(PROXY, PROXY, config.model_dump(mode="json") | self._logs()))
        await asyncio.to_thread(self._slots[PROXY].child.wait_ready, READY_S)
        self._watch = asyncio.create_task(self._watch_processes())

    @staticmethod
    def _logs() -> dict[str, Any]:
        """As this process logs, without lines that would tear its live table."""
        return {"log": {"level": logs.level()}, "summary_s": 0}

    async def close(self) -> None:
        """End every process, with a drain if possible; others are findings."""
        for task in [*self._tasks, *([self._watch] if self._watch else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        children = [slot.child for slot in self._slots.values()]
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(stop, children, self._drain_s + _DRAIN_SLACK_S)
        self.findings += [
            f"{child.label} left with status {child.process.returncode} when told to stop"
            for child in children
            if child.process.returncode != 0
        ]

    async def settled(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def remember(self) -> None:
        """Record the present resources of every process as its baseline."""
        for slot in self._slots.values():
            slot.baseline = self._process(slot)

    def growth(self) -> list[tuple[str, str, ProcessResources, ProcessResources]]:
        """Label, role, baseline and present resources of every process."""
        return [(label, slot.child.role, slot.baseline, self._process(slot)) for label, slot in self._slots.items()]

    def _process(self, slot: _Slot) -> ProcessResources:
        ports = {port_of(str(other.child.facts["url"])) for other in self._slots.values()}
        return process(slot.child.process.pid, ports)

    async def _watch_processes(self) -> None:
        dark_s: float | None = None
        while True:
            await asyncio.sleep(_TICK_S)
            roles = {slot.child.role for slot in self._slots.values()}
            if roles != {slot.child.role for slot in self._slots.values() if slot.up}:
                now = time.monotonic()
                dark_s = now - _TICK_S if dark_s is None else dark_s
                if self.outages and self.outages[-1][0] == dark_s:
                    self.outages.pop()
                self.outages.append((dark_s, now))
            else:
                dark_s = None
            for label, slot in self._slots.items():
                if slot.up and slot.child.process.poll() is not None:
                    self.findings.append(f"{label} ended by itself with status {slot.child.process.returncode}")
                    slot.up = False
                    self._spawn(self._come_back(label, slot, time.monotonic()))

    # -- faults ------------------------------------------------------------------------------------------------------

    def begin(self, fault: Fault) -> bool:
        """Begin to inject this fault. False if its target is away already."""
        slot = self._slots[fault.target]
        if not slot.up:
            self.done["skipped"] = self.done.get("skipped", 0) + 1
            return False
        self.done[fault.kind.value] = self.done.get(fault.kind.value, 0) + 1
        slot.up = False
        self.last_fault_s = gone_s = time.monotonic()
        doing = {Kind.KILL: self._kill, Kind.TERM: self._term}.get(fault.kind)
        self._spawn(
            doing(fault.target, slot, gone_s) if doing else self._stop(fault.target, slot, gone_s, fault.for_s)
        )
        return True

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kill(self, label: str, slot: _Slot, gone_s: float) -> None:
        slot.child.process.kill()
        await asyncio.to_thread(slot.child.process.wait)
        await self._come_back(label, slot, gone_s)

    async def _term(self, label: str, slot: _Slot, gone_s: float) -> None:
        process = slot.child.process
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, self._drain_s + _DRAIN_SLACK_S)
        except subprocess.TimeoutExpired:
            self.findings.append(f"{label} did not leave within {time.monotonic() - gone_s:.1f} s of SIGTERM")
            process.kill()
            await asyncio.to_thread(process.wait)
        if process.returncode not in (0, -signal.SIGKILL):
            self.findings.append(f"{label} left with status {process.returncode} after SIGTERM")
        await self._come_back(label, slot, gone_s)

    async def _stop(self, label: str, slot: _Slot, gone_s: float, for_s: float) -> None:
        slot.child.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            slot.child.process.send_signal(signal.SIGCONT)
        self.last_fault_s = time.monotonic()
        slot.up = True
        self._note_absence(label, gone_s)

    async def _come_back(self, label: str, slot: _Slot, gone_s: float) -> None:
        child = slot.child
        for num_failures in range(_MAX_STARTS):
            await asyncio.sleep(delay_s(num_failures))
            child.again()
            try:
                await asyncio.to_thread(child.wait_ready, READY_S)
                break
            except ChildFailed as error:
                self.findings.append(f"{label} could not be started again: {error}")
                await asyncio.to_thread(child.kill)
                child.close()
        else:
            return
        self.last_ready_s = time.monotonic()
        slot.up = True
        self._note_absence(label, gone_s)

    def _note_absence(self, label: str, gone_s: float) -> None:
        if label == PROXY:
            self.absences.append((gone_s, time.monotonic()))
