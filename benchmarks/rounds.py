"""Transports, peers, anchors and ceilings taking turns in one run, and what came of it.

A lane is whatever has a turn in each round: the two processes of a transport, or the one of the ceilings. In its turn
it goes through the cases it takes part in, one workload each. A lane that fails loses its turns and keeps the reason;
the others go on. Cases that are compared with each other go through the rounds together. A sweep over sizes takes one
case after the other: each is compared with what others did in the same case, and no pool is filled anew in each turn.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .lanes import Ceiling, Receiver, Sender, Viability
from .measure import Summary, machine_facts, median_ratio, summarise
from .workers import Worker, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.progress import Progress

    from pdlink.transport.base import Transport

    from .measure import Facts
    from .workload import Workload

TIMED_NBYTES = 1 << 28
"""Transfers up to this size have the deadline of the settings; larger ones in proportion."""
TELL_EVERY_S = 5.0
SETUP_TIMEOUT_S = 120.0
"""For starting a process, filling its pool and compiling: minutes on a loaded machine."""
DEFAULT = "default"
"""The case of a run that has only one."""


@dataclass(slots=True)
class Measured:
    """What one lane did in one case."""

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


@dataclass(frozen=True, slots=True)
class Stage:
    """Cases that go through their rounds together."""

    cases: tuple[str, ...]
    rounds: int


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who takes part, and in what."""

    make_transport: Callable[[], Transport]
    """Called in spawned processes; must be importable by name."""
    cases: tuple[str, ...] | None = None
    """None: all of them."""
    asynchronous: bool = True
    """Whether layers can be submitted while earlier ones are under way; without, there is no simulated prefill."""
    many_runs: bool = True
    """Whether it can be given a million runs at once."""


class _Turns:
    """What lanes of all kinds share: figures per case, and one reason for having none."""

    def __init__(self, cases: Mapping[str, Workload]) -> None:
        self.cases = cases
        self.measured = {name: Measured() for name in cases}
        self.finished: set[str] = set()
        """Cases whose rounds are over."""
        self.stopped = False
        self.workers: tuple[Worker, ...] = ()

    def stop(self, problem: str, *, failed: bool) -> None:
        self.stopped = True
        for name, measured in self.measured.items():
            if name not in self.finished:
                measured.problem, measured.failed = problem, failed

    def start(self) -> None: ...

    def connect(self) -> None: ...

    def turn(self, cases: Sequence[str], settings: Settings, keep: bool) -> None:
        for case in cases:
            if case in self.measured:
                larger = max(1.0, self.cases[case].nbytes / TIMED_NBYTES)
                self.take(case, settings, settings.timeout_s * larger, keep)

    def take(self, case: str, settings: Settings, timeout_s: float, keep: bool) -> None: ...

    def close(self) -> None: ...


