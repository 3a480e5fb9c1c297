"""The tables and pictures of `pdlink bench transfer`, and what is kept of a run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .bars import judge
from .measure import Summary, gb_per_s
from .rounds import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .bars import Verdict
    from .measure import Facts
    from .rounds import Case, Measured, Results, Settings
    from .workload import Workload

WIDTH_NOT_A_TTY = 120
CASES_PER_TABLE = 6


def machine_line(machine: Facts) -> str:
    """One line about the machine."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores (load {machine['load_average_1min']:.1f}), "
        f"{int(machine['memory_nbytes']) / 2**30:.0f} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"UCX {machine['libucx']}, {int(machine['page_nbytes']) // 1024} KiB pages, huge pages "
        f"{machine['transparent_huge_pages_shmem']} for shared memory, tcp {machine['tcp_congestion_control']}"
    )


def workload_line(case: Case) -> str:
    """One line about what is pushed."""
    workload = case.workload
    return (
        f"{workload.num_tokens} tokens x {workload.num_layers} layers x {workload.num_heads} heads x "
        f"{workload.head_dim} {workload.dtype} = {workload.nbytes / 1e6:.1f} MB in {case.num_runs} runs of "
        f"{workload.nbytes // case.num_runs} B on average; blocks of {workload.src_block_tokens} -> "
        f"{workload.dst_block_tokens} tokens, {workload.src_order} -> {workload.dst_order}"
    )


def shape_line(workload: Workload) -> str:
    """One line about what has a size when only the number of tokens changes."""
    return (
        f"{workload.num_layers} layers x {workload.num_heads} heads x {workload.head_dim} {workload.dtype}, blocks "
        f"of {workload.src_block_tokens} -> {workload.dst_block_tokens} tokens, {workload.src_order} -> "
        f"{workload.dst_order}: {workload.src.token_nbytes // 1024} KiB a token"
    )


def print_results(results: Results, sizes: Iterable[str] = (), *, bars: bool = False) -> None:
    """Machine, then one table per kind of run: everything about the default workload, speeds over a sweep.

    sizes: the cases of a sweep over sizes; the others are layouts. bars: what this project wants to reach, too.
    """
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_NOT_A_TTY)
    console.print(machine_line(results.machine), highlight=False)
    default = results.cases.get(DEFAULT)
    if default:
        _print_case(console, default, results.settings)
    sizes = [name for name in results.cases if name in set(sizes)]
    layouts = [name for name in results.cases if name not in sizes]
    if sizes:
        console.print(f"sizes: {shape_line(results.cases[sizes[0]].workload)}", highlight=False)
    for what, names in (("layouts", layouts if layouts != [DEFAULT] else []), ("sizes", sizes)):
        for first in range(0, len(names), CASES_PER_TABLE):
            cases = {name: results.cases[name] for name in names[first : first + CASES_PER_TABLE]}
            console.print(_sweep_table(what, cases))
    problems: dict[str, Measured] = {}
    for case in results.cases.values():
        problems |= {name: lane for name, lane in case.transports.items() if lane.problem}
        problems |= {"ceilings": case.ceiling} if case.ceiling.problem else {}
    for name, lane in problems.items():
        console.print(f"[{'red' if lane.failed else 'yellow'}]{name}: {escape(lane.problem)}[/]")
    if bars:
        _print_bars(console, judge(results))


def _print_bars(console: Console, verdicts: list[Verdict]) -> None:
    if measured := [verdict for verdict in verdicts if verdict.ratio is not None]:
        console.print(_bars_table(measured))
    for verdict in verdicts:
        if verdict.ratio is None and len(measured) > 1:
            text = f"bar not measured: {verdict.what}, no figures of {verdict.missing}"
            console.print(text, style="dim", highlight=False)


def _print_case(console: Console, case: Case, settings: Settings) -> None:
    console.print(workload_line(case), highlight=False)
    memcpy, nt = case.ceiling.summary("memcpy"), case.ceiling.summary("nt")
    if memcpy and nt:
        best = min(memcpy.median, nt.median)
        console.print(
            f"ceilings of one core: memcpy {_speed(case.workload.nbytes, memcpy)} GB/s, non-temporal stores "
            f"({case.ceiling.lane}) {_speed(case.workload.nbytes, nt)} GB/s; floor {best * 1e3:.1f} ms",
            highlight=False,
        )
    table = Table()
    table.add_column("transport", style="bold")
    table.add_column("lane")
    table.add_column("whole GB/s", justify="right")
    table.add_column("of\nmemcpy", justify="right")
    table.add_column("of\nNT", justify="right")
    table.add_column("layer by\nlayer GB/s", justify="right")
    table.add_column("ms/layer", justify="right")
    for layer_ms in settings.layer_ms:
        table.add_column(f"exposed at\n{layer_ms:g} ms/layer", justify="right")
    for name, measured in case.transports.items():
        whole = measured.summary("whole")
        if whole:
            table.add_row(name, measured.lane, *_cells(case, settings, measured, whole))
        else:
            table.add_row(name, "failed" if measured.failed else "unavailable")
    console.print(table)


