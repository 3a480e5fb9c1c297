"""`pdlink plan`: its options. `planning.py` does it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdlink.commands.parser import positive, positive_float
from pdlink.config.proxy import DEFAULT_POLICIES

DESCRIPTION = """\
How many prefill and decode workers your traffic needs, and whether P/D pays. Computes the ratio in closed form, then
simulates splits behind the proxy's own policies: the highest rate at which each keeps the promised TTFT and time per
token. docs/deploy.md says what is modelled.

  pdlink plan trace.jsonl --workers 24 --ttft 2 --per-token 0.02
  pdlink plan trace.csv --curves curves.json --rate 40
  pdlink plan --prompt 50:1020,90:2800,99:4142 --answer 50:129,90:450,99:601 --rate 5.5
  pdlink plan decisions.jsonl --live http://127.0.0.1:8000
"""
EPILOG = """\
traces: Mooncake's JSON lines, the proxy's decision_log, Azure's CSV.
curves: what `pdlink bench curves` measured; without, roughly an 8B model on an H100.

exit status: 0 a split keeps the promise, 1 no split does, 2 wrong usage or files
"""
MOST_WORKERS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink plan`."""
    add = parser.add_argument
    add("trace", nargs="?", type=Path, metavar="TRACE", help="file of requests; without one, --prompt and --answer")
    add("--prompt", type=_quantiles, metavar="P:TOKENS,...", help="percentiles of prompt lengths: 50:1000,99:8000")
    add("--answer", type=_quantiles, metavar="P:TOKENS,...", help="percentiles of answer lengths")
    add("--rate", type=positive_float, metavar="PER_S", help="requests per second to serve (the trace's)")
    add("--workers", type=_workers, metavar="N", help="workers to split (the fewest that serve the rate)")
    add("--ttft", type=positive_float, default=2.0, metavar="S", help="promised TTFT (%(default)s)")
    text = "promised time per token after the first (%(default)s)"
    add("--per-token", type=positive_float, default=0.03, metavar="S", help=text)
    add(
        "--share",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="share of requests that must meet both (%(default)s)",
    )
    add("--curves", type=Path, metavar="FILE", help="speeds of a worker: a file of `pdlink bench curves`")
    add("--link", type=positive_float, metavar="GB_PER_S", help="speed of a prefill worker's link (the curves')")
    add("--kv-bytes", type=positive_float, metavar="BYTES", help="KV of one token (the curves')")
    text = "tokens whose KV the tiers keep, for prompts with equal beginnings (none)"
    add("--cache-tokens", type=positive, metavar="TOKENS", help=text)
    add("--requests", type=positive, default=12_000, metavar="N", help="number of simulated requests (%(default)s)")
    add("--as-traced", action="store_true", help="requests arrive as in the trace, not at random")
    text = "placement policy, one for both or PREFILL,DECODE (%(default)s)"
    add("--policy", default=",".join(DEFAULT_POLICIES.values()), metavar="NAME", help=text)
    add("--seed", type=int, default=1, help="seed of random draws (%(default)s)")
    text = "running proxy: take its rate and number of workers, and compare its times"
    add("--live", metavar="URL", help=text)
    add("--live-s", type=positive_float, default=10.0, metavar="S", help="seconds to watch it (%(default)s)")
    add("--key-file", metavar="FILE", help="file with one of the proxy's API keys")
    add(
        "--json", type=Path, metavar="FILE", help="write all results here; - is standard output, instead of the table"
    )


def _quantiles(text: str) -> dict[float, float]:
    found = {}
    for pair in text.split(","):
        percent, _, tokens = pair.partition(":")
        found[float(percent)] = positive_float(tokens)
        if not 0 <= float(percent) <= 100:
            raise argparse.ArgumentTypeError(f"takes percentiles from 0 to 100, not {percent}")
    return found


def _workers(text: str) -> int:
    value = int(text)
    if not 2 <= value <= MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"must be from 2 to {MOST_WORKERS}, not {value}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """1 if no split keeps the promise."""
    from pdlink.commands import planning

    return planning.run(args)
