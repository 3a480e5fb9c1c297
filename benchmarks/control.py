"""`pdlink bench control`: what the control plane costs when the KV is too small to matter.

Every transport gets two processes of its own with real endpoints, and all of them take turns: transfers of one block
alone, each beside a bare ZeroMQ round trip between the same two processes; many tiny transfers at once; and the CPU
of both processes while nothing happens, with and without transfers that wait. What limits the first is the number of
times that one thread wakes another; the bare round trip is six of those.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .ends import ReceivingEnd, SendingEnd
from .measure import Summary, machine_facts, summarise
from .plot import Bar, Bars, add_output_arguments, check_can_plot, write
from .transfer import TRANSPORTS
from .workers import Worker, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdlink.transport.base import Transport

SETUP_TIMEOUT_S, TIMEOUT_S = 120.0, 90.0
ROUND_TRIPS_ALLOWED, PER_S_WANTED, IDLE_CPU_ALLOWED = 3.0, 10_000, 0.01
"""What we hold ourselves to; lines in the picture."""
MAX_LIVE = 5_000
"""Transfers that wait at once: half of what a sender keeps of receivers whose request has not come."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How it is measured."""

    num_layers: int = 2
    rounds: int = 5
    alone: int = 200
    """Transfers and round trips measured alone, per round."""
    count: int = 5000
    """Transfers per round and window."""
    windows: tuple[int, ...] = (64, 256)
    idle_s: float = 5.0
    live: int = 1000
    """Transfers that wait while the CPU of idle processes is measured."""


