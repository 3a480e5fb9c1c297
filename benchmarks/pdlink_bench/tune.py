"""`pdlink bench tune`: how short a run must be for packing it to pay over tcp (`transport.tcp.pack_below_nbytes`).

There are two pairs of processes, one that sends every run by itself and one that packs every run. They take turns
with the same runs, of one length after the other. The length that is printed loses least over all lengths measured:
shorter runs packed, longer ones not.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from pdlink import _tcp
from pdlink.transport.tcp import TcpTransport

from . import harness
from .harness import Report, Table, positive
from .measure import gb_per_s, median_ratio, summarise
from .rounds import Contestant, Settings, measure
from .workload import Workload

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.progress import Progress

LENGTHS = tuple(64 << power for power in range(11))
WAYS = {"direct": 0, "packed": _tcp.MAX_PACK_BELOW}
"""By name: shorter runs are packed."""
MAX_RUNS, MAX_NBYTES = 8192, 8 << 20
"""Of one push."""

Seconds = dict[str, dict[int, list[float]]]
"""By way and length of the runs, one value per round."""


def pushed(length: int) -> Workload:
    """NHD to HND: every run is one head of one token, and no two of them are neighbours on both sides."""
    num_tokens = min(MAX_RUNS, MAX_NBYTES // length) // 2
    return Workload(
        num_layers=1, num_parts=1, num_heads=2, head_dim=length // 2, num_tokens=num_tokens, dst_order="LPBHT"
    )


def pack_below_nbytes(seconds: Seconds) -> int:
    """The length that loses least: shorter runs packed, the others not."""
    direct, packed = seconds["direct"], seconds["packed"]
    gains = [math.log(median_ratio(direct[length], packed[length])) for length in direct]
    ends = [*direct, 2 * max(direct)]
    best = max(range(len(ends)), key=lambda end: sum(gains[:end]))
    return ends[best] if best else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, default=5, help="default %(default)s")
    parser.add_argument(
        "--length", type=positive, action="append", metavar="BYTES", help="of the runs; without it, 64 B to 64 KiB"
    )
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a push failed."""
    return harness.run("tune", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    lengths = tuple(sorted(args.length or LENGTHS))
    cases = {f"{length} B": pushed(length) for length in lengths}
    ways = {way: Contestant(partial(TcpTransport, pack_below_nbytes=below)) for way, below in WAYS.items()}
    found = measure(cases, ways, Settings((), args.rounds, warm_ups=1), progress)
    lanes = {way: {length: found.cases[f"{length} B"].transports[way] for length in lengths} for way in WAYS}
    problems = {way: lane for way, by_length in lanes.items() for lane in by_length.values() if lane.problem}
    if problems:
        return Report({}, problems=problems, ok=False)
    seconds = {way: {length: lane.samples["whole"] for length, lane in lanes[way].items()} for way in WAYS}
    below = pack_below_nbytes(seconds)
    return Report(
        {"seconds": seconds, "transport.tcp.pack_below_nbytes": below},
        [_table(seconds, lengths), f"transport.tcp.pack_below_nbytes: {below}"],
    )


def _table(seconds: Seconds, lengths: Sequence[int]) -> Table:
    table = Table(("run length", *(f"{way} GB/s" for way in WAYS)), num_left=0)
    for length in lengths:
        speeds = [gb_per_s(pushed(length).nbytes, summarise(seconds[way][length]).median) for way in WAYS]
        cells = [f"[bold]{speed:.2f}[/]" if speed == max(speeds) else f"{speed:.2f}" for speed in speeds]
        table.add(f"{length} B", *cells)
    return table
