"""Transports and ceilings taking turns in one run, and what came of it.

A lane is whatever has a turn in each round: the two processes of a transport, or the one of the ceilings. A lane that
fails loses its turns and keeps the reason; the others go on.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from .lanes import Ceiling, Receiver, Sender, Viability
from .measure import Summary, gb_per_s, machine_facts, median_ratio, summarise
from .workers import Worker, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.progress import Progress

    from pdlink.transport.base import Transport

    from .workload import Workload

SETUP_TIMEOUT_S = 120.0
"""For starting a process, filling its pool and compiling: minutes on a loaded machine."""


@dataclass(slots=True)
class Measured:
    """What one transport, or the ceilings, did."""

    lane: str = ""
    """How the bytes really travelled, as the transport says."""
    samples_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per measurement; "prefill X" are the exposed seconds at X ms per layer."""
    problem: str = ""
    """Why there is nothing to show: cannot work here, failed, or delivered wrong bytes."""
    failed: bool = False
    """True if the problem is a failure; False if the transport just cannot work on this machine."""

    def summary(self, name: str) -> Summary | None:
        samples = self.samples_s.get(name)
        return summarise(samples) if samples and not self.problem else None

    def share(self, name: str, other: Measured, other_name: str) -> float | None:
        """Time of `name` divided by that of another measurement in the same round; None if one of them is missing."""
        if self.problem or other.problem or name not in self.samples_s or other_name not in other.samples_s:
            return None
        return median_ratio(self.samples_s[name], other.samples_s[other_name])


@dataclass(frozen=True, slots=True)
class Settings:
    """How it is measured."""

    layer_ms: tuple[float, ...] = (1.0, 2.5, 5.0)
    rounds: int = 10
    warm_ups: int = 2
    timeout_s: float = 30.0


class Lane:
    """Sender and receiver of one transport."""

    def __init__(self, name: str, make_transport: Callable[[], Transport], workload: Workload) -> None:
        self.measured = Measured()
        self.sender = Worker(f"{name} sender", Sender, workload, make_transport)
        self.receiver = Worker(f"{name} receiver", Receiver, workload, make_transport)

    def start(self) -> None:
        for worker in (self.sender, self.receiver):
            worker.open()
            worker.tell("probe")

    def connect(self) -> None:
        for worker in (self.sender, self.receiver):
            viability: Viability = worker.answer(SETUP_TIMEOUT_S)
            if not viability.ok:
                self.measured.problem = viability.reason
                return
        invitation = self.receiver.ask("invite", timeout_s=SETUP_TIMEOUT_S)
        self.sender.ask("connect", invitation, timeout_s=SETUP_TIMEOUT_S)

    def turn(self, settings: Settings, keep: bool) -> None:
        timeout_s = settings.timeout_s
        self._take("whole", keep, timeout_s, "push_whole", timeout_s)
        self._take("layers", keep, timeout_s, "push_layers", timeout_s)
        for layer_ms in settings.layer_ms:
            self._take(f"prefill {layer_ms:g}", keep, timeout_s, "push_during_prefill", layer_ms / 1e3, timeout_s)
        self.measured.lane = self.sender.ask("lane", timeout_s=timeout_s)

    def _take(self, name: str, keep: bool, timeout_s: float, question: str, *args: float) -> None:
        # The sender's own deadline comes first; this one is for a sender that does not keep it.
        seconds: float = self.sender.ask(question, *args, timeout_s=2 * timeout_s + 10)
        wrong = self.receiver.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S)
        if wrong:
            raise WorkerFailed(f"wrong bytes ({name}): {wrong}")
        if keep:
            self.measured.samples_s.setdefault(name, []).append(seconds)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class CeilingLane:
    """The copies that no transport is part of."""

    def __init__(self, workload: Workload) -> None:
        self.measured = Measured()
        self.worker = Worker("ceiling", Ceiling, workload)

    def start(self) -> None:
        self.worker.open()
        self.worker.tell("store_kind")

    def connect(self) -> None:
        self.measured.lane = self.worker.answer(SETUP_TIMEOUT_S)

    def turn(self, settings: Settings, keep: bool) -> None:
        for name in ("memcpy", "nt"):
            seconds: float = self.worker.ask(f"copy_{name}", timeout_s=settings.timeout_s)
            wrong = self.worker.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S)
            if wrong:
                raise WorkerFailed(f"wrong bytes ({name}): {wrong}")
            if keep:
                self.measured.samples_s.setdefault(name, []).append(seconds)

    def close(self) -> None:
        self.worker.close()


