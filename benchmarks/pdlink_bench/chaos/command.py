"""`pdlink chaos`: its flags, and the deployment they describe."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pdlink.config import WorkerConfig, load, parse_assignments
from pdlink.errors import ConfigError
from pdlink_bench.chaos import report
from pdlink_bench.chaos.run import RunSettings, run_local, run_remote
from pdlink_bench.chaos.schedule import Kind
from pdlink_bench.chaos.tamper import LinkFaults

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DESCRIPTION = """\
Send requests with known answers, inject faults meanwhile, and judge every answer. Without --url it starts its own
deployment on this machine: it kills, stops, drains and restarts the processes, fills their pools, drops, repeats and
delays their messages, and slows their link. With --url it sends load, bad requests, bursts and clients that leave to
a running proxy, and harms nothing.

The verdict: requests sent, answered right, answered with an explicit error, wrong (must be 0), unsettled at their
deadline (must be 0), leaked blocks (must be 0), longest silence. Exit status 0 if all is well, 1 if not.
"""

EPILOG = """\
examples:
  pdlink chaos                                     1 prefill, 2 decode, a minute, a fault every 5 s
  pdlink chaos --prefill 2 --decode 2 --minutes 10 --transport ucx --ucx-tls tcp --seed 7
  pdlink chaos --seed 7                            the same faults at the same times as before
  pdlink chaos --faults kill --every 2             nothing but SIGKILL
  pdlink chaos --blocks 48                         a pool that is too small for the load
  pdlink chaos --faults lost,duplicated,late --drop 0.01    only faults of the control channel
  pdlink chaos --url http://127.0.0.1:8000         load and bad clients only
"""

TIMEOUTS: dict[str, float] = {
    "peer_s": 2.5,
    "request_s": 15.0,
    "drain_s": 4.0,
}
"""Short, so that a short run sees them all. --set timeouts.KEY=VALUE changes one."""

STEADY: dict[Kind, tuple[str, float]] = {
    Kind.LOST: ("drop", 0.002),
    Kind.DUPLICATED: ("duplicate", 0.02),
    Kind.LATE: ("delay_s", 0.02),
    Kind.SLOW: ("link_nbytes_per_s", 8 * 2**20),
}
"""Field of `LinkFaults` and its value, for permanent kinds. A link of 8 MiB a second takes half a second
for the longest prompt of the load."""

FULL_BLOCKS = 192
"""Blocks of a pool that should run full: five of the longest requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", metavar="URL", help="base URL of a proxy that is there already; nothing is killed")
    add("--prefill", type=int, default=1, metavar="N", help="prefill workers to start (1)")
    add("--decode", type=int, default=2, metavar="N", help="decode workers to start (2)")
    add("--transport", default="auto", metavar="KIND", help="auto, mapped, ucx or tcp (auto)")
    add("--ucx-tls", metavar="LANES", help="UCX transports: tcp, shm or a UCX_TLS list")
    add("--blocks", type=int, metavar="N", help="blocks in every worker's pool; a small one makes requests wait")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, metavar="S", help="length of the phase with faults (60)")
    length.add_argument("--minutes", type=float, metavar="M", help="the same in minutes")
    add("--every", type=float, default=5.0, metavar="S", help="one fault in every S seconds (5)")
    add(
        "--faults", default=",".join(kind.value for kind in Kind), metavar="LIST", help="%(default)s, or some of them"
    )
    add("--concurrency", type=int, default=8, metavar="N", help="clients that send one request after the other (8)")
    add("--rate", type=float, metavar="R", help="requests per second at most, over all clients")
    add("--seed", type=int, default=0, metavar="N", help="of faults, requests and lost messages (0)")
    add("--drop", type=float, metavar="P", help="share of control messages that are lost (0.002)")
    add("--duplicate", type=float, metavar="P", help="share of control messages that come twice (0.02)")
    add("--delay", type=float, metavar="S", help="most seconds a control message is late (0.02)")
    add("--link", type=float, metavar="MIB", help="MiB of KV a second that cross a slow link (8)")
    add("--deadline", type=float, default=120.0, metavar="S", help="with --url: a request is settled by then (120)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the started workers")
    add("--clean", type=float, default=6.0, metavar="S", help="seconds of load before the first fault (6)")
    add("--calm", type=float, default=15.0, metavar="S", help="seconds of load after the last fault (15)")
    add("--json", metavar="FILE", help="write the verdict there; - is standard output")
    add("--quiet", action="store_true", help="no live table")


