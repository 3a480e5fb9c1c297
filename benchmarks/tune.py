"""`pdlink bench tune`: how short a run must be for packing it to pay, per transport; writes the table that is used.

For every transport that can pack (`pdlink/transport/staging.py`) there are two pairs of processes, one that sends
every run by itself and one that packs every run. They take turns with the same scattered runs, of one length after
the other. The length in the table is the one that loses least over all lengths measured: shorter runs packed, longer
ones not. Every byte is checked, outside of the timing.
"""

from __future__ import annotations

import json
import math
import select
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.kv.layout import Piece
from pdlink.memory.buffers import Buffer
from pdlink.transport import staging
from pdlink.transport.base import BatchDone, PeerFailed, Status

from . import plot
from .measure import gb_per_s, machine_facts, median_ratio, summarise
from .workers import Worker, WorkerFailed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from pdlink.kv.layout import RunArray
    from pdlink.transport.base import Transport

SETUP_TIMEOUT_S, PUSH_TIMEOUT_S = 30.0, 60.0
LENGTHS = tuple(64 << power for power in range(11))
WAYS = ("direct", "packed")


def _tcp(packed: bool) -> Transport:
    from pdlink import _tcp as native
    from pdlink.transport.tcp import TcpTransport

    return TcpTransport(stage_below_nbytes=native.MAX_STAGE_BELOW if packed else 0)


def _ucx(tls: str, packed: bool) -> Transport:
    from pdlink.transport.ucx import UcxTransport, probe_ucx

    problem = probe_ucx().reason
    if problem:
        raise TransportUnavailable(problem)
    from pdlink import _ucx as native

    return UcxTransport(tls, stage_below_nbytes={"": native.MAX_STAGE_BELOW if packed else 0})


TRANSPORTS: dict[str, Callable[[bool], Transport]] = {
    "tcp": _tcp,
    "ucx/tcp": partial(_ucx, "tcp"),
    "ucx/cma": partial(_ucx, "shm"),
}
"""By key of the table."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    lengths: tuple[int, ...] = LENGTHS
    rounds: int = 5
    max_runs: int = 8192
    max_nbytes: int = 8 << 20
    """Of one push."""

    @property
    def pool_nbytes(self) -> int:
        return 2 * self.max_nbytes

    def runs(self, length: int) -> RunArray:
        """Runs of one length between places in disorder, no two of them neighbours on purpose."""
        count = min(self.max_runs, self.max_nbytes // length)
        rng = np.random.default_rng(length)
        src, dst = (rng.permutation(self.pool_nbytes // length)[:count] * length for _ in range(2))
        return np.stack([src, dst, np.full(count, length)], axis=1).astype(np.int64)


@dataclass(slots=True)
class Measured:
    """What one transport did."""

    seconds: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {way: {} for way in WAYS})
    """By way and length of the runs, one value per round."""
    problem: str = ""

    @property
    def stage_below_nbytes(self) -> int:
        """The length that loses least: shorter runs packed, the others not."""
        direct, packed = self.seconds["direct"], self.seconds["packed"]
        gains = [math.log(median_ratio(direct[length], packed[length])) for length in direct]
        ends = [*direct, 2 * max(direct)]
        best = max(range(len(ends)), key=lambda end: sum(gains[:end]))
        return ends[best] if best else 0


class Owner:
    """Whose memory is written."""

    def __init__(self, make_transport: Callable[[bool], Transport], packed: bool, settings: Settings) -> None:
        self.settings = settings
        self.transport = make_transport(packed)
        self.transport.open()
        self.buffer = Buffer(settings.pool_nbytes)
        self.transport.register(self.buffer)

    def invite(self) -> bytes:
        return self.transport.invite("writer")

    def check_and_clear(self, length: int) -> str:
        """What is wrong with the bytes of one push, "" if nothing is."""
        expected = np.zeros(self.buffer.nbytes, dtype=np.uint8)
        source = contents(self.settings)
        for src, dst, nbytes in self.settings.runs(length).tolist():
            expected[dst : dst + nbytes] = source[src : src + nbytes]
        wrong = int(np.count_nonzero(self.buffer.array != expected))
        self.buffer.array[:] = 0
        return f"{wrong} bytes of runs of {length} bytes are wrong" if wrong else ""

    def close(self) -> None:
        self.transport.close()
        self.buffer.close()


class Writer(Owner):
    """Who writes."""

    def connect(self, invitation: bytes) -> None:
        self.buffer.array[:] = contents(self.settings)
        self.transport.connect("owner", invitation)

    def push(self, length: int) -> float:
        """Seconds from the submit of all runs to the moment they are known to have landed."""
        pieces = [Piece(0, 0, 0, 0, self.settings.runs(length))]
        start_s = time.monotonic()
        ticket = self.transport.submit("owner", pieces, PUSH_TIMEOUT_S)
        while True:
            for one in self.transport.poll():
                if isinstance(one, PeerFailed):
                    raise TransportFailure(one.reason)
                if isinstance(one, BatchDone) and one.ticket == ticket:
                    if one.status is not Status.OK:
                        raise TransportFailure(f"push ended as {one.status.value}: {one.detail}")
                    return time.monotonic() - start_s
            select.select([self.transport.fileno()], [], [], PUSH_TIMEOUT_S)


def contents(settings: Settings) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What the writer's pool holds, at whole pages' length."""
    return np.random.default_rng(0).integers(1, 256, settings.pool_nbytes, dtype=np.uint8)


