"""`pdlink bench overlap`: how much of a transfer hides behind the prefill, on links faster and slower than compute.

A prefill that takes a fixed time per layer is emulated; each layer is submitted the moment it is ready, over a link
whose speed is set from far above to far below what the prefill produces (`shaped.py`). What remains after the last
layer is what a user waits for. The least there can be is one layer, plus what a slow link has not kept up with:
transfer x max(0, 1 - compute / transfer).
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from pdlink.errors import ConfigError

from . import plot
from .measure import Facts, Summary, machine_facts, summarise
from .report import WIDTH_NOT_A_TTY, machine_line
from .rounds import DEFAULT, SETUP_TIMEOUT_S
from .shaped import (
    DEVICE,
    RECEIVER_ADDRESS,
    SENDER_ADDRESS,
    LinkUnavailable,
    ShapedReceiver,
    ShapedSender,
    check_tools,
    plug_in,
)
from .workers import Worker, WorkerFailed
from .workload import Workload

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pdlink.transport.base import Transport

SPEEDS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125)
"""Of the link, in multiples of what the prefill produces."""
ALLOWED_LAYERS = 1.5
"""Exposed, in layers' shares of the whole transfer, where the link is as fast as compute."""
CALIBRATIONS = 3
"""Times a speed is corrected before it counts: frames have headers, and a bucket lets a burst through."""
TIMEOUT_S = 60.0


def _tcp(host: str) -> Transport:
    from pdlink.transport.tcp import TcpTransport

    return TcpTransport(host=host)


def _ucx_tcp(host: str) -> Transport:
    from pdlink.transport.ucx import UcxTransport

    # Not lo: UCX would offer it, and it leads nowhere.
    return UcxTransport(tls="tcp", devices=DEVICE)


TRANSPORTS: dict[str, Callable[[str], Transport]] = {"tcp": _tcp, "ucx-tcp": _ucx_tcp}


@dataclass(slots=True)
class Point:
    """One transport at one speed of the link."""

    speed: float
    bits_per_s: float = 0.0
    """What the bucket is set to, frames and all."""
    whole_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)

    def theory_s(self, compute_s: float, num_layers: int) -> list[float]:
        """The least that can be exposed, by each round's own transfer."""
        return [max(0.0, whole - compute_s) + whole / num_layers for whole in self.whole_s]

    def layers(self, num_layers: int) -> Summary:
        """Exposed time in layers' shares of the whole transfer."""
        pairs = zip(self.exposed_s, self.whole_s, strict=True)
        return summarise([exposed / whole * num_layers for exposed, whole in pairs])


