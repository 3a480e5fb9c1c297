"""The pictures of `pdlink bench transfer`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import plot
from .cases import size_name
from .measure import gb_per_s
from .report import machine_line, shape_line, workload_line
from .rounds import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .rounds import Case, Results

CEILINGS = {"memcpy": "one core, memcpy", "nt": "one core, non-temporal"}


def draw(path: Path, results: Results, sizes: Iterable[str], layouts: Iterable[str]) -> None:
    """Write the figures of a run; sizes and layouts name the cases that belong together."""
    panels: list[plot.Panel] = []
    default = results.cases.get(DEFAULT)
    notes = machine_line(results.machine)
    if default:
        panels += [
            _speeds(default, "whole", "all layers in one submit"),
            _speeds(default, "layers", "layer by layer"),
        ]
        notes += "\n" + workload_line(default)
    if len(layouts := [name for name in layouts if name in results.cases]) > 1:
        panels.append(_layouts(results, layouts))
    if sizes := [name for name in sizes if name in results.cases]:
        panels += [_sizes(results, sizes, "GB/s"), _sizes(results, sizes, "ms")]
        notes += f"\nsizes: {shape_line(results.cases[sizes[0]].workload)}"
        notes += "\nlines: medians; bands: p10 to p90; dashed: the same runs copied by one core inside one process"
    plot.write(path, panels, "pdlink bench transfer", notes.replace(", huge pages", ",\nhuge pages"))


def _convert(case: Case) -> partial[float]:
    return partial(gb_per_s, case.workload.nbytes)


def _speeds(case: Case, name: str, title: str) -> plot.Bars:
    bars = [
        plot.Bar.of(lane, summary, _convert(case))
        for lane, measured in case.transports.items()
        if (summary := measured.summary(name))
    ]
    limits = {
        text: gb_per_s(case.workload.nbytes, summary.median)
        for ceiling, text in CEILINGS.items()
        if (summary := case.ceiling.summary(ceiling))
    }
    return plot.Bars(title, "GB/s (p10 to p90)", {"": bars}, limits)


def _layouts(results: Results, names: list[str]) -> plot.Bars:
    groups = {}
    everywhere = set.intersection(*(set(results.cases[name].transports) for name in names))
    for name in names:
        case = results.cases[name]
        bars = [
            plot.Bar.of(lane, summary, _convert(case))
            for lane, measured in case.transports.items()
            if lane in everywhere and (summary := measured.summary("whole"))
        ]
        bars += [
            plot.Bar.of(text, summary, _convert(case))
            for ceiling, text in CEILINGS.items()
            if (summary := case.ceiling.summary(ceiling))
        ]
        groups["same" if name == DEFAULT else name] = bars
    return plot.Bars("layouts: all layers in one submit", "GB/s", groups)


def _sizes(results: Results, names: list[str], unit: str) -> plot.Lines:
    def convert(nbytes: float, seconds: float) -> float:
        return nbytes / seconds / 1e9 if unit == "GB/s" else seconds * 1e3

    cases = [results.cases[name] for name in names]
    lanes = list(dict.fromkeys(lane for case in cases for lane in case.transports))
    lines = []
    for lane in lanes:
        points = {
            float(case.workload.nbytes): summary
            for case in cases
            if lane in case.transports and (summary := case.transports[lane].summary("whole"))
        }
        if points:
            lines.append(plot.Line.of(lane, points, convert))
    for ceiling, text in CEILINGS.items():
        points = {float(case.workload.nbytes): s for case in cases if (s := case.ceiling.summary(ceiling))}
        if points:
            medians = [convert(nbytes, summary.median) for nbytes, summary in points.items()]
            lines.append(plot.Line(text, list(points), medians, dashed=True))
    ticks = {float(case.workload.nbytes): size_name(case.workload.nbytes) for case in cases}
    title = f"{'speed' if unit == 'GB/s' else 'time'} by size of the transfer, all layers in one submit"
    return plot.Lines(title, "", unit, lines, log_x=True, log_y=unit == "ms", x_ticks=ticks)
