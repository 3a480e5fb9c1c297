"""Traces of several kinds, quantiles, and curves from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdlink.errors import ConfigError
from pdlink.plan.curves import Curves, read_curves
from pdlink.plan.traffic import from_quantiles, read_trace

MOONCAKE = '{"timestamp": 2500, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}\n'
EARLIER = '{"timestamp": 500, "input_length": 30, "output_length": 2, "hash_ids": [3]}\n'


def test_a_mooncake_trace_is_read_and_begins_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE + "\n" + EARLIER)
    found = read_trace(path)
    assert found.at_s.tolist() == [0, 2]
    assert found.prompt_tokens.tolist() == [30, 700]
    assert found.answer_tokens.tolist() == [2, 9]
    assert found.keys == ((3,), (1, 2))
    assert len(read_trace(path, 1)) == 1


def test_a_decision_log_is_a_trace_without_requests_that_failed_or_were_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    failed = MOONCAKE.replace("}", ', "outcome": "failed"}')
    uncounted = MOONCAKE.replace('"output_length": 9', '"output_length": 0')
    path.write_text(failed + uncounted + MOONCAKE.replace("}", ', "outcome": "ok", "attempts": []}'))
    assert len(read_trace(path)) == 1


def test_a_trace_of_azure_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9305900,396,109\r\n"
    )
    found = read_trace(path)
    assert found.at_s == pytest.approx([0, 4.25])
    assert found.answer_tokens.tolist() == [44, 109]
    assert found.keys == ()


@pytest.mark.parametrize(
    "text",
    ["{", '{"timestamp": 1}', "[1]", "TIMESTAMP,X\n1,2", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1", ""],
)
def test_what_is_no_trace_is_refused_with_the_file_and_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match="trace: cannot read .*trace"):
        read_trace(path)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no text"):
        read_trace(tmp_path / "binary")


def test_lengths_from_quantiles_have_them() -> None:
    found = from_quantiles({50: 1000, 99: 8000}, {50: 100}, 20_000, 1)
    p50, p99 = np.percentile(found.prompt_tokens, (51, 99))
    assert (p50, p99) == (pytest.approx(1040, rel=0.05), pytest.approx(8000, rel=0.01))
    assert set(found.answer_tokens) == {100}
    assert found.per_s == pytest.approx(1.0)


def test_curves_are_read_as_they_were_written_and_others_refused(tmp_path: Path) -> None:
    path, curves = tmp_path / "curves.json", Curves(token_s=1e-4, source="a worker")
    path.write_text(curves.model_dump_json())
    assert read_curves(path) == curves
    wrong = {'{"schema_version": 2}': "schema_version", '{"x": 1}': "x", '{"token_s": 0}': "token_s", "[": "the file"}
    for text, what in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"with {what}"):
            read_curves(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_curves(tmp_path / "none")
