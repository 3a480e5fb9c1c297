"""`pdlink bench plan`: real workers whose engines sleep, beside what is predicted of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink.plan.curves import Curves


@pytest.mark.e2e
@pytest.mark.slow
def test_a_fleet_of_sleeping_engines_answers_every_request_and_stands_beside_its_prediction(tmp_path: Path) -> None:
    """How far apart they are is a matter of the machine, and no part of this test."""
    curves, out = tmp_path / "curves.json", tmp_path / "out.json"
    quick = Curves(prompt_s=0.02, token_s=2e-5, step_s=0.01, num_layers=4, pool_tokens=20_000, max_batched_tokens=512)
    curves.write_text(quick.model_dump_json())
    words = ["bench", "plan", "--fleet", "1+1", "--requests", "20", "--curves", str(curves), "--json", str(out)]
    assert main(words) == 0
    row = json.loads(out.read_text())["fleets"]["1P1D"]
    assert row["disaggregated"] == 1
    for what in ("ttft", "per_token"):
        assert min(row[what]["measured"]) > 0
        assert min(row[what]["predicted"]) > 0
    assert min(row["ttft"]["measured"]) >= 0.02, "no sooner than the engine wakes up"
    assert min(row["per_token"]["measured"]) >= 0.009


def test_engines_that_compute_need_curves_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--computes"]) == 2
    assert "computes: got no --curves" in capsys.readouterr().err
