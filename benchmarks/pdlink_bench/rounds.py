"""Transports, peers, anchors and ceilings taking turns in one run, and what came of it.

A lane is whatever has a turn in each round: the two processes of a transport, or the one of the ceilings. In its turn
it goes through the cases it takes part in, one workload each. A lane that fails loses its turns and keeps the reason;
the others go on. Cases that are compared with each other go through the rounds together. A sweep over sizes takes one
case after the other: each is compared with what others did in the same case, and no pool is filled anew in each turn.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import harness
from .harness import SETUP_TIMEOUT_S, in_turns, opened
from .lanes import Ceiling, Receiver, Sender
from .measure import Measured
from .workers import Worker, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.progress import Progress

    from pdlink.transport.base import Transport

    from .workload import Workload

TIMED_NBYTES = 1 << 28
"""Transfers up to this size have the deadline of the settings; larger ones in proportion."""
TELL_EVERY_S = 5.0
DEFAULT = "default"
"""The case of a run that has only one."""


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


class _Turns(harness.Lane):
    """What lanes of all kinds share: figures per case."""

    def __init__(self, cases: Mapping[str, Workload], *workers: Worker) -> None:
        super().__init__(*workers)
        self.cases = cases
        self.by_case = {name: Measured() for name in cases}
        self.finished: set[str] = set()
        """Cases whose rounds are over."""

    def stop(self, problem: str, *, failed: bool) -> None:
        super().stop(problem, failed=failed)
        for name, measured in self.by_case.items():
            if name not in self.finished:
                measured.problem, measured.failed = problem, failed

    def turn(self, cases: Sequence[str], settings: Settings, keep: bool) -> None:
        for case in cases:
            if case in self.by_case:
                larger = max(1.0, self.cases[case].nbytes / TIMED_NBYTES)
                self.take(case, settings, settings.timeout_s * larger, keep)

    def take(self, case: str, settings: Settings, timeout_s: float, keep: bool) -> None:
        """One turn in one case."""
        raise NotImplementedError

    def checked(self, case: str, name: str, keep: bool, owner: Worker, seconds: float) -> None:
        """Look at every byte that the measurement has moved to `owner`."""
        wrong = owner.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S)
        if wrong:
            raise WorkerFailed(f"wrong bytes ({name}): {wrong}")
        if keep:
            self.by_case[case].add(name, seconds)


class Lane(_Turns):
    """Sender and receiver of one transport."""

    def __init__(self, name: str, contestant: Contestant, cases: Mapping[str, Workload]) -> None:
        mine = {case: cases[case] for case in contestant.cases or cases}
        self.asynchronous = contestant.asynchronous
        self.sender = Worker(f"{name} sender", Sender, mine, contestant.make_transport)
        self.receiver = Worker(f"{name} receiver", Receiver, mine, contestant.make_transport)
        super().__init__(mine, self.sender, self.receiver)

    def connect(self) -> None:
        super().connect()
        if self.stopped:
            for worker in self.workers:
                worker.close()
            return
        invitation = self.receiver.ask("invite", timeout_s=SETUP_TIMEOUT_S)
        self.sender.ask("connect", invitation, timeout_s=SETUP_TIMEOUT_S)

    def take(self, case: str, settings: Settings, timeout_s: float, keep: bool) -> None:
        for worker in self.workers:
            worker.ask("take_up", case, timeout_s=SETUP_TIMEOUT_S)
        pushes: list[tuple[str, str, tuple[float, ...]]] = [
            ("whole", "push_whole", ()),
            ("layers", "push_layers", ()),
        ]
        if self.asynchronous:
            pushes += [(f"prefill {ms:g}", "push_during_prefill", (ms / 1e3,)) for ms in settings.layer_ms]
        for name, question, args in pushes:
            # The sender's own deadline comes first; this one is for a sender that does not keep it.
            seconds = self.sender.ask(question, *args, timeout_s, timeout_s=2 * timeout_s + 10)
            self.checked(case, name, keep, self.receiver, seconds)
        self.by_case[case].lane = self.sender.ask("lane", timeout_s=timeout_s)


class CeilingLane(_Turns):
    """The copies that no transport is part of."""

    def __init__(self, cases: Mapping[str, Workload]) -> None:
        self.worker = Worker("ceiling", Ceiling, cases)
        super().__init__(cases, self.worker)

    def open(self) -> None:
        self.worker.open()
        self.worker.tell("store_kind")

    def connect(self) -> None:
        kind: str = self.worker.answer(SETUP_TIMEOUT_S)
        for measured in self.by_case.values():
            measured.lane = kind

    def take(self, case: str, settings: Settings, timeout_s: float, keep: bool) -> None:
        self.worker.ask("take_up", case, timeout_s=SETUP_TIMEOUT_S)
        for name in ("memcpy", "nt"):
            self.checked(case, name, keep, self.worker, self.worker.ask(f"copy_{name}", timeout_s=timeout_s))


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
    cases: dict[str, Case]


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
    ceiling = CeilingLane(cases)
    lanes = {name: Lane(name, contestant, cases) for name, contestant in contestants.items()}
    everybody: list[_Turns] = [ceiling, *lanes.values()]
    num_rounds = sum(settings.warm_ups + stage.rounds for stage in stages)
    task = progress.add_task("starting", total=num_rounds * len(everybody))
    tell(f"starting {sum(len(lane.workers) for lane in everybody)} processes")
    with opened(everybody):
        begun_s, told_s = time.monotonic(), 0.0
        for stage in stages:
            what = ", ".join(stage.cases)
            for number, lane in in_turns(everybody, settings.warm_ups + stage.rounds):
                counted = number - settings.warm_ups + 1
                text = f"{what}: " + (f"round {counted} of {stage.rounds}" if counted > 0 else "warming up")
                progress.update(task, description=text)
                if (now_s := time.monotonic()) - told_s >= TELL_EVERY_S:
                    tell(f"{now_s - begun_s:.0f} s, {text}")
                    told_s = now_s
                _let(lane, run=True)
                lane.attempt(lane.turn, stage.cases, settings, counted > 0)
                _let(lane, run=False)
                progress.advance(task)
            for lane in everybody:
                if not lane.stopped:
                    lane.finished.update(stage.cases)
    return Results(
        settings,
        {
            name: Case(
                workload,
                workload.plan().num_runs,
                ceiling.by_case[name],
                {who: lane.by_case[name] for who, lane in lanes.items() if name in lane.by_case},
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
