"""Pictures of results: bars, lines over sizes or speeds, bands of percentiles; as PNG, SVG or a page of its own.

matplotlib draws them. It comes with the extra `bench` and is imported when a picture is asked for: call
`check_can_plot` before measuring, so that a missing extra is not noticed only after minutes of work. A picture is a
tuple of panels; what has one name has one colour in all of them.
"""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .measure import Summary

SUFFIXES = (".png", ".svg", ".html")
PNG_DPI = 100
PANEL_WIDTH_IN, PANEL_HEIGHT_IN = 6.0, 4.0
PANELS_PER_ROW = 2
LABELLED_BARS = 16
"""With more of them the numbers would lie on each other."""
LEGEND_INSIDE = 4
"""Entries of a legend that fit into a panel; longer ones stand beside it, once for neighbours with the same names."""

# The first seven are Okabe and Ito's, made for all kinds of colour vision, without their yellow.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"),
    *("#8c564b", "#7f3fbf", "#222222", "#7a9a01", "#b2182b", "#01665e", "#999999", "#5ab4ac", "#c51b7d"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured value, with the range of its middle 80 % where it is known."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, name: str, summary: Summary, convert: Callable[[float], float] = float) -> Bar:
        """Median, p10 and p90 of a summary; `convert` may turn times into speeds, which swaps low and high."""
        low, high = sorted((convert(summary.p10), convert(summary.p90)))
        return cls(name, convert(summary.median), low, high)


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars side by side, from zero."""

    title: str
    y_label: str
    groups: Mapping[str, Sequence[Bar]]
    """Group, below the axis, to its bars. A bar's name is its colour; one group needs no name."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Dashed lines across: name to value."""


@dataclass(frozen=True, slots=True)
class Line:
    """Values over some x, with a band around them where it is known."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    """For theory and limits: no markers."""

    @classmethod
    def of(
        cls, name: str, points: Mapping[float, Summary], convert: Callable[[float, float], float] = lambda x, y: y
    ) -> Line:
        """Medians with a band from p10 to p90; `convert(x, y)` may turn times into speeds."""
        bands = [sorted((convert(x, summary.p10), convert(x, summary.p90))) for x, summary in points.items()]
        return cls(
            name,
            list(points),
            [convert(x, summary.median) for x, summary in points.items()],
            [low for low, _ in bands],
            [high for _, high in bands],
        )


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one axis."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    x_ticks: Mapping[float, str] = field(default_factory=dict)
    """Where to put ticks and what they say; chosen by matplotlib without any."""
    limits: Mapping[str, float] = field(default_factory=dict)


Panel = Bars | Lines


def check_can_plot(path: Path | None) -> None:
    """Raise ConfigError if `write` could not write this file; None is nothing to write."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a picture ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.absolute().parent}")
    _figure_class()


def write(path: Path, panels: Sequence[Panel], title: str, notes: str = "") -> None:
    """Draw the panels into one picture.

    notes: what a reader must know of machine and workload, below the picture; a line of its own per fact.
    A page (.html) holds everything in one file and needs no network.
    """
    check_can_plot(path)
    figure = _draw(panels, title, "" if path.suffix == ".html" else notes)
    if path.suffix == ".png":
        figure.savefig(path, dpi=PNG_DPI, pil_kwargs={"optimize": True})
    elif path.suffix == ".svg":
        path.write_text(_svg(figure), encoding="utf-8")
    else:
        path.write_text(_page(_svg(figure), title, notes), encoding="utf-8")


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib ({error}): pip install 'pdlink[bench]'") from None
    return Figure


