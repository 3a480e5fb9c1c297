"""`pdlink bench tune` measures both ways, and finds the length that loses least."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from pdlink_bench import tune

if TYPE_CHECKING:
    from pathlib import Path


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(given)


def test_both_ways_are_measured_and_a_length_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tune.json"
    given = ["--length", "256", "--length", "16384", "--rounds", "1", "--json", str(file)]
    assert tune.run(options(*given)) == 0
    kept = json.loads(file.read_text())
    assert {way: list(by_length) for way, by_length in kept["seconds"].items()} == {
        way: ["256", "16384"] for way in tune.WAYS
    }
    assert kept["transport.tcp.pack_below_nbytes"] in (0, 16384, 32768)
    assert f"pack_below_nbytes: {kept['transport.tcp.pack_below_nbytes']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("packed_s", "length"), [((1, 1, 1), 2048), ((1, 1, 3), 1024), ((3, 3, 3), 0), ((1.0, 2.1, 1.0), 2048)]
)
def test_the_length_loses_least_over_all(packed_s: tuple[float, ...], length: int) -> None:
    runs = (64, 256, 1024)
    measured = {
        "direct": {run: [2.0, 2.0] for run in runs},
        "packed": {run: [float(seconds)] * 2 for run, seconds in zip(runs, packed_s, strict=True)},
    }
    assert tune.pack_below_nbytes(measured) == length


@pytest.mark.parametrize("length", tune.LENGTHS)
def test_runs_have_the_length_that_is_measured(length: int) -> None:
    workload = tune.pushed(length)
    assert workload.nbytes == workload.plan().num_runs * length <= tune.MAX_NBYTES
