"""`pdlink bench route`: time to first token by routing policy, in a simulated fleet (`pdlink.plan.fleet`)."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, quantiles
from typing import TYPE_CHECKING

from pdlink.commands.parser import positive, positive_float
from pdlink.config.proxy import DEFAULT_POLICIES
from pdlink.plan.curves import Curves
from pdlink.plan.fleet import FAR, Simulation, at_load
from pdlink.plan.traffic import read_trace
from pdlink_proxy.policies.registry import POLICIES

from . import harness, plot
from .chats import conversations
from .harness import BenchReport, TextTable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from rich.progress import Progress

_DEFAULT = ",".join(DEFAULT_POLICIES.values())
_EVENTS = "events:"
FOR_EVER_S = 1e9
"""`Curves.grace_s` of engines whose answers are decode's alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench route`."""
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="as `pdlink plan` takes them; without it, synthetic chats"
    )
    parser.add_argument("--requests", type=positive, default=4000, help="of the trace; default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of synthetic chats and of --away; default %(default)s")
    parser.add_argument(
        "--fleet",
        action="append",
        type=_fleet,
        metavar="P+D",
        help="workers; several times; default 8+8 and 100+100",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="or PREFILL,DECODE, each also as events:… where workers publish what KV they have; several times; "
        "default all",
    )
    parser.add_argument(
        "--load", type=positive_float, default=0.8, help="of prefill, if nothing were cached; default %(default)s"
    )
    parser.add_argument(
        "--routers",
        type=positive,
        default=1,
        help="that share the fleet and know only their own; default %(default)s",
    )
    parser.add_argument("--slow", type=float, default=0.0, help="share of workers at half speed; default %(default)s")
    parser.add_argument(
        "--away",
        type=float,
        default=0.0,
        help="mean share of workers that fail or drain, for 20 s on average, by the seed; default %(default)s",
    )
    parser.add_argument(
        "--racks",
        type=positive,
        default=1,
        help=f"over which the workers are dealt out: KV takes {FAR} times as long between two, and times are those "
        "of decode's first token; default %(default)s",
    )
    harness.add_output_arguments(parser, draws=True)


def _fleet(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition("+")
    return positive(prefill), positive(decode)


def run(args: argparse.Namespace) -> int:
    """1 if a request was lost."""
    return harness.run("route", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    curves = Curves(grace_s=FOR_EVER_S if args.racks > 1 else 0.0)
    policies = args.policy or [*POLICIES, _DEFAULT, f"{_EVENTS}{_DEFAULT}"]
    requests = read_trace(args.trace, args.requests) if args.trace else conversations(args.requests, args.seed)
    what = requests.name
    fleets = args.fleet or [(8, 8), (100, 100)]
    how = f"load {args.load:g}, slow {args.slow:g}, away {args.away:g}, racks {args.racks}, "
    how += f"routers {args.routers}, seed {args.seed}"
    shown: list[str | TextTable] = [f"{what}: {len(requests)} requests, {how}"]
    kept: dict[str, dict[str, dict[str, float]]] = {}
    task = progress.add_task("route", total=len(fleets) * len(policies))
    for num_prefill, num_decode in fleets:
        name = f"{num_prefill}+{num_decode}"
        paced = at_load(requests, args.load, num_prefill, curves)
        table = TextTable(
            ("policy", "TTFT mean s", "p50 s", "p99 s", "cached", "place us", "requests/s", "failed legs"),
            f"{name} workers",
        )
        found = kept[name] = {}
        for policy in policies:
            prefill, _, decode = policy.removeprefix(_EVENTS).partition(",")
            publish = policy.startswith(_EVENTS)
            simulation = Simulation(
                (prefill, decode or prefill),
                num_prefill,
                num_decode,
                slow=args.slow,
                publish=publish,
                routers=args.routers,
                away=args.away,
                racks=args.racks,
                curves=curves,
                seed=args.seed,
            )
            outcome = simulation.run(paced)
            cuts = quantiles(outcome.ttft_s, n=100)
            found[policy] = row = {"mean_s": fmean(outcome.ttft_s), "p50_s": cuts[49], "p99_s": cuts[98]}
            row |= {"cached": outcome.cached, "place_us": outcome.place_us}
            row["simulated_per_s"] = len(requests) / outcome.cpu_s
            row |= {"failed_legs": outcome.failed_legs, "outages": outcome.outages}
            table.add(
                policy,
                *(f"{row[column]:.3f}" for column in ("mean_s", "p50_s", "p99_s")),
                f"{outcome.cached:.1%}",
                f"{outcome.place_us:.0f}",
                f"{row['simulated_per_s']:,.0f}",
                f"{outcome.failed_legs}",
            )
            progress.advance(task)
        shown.append(table)
    return BenchReport(
        {
            "seed": args.seed,
            "load": args.load,
            "slow": args.slow,
            "away": args.away,
            "racks": args.racks,
            "routers": args.routers,
            "fleets": kept,
        },
        shown,
        [_panel(row, kept) for row in ("mean_s", "p99_s")],
        f"{what}: {len(requests)} requests, {how}",
    )


def _panel(row: str, kept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> plot.Bars:
    groups = {
        f"{fleet} workers": [
            plot.PlottedBar(policy, found[row], found[row], found[row]) for policy, found in policies.items()
        ]
        for fleet, policies in kept.items()
    }
    return plot.Bars(f"time to first token, {row.removesuffix('_s')}", "s", groups)
