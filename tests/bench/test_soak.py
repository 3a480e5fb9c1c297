"""`pdlink bench soak` moves KV, and says so when something grows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pdlink_bench import soak


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(given)


def test_soak_leaves_nothing_behind_and_writes_its_samples(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    assert soak.run(options("--transfers", "200", "--json", str(file))) == 0
    result = json.loads(file.read_text())
    assert [sample["transfers"] for sample in result["samples"]] == list(range(20, 201, 20))
    assert result["samples"][-1]["held"] == 0
    assert result["longest_absence_s"] == max(sample["absence_s"] for sample in result["samples"]) > 0


def test_growth_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(1000))
    monkeypatch.setattr(soak, "_sample", lambda transfers, _: soak.Sample(transfers, 1, next(count), 1, 0, 0.0))
    assert soak.run(options("--transfers", "20")) == 1
    assert "grown: descriptors" in capsys.readouterr().out
