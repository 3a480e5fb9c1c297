"""`pdlink bench soak`: very many tiny transfers in a row, and what they leave behind.

Two endpoints in this process, joined by a real control connection and a real transport, move the KV of a few tokens
over and over. A link that leaks a descriptor, a thread, a table entry or memory per transfer dies after days in
production (one site's after 92,700 transfers, nixl#1722); here it shows as a slope.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdlink.config import TimeoutConfig
from pdlink.endpoint.driver import Endpoint
from pdlink.errors import TransferFailed
from pdlink.kv.layout import paged_layout
from pdlink.kv.plan import warm_up
from pdlink.memory.buffers import Buffer
from pdlink.memory.host import host_id
from pdlink.protocol.messages import VERSION, Identity

from .measure import machine_facts
from .transfer import TRANSPORTS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pdlink.transport.base import Transport

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


class _Side:
    def __init__(self, name: str, make_transport: Callable[[], Transport]) -> None:
        self.buffer = Buffer(LAYOUT.extent(0))
        transport = make_transport()
        transport.open()
        transport.register(self.buffer)
        identity = Identity(VERSION, "soak", "main", 1, LAYOUT, host_id())
        self.endpoint = Endpoint(name, identity, [transport], TimeoutConfig())
        self.endpoint.open("127.0.0.1", 0)

    def close(self) -> None:
        self.endpoint.close()
        self.buffer.close()


class _Handler:
    """Waits for both ends of one transfer."""

    def __init__(self) -> None:
        self._released, self._sent = threading.Event(), threading.Event()
        self.problem = ""

    def ready(self, first_token: int) -> None: ...

    def failed(self, reason: str) -> None:
        self.problem = reason

    def released(self) -> None:
        self._released.set()

    def sent(self) -> None:
        self._sent.set()

    def wait(self) -> None:
        if not (self._released.wait(WAIT_S) and self._sent.wait(WAIT_S)) or self.problem:
            raise TransferFailed(self.problem or f"a transfer did not end within {WAIT_S} s")


def _transfer(sender: _Side, receiver: _Side, index: int) -> None:
    name, handler = f"soak-{index}", _Handler()
    out, into = sender.endpoint.sender, receiver.endpoint.receiver
    out.announce(name, handler.failed, handler.sent)
    into.expect(name, sender.endpoint.address, handler)
    into.offer(name, [index % 64], 0, NUM_TOKENS)
    out.publish(name, [(index * 7) % 64], NUM_TOKENS, 0)
    for layer in range(NUM_LAYERS):
        out.layer_ready(name, layer, 0, NUM_TOKENS)
    out.finish(name, 1)
    handler.wait()


def _sample(transfers: int, sides: tuple[_Side, _Side]) -> Sample:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    held = sum(sum(side.endpoint.sender.states().values()) for side in sides)
    held += sum(sum(side.endpoint.receiver.states().values()) for side in sides)
    return Sample(
        transfers,
        int(fields["VmRSS"].split()[0]),
        len(os.listdir("/proc/self/fd")),
        int(fields["Threads"]),
        held,
        max(side.endpoint.take_longest_absence_s() for side in sides),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pdlink bench soak`."""
    parser.add_argument("--transfers", type=int, default=100_000, metavar="N")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="mapped")
    parser.add_argument("--json", metavar="FILE", help="write every sample and the machine's facts here")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if a transfer failed, or descriptors, threads or held entries grew after the first tenth."""
    warm_up()
    facts = machine_facts()
    sides = _Side("soak-sender", TRANSPORTS[args.transport]), _Side("soak-receiver", TRANSPORTS[args.transport])
    samples: list[Sample] = []
    step = max(1, args.transfers // 10)
    console = Console()
    started_s = time.monotonic()
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("transfers", total=args.transfers)
            for index in range(args.transfers):
                _transfer(*sides, index)
                if (index + 1) % step == 0:
                    samples.append(_sample(index + 1, sides))
                    progress.update(task, completed=index + 1)
    finally:
        for side in sides:
            side.close()
    took_s = time.monotonic() - started_s
    table = Table(title=f"{args.transfers} transfers over {args.transport}, {args.transfers / took_s:.0f} per second")
    for column in ("transfers", "RSS MiB", "descriptors", "threads", "held", "absence ms"):
        table.add_column(column, justify="right")
    for sample in samples:
        rss = f"{sample.rss_kib / 1024:.1f}"
        absence = f"{sample.absence_s * 1e3:.1f}"
        table.add_row(*map(str, (sample.transfers, rss, sample.descriptors, sample.threads, sample.held, absence)))
    console.print(table)
    first, last = samples[0], samples[-1]
    grown = [name for name in ("descriptors", "threads", "held") if getattr(last, name) > getattr(first, name)]
    longest_s = max(sample.absence_s for sample in samples)
    slope = (last.rss_kib - first.rss_kib) * 1024 / max(1, last.transfers - first.transfers)
    console.print(
        f"memory: {slope:.1f} bytes per transfer after the first tenth; grown: {', '.join(grown) or 'nothing'}; "
        f"longest absence of a loop: {longest_s * 1e3:.1f} ms"
    )
    if args.json:
        result = {
            "machine": facts,
            "transport": args.transport,
            "per_s": args.transfers / took_s,
            "rss_bytes_per_transfer": slope,
            "longest_absence_s": longest_s,
            "samples": [asdict(sample) for sample in samples],
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if grown else 0
