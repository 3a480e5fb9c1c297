"""`pdlink bench sharing`: many transfers at once over one link, and who waits for whom.

Transfers of very different lengths come at random, at a share of what the link can carry. The same trace is played
with every order, in turns: `at once` hands everything to the transport as it comes, `fcfs` and `shortest` keep a
window (`pdlink/endpoint/order.py`). What counts is the time from a transfer's offer to its being ready.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdlink.config import SharingConfig

from . import harness, plot
from .harness import SETUP_TIMEOUT_S, Report, Table, check, opened, positive
from .measure import median_ratio
from .traffic import Arrival, Decode, Prefill, Shape, trace
from .transfer import TRANSPORTS
from .workers import Worker

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

    from pdlink.transport.base import Transport

PLAY_TIMEOUT_S = 120.0
ORDERS = {
    "at once": SharingConfig(order="fcfs", window_nbytes=1 << 60, peer_window_nbytes=1 << 60, part_nbytes=1 << 60),
    "fcfs": SharingConfig(order="fcfs"),
    "shortest": SharingConfig(),
}


@dataclass(frozen=True, slots=True)
class Settings:
    transfers: int = 100
    load: float = 0.9
    """Share of the link's capacity that the trace asks for."""
    rounds: int = 12
    seed: int = 1


