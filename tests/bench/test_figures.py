"""`pdlink bench figures` runs every benchmark as its own command, whatever the others do."""

from __future__ import annotations

import argparse
import importlib
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdlink.commands.words import BENCHMARKS
from pdlink_bench import figures


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    figures.add_arguments(parser)
    return parser.parse_args(given)


def test_every_figure_is_made_by_a_benchmark_that_exists() -> None:
    assert {command.split()[0] for command in figures.COMMANDS.values()} <= set(BENCHMARKS)


def test_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(words[4:])
        if "overlap" in words:
            Path(words[words.index("--markdown") + 1]).write_text("| tcp | 1.00 |\n")
        return subprocess.CompletedProcess(words, 1 if "--layouts" in words else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert figures.run(options("--only", "layouts", "overlap", "-d", str(tmp_path), "--peers", "nixl")) == 1
    stem = tmp_path / datetime.now(UTC).date().isoformat()
    assert ran == [
        ["transfer", "--layouts", "--markdown", f"{stem}-layouts.md", "--plot", f"{stem}-layouts.png"],
        ["overlap", "--markdown", f"{stem}-overlap.md", "--plot", f"{stem}-overlap.png"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == [f"{stem.name}.md"]
    page = stem.with_suffix(".md").read_text()
    assert page.endswith("## overlap\n\n`pdlink bench overlap`\n\n| tcp | 1.00 |\n")
    assert "layouts" not in page
    printed = capsys.readouterr().out
    assert "layouts: exit status 1" in printed
    assert "overlap: done" in printed


def test_every_figure_is_a_command_line_that_its_benchmark_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--plot` is refused where nothing is drawn."""

    def run(words: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        module = importlib.import_module(f"pdlink_bench.{words[4]}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        parser.parse_args(words[5:])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert figures.run(options("-d", str(tmp_path), "--peers", "nixl")) == 0
