"""What this distribution adds to `pdlink`: the commands `bench` and `chaos` (entry points of `pdlink.commands`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdlink.commands.parser import add_log_behind, fill, no_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.commands.parser import Parser

BENCHMARKS: dict[str, str] = {
    "transfer": "push KV between two processes over every transport",
    "serving": "time to first token through prefill and decode, beside other connectors",
    "control": "what the control plane costs: latency, transfers per second, idle CPU",
    "tiers": "records on disk beside bare reads and writes of the same size, and a restart",
    "warm": "time to first token of a long prompt that was seen before, beside a new one",
    "agents": "time to first token of an agent's next turn, with sessions and without",
    "curves": "how long a server takes for prompts and decode steps, as a file for `pdlink plan`",
    "route": "routing policies of the proxy, in a simulated fleet",
    "proxy": "CPU of a routed request, beside other routers",
}
"""Modules here, each with `add_arguments(parser)` and `run(args)`."""


def add_bench(bench: Parser, argv: Sequence[str], *, whole: bool) -> None:
    """The benchmarks below `pdlink bench`. Options only of what argv names, or of all if whole: most need the
    planner or torch to be imported."""
    bench.description = (
        "Measure this machine and this link beside their limits. What each figure means: benchmarks/README.md."
    )
    bench.set_defaults(run=lambda _: no_command(bench))
    bench.commands = list(BENCHMARKS)
    benchmarks = bench.add_subparsers(metavar="BENCHMARK")
    for title, text in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(title, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_log_behind(benchmark)
        if whole or title in argv:
            module = importlib.import_module(f"pdlink_bench.{title}")
            module.add_arguments(benchmark)
            benchmark.set_defaults(run=module.run)


def add_chaos(chaos: Parser, argv: Sequence[str], *, whole: bool) -> None:
    """Options of `pdlink chaos`."""
    from pdlink_bench.chaos import command

    fill(chaos, command)
    chaos.set_defaults(run=command.run, words=list(argv))
