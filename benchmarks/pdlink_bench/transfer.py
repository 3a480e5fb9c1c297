"""`pdlink bench transfer`: push the KV of one sequence between two processes and say what limits it.

Every transport gets two processes of its own. All of them, peers and anchors where asked for, and the ceilings, take
turns in one run, because timings on a shared machine drift: what counts is the ratio of two columns, not a column.
Every byte of every transfer is checked at the receiver, outside of the timing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

from . import cases as sets
from . import harness
from .bars import BLOCK_16_TO_128, NHD_TO_HND
from .fitting import fitting, without_many_runs
from .harness import positive, positive_float
from .report import report
from .rounds import DEFAULT, Contestant, Settings, Stage, measure
from .workload import ITEMSIZE, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.progress import Progress

    from pdlink.transport.base import Transport

    from .harness import Report


def _mapped(threads: int = 2) -> Transport:
    from pdlink.transport.mapped import MappedTransport

    return MappedTransport(threads, within_process=True)  # tests run both ends of a benchmark in one


def _tcp() -> Transport:
    from pdlink.transport.tcp import TcpTransport

    return TcpTransport()


def _ucx_tcp() -> Transport:
    from pdlink.transport.ucx import UcxTransport

    return UcxTransport(tls="tcp")


def _ucx_shm() -> Transport:
    from pdlink.transport.ucx import UcxTransport

    return UcxTransport(tls="shm")


def _nixl(tls: str, progress_thread: bool) -> Transport:
    from .peers import Nixl

    return Nixl(tls, progress_thread)


def _mooncake() -> Transport:
    from .peers import Mooncake

    return Mooncake()


def _bare_puts(tls: str) -> Transport:
    from .anchors import PutLoop

    return PutLoop(tls)


def _bare_sockets() -> Transport:
    from .anchors import SocketPair

    return SocketPair()


TRANSPORTS: Mapping[str, Callable[[], Transport]] = {
    "mapped": _mapped,
    "ucx-shm": _ucx_shm,
    "tcp": _tcp,
    "ucx-tcp": _ucx_tcp,
}
"""What `--transport` offers. Each is loaded in its own two processes only."""

PEERS: Mapping[str, Mapping[str, Contestant]] = {
    "nixl": {
        "nixl-shm": Contestant(partial(_nixl, "", True)),
        "nixl-tcp": Contestant(partial(_nixl, "tcp", True)),
    },
    "nixl-polled": {
        "nixl-polled-shm": Contestant(partial(_nixl, "", False)),
        "nixl-polled-tcp": Contestant(partial(_nixl, "tcp", False)),
    },
    "mooncake": {"mooncake-tcp": Contestant(_mooncake, asynchronous=False)},
}
"""What `--peers` offers."""

ANCHORS: Mapping[str, Contestant] = {
    "bare-put-shm": Contestant(partial(_bare_puts, "shm"), asynchronous=False),
    "bare-put-tcp": Contestant(partial(_bare_puts, "tcp"), asynchronous=False),
    "bare-sockets": Contestant(_bare_sockets, asynchronous=False),
}
"""What `--anchors` adds."""

SWEEP_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench transfer`."""
    shape, how = Workload(), Settings()
    model = parser.add_argument_group("what is pushed", "the default is the KV of an 8B model with 8 KV heads")
    model.add_argument("--layers", type=positive, default=shape.num_layers, help="layers (default %(default)s)")
    model.add_argument("--heads", type=positive, default=shape.num_heads, help="KV heads (default %(default)s)")
    model.add_argument("--head-dim", type=positive, default=shape.head_dim, help="default %(default)s")
    model.add_argument(
        "--parts", type=positive, default=shape.num_parts, help="2 for K and V, 1 for MLA (default %(default)s)"
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
    pages.add_argument(
        "--sweep",
        choices=["sizes", "layouts", "all"],
        help="go through sizes from one block to 1 GiB, through pairs of layouts, or both, in one run",
    )
    pages.add_argument(
        "--largest",
        type=positive,
        default=sets.LARGEST_NBYTES >> 20,
        metavar="MIB",
        help="largest size of a sweep (default %(default)s)",
    )
    who = parser.add_argument_group("who takes part")
    who.add_argument(
        "--transport",
        action="append",
        choices=sorted(TRANSPORTS),
        help="repeat for several; without it, every one that works here",
    )
    who.add_argument(
        "--peers",
        type=_peers,
        default=[],
        metavar="NAME,...",
        help=f"of {', '.join(PEERS)}: where their wheels are installed",
    )
    who.add_argument(
        "--copy-threads",
        type=int,
        choices=(1, 2),
        nargs="+",
        help="adds mapped-1 or mapped-2: mapped with so many copying threads; mapped itself has two",
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
        help="pace of the simulated prefill, one column each (default 1 2.5 5, none in a sweep; 2.5 is an 8B model, "
        "2,048 tokens and 400 TFLOP/s)",
    )
    run_options.add_argument(
        "--rounds",
        type=positive,
        help=f"default {how.rounds}; in a sweep {SWEEP_ROUNDS} for layouts, for sizes as many as move 4 GiB, 4 to 12",
    )
    run_options.add_argument("--warm-ups", type=positive, help=f"default {how.warm_ups}, 1 in a sweep")
    run_options.add_argument(
        "--timeout-s",
        type=positive_float,
        default=how.timeout_s,
        help="deadline of one transfer, in proportion longer above 256 MiB (default %(default)s)",
    )
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if one of our transports failed or none worked, 2 for bad options; a peer that fails is only reported."""
    return harness.run("transfer", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    tell = partial(progress.console.print, highlight=False)
    try:
        base = _workload(args)
        contestants = _contestants(args)
        sizes, layouts = _cases(args, base)
        cases = fitting(sizes, layouts, contestants, tell)
        contestants = without_many_runs(contestants, cases, tell)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    stages = _stages(args, sizes, layouts)
    how = Settings()
    settings = Settings(
        tuple(args.layer_ms or (() if args.sweep else how.layer_ms)),
        stages[0].rounds,
        args.warm_ups or (1 if args.sweep else how.warm_ups),
        args.timeout_s,
    )
    results = measure(
        cases, contestants, settings, progress, stages, tell if progress.disable else lambda _text: None
    )
    found = report(results, sizes, bars=args.bars)
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


def _contestants(args: argparse.Namespace) -> dict[str, Contestant]:
    # Only mapped needs the other layouts for the bars; everybody else would only take time and memory.
    only_default = (DEFAULT,) if args.bars and not args.sweep else None
    names = args.transport or list(TRANSPORTS)
    found = {
        name: Contestant(TRANSPORTS[name], None if name == "mapped" else only_default)
        for name in dict.fromkeys(names)
    }
    for threads in args.copy_threads or ():
        found[f"mapped-{threads}"] = Contestant(partial(_mapped, threads), only_default)
    peers = dict.fromkeys([*args.peers, *(["nixl"] if args.bars else [])])
    others = {name: contestant for peer in peers for name, contestant in PEERS[peer].items()}
    if args.anchors or args.bars:
        others |= ANCHORS
    return found | {
        name: replace(contestant, cases=only_default, many_runs=False) for name, contestant in others.items()
    }


def _cases(args: argparse.Namespace, base: Workload) -> tuple[dict[str, Workload], dict[str, Workload]]:
    """Sizes and layouts to go through; the default workload is among the layouts."""
    sizes = sets.sizes(base, args.largest << 20) if args.sweep in ("sizes", "all") else {}
    if args.sweep in ("layouts", "all"):
        return sizes, sets.layouts(base)
    if args.bars:
        every = sets.layouts(base)
        return sizes, {name: every[name] for name in (DEFAULT, NHD_TO_HND, BLOCK_16_TO_128)}
    return sizes, {} if sizes else {DEFAULT: base}


def _stages(args: argparse.Namespace, sizes: Mapping[str, Workload], layouts: Mapping[str, Workload]) -> list[Stage]:
    """Layouts together, because they are compared with the default one; then each size alone."""
    rounds = args.rounds or (SWEEP_ROUNDS if args.sweep else Settings().rounds)
    stages = [Stage(tuple(layouts), rounds)] if layouts else []
    return stages + [Stage((name,), args.rounds or sets.rounds(workload)) for name, workload in sizes.items()]


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no peer {name!r}, there are {', '.join(PEERS)}")
    return names