@dataclass(frozen=True, slots=True)
class Results:
    """One run, as it is printed and kept."""

    workload: Workload
    settings: Settings
    machine: dict[str, str | int | float]
    num_runs: int
    """Copies per transfer, after joining neighbours."""
    ceiling: Measured
    transports: dict[str, Measured]

    def to_json(self) -> str:
        """Every sample, and the ratios that the table shows."""
        ceiling = self.ceiling
        shares = {
            name: {
                "of_memcpy": ceiling.share("memcpy", measured, "whole"),
                "of_nt": ceiling.share("nt", measured, "whole"),
            }
            | {
                f"exposed at {layer_ms:g} ms": measured.share(f"prefill {layer_ms:g}", measured, "whole")
                for layer_ms in self.settings.layer_ms
            }
            for name, measured in self.transports.items()
        }
        return json.dumps(
            {
                "benchmark": "transfer",
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": self.machine,
                "workload": asdict(self.workload) | {"nbytes": self.workload.nbytes, "num_runs": self.num_runs},
                "settings": asdict(self.settings),
                "ceiling": self._lane(ceiling),
                "transports": {
                    name: self._lane(measured) | {"ratios": shares[name]}
                    for name, measured in self.transports.items()
                },
            },
            indent=1,
        )

    def _lane(self, measured: Measured) -> dict[str, object]:
        seconds, speeds = {}, {}
        for name in measured.samples_s:
            if summary := measured.summary(name):
                seconds[name] = asdict(summary)
                if not name.startswith("prefill"):
                    speeds[name] = gb_per_s(self.workload.nbytes, summary.median)
        return {"lane": measured.lane, "problem": measured.problem, "gb_per_s": speeds, "seconds": seconds}


def measure(
    workload: Workload, transports: Mapping[str, Callable[[], Transport]], settings: Settings, progress: Progress
) -> Results:
    """Let every transport and the ceilings take turns.

    A transport that cannot work, fails or delivers wrong bytes loses its turns and is reported; the others go on.
    The factories are called in spawned processes and must be importable by name.
    """
    machine = machine_facts()
    ceiling = CeilingLane(workload)
    lanes = {name: Lane(name, make, workload) for name, make in transports.items()}
    in_turn: list[Lane | CeilingLane] = [ceiling, *lanes.values()]
    with ExitStack() as stack:
        task = progress.add_task("starting", total=settings.warm_ups + settings.rounds)
        for lane in in_turn:
            stack.callback(lane.close)
            _attempt(lane, lane.start)
        for lane in in_turn:
            _attempt(lane, lane.connect)
        for round_number in range(settings.warm_ups + settings.rounds):
            keep = round_number >= settings.warm_ups
            progress.update(task, description="measuring" if keep else "warming up")
            for lane in in_turn:
                _attempt(lane, partial(lane.turn, settings, keep))
            in_turn.append(in_turn.pop(0))  # so that nobody always follows the same one
            progress.advance(task)
    return Results(
        workload=workload,
        settings=settings,
        machine=machine,
        num_runs=workload.plan().num_runs,
        ceiling=ceiling.measured,
        transports={name: lane.measured for name, lane in lanes.items()},
    )


def _attempt(lane: Lane | CeilingLane, step: Callable[[], None]) -> None:
    if lane.measured.problem:
        return
    try:
        step()
    except WorkerFailed as failure:
        lane.measured.problem, lane.measured.failed = str(failure), True
