"""`pdlink bench transfer`: push the KV of one sequence between two processes and say what limits it.

Every transport gets two processes of its own. All of them, and the ceilings, take turns in one run, because timings
on a shared machine drift: what counts is the ratio of two columns, not a column. Every byte of every transfer is
checked at the receiver, outside of the timing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .measure import available_memory_nbytes
from .report import print_results
from .rounds import Settings, measure
from .workload import ITEMSIZE, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.transport.base import Transport


def _mapped() -> Transport:
    from pdlink.transport.mapped import MappedTransport

    return MappedTransport()


def _tcp() -> Transport:
    from pdlink.transport.tcp import TcpTransport

    return TcpTransport()


def _ucx_tcp() -> Transport:
    from pdlink.transport.ucx import UcxTransport

    return UcxTransport(tls="tcp")


def _ucx_shm() -> Transport:
    from pdlink.transport.ucx import UcxTransport

    return UcxTransport(tls="shm")


TRANSPORTS: Mapping[str, Callable[[], Transport]] = {
    "mapped": _mapped,
    "ucx-shm": _ucx_shm,
    "tcp": _tcp,
    "ucx-tcp": _ucx_tcp,
}
"""What `--transport` offers. Each is loaded in its own two processes only."""


def memory_needed_nbytes(workload: Workload, num_transports: int) -> int:
    """Pools of all processes together."""
    return (workload.src.extent(0) + workload.dst.extent(0)) * (num_transports + 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench transfer`."""
    shape, how = Workload(), Settings()
    model = parser.add_argument_group("what is pushed", "the default is the KV of an 8B model with 8 KV heads")
    model.add_argument("--layers", type=_positive, default=shape.num_layers, help="layers (default %(default)s)")
    model.add_argument("--heads", type=_positive, default=shape.num_heads, help="KV heads (default %(default)s)")
    model.add_argument("--head-dim", type=_positive, default=shape.head_dim, help="default %(default)s")
    model.add_argument(
        "--parts", type=_positive, default=shape.num_parts, help="2 for K and V, 1 for MLA (default %(default)s)"
    )
    model.add_argument("--dtype", choices=sorted(ITEMSIZE), default=shape.dtype, help="default %(default)s")
    model.add_argument("--tokens", type=_positive, default=shape.num_tokens, help="default %(default)s")
    pages = parser.add_argument_group("where it lies")
    pages.add_argument(
        "--block-tokens",
        type=_positive,
        default=shape.src_block_tokens,
        help="tokens per block, of both sides unless --dst-block-tokens is given (default %(default)s)",
    )
    pages.add_argument("--dst-block-tokens", type=_positive, help="tokens per block of the destination")
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
        type=_positive,
        default=shape.pool_factor,
        help="size of each pool in sequences; the blocks are drawn from all of it (default %(default)s)",
    )
    pages.add_argument("--seed", type=int, default=shape.seed, help="of that draw (default %(default)s)")
    run_options = parser.add_argument_group("how it is measured")
    run_options.add_argument(
        "--transport",
        action="append",
        choices=sorted(TRANSPORTS),
        help="repeat for several; without it, every one that works here",
    )
    run_options.add_argument(
        "--layer-ms",
        type=_positive_float,
        nargs="+",
        default=list(how.layer_ms),
        metavar="MS",
        help="pace of the simulated prefill, one column each (default 1 2.5 5; 2.5 is an 8B model, 2,048 tokens and "
        "400 TFLOP/s)",
    )
    run_options.add_argument("--rounds", type=_positive, default=how.rounds, help="default %(default)s")
    run_options.add_argument("--warm-ups", type=_positive, default=how.warm_ups, help="default %(default)s")
    run_options.add_argument(
        "--timeout-s",
        type=_positive_float,
        default=how.timeout_s,
        help="deadline of one transfer (default %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the machine's facts here")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON if asked to; 1 if a transport failed or none worked, 2 for bad options."""
    errors = Console(stderr=True)
    workload = Workload(
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
    settings = Settings(tuple(args.layer_ms), args.rounds, args.warm_ups, args.timeout_s)
    names = args.transport or list(TRANSPORTS)
    try:
        needed = memory_needed_nbytes(workload, len(names))
    except ValueError as error:
        errors.print(f"[red]{error}[/]")
        return 2
    available = available_memory_nbytes()
    if available and needed > 0.9 * available:
        errors.print(
            f"[red]needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available:[/] "
            "try fewer --tokens, a smaller --pool-factor or one --transport"
        )
        return 2
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        results = measure(workload, {name: TRANSPORTS[name] for name in names}, settings, progress)
    print_results(results)
    if args.json:
        args.json.write_text(results.to_json() + "\n", encoding="utf-8")
    measured = [results.ceiling, *results.transports.values()]
    nothing = all(lane.problem for lane in results.transports.values())
    return 1 if nothing or any(lane.failed for lane in measured) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdlink bench transfer", description=__doc__.splitlines()[0])
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KeyboardInterrupt:
        return 130


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