@dataclass(slots=True)
class Measured:
    """What one transport did."""

    lane: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Seconds, transfers per second and shares of a core, by what was measured."""
    ratios: list[float] = field(default_factory=list)
    """Median of offer to ready by median of the round trips beside it, per round."""
    problem: str = ""
    failed: bool = False
    """True if the problem is a failure; False if the transport just cannot work on this machine."""

    def add(self, name: str, *values: float) -> None:
        self.samples.setdefault(name, []).extend(values)

    def summary(self, name: str) -> Summary | None:
        samples = self.samples.get(name)
        return summarise(samples) if samples else None


class Lane:
    """Prefill and decode over one transport."""

    def __init__(self, name: str, make_transport: Callable[[], Transport], settings: Settings) -> None:
        self.measured = Measured()
        self._settings = settings
        self._sender = Worker(f"{name} sender", SendingEnd, settings.num_layers, make_transport)
        self._receiver = Worker(f"{name} receiver", ReceivingEnd, settings.num_layers, make_transport)
        self._address = ""
        self._num_runs = 0

    def open(self) -> None:
        for worker in (self._sender, self._receiver):
            worker.open()
            worker.tell("probe")

    def start(self) -> None:
        for worker in (self._sender, self._receiver):
            viability = worker.answer(SETUP_TIMEOUT_S)
            if not viability.ok:
                self.measured.problem = viability.reason
                return
        self._address, _ = (
            worker.ask("start", timeout_s=SETUP_TIMEOUT_S) for worker in (self._sender, self._receiver)
        )

    def turn(self, keep: bool) -> None:
        self._alone(keep)
        for window in self._settings.windows:
            self._many(window, keep)

    def _alone(self, keep: bool) -> None:
        prefix, count = self._run(), self._settings.alone
        echo = self._sender.ask("start_echo", timeout_s=TIMEOUT_S)
        self._sender.ask("feed", prefix, count, count, timeout_s=TIMEOUT_S)
        self._receiver.ask("expect", prefix, count, self._address, timeout_s=TIMEOUT_S)
        in_a_row = self._receiver.ask("round_trips", echo, count, timeout_s=TIMEOUT_S)
        bare, ready = self._receiver.ask("one_by_one", echo, timeout_s=TIMEOUT_S)
        self._sender.ask("stop_echo", timeout_s=TIMEOUT_S)
        if keep:
            self.measured.add("round trips in a row", *in_a_row)
            self.measured.add("round trip", *bare)
            self.measured.add("offer to ready", *ready)
            self.measured.ratios.append(float(np.median(ready) / np.median(bare)))
            self.measured.lane = self._sender.ask("lane", timeout_s=TIMEOUT_S)

    def _many(self, window: int, keep: bool) -> None:
        prefix, count = self._run(), self._settings.count
        before = self._cpu_s()
        self._sender.ask("feed", prefix, count, window, timeout_s=TIMEOUT_S)
        seconds = self._receiver.ask("many", prefix, count, window, self._address, timeout_s=TIMEOUT_S)
        if keep:
            self.measured.add(f"per second, {window} at once", count / seconds)
            for end, then, now in zip(("sender", "receiver"), before, self._cpu_s(), strict=True):
                self.measured.add(f"{end} CPU seconds per transfer, {window} at once", (now - then) / count)

    def begin_waiting(self) -> None:
        """Have transfers that are offered, and never computed."""
        prefix = self._run()
        self._sender.ask("announce", prefix, self._settings.live, timeout_s=TIMEOUT_S)
        self._receiver.ask("expect", prefix, self._settings.live, self._address, timeout_s=TIMEOUT_S)
        self._receiver.ask("offer", timeout_s=TIMEOUT_S)
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._sender.ask("num_writing", timeout_s=TIMEOUT_S) < self._settings.live:
            if time.monotonic() > deadline_s:
                raise WorkerFailed(f"{self._settings.live} offers did not arrive within {TIMEOUT_S} s")
            time.sleep(0.05)

    def end_waiting(self) -> None:
        self._receiver.ask("cancel", timeout_s=TIMEOUT_S)

    def begin_idle(self) -> None:
        self._before = self._cpu_s()
        self._idle_from_s = time.monotonic()

    def end_idle(self, what: str) -> None:
        idle_s = time.monotonic() - self._idle_from_s
        for end, then, now in zip(("sender", "receiver"), self._before, self._cpu_s(), strict=True):
            self.measured.add(f"{end} CPU, idle, {what}", (now - then) / idle_s)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

    def _cpu_s(self) -> list[float]:
        return [worker.ask("cpu_s", timeout_s=TIMEOUT_S) for worker in (self._sender, self._receiver)]

    def _run(self) -> str:
        self._num_runs += 1
        return f"run-{self._num_runs}"


def measure(names: Sequence[str], settings: Settings, progress: Progress) -> dict[str, Measured]:
    """Let every transport take turns. One that cannot work or fails is reported; the others go on."""
    lanes = {name: Lane(name, TRANSPORTS[name], settings) for name in names}
    in_turn = list(lanes.values())
    with ExitStack() as stack:
        task = progress.add_task("starting", total=1 + settings.rounds)
        for lane in in_turn:
            stack.callback(lane.close)
            _attempt(lane, lane.open)
        for lane in in_turn:
            _attempt(lane, lane.start)
        for round_number in range(1 + settings.rounds):
            progress.update(task, description="measuring" if round_number else "warming up")
            for lane in in_turn:
                _attempt(lane, partial(lane.turn, round_number > 0))
            in_turn.append(in_turn.pop(0))  # so that nobody always follows the same one
            progress.advance(task)
        progress.update(task, description="doing nothing")
        _idle(in_turn, settings, "nothing waits")
        for lane in in_turn:
            _attempt(lane, lane.begin_waiting)
        _idle(in_turn, settings, f"{settings.live} wait")
        for lane in in_turn:
            _attempt(lane, lane.end_waiting)
    return {name: lane.measured for name, lane in lanes.items()}


def _idle(lanes: Sequence[Lane], settings: Settings, what: str) -> None:
    time.sleep(0.5)  # what was going on has ended
    for lane in lanes:
        _attempt(lane, lane.begin_idle)
    time.sleep(settings.idle_s)
    for lane in lanes:
        _attempt(lane, partial(lane.end_idle, what))


def _attempt(lane: Lane, step: Callable[[], None]) -> None:
    if lane.measured.problem:
        return
    try:
        step()
    except WorkerFailed as failure:
        lane.measured.problem, lane.measured.failed = str(failure), True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench control`."""
    how = Settings()
    parser.add_argument(
        "--transport",
        action="append",
        choices=sorted(TRANSPORTS),
        help="repeat for several; without it, every one that works here",
    )
    parser.add_argument("--layers", type=_positive, default=how.num_layers, help="of each transfer (default 2)")
    parser.add_argument("--rounds", type=_positive, default=how.rounds, help="default %(default)s")
    parser.add_argument("--alone", type=_positive, default=how.alone, help="transfers measured alone, per round")
    parser.add_argument("--count", type=_positive, default=how.count, help="transfers per round and window")
    parser.add_argument("--windows", type=_positive, nargs="+", default=list(how.windows), help="transfers at once")
    parser.add_argument("--idle-s", type=float, default=how.idle_s, help="how long to watch idle processes")
    parser.add_argument("--live", type=_positive, default=how.live, help="transfers that wait meanwhile")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write what was asked for; 1 if a transport failed or none worked, 2 for bad options."""
    errors = Console(stderr=True)
    if args.live > MAX_LIVE:
        errors.print(f"[red]--live {args.live}: at most {MAX_LIVE}[/]")
        return 2
    check_can_plot(args.plot)
    settings = Settings(args.layers, args.rounds, args.alone, args.count, tuple(args.windows), args.idle_s, args.live)
    facts = machine_facts()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=errors,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        results = measure(args.transport or list(TRANSPORTS), settings, progress)
    _print(results, settings)
    if args.json:
        args.json.write_text(_to_json(results, settings, facts) + "\n", encoding="utf-8")
    working = {name: measured for name, measured in results.items() if not measured.problem}
    if args.plot and working:
        _draw(args.plot, working, settings, facts)
    return 1 if not working or any(measured.failed for measured in results.values()) else 0


def _print(results: dict[str, Measured], settings: Settings) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=140)
    table = Table(title=f"transfers of one block in {settings.num_layers} layers; p50 (p90)")
    table.add_column("transport", style="bold")
    table.add_column("lane")
    for title in ("ZeroMQ round\ntrip µs", "the same\nin a row µs", "offer to\nready µs", "round\ntrips"):
        table.add_column(title, justify="right")
    for window in settings.windows:
        table.add_column(f"per second,\n{window} at once", justify="right")
    table.add_column("CPU µs each,\nsender + receiver", justify="right")
    for what in ("nothing waits", f"{settings.live} wait"):
        table.add_column(f"idle CPU,\n{what}", justify="right")
    for name, measured in results.items():
        if measured.problem:
            table.add_row(name, "failed" if measured.failed else "unavailable")
        else:
            table.add_row(name, measured.lane, *_cells(measured, settings))
    console.print(table)
    for name, measured in results.items():
        if measured.problem:
            console.print(f"[{'red' if measured.failed else 'yellow'}]{name}: {escape(measured.problem)}[/]")


def _cells(measured: Measured, settings: Settings) -> list[str]:
    def micros(name: str) -> str:
        summary = summarise(measured.samples[name])
        return f"{summary.median * 1e6:.0f} ({summary.p90 * 1e6:.0f})"

    def medians(*names: str) -> list[float]:
        return [summarise(measured.samples[name]).median for name in names]

    window = settings.windows[-1]
    busy = medians(*(f"{end} CPU seconds per transfer, {window} at once" for end in ("sender", "receiver")))
    cells = [micros("round trip"), micros("round trips in a row"), micros("offer to ready")]
    cells.append(f"{np.median(measured.ratios):.1f}")
    cells += [f"{medians(f'per second, {count} at once')[0]:,.0f}" for count in settings.windows]
    cells.append(" + ".join(f"{seconds * 1e6:.0f}" for seconds in busy))
    for what in ("nothing waits", f"{settings.live} wait"):
        shares = medians(*(f"{end} CPU, idle, {what}" for end in ("sender", "receiver")))
        cells.append(", ".join(f"{share:.2%}" for share in shares))
    return cells


def _to_json(results: dict[str, Measured], settings: Settings, facts: dict[str, str | int | float]) -> str:
    return json.dumps(
        {
            "benchmark": "control",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": facts,
            "settings": asdict(settings),
            "transports": {
                name: {
                    "lane": measured.lane,
                    "problem": measured.problem,
                    "round_trips_per_transfer": measured.ratios,
                    "measured": {
                        what: asdict(summarise(samples)) for what, samples in measured.samples.items() if samples
                    },
                }
                for name, measured in results.items()
            },
        },
        indent=1,
    )


def _draw(path: Path, results: dict[str, Measured], settings: Settings, facts: dict[str, str | int | float]) -> None:
    def bars(what: Sequence[tuple[str, str]], factor: float) -> dict[str, list[Bar]]:
        """By transport: one bar for each (name of the bar, what was measured)."""
        return {
            name: [
                Bar.of(title, summarise(measured.samples[sample]), lambda value: value * factor)
                for title, sample in what
            ]
            for name, measured in results.items()
        }

    waits = ("nothing waits", f"{settings.live} wait")
    idle = [(f"{end}, {what}", f"{end} CPU, idle, {what}") for what in waits for end in ("sender", "receiver")]
    alone = [(what, what) for what in ("round trips in a row", "round trip", "offer to ready")]
    many = [(f"{window} at once", f"per second, {window} at once") for window in settings.windows]
    ratios = {name: [Bar.of("offer to ready", summarise(measured.ratios))] for name, measured in results.items()}
    panels = [
        Bars("one block, alone", "µs", bars(alone, 1e6)),
        Bars("the same in round trips", "round trips", ratios, {"at most": ROUND_TRIPS_ALLOWED}),
        Bars("tiny transfers", "per second", bars(many, 1.0), {"at least": PER_S_WANTED}),
        Bars("CPU while nothing happens", "% of a core", bars(idle, 100.0), {"below": 100 * IDLE_CPU_ALLOWED}),
    ]
    notes = f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, Python {facts['python']}"
    write(path, panels, "pdlink bench control", f"{notes}\nblocks of 4 KiB per layer, {settings.num_layers} layers")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
