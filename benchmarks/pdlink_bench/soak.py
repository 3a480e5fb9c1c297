"""`pdlink bench soak`: very many tiny transfers in a row, and what they leave behind.

Two nodes in this process, joined by a real control connection and a real transport, move the KV of a few tokens
over and over. A link that leaks a descriptor, a thread, a table entry or memory per transfer dies after days in
production (one site's after 92,700 transfers, nixl#1722); here it shows as a slope.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.commands.parser import positive
from pdlink.kv.layout import paged_layout
from pdlink.node.node import Node

from . import harness
from .harness import BenchReport, TextTable
from .transfer import TRANSPORTS

if TYPE_CHECKING:
    import argparse

    from rich.progress import Progress


NUM_LAYERS, NUM_TOKENS, BLOCK_TOKENS = 2, 4, 4
WAIT_S = 30.0

LAYOUT = paged_layout(
    dtype="bfloat16",
    itemsize=2,
    num_layers=NUM_LAYERS,
    num_blocks=64,
    block_tokens=BLOCK_TOKENS,
    num_heads=2,
    head_dim=32,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds after so many transfers."""

    transfers: int
    rss_kib: int
    descriptors: int
    threads: int
    held: int
    """Entries of live transfers on both sides; the ended ones are remembered in bounded tables."""
    absence_s: float
    """Longest time since the last sample for which one of the two loops could not go round."""


def _transfer(sender: Node, receiver: Node, index: int) -> None:
    name = f"soak-{index}"
    outgoing = sender.send(name, [(index * 7) % 64], NUM_TOKENS)
    incoming = receiver.receive(name, sender.address, [index % 64], range(NUM_TOKENS), by_layer=False)
    for layer in range(NUM_LAYERS):
        outgoing.layer_ready(layer)
    outgoing.finish(1)
    incoming.wait(WAIT_S)
    outgoing.wait(WAIT_S)
    incoming.released.wait(WAIT_S)
    outgoing.released.wait(WAIT_S)


def _sample(transfers: int, sides: tuple[Node, Node]) -> Sample:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    reports = [side.report() for side in sides]
    held = sum(sum(report.sending.values()) + sum(report.receiving.values()) for report in reports)
    return Sample(
        transfers,
        int(fields["VmRSS"].split()[0]),
        len(os.listdir("/proc/self/fd")),
        int(fields["Threads"]),
        held,
        max(side.longest_absence_s() for side in sides),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transfers", type=positive, default=100_000, metavar="N")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="mapped")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a transfer failed, or descriptors, threads or held entries grew after the first tenth."""
    return harness.run("soak", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    make = TRANSPORTS[args.transport]
    sides = Node("soak-sender", LAYOUT, transports=[make()]), Node("soak-receiver", LAYOUT, transports=[make()])
    samples: list[Sample] = []
    step = max(1, args.transfers // 10)
    started_s = time.monotonic()
    task = progress.add_task("transfers", total=args.transfers)
    try:
        for index in range(args.transfers):
            _transfer(*sides, index)
            if (index + 1) % step == 0:
                samples.append(_sample(index + 1, sides))
                progress.update(task, completed=index + 1)
    finally:
        for side in sides:
            side.close()
    per_s = args.transfers / (time.monotonic() - started_s)
    first, last = samples[0], samples[-1]
    grown = [name for name in ("descriptors", "threads", "held") if getattr(last, name) > getattr(first, name)]
    longest_s = max(sample.absence_s for sample in samples)
    slope = (last.rss_kib - first.rss_kib) * 1024 / max(1, last.transfers - first.transfers)
    table = TextTable(
        ("transfers", "RSS MiB", "descriptors", "threads", "held", "absence ms"),
        f"{args.transfers} transfers over {args.transport}, {per_s:.0f} per second",
        num_left=0,
    )
    for sample in samples:
        numbers = map(str, (sample.descriptors, sample.threads, sample.held))
        table.add(str(sample.transfers), f"{sample.rss_kib / 1024:.1f}", *numbers, f"{sample.absence_s * 1e3:.1f}")
    return BenchReport(
        {
            "transport": args.transport,
            "per_s": per_s,
            "rss_bytes_per_transfer": slope,
            "longest_absence_s": longest_s,
            "samples": samples,
        },
        [
            table,
            f"memory: {slope:.1f} bytes per transfer after the first tenth; grown: {', '.join(grown) or 'nothing'}; "
            f"longest absence of a loop: {longest_s * 1e3:.1f} ms",
        ],
        ok=not grown,
    )