def _cells(case: Case, settings: Settings, measured: Measured, whole: Summary) -> list[str]:
    nbytes = case.workload.nbytes
    cells = [_speed(nbytes, whole, "\n")]
    for ceiling in ("memcpy", "nt"):
        share = case.ceiling.share(ceiling, measured, "whole")
        cells.append("-" if share is None else f"{share:.2f}")
    layers = measured.summary("layers")
    if layers:
        cells += [_speed(nbytes, layers, "\n"), f"{layers.median * 1e3 / case.workload.num_layers:.2f}"]
    for layer_ms in settings.layer_ms:
        name = f"prefill {layer_ms:g}"
        exposed, share = measured.summary(name), measured.share(name, measured, "whole")
        cells.append(f"{share:.1%}\n{exposed.median * 1e3:.1f} ms" if exposed and share is not None else "-")
    return cells


def _sweep_table(what: str, cases: dict[str, Case]) -> Table:
    """Cases side by side, for those who have figures in more than the default one."""
    title = f"{what}: GB/s whole / layer by layer, ms whole"
    table = Table(title=title, title_justify="left")
    table.add_column("transport", style="bold")
    for name, case in cases.items():
        table.add_column(f"{name}\n{case.num_runs} x {case.workload.nbytes // case.num_runs} B", justify="right")
    others = [case for name, case in cases.items() if name != DEFAULT]
    for lane in dict.fromkeys(lane for case in others for lane in case.transports):
        row = []
        if not any(case.transports[lane].samples_s for case in others if lane in case.transports):
            continue
        for case in cases.values():
            measured = case.transports.get(lane)
            whole = measured.summary("whole") if measured else None
            if measured and whole:
                speeds = f"{_gb(case, measured, 'whole')} / {_gb(case, measured, 'layers')}"
                row.append(f"{speeds}\n{whole.median * 1e3:.3g} ms")
            else:
                row.append("-")
        table.add_row(lane, *row)
    table.add_section()
    for name, text in (("memcpy", "one core, memcpy"), ("nt", "one core, NT")):
        table.add_row(text, *(_gb(case, case.ceiling, name) for case in cases.values()))
    return table


def _bars_table(verdicts: list[Verdict]) -> Table:
    table = Table(title="bars: medians of the ratios of each round", title_justify="left")
    table.add_column("bar", style="bold")
    for title in ("ratio", "at least", "met", "bare copies or\nloops reach"):
        table.add_column(title, justify="right")
    for verdict in verdicts:
        met = "[green]yes[/]" if verdict.met else "[red]no[/]"
        cells = [f"{verdict.ratio:.2f}", f"{verdict.required:g}", met]
        table.add_row(verdict.what, *cells, "-" if verdict.at_best is None else f"{verdict.at_best:.2f}")
    return table


def _gb(case: Case, measured: Measured, name: str) -> str:
    summary = measured.summary(name)
    return f"{gb_per_s(case.workload.nbytes, summary.median):.2f}" if summary else "-"


def _speed(nbytes: int, summary: Summary, between: str = " ") -> str:
    """Median with p10 and p90 in brackets; the slowest tenth of the times is the p10 of the speed."""
    median, low, high = (gb_per_s(nbytes, seconds) for seconds in (summary.median, summary.p90, summary.p10))
    return f"{median:.2f}{between}({low:.1f}-{high:.1f})"


def to_json(results: Results) -> str:
    """Every sample, the ratios that the tables show, and the bars."""
    return json.dumps(
        {
            "benchmark": "transfer",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": results.machine,
            "settings": asdict(results.settings),
            "cases": {
                name: {
                    "workload": asdict(case.workload) | {"nbytes": case.workload.nbytes, "num_runs": case.num_runs},
                    "ceiling": _kept(case, case.ceiling),
                    "transports": {
                        lane: _kept(case, measured) | {"ratios": _ratios(case, measured, results.settings)}
                        for lane, measured in case.transports.items()
                    },
                }
                for name, case in results.cases.items()
            },
            "bars": [asdict(verdict) for verdict in judge(results)],
        },
        indent=1,
    )


def _ratios(case: Case, measured: Measured, settings: Settings) -> dict[str, float | None]:
    return {
        "of_memcpy": case.ceiling.share("memcpy", measured, "whole"),
        "of_nt": case.ceiling.share("nt", measured, "whole"),
    } | {
        f"exposed at {layer_ms:g} ms": measured.share(f"prefill {layer_ms:g}", measured, "whole")
        for layer_ms in settings.layer_ms
    }


def _kept(case: Case, measured: Measured) -> dict[str, object]:
    seconds, speeds = {}, {}
    for name in measured.samples_s:
        if summary := measured.summary(name):
            seconds[name] = asdict(summary)
            if not name.startswith("prefill"):
                speeds[name] = gb_per_s(case.workload.nbytes, summary.median)
    return {"lane": measured.lane, "problem": measured.problem, "gb_per_s": speeds, "seconds": seconds}
