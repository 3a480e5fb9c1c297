"""What `pdlink bench transfer` shows of a run: sentences, tables, panels, and what is kept."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from . import plot
from .bars import judge
from .harness import BenchReport, TextTable
from .measure import gb_per_s
from .workload import DEFAULT

if TYPE_CHECKING:
    from .bars import BarVerdict
    from .measure import Measured, Summary
    from .rounds import Case, RoundResults, RoundSettings

CEILINGS = {"memcpy": "one core, memcpy", "nt": "one core, non-temporal"}


def report(results: RoundResults, *, bars: bool = False) -> BenchReport:
    """The default workload with everything about it, then speeds over all layouts. bars: with verdicts."""
    cases, default = results.cases, results.cases[DEFAULT]
    shown: list[str | TextTable] = [workload_line(default), *_ceilings_line(default)]
    shown.append(_case_table(default, results.settings))
    panels = [_speeds(default, "whole", "all layers in one submit"), _speeds(default, "layers", "layer by layer")]
    if len(cases) > 1:
        shown.append(_layouts_table(cases))
        panels.append(_layouts(cases))
    verdicts = judge(results)
    if bars:
        shown.append(_bars(verdicts))
    return BenchReport(
        {
            "settings": results.settings,
            "cases": {name: _kept(case, results.settings) for name, case in cases.items()},
            "bars": verdicts,
        },
        shown,
        panels,
        workload_line(default),
        {name: lane for case in cases.values() for name, lane in _everybody(case).items() if lane.problem},
    )


def _everybody(case: Case) -> dict[str, Measured]:
    return {**case.transports, "ceilings": case.ceiling}


def workload_line(case: Case) -> str:
    workload = case.workload
    return (
        f"{workload.num_tokens} tokens x {workload.num_layers} layers x {workload.num_heads} heads x "
        f"{workload.head_dim} {workload.dtype} = {workload.nbytes / 1e6:.1f} MB in {case.num_runs} runs of "
        f"{workload.nbytes // case.num_runs} B on average; blocks of {workload.src_block_tokens} -> "
        f"{workload.dst_block_tokens} tokens, {workload.src_order} -> {workload.dst_order}"
    )


def _ceilings_line(case: Case) -> list[str]:
    memcpy, nt = case.ceiling.summary("memcpy"), case.ceiling.summary("nt")
    if not memcpy or not nt:
        return []
    nbytes, best_s = case.workload.nbytes, min(memcpy.median, nt.median)
    return [
        f"ceilings of one core: memcpy {_speed(nbytes, memcpy)} GB/s, non-temporal stores ({case.ceiling.lane}) "
        f"{_speed(nbytes, nt)} GB/s; floor {best_s * 1e3:.1f} ms"
    ]


def _case_table(case: Case, settings: RoundSettings) -> TextTable:
    exposed = [f"exposed at\n{layer_ms:g} ms/layer\nof whole" for layer_ms in settings.layer_ms]
    columns = (
        "transport",
        "lane",
        "whole GB/s",
        "of\nmemcpy",
        "of\nNT",
        "layer by\nlayer GB/s",
        "ms/layer",
        *exposed,
    )
    table = TextTable(columns, num_left=2)
    for name, measured in case.transports.items():
        if measured.summary("whole"):
            table.add(name, measured.lane, *_cells(case, settings, measured))
        else:
            table.add(name, "failed" if measured.failed else "unavailable")
    return table


def _cells(case: Case, settings: RoundSettings, measured: Measured) -> list[str]:
    nbytes, whole, layers = case.workload.nbytes, measured.summary("whole"), measured.summary("layers")
    ratios = _ratios(case, measured, settings)
    cells = [_speed(nbytes, whole, "\n") if whole else "-"]
    cells += ["-" if share is None else f"{share:.2f}" for share in (ratios["of_memcpy"], ratios["of_nt"])]
    if layers:
        cells += [_speed(nbytes, layers, "\n"), f"{layers.median * 1e3 / case.workload.num_layers:.2f}"]
    for layer_ms in settings.layer_ms:
        left, share = measured.summary(f"prefill {layer_ms:g}"), ratios[f"exposed at {layer_ms:g} ms"]
        cells.append(f"{left.median * 1e3:.1f} ms\n{share:.2f}" if left and share is not None else "-")
    return cells


def _layouts_table(cases: dict[str, Case]) -> TextTable:
    """Cases side by side, of modules with figures in more than the default one."""
    runs = [f"{name}\n{case.num_runs} x {case.workload.nbytes // case.num_runs} B" for name, case in cases.items()]
    table = TextTable(("transport", *runs), "layouts: GB/s whole / layer by layer, ms whole")
    others = [case for name, case in cases.items() if name != DEFAULT]
    for lane in dict.fromkeys(lane for case in others for lane in case.transports):
        if any(case.transports[lane].samples for case in others if lane in case.transports):
            table.add(lane, *(_layout_cell(case, case.transports.get(lane)) for case in cases.values()))
    table.add()
    for name, text in CEILINGS.items():
        table.add(text, *(_gb(case, case.ceiling, name) for case in cases.values()))
    return table


def _layout_cell(case: Case, measured: Measured | None) -> str:
    whole = measured.summary("whole") if measured else None
    if not measured or not whole:
        return "-"
    return f"{_gb(case, measured, 'whole')} / {_gb(case, measured, 'layers')}\n{whole.median * 1e3:.3g} ms"


def _bars(verdicts: list[BarVerdict]) -> TextTable:
    columns = ("bar", "ratio", "at least", "met", "bare copies or\nloops reach")
    table = TextTable(columns, "bars: medians of the ratios of each round")
    for verdict in verdicts:
        met = "[green]yes[/]" if verdict.met else "[red]no[/]" if verdict.ratio else "not measured"
        ratio, at_best = ("-" if one is None else f"{one:.2f}" for one in (verdict.ratio, verdict.at_best))
        table.add(verdict.what, ratio, f"{verdict.required:g}", met, at_best)
    return table


def _gb(case: Case, measured: Measured, name: str) -> str:
    summary = measured.summary(name)
    return f"{gb_per_s(case.workload.nbytes, summary.median):.2f}" if summary else "-"


def _speed(nbytes: int, summary: Summary, between: str = " ") -> str:
    """Median with p10 and p90 in brackets; the slowest tenth of the times is the p10 of the speed."""
    median, low, high = (gb_per_s(nbytes, seconds) for seconds in (summary.median, summary.p90, summary.p10))
    return f"{median:.2f}{between}({low:.1f}-{high:.1f})"


def _ratios(case: Case, measured: Measured, settings: RoundSettings) -> dict[str, float | None]:
    return {
        "of_memcpy": case.ceiling.share("memcpy", measured, "whole"),
        "of_nt": case.ceiling.share("nt", measured, "whole"),
    } | {
        f"exposed at {layer_ms:g} ms": measured.share(f"prefill {layer_ms:g}", measured, "whole")
        for layer_ms in settings.layer_ms
    }


def _kept(case: Case, settings: RoundSettings) -> dict[str, Any]:
    """Every sample, and the ratios that the tables show."""
    return {
        "workload": asdict(case.workload) | {"nbytes": case.workload.nbytes, "num_runs": case.num_runs},
        "ceiling": case.ceiling,
        "transports": case.transports,
        "ratios": {lane: _ratios(case, measured, settings) for lane, measured in case.transports.items()},
    }


def _speeds(case: Case, name: str, title: str) -> plot.Bars:
    limits = {
        text: gb_per_s(case.workload.nbytes, summary.median)
        for ceiling, text in CEILINGS.items()
        if (summary := case.ceiling.summary(ceiling))
    }
    return plot.Bars(title, "GB/s (p10 to p90)", {"": _lanes(case, name)}, limits)


def _layouts(cases: dict[str, Case]) -> plot.Bars:
    everywhere = set.intersection(*(set(case.transports) for case in cases.values()))
    groups = {name: [bar for bar in _lanes(case) if bar.name in everywhere] for name, case in cases.items()}
    return plot.Bars("layouts: all layers in one submit", "GB/s", groups)


def _lanes(case: Case, name: str = "whole") -> list[plot.PlottedBar]:
    speed = partial(gb_per_s, case.workload.nbytes)
    lanes = {lane: measured.summary(name) for lane, measured in case.transports.items()}
    return [plot.PlottedBar.of(lane, summary, speed) for lane, summary in lanes.items() if summary]
