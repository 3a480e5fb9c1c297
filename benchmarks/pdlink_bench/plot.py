"""Pictures of results: bars with bands of percentiles; as PNG.

matplotlib draws them. It comes with the extra `pictures` and is imported when a picture is asked for: call
`check_can_plot` before measuring, so that a missing extra is not noticed only after minutes of work. A picture is a
tuple of panels; what has one name has one colour in all of them.
"""

from __future__ import annotations

import math
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

PNG_DPI = 100
PANEL_WIDTH_IN, PANEL_HEIGHT_IN = 6.0, 4.0
PANELS_PER_ROW = 2
NOTE_HEIGHT_IN = 0.18
LABELLED_BARS = 16
"""With more of them the numbers would lie on each other."""
LEGEND_INSIDE = 4
"""Entries of a legend that fit into a panel; longer ones stand beside it."""

# The first seven are Okabe and Ito's, made for all kinds of colour vision, without their yellow.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"),
    *("#8c564b", "#7f3fbf", "#222222", "#7a9a01", "#b2182b", "#01665e", "#999999", "#5ab4ac", "#c51b7d"),
)


@dataclass(frozen=True, slots=True)
class PlottedBar:
    """One measured value, with the range of its middle 80 %."""

    name: str
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, summary: Summary, convert: Callable[[float], float] = float) -> PlottedBar:
        """Median, p10 and p90 of a summary; `convert` may turn times into speeds, which swaps low and high."""
        low, high = sorted((convert(summary.p10), convert(summary.p90)))
        return cls(name, convert(summary.median), low, high)


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars side by side, from zero."""

    title: str
    y_label: str
    groups: Mapping[str, Sequence[PlottedBar]]
    """Group, below the axis, to its bars. A bar's name is its colour; one group needs no name."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Dashed lines across: name to value."""

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys(bar.name for bars in self.groups.values() for bar in bars), *self.limits]


def check_can_plot(path: Path | None) -> None:
    """Raise ConfigError if `write` could not write this file; None is nothing to write."""
    if path is None:
        return
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: a picture ends in .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.absolute().parent}")
    _figure_class()


def write(path: Path, panels: Sequence[Bars], title: str, notes: str = "") -> None:
    """Draw the panels into one picture.

    notes: what a reader must know of machine and workload, below the picture; a line of its own per fact.
    """
    check_can_plot(path)
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    below_in = NOTE_HEIGHT_IN * (notes.count("\n") + 1)
    height_in = PANEL_HEIGHT_IN * rows + 0.5 + below_in
    figure = _figure_class()(figsize=(PANEL_WIDTH_IN * columns, height_in), layout="constrained")
    figure.get_layout_engine().set(rect=(0, below_in / height_in, 1, 1 - below_in / height_in))  # type: ignore[union-attr,call-arg]
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.text(0.01, 0.01, notes, fontsize=7, color="#555555", va="bottom", family="monospace")
    names = dict.fromkeys(name for panel in panels for name in panel.names)
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(panel.y_label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_bars(axes, panel, colours)
        entries = axes.get_legend_handles_labels()[1]
        if len(entries) > LEGEND_INSIDE:
            axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        elif entries:
            axes.legend(fontsize=7, framealpha=0.8)
    figure.savefig(path, dpi=PNG_DPI, pil_kwargs={"optimize": True})


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib ({error}): pip install './benchmarks[pictures]'") from None
    return Figure


def _draw_bars(axes: Axes, panel: Bars, colours: Mapping[str, str]) -> None:
    single = len(panel.groups) == 1
    width = 0.8 if single else 0.8 / max(1, len(panel.names))
    every = [bar for bars in panel.groups.values() for bar in bars]
    axes.axhline(0, color="black", linewidth=0.8)
    for group_index, bars in enumerate(panel.groups.values()):
        first = 0.0 if single else group_index - width * (len(bars) - 1) / 2
        for bar_index, bar in enumerate(bars):
            place = first + (1.0 if single else width) * bar_index
            axes.bar(place, bar.value, width * 0.92, color=colours[bar.name])
            axes.vlines(place, bar.low, bar.high, color="black", linewidth=1)
            if len(every) <= LABELLED_BARS:
                above = (place, max(0.0, bar.value, bar.high))
                text = f"{bar.value:.3g}"
                axes.annotate(text, above, (0, 2), textcoords="offset points", ha="center", fontsize=7)
    if single:
        turn, side = (30, "right") if len(every) > 4 else (0, "center")
        axes.set_xticks(range(len(every)), [bar.name for bar in every], fontsize=8, rotation=turn, ha=side)
    else:
        labels = ["\n".join(textwrap.wrap(name, 12)) for name in panel.groups]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        for name in dict.fromkeys(bar.name for bar in every):
            axes.bar(0, 0, color=colours[name], label=name)  # what the legend shows
    for name, value in panel.limits.items():
        axes.axhline(value, color=colours[name], linestyle="--", linewidth=1.2, label=name)
    top = axes.dataLim.ymax
    # Spreads below the lowest bar may go out of the picture.
    axes.set_ylim(min([0.0, *(bar.value for bar in every)]) * 1.25, top * 1.12 if 0 < top < math.inf else 1)
