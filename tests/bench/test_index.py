"""`pdlink bench index`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pdlink.cli import main
from pdlink_bench.index import BAR_NBYTES_PER_BLOCK

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_index_holds_what_it_was_told_within_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By block as with ten million: the tables grow by halves."""
    out = tmp_path / "index.json"
    few = ["--blocks", "60000", "--publishers", "20", "--tokens", "8192", "--json", str(out)]
    assert main(["bench", "index", *few]) == 0
    kept = json.loads(out.read_text())
    assert kept["blocks"] >= 60_000
    assert kept["index_nbytes"] <= BAR_NBYTES_PER_BLOCK * kept["blocks"]
    assert "8,192 tokens, held: p50" in capsys.readouterr().out


def test_a_prompt_of_several_events_is_found_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "index", "--blocks", "5000", "--tokens", "20000", "--holders", "3"]) == 0
    assert "20,000 tokens, held by nobody" in capsys.readouterr().out