@dataclass
class Lane:
    """One transport over a cable of its own."""

    name: str
    workload: Workload
    problem: str = ""
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        cases = {DEFAULT: self.workload}
        make = TRANSPORTS[self.name]
        self.sender = Worker(f"{self.name} sender", ShapedSender, cases, partial(make, SENDER_ADDRESS))
        self.receiver = Worker(f"{self.name} receiver", ShapedReceiver, cases, partial(make, RECEIVER_ADDRESS))

    def open(self) -> None:
        ends = ((self.sender, SENDER_ADDRESS), (self.receiver, RECEIVER_ADDRESS))
        for worker, _ in ends:
            worker.open()
            worker.tell("enter")
        pids = [worker.answer(SETUP_TIMEOUT_S) for worker, _ in ends]
        self.sender.ask("lay_cable", pids[1], timeout_s=SETUP_TIMEOUT_S)
        for worker, address in ends:
            for words in plug_in(address):
                worker.ask("command", words, timeout_s=SETUP_TIMEOUT_S)
        for worker, _ in ends:
            worker.ask("wait_for_cable", timeout_s=SETUP_TIMEOUT_S)
            viability = worker.ask("probe", timeout_s=SETUP_TIMEOUT_S)
            if not viability.ok:
                raise WorkerFailed(viability.reason)
        invitation = self.receiver.ask("invite", timeout_s=SETUP_TIMEOUT_S)
        self.sender.ask("connect", invitation, timeout_s=SETUP_TIMEOUT_S)
        for worker, _ in ends:
            worker.ask("take_up", DEFAULT, timeout_s=SETUP_TIMEOUT_S)
        self.push("push_whole")  # the connection is made by the first one

    def calibrate(self, point: Point, transfer_s: float) -> None:
        """Set the bucket so that the whole transfer takes `transfer_s`."""
        point.bits_per_s = self.workload.nbytes * 8 / transfer_s
        for _ in range(CALIBRATIONS):
            self.sender.ask("shape", point.bits_per_s, timeout_s=SETUP_TIMEOUT_S)
            # Half of the error beyond a factor of two: there it is not the bucket that limits.
            correction = min(2.0, self.push("push_whole") / transfer_s)
            point.bits_per_s *= correction

    def turn(self, point: Point, layer_s: float) -> None:
        self.sender.ask("shape", point.bits_per_s, timeout_s=SETUP_TIMEOUT_S)
        whole_s = self.push("push_whole")
        exposed_s = self.push("push_during_prefill", layer_s)
        point.whole_s.append(whole_s)
        point.exposed_s.append(exposed_s)

    def push(self, question: str, *args: float) -> float:
        seconds: float = self.sender.ask(question, *args, TIMEOUT_S, timeout_s=2 * TIMEOUT_S + 10)
        wrong = self.receiver.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S)
        if wrong:
            raise WorkerFailed(f"wrong bytes: {wrong}")
        return seconds

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench overlap`."""
    parser.add_argument(
        "--transport", action="append", choices=sorted(TRANSPORTS), help="repeat for several; without it, both"
    )
    parser.add_argument("--layers", type=int, default=32, help="default %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=256, help="of 4 KiB per layer: 256 are 32 MiB (default %(default)s)"
    )
    parser.add_argument("--layer-ms", type=float, default=10.0, help="compute per layer (default %(default)s)")
    parser.add_argument(
        "--speeds",
        type=float,
        nargs="+",
        default=list(SPEEDS),
        metavar="X",
        help="of the link, in multiples of what the prefill produces (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    plot.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 if the bar is met, 1 if it is not or a transport failed, 2 where such a link cannot be made."""
    errors = Console(stderr=True)
    try:
        plot.check_can_plot(args.plot)
        check_tools()
        if min(args.layers, args.tokens, args.rounds, args.layer_ms, *args.speeds) <= 0:
            raise ConfigError("every option must be positive")
    except (ConfigError, LinkUnavailable) as error:
        errors.print(f"[red]{escape(str(error))}[/]")
        return 2
    machine = machine_facts()
    workload = Workload(num_layers=args.layers, num_tokens=args.tokens)
    lanes = [Lane(name, workload) for name in args.transport or TRANSPORTS]
    with Progress(console=errors, transient=True, disable=not sys.stderr.isatty()) as progress:
        measure(lanes, args.speeds, args.layer_ms / 1e3, args.rounds, progress)
    if all("CAP_SYS_ADMIN" in lane.problem for lane in lanes):
        errors.print(f"[red]{escape(lanes[0].problem)}[/]")
        return 2
    print_lanes(lanes, args.layer_ms / 1e3, machine)
    if args.json:
        args.json.write_text(to_json(lanes, args.layer_ms / 1e3, machine) + "\n", encoding="utf-8")
    if args.plot:
        draw(args, lanes, machine)
    return 1 if any(lane.problem or not met(lane) for lane in lanes) else 0


def measure(lanes: list[Lane], speeds: list[float], layer_s: float, rounds: int, progress: Progress) -> None:
    """Let the transports take turns at each speed; a lane that fails keeps the reason."""
    compute_s = layer_s * lanes[0].workload.num_layers
    with ExitStack() as stack:
        task = progress.add_task("calibrating", total=len(lanes) * len(speeds) * (rounds + 1))
        for lane in lanes:
            stack.callback(lane.close)
            lane.points = [Point(speed) for speed in speeds]
            _attempt(lane, lane.open)
            for point in lane.points:
                _attempt(lane, partial(lane.calibrate, point, compute_s / point.speed))
                progress.advance(task)
        progress.update(task, description="measuring")
        for _ in range(rounds):
            for index in range(len(speeds)):
                for lane in lanes:
                    _attempt(lane, partial(lane.turn, lane.points[index], layer_s))
                    progress.advance(task)


def _attempt(lane: Lane, step: Callable[[], None]) -> None:
    if lane.problem:
        return
    try:
        step()
    except WorkerFailed as failure:
        lane.problem = str(failure)


def met(lane: Lane) -> bool:
    """Whether no more is exposed than the bar allows; true where that speed was not measured."""
    return all(
        point.layers(lane.workload.num_layers).median <= ALLOWED_LAYERS
        for point in lane.points
        if point.speed == 1.0 and point.exposed_s
    )


def print_lanes(lanes: list[Lane], layer_s: float, machine: Facts) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_NOT_A_TTY)
    workload = lanes[0].workload
    console.print(machine_line(machine), highlight=False)
    console.print(
        f"{workload.nbytes / 1e6:.1f} MB in {workload.num_layers} layers, one every {layer_s * 1e3:g} ms of compute",
        highlight=False,
    )
    table = Table()
    table.add_column("transport", style="bold")
    for title in ("link /\ncompute", "Gbit/s", "transfer\nms", "exposed ms", "of transfer", "in layers", "least\nms"):
        table.add_column(title, justify="right")
    for lane in lanes:
        for point in lane.points if not lane.problem else ():
            whole, exposed = summarise(point.whole_s), summarise(point.exposed_s)
            layers = point.layers(workload.num_layers)
            theory = summarise(point.theory_s(layer_s * workload.num_layers, workload.num_layers))
            table.add_row(
                lane.name,
                f"{point.speed:g}",
                f"{point.bits_per_s / 1e9:.3g}",
                f"{whole.median * 1e3:.1f}",
                f"{exposed.median * 1e3:.1f} ({exposed.p10 * 1e3:.1f}-{exposed.p90 * 1e3:.1f})",
                f"{layers.median / workload.num_layers:.1%}",
                f"{layers.median:.2f}",
                f"{theory.median * 1e3:.1f}",
            )
        table.add_section()
    console.print(table)
    for lane in lanes:
        if lane.problem:
            console.print(f"[red]{lane.name}: {escape(lane.problem)}[/]")
        elif any(point.speed == 1.0 for point in lane.points):
            verdict = "[green]met[/]" if met(lane) else "[red]not met[/]"
            console.print(
                f"bar: {lane.name}, link as fast as compute: at most {ALLOWED_LAYERS} layers exposed: {verdict}"
            )


def to_json(lanes: list[Lane], layer_s: float, machine: Facts) -> str:
    """Every sample."""
    workload = lanes[0].workload
    compute_s = layer_s * workload.num_layers
    return json.dumps(
        {
            "benchmark": "overlap",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine,
            "workload": asdict(workload) | {"nbytes": workload.nbytes},
            "layer_s": layer_s,
            "allowed_layers": ALLOWED_LAYERS,
            "transports": {
                lane.name: {
                    "problem": lane.problem,
                    "met": not lane.problem and met(lane),
                    "points": [
                        asdict(point)
                        | {
                            "theory_s": point.theory_s(compute_s, workload.num_layers),
                            "exposed_layers": point.layers(workload.num_layers).median,
                        }
                        for point in lane.points
                        if point.exposed_s
                    ],
                }
                for lane in lanes
            },
        },
        indent=1,
    )


def draw(args: argparse.Namespace, lanes: list[Lane], machine: Facts) -> None:
    layer_s, num_layers = args.layer_ms / 1e3, lanes[0].workload.num_layers
    good = [lane for lane in lanes if not lane.problem]
    shares, times = [], []
    for lane in good:
        points = sorted(lane.points, key=lambda point: point.speed)
        shares.append(
            plot.Line.of(
                lane.name,
                {point.speed: point.layers(num_layers) for point in points},
                lambda _, layers: layers / num_layers,
            )
        )
        times.append(plot.Line.of(lane.name, {p.speed: summarise(p.exposed_s) for p in points}, lambda _, s: s * 1e3))
    if good:
        points = sorted(good[0].points, key=lambda point: point.speed)
        least = [summarise(point.theory_s(layer_s * num_layers, num_layers)).median for point in points]
        whole = [summarise(point.whole_s).median for point in points]
        x = [point.speed for point in points]
        shares.append(plot.Line("least possible", x, [a / b for a, b in zip(least, whole, strict=True)], dashed=True))
        times.append(plot.Line("least possible", x, [seconds * 1e3 for seconds in least], dashed=True))
        times.append(plot.Line("whole transfer", x, [seconds * 1e3 for seconds in whole], dashed=True))
    ticks = {speed: f"{speed:g}" for speed in args.speeds}
    label = "speed of the link / speed of compute"
    plot.write(
        args.plot,
        [
            plot.Lines(
                "exposed after the last layer", label, "share of the transfer", shares, log_x=True, x_ticks=ticks
            ),
            plot.Lines("the same in time", label, "ms", times, log_x=True, log_y=True, x_ticks=ticks),
        ],
        "pdlink bench overlap",
        machine_line(machine).replace(", huge pages", ",\nhuge pages"),
    )
