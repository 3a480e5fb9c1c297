"""`pdlink bench transfer`: push the KV of one sequence between two processes and say what limits it.

Every transport gets two processes of its own. All of them, peers and anchors where asked for, and the ceilings, take
turns in one run, because timings on a shared machine drift: what counts is the ratio of two columns, not a column.
Every byte of every transfer is checked at the receiver, outside of the timing.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pdlink.commands.parser import positive, positive_float
from pdlink.errors import ConfigError

from . import harness
from .report import report
from .rounds import Contestant, RoundSettings, measure
from .workload import BLOCK_16_TO_128, DEFAULT, ITEMSIZE, NHD_TO_HND, Workload, layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.progress import Progress

    from pdlink.transport.base import Transport

    from .harness import BenchReport


def _made(module: str, name: str, *args: object, **options: object) -> Transport:
    """Imported in the two processes of a transport only."""
    transport: Transport = getattr(importlib.import_module(module, __package__), name)(*args, **options)
    return transport


TRANSPORTS: Mapping[str, Callable[[], Transport]] = {
    # Tests run both ends of a benchmark in one process.
    "mapped": partial(_made, "pdlink.transport.mapped", "MappedTransport", within_process=True),
    "ucx-shm": partial(_made, "pdlink.transport.ucx", "UcxTransport", tls="shm"),
    "tcp": partial(_made, "pdlink.transport.tcp", "TcpTransport"),
    "ucx-tcp": partial(_made, "pdlink.transport.ucx", "UcxTransport", tls="tcp"),
}
"""What `--transport` offers."""

PEERS: Mapping[str, Mapping[str, Contestant]] = {
    "nixl": {
        "nixl-shm": Contestant(partial(_made, ".peers", "Nixl", "", True)),
        "nixl-tcp": Contestant(partial(_made, ".peers", "Nixl", "tcp", True)),
    },
    "nixl-polled": {
        "nixl-polled-shm": Contestant(partial(_made, ".peers", "Nixl", "", False)),
        "nixl-polled-tcp": Contestant(partial(_made, ".peers", "Nixl", "tcp", False)),
    },
    "mooncake": {"mooncake-tcp": Contestant(partial(_made, ".peers", "Mooncake"), asynchronous=False)},
}
"""What `--peers` offers."""

ANCHORS: Mapping[str, Contestant] = {
    "bare-put-shm": Contestant(partial(_made, ".anchors", "PutLoop", "shm"), asynchronous=False),
    "bare-put-tcp": Contestant(partial(_made, ".anchors", "PutLoop", "tcp"), asynchronous=False),
    "bare-sockets": Contestant(partial(_made, ".anchors", "SocketPair"), asynchronous=False),
}
"""What `--anchors` adds."""

LAYOUTS_ROUNDS = 5


PROCESS_NBYTES = 200_000_000
"""Of an interpreter with numpy, numba and a transport."""
MANY_RUNS = 1 << 17
"""More runs than this are for those who pack them. Peers and bare loops make a request of each: NIXL took 10 to 20 us
for one of 256 bytes (32,768 of them, on a busy machine), and in such runs the default workload has a million."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape, how = Workload(), RoundSettings()
    model = parser.add_argument_group("what is pushed", "the default is the KV of an 8B model with 8 KV heads")
    model.add_argument("--layers", type=positive, default=shape.num_layers, help="layers (default %(default)s)")
    model.add_argument("--heads", type=positive, default=shape.num_heads, help="KV heads (default %(default)s)")
    model.add_argument("--head-dim", type=positive, default=shape.head_dim, help="default %(default)s")
    model.add_argument(
        "--parts", type=positive, default=shape.num_parts, help="2 for K and V, 1 for MLA (%(default)s)"
    )
    model.add_argument("--dtype", choices=sorted(ITEMSIZE), default=shape.dtype, help="default %(default)s")
    model.add_argument("--tokens", type=positive, default=shape.num_tokens, help="default %(default)s")
    pages = parser.add_argument_group("where it lies")
    pages.add_argument(
        "--block-tokens",
        type=positive,
        default=shape.src_block_tokens,
        help="tokens per block, of both sides unless --dst-block-tokens is given (default %(default)s)",
    )
    pages.add_argument("--dst-block-tokens", type=positive, help="tokens per block of the destination")
    for side in ("src", "dst"):
        pages.add_argument(
            f"--{side}-order",
            default=shape.src_order,
            metavar="ORDER",
            help="axes, outermost first, of L(ayer) P(art) B(lock) T(oken) H(ead): LPBTH is NHD, LPBHT is HND, LBPTH "
            "has K and V of a block side by side (default %(default)s)",
        )
    pages.add_argument(
        "--pool-factor",
        type=positive,
        default=shape.pool_factor,
        help="size of each pool in sequences; the blocks are drawn from all of it (default %(default)s)",
    )
    pages.add_argument("--seed", type=int, default=shape.seed, help="of that draw (default %(default)s)")
    pages.add_argument("--layouts", action="store_true", help="go through pairs of layouts in one run")
    who = parser.add_argument_group("who takes part")
    who.add_argument(
        "--transport", action="append", choices=sorted(TRANSPORTS), help="repeatable (all that work here)"
    )
    who.add_argument(
        "--peers",
        type=_peers,
        default=[],
        metavar="NAME,...",
        help=f"of {', '.join(PEERS)}: where their wheels are installed",
    )
    who.add_argument("--anchors", action="store_true", help="bare loops over ucp_put and over a pair of sockets")
    who.add_argument(
        "--bars",
        action="store_true",
        help="whatever the bars need: --anchors --peers nixl, two layout pairs for mapped",
    )
    run_options = parser.add_argument_group("how it is measured")
    run_options.add_argument(
        "--layer-ms",
        type=positive_float,
        nargs="+",
        metavar="MS",
        help="pace of the simulated prefill, one column each (default 1 2.5 5, none with --layouts; 2.5 is an 8B "
        "model, 2,048 tokens and 400 TFLOP/s)",
    )
    run_options.add_argument("--rounds", type=positive, help=f"default {how.rounds}; {LAYOUTS_ROUNDS} with --layouts")
    run_options.add_argument("--warm-ups", type=positive, help=f"default {how.warm_ups}; 1 with --layouts")
    run_options.add_argument(
        "--timeout-s", type=positive_float, default=how.timeout_s, help="of one transfer (default %(default)s)"
    )
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if one of our transports failed or none worked, 2 for bad options; a peer that fails is only reported."""
    return harness.run("transfer", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    how = RoundSettings()
    contestants = _contestants(args)
    try:
        cases = _cases(args, _workload(args))
        nbytes = max(workload.src.extent(0) + workload.dst.extent(0) for workload in cases.values())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    needed = (nbytes + 2 * PROCESS_NBYTES) * (1 + len(contestants))  # the ceilings have pools, too
    harness.check_memory(needed, "fewer --tokens, a smaller --pool-factor or one --transport")
    few = [name for name, workload in cases.items() if workload.plan().num_runs <= MANY_RUNS]
    contestants = {
        name: one if name in TRANSPORTS else replace(one, cases=[case for case in one.cases or cases if case in few])
        for name, one in contestants.items()
    }
    settings = RoundSettings(
        tuple(args.layer_ms or (() if args.layouts else how.layer_ms)),
        args.rounds or (LAYOUTS_ROUNDS if args.layouts else how.rounds),
        args.warm_ups or (1 if args.layouts else how.warm_ups),
        args.timeout_s,
    )
    results = measure(cases, contestants, settings, progress)
    found = report(results, bars=args.bars)
    foreign = {name for some in (*PEERS.values(), ANCHORS) for name in some}
    found.problems = {
        name: replace(lane, failed=lane.failed and name not in foreign) for name, lane in found.problems.items()
    }
    ours = [lane for case in results.cases.values() for name, lane in case.transports.items() if name in TRANSPORTS]
    found.ok = not all(lane.problem for lane in ours)
    return found


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        num_layers=args.layers,
        num_parts=args.parts,
        num_heads=args.heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        num_tokens=args.tokens,
        src_block_tokens=args.block_tokens,
        dst_block_tokens=args.dst_block_tokens or args.block_tokens,
        src_order=args.src_order,
        dst_order=args.dst_order,
        pool_factor=args.pool_factor,
        seed=args.seed,
    )


def _cases(args: argparse.Namespace, base: Workload) -> dict[str, Workload]:
    every = layouts(base)
    if args.layouts:
        return every
    return {name: every[name] for name in (DEFAULT, *((NHD_TO_HND, BLOCK_16_TO_128) if args.bars else ()))}


def _contestants(args: argparse.Namespace) -> dict[str, Contestant]:
    others = {who: one for name in [*args.peers, *["nixl"] * args.bars] for who, one in PEERS[name].items()}
    if args.anchors or args.bars:
        others |= ANCHORS
    # Only mapped needs the other layouts for the bars; everybody else would only take time and memory.
    taken = [DEFAULT] if args.bars and not args.layouts else None
    ours = {name: Contestant(TRANSPORTS[name]) for name in args.transport or TRANSPORTS}
    return {name: one if name == "mapped" else replace(one, cases=taken) for name, one in (ours | others).items()}


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no peer {name!r}, there are {', '.join(PEERS)}")
    return names
