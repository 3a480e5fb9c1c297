"""`pdlink chaos` itself: a short run on real processes, which has to end well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink_bench.chaos.schedule import Kind, schedule

pytestmark = pytest.mark.e2e

SEED, SECONDS, EVERY_S = 35, 8.0, 2.0
WORKERS = ("prefill-0", "decode-0", "decode-1")


def test_a_short_run_of_faults_ends_with_right_answers_and_nothing_held(tmp_path: Path) -> None:
    kinds = {fault.kind for fault in schedule(SEED, SECONDS, EVERY_S, WORKERS)}
    assert kinds >= {Kind.KILL, Kind.STOP, Kind.TERM, Kind.FULL}, "and the other kinds go on all the time"
    file = tmp_path / "verdict.json"
    flags = ["--seed", str(SEED), "--seconds", str(SECONDS), "--every", str(EVERY_S), "--calm", "3", "--clean", "2"]
    flags += ["--prefill", "1", "--decode", "2", "--concurrency", "4", "--transport", "mapped", "--quiet"]
    status = main(["chaos", *flags, "--json", str(file)])
    verdict = json.loads(file.read_text())
    assert verdict["problems"] == []
    assert status == 0
    assert verdict["verdict"] == "ok"
    assert verdict["outcomes"]["right"] > 5, "each client has had some"
    assert verdict["outcomes"]["wrong"] == verdict["outcomes"]["unsettled"] == verdict["leaked_blocks"] == 0
    assert sum(verdict["faults"].values()) == SECONDS / EVERY_S
