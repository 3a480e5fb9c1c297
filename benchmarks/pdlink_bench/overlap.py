"""`pdlink bench overlap`: how much of a transfer hides behind the prefill, on links faster and slower than compute.

A prefill that takes a fixed time per layer is emulated; each layer is submitted the moment it is ready, over a link
whose speed is set from far above to far below what the prefill produces (`shaped.py`). What remains after the last
layer is what a user waits for. The least there can be is one layer, plus what a slow link has not kept up with:
transfer x max(0, 1 - compute / transfer).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlink.errors import ConfigError

from . import harness, plot
from .harness import SETUP_TIMEOUT_S, Report, Table, opened, positive, positive_float
from .measure import Summary, spread, summarise
from .rounds import Pair
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
from .workers import Worker
from .workload import DEFAULT, Workload

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

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


class Lane(Pair):
    """One transport over a cable of its own."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload
        self.points: list[Point] = []
        cases, make = {DEFAULT: workload}, TRANSPORTS[name]
        super().__init__(
            cases,
            Worker(f"{name} sender", ShapedSender, cases, partial(make, SENDER_ADDRESS)),
            Worker(f"{name} receiver", ShapedReceiver, cases, partial(make, RECEIVER_ADDRESS)),
        )

    def open(self) -> None:
        for worker in self.workers:
            worker.open()
            worker.tell("enter")

    def connect(self) -> None:
        ends = ((self.sender, SENDER_ADDRESS), (self.receiver, RECEIVER_ADDRESS))
        pids = [worker.answer(SETUP_TIMEOUT_S) for worker, _ in ends]
        self.sender.ask("lay_cable", pids[1], timeout_s=SETUP_TIMEOUT_S)
        for worker, address in ends:
            for words in plug_in(address):
                worker.ask("command", words, timeout_s=SETUP_TIMEOUT_S)
        for worker, _ in ends:
            worker.ask("wait_for_cable", timeout_s=SETUP_TIMEOUT_S)
            worker.tell("probe")
        super().connect()
        if self.stopped:
            return
        self.take_up(DEFAULT)
        self.push("push_whole", timeout_s=TIMEOUT_S)  # the connection is made by the first one

    def calibrate(self, point: Point, transfer_s: float) -> None:
        """Set the bucket so that the whole transfer takes `transfer_s`."""
        point.bits_per_s = self.workload.nbytes * 8 / transfer_s
        for _ in range(CALIBRATIONS):
            self.sender.ask("shape", point.bits_per_s, timeout_s=SETUP_TIMEOUT_S)
            # Half of the error beyond a factor of two: there it is not the bucket that limits.
            correction = min(2.0, self.push("push_whole", timeout_s=TIMEOUT_S) / transfer_s)
            point.bits_per_s *= correction

    def at(self, point: Point, layer_s: float) -> None:
        """One turn at one speed."""
        self.sender.ask("shape", point.bits_per_s, timeout_s=SETUP_TIMEOUT_S)
        whole_s = self.push("push_whole", timeout_s=TIMEOUT_S)
        exposed_s = self.push("push_during_prefill", layer_s, timeout_s=TIMEOUT_S)
        point.whole_s.append(whole_s)
        point.exposed_s.append(exposed_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport", action="append", choices=sorted(TRANSPORTS), help="repeat for several; without it, both"
    )
    parser.add_argument("--layers", type=positive, default=32, help="default %(default)s")
    parser.add_argument(
        "--tokens", type=positive, default=256, help="of 4 KiB per layer: 256 are 32 MiB (default %(default)s)"
    )
    parser.add_argument(
        "--layer-ms", type=positive_float, default=10.0, help="compute per layer (default %(default)s)"
    )
    parser.add_argument(
        "--speeds",
        type=positive_float,
        nargs="+",
        default=list(SPEEDS),
        metavar="X",
        help="of the link, in multiples of what the prefill produces (default %(default)s)",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default %(default)s")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """0 if the bar is met, 1 if it is not or a transport failed, 2 where such a link cannot be made."""
    return harness.run("overlap", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    try:
        check_tools()
    except LinkUnavailable as error:
        raise ConfigError(str(error)) from None
    layer_s = args.layer_ms / 1e3
    lanes = [
        Lane(name, Workload(num_layers=args.layers, num_tokens=args.tokens)) for name in args.transport or TRANSPORTS
    ]
    measure(lanes, args.speeds, layer_s, args.rounds, progress)
    if all("CAP_SYS_ADMIN" in lane.measured.problem for lane in lanes):
        raise ConfigError(lanes[0].measured.problem)
    workload, good = lanes[0].workload, [lane for lane in lanes if not lane.stopped]
    what = (
        f"{workload.nbytes / 1e6:.1f} MB in {workload.num_layers} layers, one every {args.layer_ms:g} ms of compute"
    )
    verdicts = [
        f"bar: {lane.name}, link as fast as compute: at most {ALLOWED_LAYERS} layers exposed: "
        + ("[green]met[/]" if met(lane) else "[red]not met[/]")
        for lane in good
        if any(point.speed == 1.0 for point in lane.points)
    ]
    return Report(
        {
            "workload": workload,
            "layer_s": layer_s,
            "allowed_layers": ALLOWED_LAYERS,
            "transports": {lane.name: _kept(lane, layer_s) for lane in lanes},
        },
        [what, _table(good, layer_s), *verdicts],
        _panels(good, layer_s) if good else (),
        what,
        {lane.name: lane.measured for lane in lanes},
        bool(good) and all(map(met, good)),
    )


def measure(lanes: list[Lane], speeds: Sequence[float], layer_s: float, rounds: int, progress: Progress) -> None:
    """Let the transports take turns at each speed; a lane that fails keeps the reason."""
    compute_s = layer_s * lanes[0].workload.num_layers
    task = progress.add_task("calibrating", total=len(lanes) * len(speeds) * (rounds + 1))
    with opened(lanes):
        for lane in lanes:
            lane.points = [Point(speed) for speed in speeds]
            for point in lane.points:
                lane.attempt(lane.calibrate, point, compute_s / point.speed)
                progress.advance(task)
        progress.update(task, description="measuring")
        for _ in range(rounds):
            for index in range(len(speeds)):
                for lane in lanes:
                    lane.attempt(lane.at, lane.points[index], layer_s)
                    progress.advance(task)


def met(lane: Lane) -> bool:
    """Whether no more is exposed than the bar allows; true where that speed was not measured."""
    return all(
        point.layers(lane.workload.num_layers).median <= ALLOWED_LAYERS
        for point in lane.points
        if point.speed == 1.0 and point.exposed_s
    )


def _table(lanes: Sequence[Lane], layer_s: float) -> Table:
    table = Table(
        (
            "transport",
            "link /\ncompute",
            "Gbit/s",
            "transfer\nms",
            "exposed ms",
            "of transfer",
            "in layers",
            "least\nms",
        )
    )
    for lane in lanes:
        for point in lane.points:
            num_layers = lane.workload.num_layers
            layers = point.layers(num_layers).median
            table.add(
                lane.name,
                f"{point.speed:g}",
                f"{point.bits_per_s / 1e9:.3g}",
                f"{summarise(point.whole_s).median * 1e3:.1f}",
                spread(summarise(point.exposed_s)),
                f"{layers / num_layers:.1%}",
                f"{layers:.2f}",
                f"{summarise(point.theory_s(layer_s * num_layers, num_layers)).median * 1e3:.1f}",
            )
        table.add()
    return table


def _kept(lane: Lane, layer_s: float) -> dict[str, Any]:
    num_layers = lane.workload.num_layers
    points = [
        asdict(point)
        | {
            "theory_s": point.theory_s(layer_s * num_layers, num_layers),
            "exposed_layers": point.layers(num_layers).median,
        }
        for point in lane.points
        if point.exposed_s
    ]
    return {"problem": lane.measured.problem, "met": not lane.stopped and met(lane), "points": points}


def _panels(lanes: Sequence[Lane], layer_s: float) -> list[plot.Panel]:
    num_layers, points = lanes[0].workload.num_layers, sorted(lanes[0].points, key=lambda point: point.speed)
    lines = [
        plot.Line.of(
            lane.name,
            {point.speed: point.layers(num_layers) for point in sorted(lane.points, key=lambda point: point.speed)},
            1 / num_layers,
        )
        for lane in lanes
    ]
    least = [
        summarise(point.theory_s(layer_s * num_layers, num_layers)).median / summarise(point.whole_s).median
        for point in points
    ]
    speeds = {point.speed: f"{point.speed:g}" for point in points}
    lines.append(plot.Line("least possible", list(speeds), least, dashed=True))
    label = "speed of the link / speed of compute"
    title = "exposed after the last layer"
    return [plot.Lines(title, label, "share of the transfer", lines, log_x=True, x_ticks=speeds)]