@dataclass(slots=True)
class Played:
    gb_per_s: float = 0.0
    """Of long transfers, one after the other: the capacity that `load` is a share of."""
    ready_s: dict[str, list[list[float]]] = field(default_factory=dict)
    """By order, one list per round: seconds from offer to ready, by number of the transfer."""
    num_tokens: list[list[int]] = field(default_factory=list)
    """One list per round: length of each transfer."""

    def figures(self, order: str) -> dict[str, float]:
        """Milliseconds over all rounds."""
        all_ms = np.concatenate([np.array(seconds) for seconds in self.ready_s[order]]) * 1e3
        tokens = np.concatenate([np.array(lengths) for lengths in self.num_tokens])
        longest = np.argsort(tokens, kind="stable")[-max(1, len(tokens) // 10) :]
        return {
            "mean": float(all_ms.mean()),
            "p50": float(np.percentile(all_ms, 50)),
            "p99": float(np.percentile(all_ms, 99)),
            "longest": float(all_ms.max()),
            "mean of the longest tenth": float(all_ms[longest].mean()),
        }

    def ratio(self, order: str, to: str = "fcfs") -> float:
        """Mean time to ready beside that of another order; median over the rounds."""
        return median_ratio(*([float(np.mean(seconds)) for seconds in self.ready_s[name]] for name in (order, to)))


class Lane(harness.Lane):
    """The processes of one transport: a sender for each order, and one receiver."""

    def __init__(self, name: str, make_transport: Callable[[], Transport], shape: Shape, settings: Settings) -> None:
        self.shape, self.settings = shape, settings
        self.played = Played()
        self._senders = {
            order: Worker(f"{name} sender {order}", Prefill, f"prefill-{index}", shape, make_transport, sharing)
            for index, (order, sharing) in enumerate(ORDERS.items())
        }
        self._receiver = Worker(f"{name} receiver", Decode, "decode", shape, make_transport)
        super().__init__(*self._senders.values(), self._receiver)
        self._addresses: dict[str, str] = {}
        self._num_names = 0

    def open(self) -> None:
        for worker in self.workers:
            worker.open()
        for worker in self._senders.values():
            worker.tell("address")

    def connect(self) -> None:
        self._addresses = {order: worker.answer(SETUP_TIMEOUT_S) for order, worker in self._senders.items()}
        for order in ORDERS:
            self._stream(order, 2)  # sessions, page faults
        self.played.gb_per_s = max(self._stream("fcfs", 6) for _ in range(3))
        check(self._receiver)

    def play(self, round_: int) -> None:
        """One trace with every order, in turns."""
        settings, shape = self.settings, self.shape
        tokens_per_s = settings.load * self.played.gb_per_s * 1e9 / shape.layout.token_nbytes
        orders = list(ORDERS)
        for index in range(len(orders)):
            order = orders[(index + round_) % len(orders)]
            arrivals = trace(self._name(), settings.seed + round_, settings.transfers, shape.max_tokens, tokens_per_s)
            self._publish(order, [(arrival.transfer_id, arrival.num_tokens) for arrival in arrivals])
            self.played.ready_s.setdefault(order, []).append(self._play(order, arrivals))
            check(self._receiver)
        self.played.num_tokens.append([arrival.num_tokens for arrival in arrivals])

    def _play(self, order: str, arrivals: Sequence[Arrival]) -> list[float]:
        seconds: list[float] = self._receiver.ask(
            "play", self._addresses[order], arrivals, PLAY_TIMEOUT_S, timeout_s=2 * PLAY_TIMEOUT_S
        )
        return seconds

    def _stream(self, order: str, count: int) -> float:
        transfers = [(self._name(), self.shape.max_tokens // 4) for _ in range(count)]
        self._publish(order, transfers)
        address = self._addresses[order]
        seconds: float = self._receiver.ask(
            "stream", address, transfers, PLAY_TIMEOUT_S, timeout_s=2 * PLAY_TIMEOUT_S
        )
        return count * (self.shape.max_tokens // 4) * self.shape.layout.token_nbytes / seconds / 1e9

    def _publish(self, order: str, transfers: Sequence[tuple[str, int]]) -> None:
        self._senders[order].ask("publish", transfers, timeout_s=SETUP_TIMEOUT_S)

    def _name(self) -> str:
        self._num_names += 1
        return f"t{self._num_names}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how, shape = Settings(), Shape()
    parser.add_argument(
        "--transport", action="append", choices=sorted(TRANSPORTS), help="repeatable (mapped and tcp)"
    )
    parser.add_argument(
        "--transfers", type=positive, default=how.transfers, metavar="N", help="per trace (%(default)s)"
    )
    parser.add_argument("--load", type=float, default=how.load, help="share of the link's capacity (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=how.rounds, help="traces (default %(default)s)")
    parser.add_argument("--seed", type=int, default=how.seed, help="of the first trace (default %(default)s)")
    parser.add_argument(
        "--layers", type=positive, default=shape.num_layers, help="of the model (default %(default)s)"
    )
    parser.add_argument("--heads", type=positive, default=shape.num_heads, help="KV heads (default %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=shape.max_tokens, help="longest prompt (%(default)s)")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a transport failed, 2 if there is not enough memory."""
    return harness.run("sharing", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    settings = Settings(args.transfers, args.load, args.rounds, args.seed)
    shape = Shape(args.layers, args.heads, max_tokens=args.max_tokens)
    harness.check_memory(shape.layout.extent(0) * (len(ORDERS) + 1), "fewer --max-tokens")
    lanes = {name: Lane(name, TRANSPORTS[name], shape, settings) for name in args.transport or ("mapped", "tcp")}
    for name, lane in lanes.items():
        task = progress.add_task(name, total=settings.rounds)
        with opened([lane]):  # each by itself: it is the whole link that is shared
            for round_ in range(settings.rounds):
                lane.attempt(lane.play, round_)
                progress.advance(task)
    good = {name: lane.played for name, lane in lanes.items() if not lane.stopped}
    figures = {name: {order: played.figures(order) for order in ORDERS} for name, played in good.items()}
    return Report(
        {
            "settings": settings,
            "shape": shape,
            "orders": {order: sharing.model_dump() for order, sharing in ORDERS.items()},
            "transports": {name: asdict(played) | {"figures_ms": figures[name]} for name, played in good.items()},
        },
        [_orders(good, settings, shape)],
        _panels(good),
        f"lognormal lengths up to {shape.max_tokens} tokens",
        {name: lane.measured for name, lane in lanes.items()},
    )


def _orders(results: dict[str, Played], settings: Settings, shape: Shape) -> Table:
    columns = ("mean", "p50", "p99", "longest", "mean of the longest tenth")
    table = Table(
        ("transport", "order", *columns, "mean, of fcfs"),
        f"time to ready in ms: {settings.transfers} lognormal transfers of up to {shape.max_tokens} "
        f"tokens ({shape.layout.token_nbytes // 1024} KiB each), {settings.load:.0%} of the link",
        num_left=2,
    )
    for name, played in results.items():
        for order in ORDERS:
            figures = played.figures(order)
            numbers = [f"{figures[column]:.1f}" for column in columns]
            table.add(f"{name} {played.gb_per_s:.1f} GB/s", order, *numbers, f"{played.ratio(order):.2f}")
    return table


def _panels(results: dict[str, Played]) -> list[plot.Panel]:
    percentiles = [1, 10, 25, 50, 75, 90, 95, 99]
    panels: list[plot.Panel] = []
    for name, played in results.items():
        lines = []
        for order, rounds in played.ready_s.items():
            all_ms = np.concatenate([np.array(seconds) for seconds in rounds]) * 1e3
            lines.append(plot.Line(order, percentiles, np.percentile(all_ms, percentiles).tolist()))
        panels.append(plot.Lines(f"{name}: time to ready", "percentile", "ms", lines, log_y=True))
    return panels