class Lane(_Turns):
    """Sender and receiver of one transport."""

    def __init__(self, name: str, contestant: Contestant, cases: Mapping[str, Workload]) -> None:
        super().__init__({case: cases[case] for case in contestant.cases or cases})
        self.asynchronous = contestant.asynchronous
        self.sender = Worker(f"{name} sender", Sender, self.cases, contestant.make_transport)
        self.receiver = Worker(f"{name} receiver", Receiver, self.cases, contestant.make_transport)
        self.workers = (self.sender, self.receiver)

    def start(self) -> None:
        for worker in (self.sender, self.receiver):
            worker.open()
            worker.tell("probe")

    def connect(self) -> None:
        for worker in (self.sender, self.receiver):
            viability: Viability = worker.answer(SETUP_TIMEOUT_S)
            if not viability.ok:
                self.stop(viability.reason, failed=False)
                self.close()
                return
        invitation = self.receiver.ask("invite", timeout_s=SETUP_TIMEOUT_S)
        self.sender.ask("connect", invitation, timeout_s=SETUP_TIMEOUT_S)

    def take(self, case: str, settings: Settings, timeout_s: float, keep: bool) -> None:
        measured = self.measured[case]
        for worker in (self.sender, self.receiver):
            worker.ask("take_up", case, timeout_s=SETUP_TIMEOUT_S)
        self._push(measured, "whole", keep, timeout_s, "push_whole", timeout_s)
        self._push(measured, "layers", keep, timeout_s, "push_layers", timeout_s)
        for layer_ms in settings.layer_ms if self.asynchronous else ():
            name = f"prefill {layer_ms:g}"
            self._push(measured, name, keep, timeout_s, "push_during_prefill", layer_ms / 1e3, timeout_s)
        measured.lane = self.sender.ask("lane", timeout_s=timeout_s)

    def _push(self, into: Measured, name: str, keep: bool, timeout_s: float, question: str, *args: float) -> None:
        # The sender's own deadline comes first; this one is for a sender that does not keep it.
        seconds: float = self.sender.ask(question, *args, timeout_s=2 * timeout_s + 10)
        wrong = self.receiver.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S)
        if wrong:
            raise WorkerFailed(f"wrong bytes ({name}): {wrong}")
        if keep:
            into.samples_s.setdefault(name, []).append(seconds)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class CeilingLane(_Turns):
    """The copies that no transport is part of."""

    def __init__(self, cases: Mapping[str, Workload]) -> None:
        super().__init__(cases)
        self.worker = Worker("ceiling", Ceiling, cases)
        self.workers = (self.worker,)

    def start(self) -> None:
        self.worker.open()
        self.worker.tell("store_kind")

    def connect(self) -> None:
        kind: str = self.worker.answer(SETUP_TIMEOUT_S)
        for measured in self.measured.values():
            measured.lane = kind

    def take(self, case: str, settings: Settings, timeout_s: float, keep: bool) -> None:
        self.worker.ask("take_up", case, timeout_s=SETUP_TIMEOUT_S)
        for name in ("memcpy", "nt"):
            seconds: float = self.worker.ask(f"copy_{name}", timeout_s=timeout_s)
            wrong = self.worker.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S)
            if wrong:
                raise WorkerFailed(f"wrong bytes ({name}): {wrong}")
            if keep:
                self.measured[case].samples_s.setdefault(name, []).append(seconds)

    def close(self) -> None:
        self.worker.close()


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, and what everybody did with it."""

    workload: Workload
    num_runs: int
    """Copies per transfer, after joining neighbours."""
    ceiling: Measured
    transports: dict[str, Measured]
    """Only of those that took part in it."""


@dataclass(frozen=True, slots=True)
class Results:
    """One run, as it is printed and kept."""

    settings: Settings
    machine: Facts
    cases: dict[str, Case]

    def lanes(self) -> list[Measured]:
        """Of everybody, in every case."""
        return [lane for case in self.cases.values() for lane in (case.ceiling, *case.transports.values())]


def measure(
    cases: Mapping[str, Workload],
    contestants: Mapping[str, Contestant],
    settings: Settings,
    progress: Progress,
    stages: Sequence[Stage] = (),
    tell: Callable[[str], None] = lambda _text: None,
) -> Results:
    """Let every contestant and the ceilings take turns.

    stages: of all cases; without any, all go through `settings.rounds` together. tell: how far it is, now and then.
    A transport that cannot work, fails or delivers wrong bytes loses its turns and is reported; the others go on. It
    keeps the figures of stages that were over.
    """
    stages = stages or (Stage(tuple(cases), settings.rounds),)
    machine = machine_facts()
    ceiling = CeilingLane(cases)
    lanes = {name: Lane(name, contestant, cases) for name, contestant in contestants.items()}
    in_turn: list[_Turns] = [ceiling, *lanes.values()]
    with ExitStack() as stack:
        num_rounds = sum(settings.warm_ups + stage.rounds for stage in stages)
        task = progress.add_task("starting", total=num_rounds * len(in_turn))
        tell(f"starting {sum(len(lane.workers) for lane in in_turn)} processes")
        for lane in in_turn:
            stack.callback(lane.close)
            _attempt(lane, lane.start)
        for lane in in_turn:
            _attempt(lane, lane.connect)
        begun_s, told_s = time.monotonic(), 0.0
        for stage in stages:
            what = ", ".join(stage.cases)
            for number in range(1 - settings.warm_ups, stage.rounds + 1):
                text = f"{what}: " + (f"round {number} of {stage.rounds}" if number > 0 else "warming up")
                progress.update(task, description=text)
                if (now_s := time.monotonic()) - told_s >= TELL_EVERY_S:
                    tell(f"{now_s - begun_s:.0f} s, {text}")
                    told_s = now_s
                for lane in in_turn:
                    _let(lane, run=True)
                    _attempt(lane, partial(lane.turn, stage.cases, settings, number > 0))
                    _let(lane, run=False)
                    progress.advance(task)
                in_turn.append(in_turn.pop(0))  # so that nobody always follows the same one
            for lane in in_turn:
                if not lane.stopped:
                    lane.finished.update(stage.cases)
    return Results(
        settings=settings,
        machine=machine,
        cases={
            name: Case(
                workload,
                workload.plan().num_runs,
                ceiling.measured[name],
                {lane_name: lane.measured[name] for lane_name, lane in lanes.items() if name in lane.measured},
            )
            for name, workload in cases.items()
        },
    )


def _let(lane: _Turns, *, run: bool) -> None:
    """Processes run in their turn only: NIXL's progress threads spin, one core each (1.5.1).

    Not before the first turn, which is a warm-up: connections are made meanwhile.
    """
    for worker in lane.workers:
        if run:
            worker.resume()
        else:
            worker.suspend()


def _attempt(lane: _Turns, step: Callable[[], None]) -> None:
    if lane.stopped:
        return
    try:
        step()
    except WorkerFailed as failure:
        lane.stop(str(failure), failed=True)
