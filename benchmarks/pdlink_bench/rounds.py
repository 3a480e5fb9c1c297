"""Transports, peers, anchors and ceilings taking turns in one run, and what came of it.

A lane is whatever has a turn in each round: the two processes of a transport, or the one of the ceilings. In its turn
it goes through the cases it takes part in, one workload each. A lane that fails loses its turns and keeps the reason;
the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import harness
from .harness import SETUP_TIMEOUT_S, check, in_turns, opened
from .lanes import Ceiling, LaneReceiver, LaneSender
from .measure import Measured
from .workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rich.progress import Progress

    from pdlink.transport.base import Transport

    from .workload import Workload


@dataclass(frozen=True, slots=True)
class RoundSettings:
    layer_ms: tuple[float, ...] = (1.0, 2.5, 5.0)
    rounds: int = 10
    warm_ups: int = 2
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who takes part, and in what."""

    make_transport: Callable[[], Transport]
    """Called in spawned processes; must be importable by name."""
    cases: Collection[str] | None = None
    """None: all of them."""
    asynchronous: bool = True
    """Whether layers can be submitted while earlier ones are under way; without, there is no simulated prefill."""


class _Turns(harness.Lane):
    """What lanes of all kinds share: figures per case."""

    def __init__(self, cases: Mapping[str, Workload], *workers: WorkerProcess) -> None:
        super().__init__(*workers)
        self.by_case = {name: Measured() for name in cases}

    def stop(self, problem: str, *, failed: bool) -> None:
        super().stop(problem, failed=failed)
        for measured in self.by_case.values():
            measured.problem, measured.failed = problem, failed

    def turn(self, settings: RoundSettings, keep: bool) -> None:
        for case in self.by_case:
            self.take(case, settings, keep)

    def take(self, case: str, settings: RoundSettings, keep: bool) -> None:
        """One turn in one case."""
        raise NotImplementedError


class TwoProcesses(_Turns):
    """Sender and receiver of one transport; subclasses push."""

    def __init__(self, cases: Mapping[str, Workload], sender: WorkerProcess, receiver: WorkerProcess) -> None:
        self.sender, self.receiver = sender, receiver
        super().__init__(cases, sender, receiver)

    def connect(self) -> None:
        super().connect()
        if self.stopped:
            for worker in self.workers:
                worker.close()
            return
        invitation = self.receiver.ask("invite", timeout_s=SETUP_TIMEOUT_S)
        self.sender.ask("connect", invitation, timeout_s=SETUP_TIMEOUT_S)

    def take_up(self, case: str) -> None:
        for worker in self.workers:
            worker.ask("take_up", case, timeout_s=SETUP_TIMEOUT_S)

    def push(self, question: str, *args: float, timeout_s: float) -> float:
        """Seconds of one push whose every byte was looked at."""
        # The sender's own deadline comes first; this one is for a sender that does not keep it.
        seconds: float = self.sender.ask(question, *args, timeout_s, timeout_s=2 * timeout_s + 10)
        check(self.receiver, question)
        return seconds


class TransferLane(TwoProcesses):
    def __init__(self, name: str, contestant: Contestant, cases: Mapping[str, Workload]) -> None:
        mine = {case: cases[case] for case in (cases if contestant.cases is None else contestant.cases)}
        make = contestant.make_transport
        sender, receiver = (
            WorkerProcess(f"{name} {word}", role, mine, make)
            for word, role in (("sender", LaneSender), ("receiver", LaneReceiver))
        )
        super().__init__(mine, sender, receiver)
        self.asynchronous = contestant.asynchronous

    def take(self, case: str, settings: RoundSettings, keep: bool) -> None:
        self.take_up(case)
        pushes: list[tuple[str, str, tuple[float, ...]]] = [
            ("whole", "push_whole", ()),
            ("layers", "push_layers", ()),
        ]
        if self.asynchronous:
            pushes += [(f"prefill {ms:g}", "push_during_prefill", (ms / 1e3,)) for ms in settings.layer_ms]
        for name, question, args in pushes:
            seconds = self.push(question, *args, timeout_s=settings.timeout_s)
            if keep:
                self.by_case[case].add(name, seconds)
        self.by_case[case].lane = self.sender.ask("lane", timeout_s=settings.timeout_s)


class CeilingLane(_Turns):
    """The copies that no transport is part of."""

    def __init__(self, cases: Mapping[str, Workload]) -> None:
        self.worker = WorkerProcess("ceiling", Ceiling, cases)
        super().__init__(cases, self.worker)

    def open(self) -> None:
        self.worker.open()
        self.worker.tell("store_kind")

    def connect(self) -> None:
        kind: str = self.worker.answer(SETUP_TIMEOUT_S)
        for measured in self.by_case.values():
            measured.lane = kind

    def take(self, case: str, settings: RoundSettings, keep: bool) -> None:
        self.worker.ask("take_up", case, timeout_s=SETUP_TIMEOUT_S)
        for name in ("memcpy", "nt"):
            seconds = self.worker.ask(f"copy_{name}", timeout_s=settings.timeout_s)
            check(self.worker, name)
            if keep:
                self.by_case[case].add(name, seconds)


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, and what everybody did with it."""

    workload: Workload
    num_runs: int
    """Copies per transfer, after joining neighbours."""
    ceiling: Measured
    transports: dict[str, Measured]
    """Only the transports that took part."""


@dataclass(frozen=True, slots=True)
class RoundResults:
    """One run, as it is printed and kept."""

    settings: RoundSettings
    cases: dict[str, Case]


def measure(
    cases: Mapping[str, Workload],
    contestants: Mapping[str, Contestant],
    settings: RoundSettings,
    progress: Progress,
) -> RoundResults:
    """Let every contestant and the ceilings take turns.

    A transport that cannot work, fails or delivers wrong bytes loses its turns and is reported; the others go on.
    """
    ceiling = CeilingLane(cases)
    lanes = {name: TransferLane(name, contestant, cases) for name, contestant in contestants.items()}
    everybody: list[_Turns] = [ceiling, *lanes.values()]
    task = progress.add_task("measuring", total=(settings.warm_ups + settings.rounds) * len(everybody))
    with opened(everybody):
        for number, lane in in_turns(everybody, settings.warm_ups + settings.rounds):
            _let(lane, run=True)
            lane.attempt(lane.turn, settings, number >= settings.warm_ups)
            _let(lane, run=False)
            progress.advance(task)
    return RoundResults(
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
