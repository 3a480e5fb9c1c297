"""`pdlink bench tiers` on a small scale: what it measures is compared, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink_bench import tiers

WORDS = ["--sizes", "64", "--turn", "1", "--rounds", "2", "--entries", "2000"]


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SEGMENT_NBYTES", 40 << 20)


def test_every_lane_has_figures_and_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    kept, directory = tmp_path / "kept.json", tmp_path / "disk"
    directory.mkdir()
    assert main(["bench", "tiers", "--directory", str(directory), "--json", str(kept), *WORDS]) == 0
    lanes = json.loads(kept.read_text())["lanes"]["65536"]
    assert set(lanes) == {"bare", "bare, parts", "disk"}
    for lane in lanes.values():
        assert {name: len(one["samples"]) for name, one in lane["measured"].items()} == dict.fromkeys(
            ("put", "put CPU", "get", "get CPU"), 2
        )
    assert list(directory.iterdir()) == []


def test_a_lane_that_gives_other_bytes_back_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers.Tiered, "read", lambda *_: None)
    assert main(["bench", "tiers", "--directory", str(tmp_path), *WORDS]) == 1
    assert "disk: other bytes were read than written" in capsys.readouterr().err
