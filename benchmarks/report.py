"""The table of `pdlink bench transfer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .measure import Summary, gb_per_s

if TYPE_CHECKING:
    from .rounds import Measured, Results

WIDTH_NOT_A_TTY = 120


def print_results(results: Results) -> None:
    """Machine and workload, then one row per transport beside the ceilings."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_NOT_A_TTY)
    workload, machine = results.workload, results.machine
    console.print(
        f"[bold]{machine['cpu']}[/], {machine['cores']} cores (load {machine['load_average_1min']:.1f}), "
        f"{int(machine['memory_nbytes']) / 2**30:.0f} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"UCX {machine['libucx']}, {int(machine['page_nbytes']) // 1024} KiB pages, huge pages "
        f"{machine['transparent_huge_pages_shmem']} for shared memory, tcp {machine['tcp_congestion_control']}",
        highlight=False,
    )
    console.print(
        f"{workload.num_tokens} tokens x {workload.num_layers} layers x {workload.num_heads} heads x "
        f"{workload.head_dim} {workload.dtype} = {workload.nbytes / 1e6:.1f} MB in {results.num_runs} runs of "
        f"{workload.nbytes // results.num_runs} B on average; blocks of {workload.src_block_tokens} -> "
        f"{workload.dst_block_tokens} tokens, {workload.src_order} -> {workload.dst_order}",
        highlight=False,
    )
    memcpy, nt = results.ceiling.summary("memcpy"), results.ceiling.summary("nt")
    if memcpy and nt:
        best = min(memcpy.median, nt.median)
        console.print(
            f"ceilings of one core: memcpy {_speed(workload.nbytes, memcpy)} GB/s, non-temporal stores "
            f"({results.ceiling.lane}) {_speed(workload.nbytes, nt)} GB/s; floor {best * 1e3:.1f} ms",
            highlight=False,
        )
    else:
        console.print(f"[yellow]no ceilings: {escape(results.ceiling.problem)}[/]")
    console.print(_table(results))
    for name, measured in results.transports.items():
        if measured.problem:
            console.print(f"[{'red' if measured.failed else 'yellow'}]{name}: {escape(measured.problem)}[/]")


def _table(results: Results) -> Table:
    table = Table()
    table.add_column("transport", style="bold")
    table.add_column("lane")
    table.add_column("whole GB/s", justify="right")
    table.add_column("of\nmemcpy", justify="right")
    table.add_column("of\nNT", justify="right")
    table.add_column("layer by\nlayer GB/s", justify="right")
    table.add_column("ms/layer", justify="right")
    for layer_ms in results.settings.layer_ms:
        table.add_column(f"exposed at\n{layer_ms:g} ms/layer", justify="right")
    for name, measured in results.transports.items():
        whole = measured.summary("whole")
        if whole:
            table.add_row(name, measured.lane, *_cells(results, measured, whole))
        else:
            table.add_row(name, "failed" if measured.failed else "unavailable")
    return table


def _cells(results: Results, measured: Measured, whole: Summary) -> list[str]:
    nbytes = results.workload.nbytes
    cells = [_speed(nbytes, whole, "\n")]
    for ceiling in ("memcpy", "nt"):
        share = results.ceiling.share(ceiling, measured, "whole")
        cells.append("-" if share is None else f"{share:.2f}")
    layers = measured.summary("layers")
    if layers:
        cells += [_speed(nbytes, layers, "\n"), f"{layers.median * 1e3 / results.workload.num_layers:.2f}"]
    for layer_ms in results.settings.layer_ms:
        name = f"prefill {layer_ms:g}"
        exposed, share = measured.summary(name), measured.share(name, measured, "whole")
        if exposed and share is not None:
            cells.append(f"{share:.1%}\n{exposed.median * 1e3:.1f} ms")
    return cells


def _speed(nbytes: int, summary: Summary, between: str = " ") -> str:
    """Median with p10 and p90 in brackets; the slowest tenth of the times is the p10 of the speed."""
    median, low, high = (gb_per_s(nbytes, seconds) for seconds in (summary.median, summary.p90, summary.p10))
    return f"{median:.2f}{between}({low:.1f}-{high:.1f})"