def measure(names: Sequence[str], settings: Settings) -> dict[str, Measured]:
    """Each transport by itself, its two ways in turn."""
    results = {}
    for name in names:
        results[name] = measured = Measured()
        try:
            _measure_one(name, settings, measured)
        except WorkerFailed as error:
            measured.problem = str(error)
    return results


def _measure_one(name: str, settings: Settings, measured: Measured) -> None:
    with ExitStack() as stack:
        pairs: dict[str, tuple[Worker, Worker]] = {}
        for way in WAYS:
            roles = (("writer", Writer), ("owner", Owner))
            workers = [
                Worker(f"{name} {way} {title}", role, TRANSPORTS[name], way == "packed", settings)
                for title, role in roles
            ]
            for worker in workers:
                worker.open()
                stack.callback(worker.close)
            pairs[way] = (workers[0], workers[1])
            invitation = workers[1].ask("invite", timeout_s=SETUP_TIMEOUT_S)
            workers[0].ask("connect", invitation, timeout_s=SETUP_TIMEOUT_S)
        for length in settings.lengths:
            for round_number in range(-1, settings.rounds):  # the first one warms up
                for way, (writer, owner) in pairs.items():
                    seconds = writer.ask("push", length, timeout_s=2 * PUSH_TIMEOUT_S)
                    wrong = owner.ask("check_and_clear", length, timeout_s=SETUP_TIMEOUT_S)
                    if wrong:
                        raise WorkerFailed(wrong)
                    if round_number >= 0:
                        measured.seconds[way].setdefault(length, []).append(seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench tune`."""
    how = Settings()
    parser.add_argument(
        "--transport", action="append", choices=list(TRANSPORTS), help="repeat for several; without it, all"
    )
    parser.add_argument("--rounds", type=int, default=how.rounds, help="default %(default)s")
    parser.add_argument(
        "--length", type=int, action="append", metavar="BYTES", help="of the runs; without it, 64 B to 64 KiB"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the table; a worker takes it with transport.staging.table, the package's own is "
        f"{staging.TABLE.name} beside pdlink/transport/staging.py",
    )
    plot.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a transport failed."""
    plot.check_can_plot(args.plot)
    machine = machine_facts()
    settings = Settings(tuple(sorted(args.length or LENGTHS)), args.rounds)
    results = measure(args.transport or list(TRANSPORTS), settings)
    good = {name: measured for name, measured in results.items() if not measured.problem}
    _print(good, settings)
    for name, measured in results.items():
        if measured.problem:
            Console(stderr=True).print(f"[red]{name}: {escape(measured.problem)}[/]")
    if args.json:
        facts = {"machine": machine, "settings": asdict(settings)}
        found = {name: asdict(measured) for name, measured in results.items()}
        args.json.write_text(json.dumps({**facts, "transports": found}, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot.write(args.plot, [_panel(name, measured, settings) for name, measured in good.items()], "Packing runs")
    if args.write and good:
        lengths = dict(staging.read_table().stage_below_nbytes)
        lengths.update({name: measured.stage_below_nbytes for name, measured in good.items()})
        staging.write_table(args.write, machine, lengths)
    return 0 if len(good) == len(results) else 1


def _print(results: dict[str, Measured], settings: Settings) -> None:
    table = Table()
    table.add_column("run length", justify="right")
    for name in results:
        for way in WAYS:
            table.add_column(f"{name}\n{way} GB/s", justify="right")
    for length in settings.lengths:
        nbytes = int(settings.runs(length)[:, 2].sum())
        cells = []
        for measured in results.values():
            speeds = [gb_per_s(nbytes, summarise(measured.seconds[way][length]).median) for way in WAYS]
            cells += [f"[bold]{speed:.2f}[/]" if speed == max(speeds) else f"{speed:.2f}" for speed in speeds]
        table.add_row(f"{length} B", *cells)
    console = Console(width=max(80, 24 * len(results) + 16))
    console.print(table)
    for name, measured in results.items():
        console.print(f"{name}: pack runs shorter than {measured.stage_below_nbytes} bytes", highlight=False)


def _panel(name: str, measured: Measured, settings: Settings) -> plot.Lines:
    nbytes = {length: int(settings.runs(length)[:, 2].sum()) for length in settings.lengths}
    lines = [
        plot.Line.of(
            way,
            {length: summarise(seconds) for length, seconds in measured.seconds[way].items()},
            lambda length, seconds: gb_per_s(nbytes[int(length)], seconds),
        )
        for way in WAYS
    ]
    ticks = {float(length): str(length) for length in settings.lengths[::2]}
    return plot.Lines(name, "bytes per run", "GB/s", lines, log_x=True, log_y=True, x_ticks=ticks)
