"""`pdlink bench tune` measures both ways, looks at every byte, and writes a table that workers read."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import ConfigError
from pdlink.transport import staging
from pdlink_bench import tune

if TYPE_CHECKING:
    from pathlib import Path


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(given)


def test_both_ways_are_measured_and_the_table_can_be_read(tmp_path: Path) -> None:
    file, picture, table = (tmp_path / name for name in ("tune.json", "tune.html", "table.json"))
    lengths = ["--length", "256", "--length", "16384"]
    given = ["--transport", "tcp", *lengths, "--rounds", "1", "--json", str(file), "--plot", str(picture)]
    assert tune.run(options(*given, "--write", str(table))) == 0
    measured = json.loads(file.read_text())["transports"]["tcp"]
    assert {way: list(by_length) for way, by_length in measured["seconds"].items()} == {
        way: ["256", "16384"] for way in tune.WAYS
    }
    assert staging.stage_below("tcp", str(table)) in (0, 16384, 32768)
    assert staging.stage_below_lanes(str(table)) == staging.stage_below_lanes(), "what was not measured is kept"
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("packed_s", "length"), [((1, 1, 1), 2048), ((1, 1, 3), 1024), ((3, 3, 3), 0), ((1.0, 2.1, 1.0), 2048)]
)
def test_the_length_loses_least_over_all(packed_s: tuple[float, ...], length: int) -> None:
    measured = tune.Measured()
    for run, seconds in zip((64, 256, 1024), packed_s, strict=True):
        measured.seconds["direct"][run] = [2.0, 2.0]
        measured.seconds["packed"][run] = [seconds, seconds]
    assert measured.stage_below_nbytes == length


def test_a_byte_that_was_not_sent_is_found() -> None:
    settings = tune.Settings(max_runs=4, max_nbytes=1 << 16)
    owner = tune.Owner(tune.TRANSPORTS["tcp"], True, settings)
    assert "1024 bytes" in owner.check_and_clear(256)
    owner.close()


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "table.json"
    broken.write_text('{"machine": {}, "stage_below_nbytes": {"tcp": "x"}}')
    for file in (broken, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=file.name):
            staging.stage_below("tcp", str(file))


def test_what_is_chosen_goes_before_the_table() -> None:
    assert staging.stage_below("tcp", None, 77) == 77
    assert staging.stage_below_lanes(None, 0) == {"": 0}