def _draw(panels: Sequence[Panel], title: str, notes: str) -> Figure:
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    lines_below = notes.count("\n") + 1 if notes else 0
    height_in = PANEL_HEIGHT_IN * rows + 0.5 + 0.18 * lines_below
    figure = _figure_class()(figsize=(PANEL_WIDTH_IN * columns, height_in), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.18 * lines_below / height_in, 1, 1 - 0.18 * lines_below / height_in))  # type: ignore[union-attr,call-arg]
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.text(0.01, 0.01, notes, fontsize=7, color="#555555", va="bottom", family="monospace")
    colours = _colours(panels)
    beside: list[str] = []
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(panel.y_label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, axis="y" if isinstance(panel, Bars) else "both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if isinstance(panel, Bars):
            _draw_bars(axes, panel, colours)
        else:
            _draw_lines(axes, panel, colours)
        for name, value in panel.limits.items():
            axes.axhline(value, color=colours[name], linestyle="--", linewidth=1.2, label=name)
        if isinstance(panel, Bars) or not panel.log_y:
            top = axes.dataLim.ymax
            axes.set_ylim(_lowest(panel) * 1.25, top * 1.12 if math.isfinite(top) and top > 0 else 1)
        names = axes.get_legend_handles_labels()[1]
        if len(names) > LEGEND_INSIDE:
            if names != beside or number % columns == 1:
                axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            beside = names
        elif names:
            axes.legend(fontsize=7, framealpha=0.8)
    return figure


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """One colour for each name, in order of appearance."""
    names: dict[str, None] = {}
    for panel in panels:
        if isinstance(panel, Bars):
            names.update(dict.fromkeys(bar.name for bars in panel.groups.values() for bar in bars))
        else:
            names.update(dict.fromkeys(line.name for line in panel.lines))
    for panel in panels:
        names.update(dict.fromkeys(panel.limits))
    return {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}


def _lowest(panel: Panel) -> float:
    """0, or the lowest bar below it; spreads may go out of the picture."""
    if not isinstance(panel, Bars):
        return 0.0
    return min([0.0, *(bar.value for bars in panel.groups.values() for bar in bars)])


def _draw_bars(axes: Axes, panel: Bars, colours: Mapping[str, str]) -> None:
    names = list(dict.fromkeys(bar.name for bars in panel.groups.values() for bar in bars))
    single = len(panel.groups) == 1
    width = 0.8 if single else 0.8 / max(1, len(names))
    num_bars = sum(map(len, panel.groups.values()))
    axes.axhline(0, color="black", linewidth=0.8)
    for group_index, bars in enumerate(panel.groups.values()):
        first = group_index - width * (len(bars) - 1) / 2
        for bar_index, bar in enumerate(bars):
            place = float(bar_index) if single else first + width * bar_index
            low, high = (bar.value if end is None else end for end in (bar.low, bar.high))
            axes.bar(place, bar.value, width * 0.92, color=colours[bar.name])
            axes.vlines(place, low, high, color="black", linewidth=1)
            if num_bars <= LABELLED_BARS:
                above = max(0.0, bar.value, high)
                axes.annotate(
                    f"{bar.value:.3g}", (place, above), (0, 2), textcoords="offset points", ha="center", fontsize=7
                )
    if single:
        labels = [bar.name for bars in panel.groups.values() for bar in bars]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        if len(labels) > 4:
            axes.tick_params(axis="x", rotation=30)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")
    else:
        labels = ["\n".join(textwrap.wrap(name, 12)) for name in panel.groups]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        for name in names:
            axes.bar(0, 0, color=colours[name], label=name)  # what the legend shows


def _draw_lines(axes: Axes, panel: Lines, colours: Mapping[str, str]) -> None:
    for line in panel.lines:
        style = "--" if line.dashed else "-"
        marker = "" if line.dashed else "o"
        colour = colours[line.name]
        axes.plot(line.x, line.y, style, marker=marker, markersize=3.5, linewidth=1.4, color=colour, label=line.name)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(panel.x_label, fontsize=9)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()), fontsize=8)
        axes.set_xticks([], minor=True)


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _page(svg: str, title: str, notes: str) -> str:
    picture = re.sub(
        r"^.*?(?=<svg)", "", svg, flags=re.DOTALL
    )  # without the XML declaration, which HTML has no use for
    return (
        f"<!doctype html>\n<meta charset='utf-8'>\n<title>{html.escape(title)}</title>\n"
        "<style>body{font:14px sans-serif;margin:2em;color:#222}svg{max-width:100%;height:auto}</style>\n"
        f"{picture}\n<pre>{html.escape(notes)}</pre>\n"
    )
