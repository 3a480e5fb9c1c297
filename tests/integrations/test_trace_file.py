"""Timelines as files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pdlink.events import LayerWritten, emit
from pdlink.integrations.trace_file import TraceFile
from tests.observe.traced import tracks_of


def test_a_trace_is_there_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    for suffix in ("json", "pftrace"):
        TraceFile("decode-0", str(tmp_path / f"decode-0.{suffix}")).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["decode-0.json", "decode-0.pftrace"]
    assert json.loads((tmp_path / "decode-0.json").read_text())["name"] == "decode-0"
    assert tracks_of((tmp_path / "decode-0.pftrace").read_bytes()) == ["decode-0"]


def test_a_file_that_cannot_be_written_costs_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's worker went on without its trace and ended with an exception, once its disk was full."""
    file = TraceFile("a", str(tmp_path / "gone" / "a.json"))
    emit(LayerWritten(transfer_id="t", layer=0, start=0, end=1, at_s=0.0))
    file._write()
    file.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "timeline: cannot write" in caplog.text
