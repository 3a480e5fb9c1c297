"""`pdlink bench control`: what the control plane costs when the KV is too small to matter.

Every transport gets two processes of its own with real endpoints, and all of them take turns: transfers of one block
alone, each beside a bare ZeroMQ round trip between the same two processes; many tiny transfers at once; and the CPU
of both processes while nothing happens. What limits the first is the number of times that one thread wakes another;
the bare round trip is six of those.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdlink.commands.parser import positive

from . import harness, plot
from .ends import ReceivingEnd, SendingEnd
from .harness import SETUP_TIMEOUT_S, BenchReport, TextTable, in_turns, opened
from .measure import Measured, summarise
from .transfer import TRANSPORTS
from .workers import WorkerProcess

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

    from pdlink.transport.base import Transport

ENDS = ("sender", "receiver")
TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class ControlSettings:
    num_layers: int = 2
    rounds: int = 5
    alone: int = 200
    """Transfers and round trips measured alone, per round."""
    count: int = 5000
    """Transfers per round and window."""
    windows: tuple[int, ...] = (64, 256)
    idle_s: float = 5.0


class ControlLane(harness.Lane):
    def __init__(self, name: str, make_transport: Callable[[], Transport], settings: ControlSettings) -> None:
        self._settings = settings
        self._sender = WorkerProcess(f"{name} sender", SendingEnd, settings.num_layers, make_transport)
        self._receiver = WorkerProcess(f"{name} receiver", ReceivingEnd, settings.num_layers, make_transport)
        super().__init__(self._sender, self._receiver)
        self._address = ""
        self._num_runs = 0

    def connect(self) -> None:
        super().connect()
        if not self.stopped:
            self._address, _ = (worker.ask("start", timeout_s=SETUP_TIMEOUT_S) for worker in self.workers)

    def turn(self, keep: bool) -> None:
        self._alone(keep)
        for window in self._settings.windows:
            self._many(window, keep)

    def _alone(self, keep: bool) -> None:
        prefix, count = self._run(), self._settings.alone
        echo = self._sender.ask("start_echo", timeout_s=TIMEOUT_S)
        self._sender.ask("feed", prefix, count, count, timeout_s=TIMEOUT_S)
        self._receiver.ask("expect", prefix, count, self._address, timeout_s=TIMEOUT_S)
        bare, ready = self._receiver.ask("one_by_one", echo, timeout_s=TIMEOUT_S)
        self._sender.ask("stop_echo", timeout_s=TIMEOUT_S)
        if keep:
            self.measured.add("round trip", *bare)
            self.measured.add("offer to ready", *ready)
            self.measured.add("in round trips", float(np.median(ready) / np.median(bare)))
            self.measured.lane = self._sender.ask("lane", timeout_s=TIMEOUT_S)

    def _many(self, window: int, keep: bool) -> None:
        prefix, count = self._run(), self._settings.count
        before = self._cpu_s()
        self._sender.ask("feed", prefix, count, window, timeout_s=TIMEOUT_S)
        seconds = self._receiver.ask("many", prefix, count, window, self._address, timeout_s=TIMEOUT_S)
        if keep:
            self.measured.add(f"per second, {window} at once", count / seconds)
            for end, then, now in zip(ENDS, before, self._cpu_s(), strict=True):
                self.measured.add(f"{end} CPU seconds per transfer, {window} at once", (now - then) / count)

    def begin_idle(self) -> None:
        self._before = self._cpu_s()
        self._idle_from_s = time.monotonic()

    def end_idle(self) -> None:
        idle_s = time.monotonic() - self._idle_from_s
        for end, then, now in zip(ENDS, self._before, self._cpu_s(), strict=True):
            self.measured.add(f"{end} CPU, idle", (now - then) / idle_s)

    def _cpu_s(self) -> list[float]:
        return [worker.ask("cpu_s", timeout_s=TIMEOUT_S) for worker in self.workers]

    def _run(self) -> str:
        self._num_runs += 1
        return f"run-{self._num_runs}"


def measure(names: Sequence[str], settings: ControlSettings, progress: Progress) -> dict[str, Measured]:
    """Let every transport take turns. One that cannot work or fails is reported; the others go on."""
    lanes = {name: ControlLane(name, TRANSPORTS[name], settings) for name in names}
    task = progress.add_task("measuring", total=(1 + settings.rounds) * len(lanes))
    with opened(list(lanes.values())):
        for number, lane in in_turns(list(lanes.values()), 1 + settings.rounds):  # the first one warms up
            lane.attempt(lane.turn, number > 0)
            progress.advance(task)
        time.sleep(0.5)  # what was going on has ended
        for lane in lanes.values():
            lane.attempt(lane.begin_idle)
        time.sleep(settings.idle_s)
        for lane in lanes.values():
            lane.attempt(lane.end_idle)
    return {name: lane.measured for name, lane in lanes.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = ControlSettings()
    parser.add_argument(
        "--transport",
        action="append",
        choices=sorted(TRANSPORTS),
        help="repeat for several; without it, every one that works here",
    )
    parser.add_argument("--layers", type=positive, default=how.num_layers, help="of each transfer (default 2)")
    parser.add_argument("--rounds", type=positive, default=how.rounds, help="default %(default)s")
    parser.add_argument("--alone", type=positive, default=how.alone, help="transfers measured alone, per round")
    parser.add_argument("--count", type=positive, default=how.count, help="transfers per round and window")
    parser.add_argument("--windows", type=positive, nargs="+", default=list(how.windows), help="transfers at once")
    parser.add_argument("--idle-s", type=float, default=how.idle_s, help="how long to watch idle processes")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a transport failed or none worked, 2 for bad options."""
    return harness.run("control", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    settings = ControlSettings(args.layers, args.rounds, args.alone, args.count, tuple(args.windows), args.idle_s)
    results = measure(args.transport or list(TRANSPORTS), settings, progress)
    working = {name: measured for name, measured in results.items() if not measured.problem}
    return BenchReport(
        {"settings": settings, "transports": results},
        [_table(working, settings)],
        _panels(working, settings),
        problems=results,
        ok=bool(working),
    )


def _table(results: dict[str, Measured], settings: ControlSettings) -> TextTable:
    table = TextTable(
        ("transport", "lane", "ZeroMQ round\ntrip µs", "offer to\nready µs", "round\ntrips")
        + tuple(f"per second,\n{window} at once" for window in settings.windows)
        + ("CPU µs each,\nsender + receiver", "idle CPU"),
        f"transfers of one block of 4 KiB in {settings.num_layers} layers; p50 (p90)",
        num_left=2,
    )
    busy = f"CPU seconds per transfer, {settings.windows[-1]} at once"
    for name, measured in results.items():
        alone = [summarise(measured.samples[what]) for what in ("round trip", "offer to ready")]
        table.add(
            name,
            measured.lane,
            *(f"{summary.median * 1e6:.0f} ({summary.p90 * 1e6:.0f})" for summary in alone),
            f"{measured.median('in round trips'):.1f}",
            *(f"{measured.median(f'per second, {window} at once'):,.0f}" for window in settings.windows),
            " + ".join(f"{measured.median(f'{end} {busy}') * 1e6:.0f}" for end in ENDS),
            ", ".join(f"{measured.median(f'{end} CPU, idle'):.2%}" for end in ENDS),
        )
    return table


def _panels(results: dict[str, Measured], settings: ControlSettings) -> list[plot.Bars]:
    def groups(names: Sequence[str], factor: float) -> dict[str, list[plot.PlottedBar]]:
        return {
            lane: [
                plot.PlottedBar.of(name, summarise(measured.samples[name]), lambda v: v * factor) for name in names
            ]
            for lane, measured in results.items()
        }

    at_once = [f"per second, {window} at once" for window in settings.windows]
    return [
        plot.Bars("one block, alone", "µs", groups(("round trip", "offer to ready"), 1e6)),
        plot.Bars("tiny transfers", "per second", groups(at_once, 1.0)),
    ]
