"""Pictures are drawn from results, and a missing library is noticed before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdlink.errors import ConfigError
from pdlink_bench import plot
from pdlink_bench.measure import summarise

PANELS = [
    plot.Bars(
        "one group",
        "GB/s",
        {"": [plot.PlottedBar("mapped", 8.0, 7.0, 9.0), plot.PlottedBar("tcp", 5.0, 4.0, 6.0)]},
        {"limit": 8.8},
    ),
    plot.Bars(
        "two groups",
        "GB/s",
        {"same": [plot.PlottedBar("mapped", 8.0, 7.0, 9.0)], "other": [plot.PlottedBar("mapped", 4.0, 3.0, 5.0)]},
    ),
]


def test_panels_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    plot.write(path, PANELS, "title", "machine & load\nworkload")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_panel_without_figures_is_drawn_empty(tmp_path: Path) -> None:
    """When every transport of a run has failed."""
    plot.write(tmp_path / "figure.png", [plot.Bars("none", "s", {})], "title")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install './benchmarks\[pictures\]'"):
        plot.check_can_plot(tmp_path / "figure.png")
    plot.check_can_plot(None)


@pytest.mark.parametrize("name", ["figure.svg", "figure", "missing/figure.png"])
def test_a_file_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        plot.check_can_plot(tmp_path / name)


def test_a_bar_of_speeds_has_the_slow_times_at_its_low_end() -> None:
    bar = plot.PlottedBar.of("mapped", summarise([1.0, 2.0, 4.0]), lambda seconds: 8.0 / seconds)
    assert bar.value == 4.0
    assert bar.low is not None
    assert bar.high is not None
    assert 2.0 < bar.low < bar.value < bar.high < 8.0