_OF_ITS_OWN = ("prefill", "decode", "transport", "ucx_tls", "blocks", "drop", "duplicate", "delay", "link", "set")
"""Flags of the started deployment."""


def run(args: argparse.Namespace) -> int:
    """Run it; 0 if the verdict is ok, 1 if not. Raises ConfigError for flags that exclude each other."""
    seconds = args.minutes * 60 if args.minutes is not None else 60.0 if args.seconds is None else args.seconds
    plan = RunSettings(
        command="pdlink " + shlex.join(_without_file(args.words)),
        seed=args.seed,
        seconds=seconds,
        every_s=args.every,
        concurrency=args.concurrency,
        rate=args.rate,
        clean_s=args.clean,
        calm_s=args.calm,
        kinds=_kinds(args.faults),
        quiet=args.quiet,
    )
    if min(seconds, args.every, args.clean, args.concurrency, args.prefill, args.decode) <= 0:
        raise ConfigError("--seconds, --every, --clean, --concurrency, --prefill and --decode must be above 0")
    if args.url is not None:
        given = [name for name in _OF_ITS_OWN if getattr(args, name) != args.parser.get_default(name)]
        idle = [f"--{name.replace('_', '-')}" for name in given]
        if idle:
            raise ConfigError(f"{', '.join(idle)}: of workers that it starts, and with --url it starts none")
        verdict = asyncio.run(run_remote(plan, args.url.rstrip("/"), args.deadline))
    else:
        prefill, decode = (_worker(args, role) for role in ("prefill", "decode"))
        verdict = asyncio.run(run_local(plan, prefill, decode, args.prefill, args.decode, _faults(args)))
    Console(stderr=args.json == "-").print(report.final(verdict))
    if args.json is not None:
        text = json.dumps(verdict.json(), indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    return 0 if verdict.ok else 1


def _without_file(words: Sequence[str]) -> Sequence[str]:
    """The command to repeat this run, without the output path."""
    at = words.index("--json") if "--json" in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def _kinds(text: str) -> Sequence[Kind]:
    try:
        return [Kind(name.strip()) for name in text.split(",")]
    except ValueError:
        known = ", ".join(kind.value for kind in Kind)
        raise ConfigError(f"--faults takes a list of {known}, got {text!r}") from None


def _worker(args: argparse.Namespace, role: str) -> WorkerConfig:
    """Settings of one role: short deadlines, the flags, then --set."""
    flags: dict[str, Any] = {"role": role, "transport.kind": args.transport, "transport.ucx.tls": args.ucx_tls}
    flags |= {f"timeouts.{key}": value for key, value in TIMEOUTS.items()}
    kinds = _kinds(args.faults)
    blocks = FULL_BLOCKS if args.blocks is None and Kind.FULL in kinds else args.blocks
    flags |= {"cache.num_blocks": blocks}
    flags = {key: value for key, value in flags.items() if value is not None}
    return load(WorkerConfig, flags=flags | parse_assignments(args.set))


def _faults(args: argparse.Namespace) -> LinkFaults:
    """Of all links, for as long as the deployment runs."""
    kinds = _kinds(args.faults)
    given = {"drop": args.drop, "duplicate": args.duplicate, "delay_s": args.delay}
    given["link_nbytes_per_s"] = None if args.link is None else args.link * 2**20
    found: dict[str, float] = {}
    for kind, (setting, usual) in STEADY.items():
        value = given[setting] if given[setting] is not None else usual
        found[setting] = value if kind in kinds or given[setting] is not None else 0.0
    return LinkFaults(seed=args.seed, **found)
