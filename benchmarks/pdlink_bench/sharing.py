"""`pdlink bench sharing`: many transfers at once over one link, and who waits for whom.

Two questions, each answered by turns in one run, so that what disturbs the machine disturbs both sides of a ratio.

*Order.* Transfers of very different lengths come at random, at a share of what the link can carry. The same trace is
played with every order: `at once` hands everything to the transport as it comes, `fcfs` and `shortest` keep a window
(`pdlink/endpoint/order.py`). What counts is the time from a transfer's offer to its being ready.

*Peers.* One receiver takes transfer after transfer, while a second one that has asked for a lot is stopped, or runs a
tenth of the time only. What counts is how fast the first one is, compared with being alone. (Not where a receiver
takes no part in a transfer, as with mapped memory: stopping it stops nothing there.)
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdlink.config import SharingConfig
from pdlink.errors import ConfigError

from . import harness, plot
from .harness import SETUP_TIMEOUT_S, Report, Table, opened, positive
from .measure import available_memory_nbytes, median_ratio, summarise
from .traffic import MIXES, Arrival, Decode, Prefill, Shape, trace
from .transfer import TRANSPORTS
from .workers import Worker, WorkerFailed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from rich.progress import Progress

    from pdlink.transport.base import Transport

PLAY_TIMEOUT_S = 120.0
ORDERS = {
    "at once": SharingConfig(order="fcfs", window_nbytes=1 << 60, peer_window_nbytes=1 << 60, part_nbytes=1 << 60),
    "fcfs": SharingConfig(order="fcfs"),
    "shortest": SharingConfig(),
}
NEEDS_RECEIVER = ("tcp", "ucx-tcp")
OTHERS = {"alone": None, "slow": 0.1, "stopped": 0.0}
"""What the second receiver does meanwhile: nothing, or running this share of the time."""
SLICE_S = 0.02
"""How long a slow receiver runs and is stopped, taken together."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How it is measured."""

    mix: str = "lognormal"
    transfers: int = 100
    load: float = 0.9
    """Share of the link's capacity that the trace asks for."""
    rounds: int = 12
    seed: int = 1


@dataclass(slots=True)
class Played:
    """What one transport did."""

    gb_per_s: float = 0.0
    """Of long transfers, one after the other: the capacity that `load` is a share of."""
    ready_s: dict[str, list[list[float]]] = field(default_factory=dict)
    """By order, one list per round: seconds from offer to ready, by number of the transfer."""
    num_tokens: list[list[int]] = field(default_factory=list)
    """One list per round: length of each transfer."""
    beside_gb_per_s: dict[str, list[float]] = field(default_factory=dict)
    """By what the second receiver did, one value per round: speed of the first."""

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

    def beside(self, other: str) -> float:
        """Speed of the first receiver beside that of being alone; median over the rounds."""
        return median_ratio(self.beside_gb_per_s[other], self.beside_gb_per_s["alone"])


