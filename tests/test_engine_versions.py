"""`make engines`: its windows are those of the integrations, and the pages show its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdlink.integrations.sglang_parts import versions as sglang
from pdlink.integrations.vllm_parts import versions as vllm
from tests.tools import tool

engines: Any = tool("engines")
PAGES = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(("name", "known"), [("vllm", vllm), ("sglang", sglang)])
def test_the_window_is_what_servers_start_with_and_its_page_shows_the_table(name: str, known: Any) -> None:
    window = engines.ENGINES[name].window
    numbers = [tuple(map(int, version.split(".")))[: len(known.NEWEST)] for version in window]
    assert (numbers[0], numbers[-1]) == (known.NEWEST, known.OLDEST)
    assert numbers == sorted(set(numbers), reverse=True)
    refused = engines.ENGINES[name].refused
    assert all(tuple(map(int, version.split(".")[:3])) < known.OLDEST for version in refused)
    shown = engines.table(name, dict.fromkeys(window, engines.PASSED) | refused)
    assert f"\n{shown}\n" in (PAGES / f"{name}.md").read_text()


def test_versions_of_which_the_same_is_known_share_a_row() -> None:
    said = {"0.33.0": "passed", "0.27.1": "passed", "0.25.1": "passed", "0.23.0": "1 of 9 FAILED"}
    assert engines.table("vllm", said).splitlines()[2:] == [
        "| 0.33.0 | passed | no build for CPUs | not run |",
        "| 0.25.1 to 0.27.1 | passed | not run | not run |",
        "| 0.23.0 | 1 of 9 FAILED | not run | not run |",
    ]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (["passed", "passed"], 0),
        (["passed", "2 of 9 FAILED", "not fetched"], 1),
        (["nothing ran: it cannot be imported"], 1),
        (["passed", "not fetched"], 3),
    ],
)
def test_the_status_tells_a_failure_from_a_wheel_that_did_not_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str], status: int
) -> None:
    monkeypatch.setattr(engines, "CACHE", tmp_path)
    answers = iter(said)
    monkeypatch.setattr(engines, "tried", lambda *_: next(answers))
    assert engines.main(["sglang", *(f"0.5.{number}" for number in range(len(said)))]) == status