class Lane(harness.Lane):
    """The processes of one transport: a sender for each order, and two receivers."""

    def __init__(self, name: str, make_transport: Callable[[], Transport], shape: Shape, settings: Settings) -> None:
        self.shape, self.settings = shape, settings
        self.played = Played()
        self._senders = {
            order: Worker(f"{name} sender {order}", Prefill, f"prefill-{index}", shape, make_transport, sharing)
            for index, (order, sharing) in enumerate(ORDERS.items())
        }
        self._receivers = [
            Worker(f"{name} receiver {index}", Decode, f"decode-{index}", shape, make_transport) for index in range(2)
        ]
        super().__init__(*self._senders.values(), *self._receivers)
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
        self._check()

    def play(self, round_: int) -> None:
        """One trace with every order, in turns."""
        settings, shape = self.settings, self.shape
        tokens_per_s = settings.load * self.played.gb_per_s * 1e9 / shape.layout.token_nbytes
        orders = list(ORDERS)
        for index in range(len(orders)):
            order = orders[(index + round_) % len(orders)]
            arrivals = trace(
                self._name(), settings.seed + round_, settings.transfers, settings.mix, shape.max_tokens, tokens_per_s
            )
            self._publish(order, [(arrival.transfer_id, arrival.num_tokens) for arrival in arrivals])
            self.played.ready_s.setdefault(order, []).append(self._play(order, arrivals))
            self._check()
        self.played.num_tokens.append([arrival.num_tokens for arrival in arrivals])

    def stand_beside(self) -> None:
        """The first receiver streams, whatever the second one does."""
        for other, share in OTHERS.items():
            held = [(self._name(), self.shape.max_tokens) for _ in range(4)]
            if share is None:
                speed = self._stream("shortest", 6)
            else:
                self._publish("shortest", held)
                self._receivers[1].ask("hold", self._addresses["shortest"], held, timeout_s=SETUP_TIMEOUT_S)
                with _running(self._receivers[1], share):
                    speed = self._stream("shortest", 6)
                self._receivers[1].ask("held", PLAY_TIMEOUT_S, timeout_s=2 * PLAY_TIMEOUT_S)
            self.played.beside_gb_per_s.setdefault(other, []).append(speed)
            self._check()

    def _play(self, order: str, arrivals: Sequence[Arrival]) -> list[float]:
        seconds: list[float] = self._receivers[0].ask(
            "play", self._addresses[order], arrivals, PLAY_TIMEOUT_S, timeout_s=2 * PLAY_TIMEOUT_S
        )
        return seconds

    def _stream(self, order: str, count: int) -> float:
        transfers = [(self._name(), self.shape.max_tokens // 4) for _ in range(count)]
        self._publish(order, transfers)
        address = self._addresses[order]
        seconds: float = self._receivers[0].ask(
            "stream", address, transfers, PLAY_TIMEOUT_S, timeout_s=2 * PLAY_TIMEOUT_S
        )
        return count * (self.shape.max_tokens // 4) * self.shape.layout.token_nbytes / seconds / 1e9

    def _publish(self, order: str, transfers: Sequence[tuple[str, int]]) -> None:
        self._senders[order].ask("publish", transfers, timeout_s=SETUP_TIMEOUT_S)

    def _name(self) -> str:
        self._num_names += 1
        return f"t{self._num_names}"

    def _check(self) -> None:
        for receiver in self._receivers:
            if wrong := receiver.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S):
                raise WorkerFailed(f"wrong bytes: {wrong}")


@contextmanager
def _running(worker: Worker, share: float) -> Iterator[None]:
    """Let a worker run only this share of the time."""
    done = threading.Event()

    def toggle() -> None:
        while not done.wait(SLICE_S * (1 - share)):
            worker.resume()
            done.wait(SLICE_S * share)
            worker.suspend()

    worker.suspend()
    thread = threading.Thread(target=toggle)
    if share:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if share:
            thread.join()
        worker.resume()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench sharing`."""
    how, shape = Settings(), Shape()
    parser.add_argument(
        "--transport", action="append", choices=sorted(TRANSPORTS), help="repeatable (mapped and tcp)"
    )
    parser.add_argument("--mix", choices=sorted(MIXES), default=how.mix, help="lengths (default %(default)s)")
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
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a transport failed, 2 if there is not enough memory."""
    return harness.run("sharing", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    settings = Settings(args.mix, args.transfers, args.load, args.rounds, args.seed)
    shape = Shape(args.layers, args.heads, max_tokens=args.max_tokens)
    needed, available = shape.layout.extent(0) * (len(ORDERS) + 2), available_memory_nbytes()
    if available and needed > 0.9 * available:
        raise ConfigError(f"memory: needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free: try --max-tokens")
    lanes = {name: Lane(name, TRANSPORTS[name], shape, settings) for name in args.transport or ("mapped", "tcp")}
    for name, lane in lanes.items():
        task = progress.add_task(name, total=settings.rounds)
        with opened([lane]):  # each by itself: it is the whole link that is shared
            for round_ in range(settings.rounds):
                lane.attempt(lane.play, round_)
                if name in NEEDS_RECEIVER:
                    lane.attempt(lane.stand_beside)
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
        [_orders(good, settings, shape), _beside(good)],
        _panels(good),
        f"{settings.mix} lengths up to {shape.max_tokens} tokens",
        {name: lane.measured for name, lane in lanes.items()},
    )


def _orders(results: dict[str, Played], settings: Settings, shape: Shape) -> Table:
    columns = ("mean", "p50", "p99", "longest", "mean of the longest tenth")
    table = Table(
        ("transport", "order", *columns, "mean, of fcfs"),
        f"time to ready in ms: {settings.transfers} {settings.mix} transfers of up to {shape.max_tokens} "
        f"tokens ({shape.layout.token_nbytes // 1024} KiB each), {settings.load:.0%} of the link",
        num_left=2,
    )
    for name, played in results.items():
        for order in ORDERS:
            figures = played.figures(order)
            numbers = [f"{figures[column]:.1f}" for column in columns]
            table.add(f"{name} {played.gb_per_s:.1f} GB/s", order, *numbers, f"{played.ratio(order):.2f}")
    return table


def _beside(results: dict[str, Played]) -> Table:
    others = [other for other in OTHERS if other != "alone"]
    title = "speed of one receiver while another one is …, of its speed alone"
    table = Table(("transport", "alone GB/s", *others), title)
    for name, played in results.items():
        if played.beside_gb_per_s:
            alone = summarise(played.beside_gb_per_s["alone"]).median
            table.add(name, f"{alone:.2f}", *(f"{played.beside(other):.2f}" for other in others))
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
    groups = {
        name: [plot.Bar.of(other, summarise(speeds)) for other, speeds in played.beside_gb_per_s.items()]
        for name, played in results.items()
        if played.beside_gb_per_s
    }
    return [*panels, plot.Bars("one receiver, while another one is …", "GB/s", groups)] if groups else panels
