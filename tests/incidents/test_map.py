"""`docs/incidents.md` speaks the truth: every test it names exists and says which incident it is about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THREAD = re.compile(r"[\w-]+#\d+")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
REASONS = ("Cannot happen", "Missing")


def rows() -> list[tuple[str, str]]:
    """(threads, what the last column says) of every incident."""
    found = []
    for line in (ROOT / "docs/incidents.md").read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if line.startswith("|") and THREAD.match(columns[0]):
            found.append((columns[0], columns[2]))
    return found


def docstring(path: str, name: str) -> str:
    """Of a test. Raises KeyError if there is no such test."""
    tree = ast.parse((ROOT / path).read_text())
    functions = {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return functions[name]


@pytest.mark.parametrize(("threads", "here"), rows(), ids=[threads for threads, _ in rows()])
def test_every_incident_has_a_test_that_names_it_or_a_reason(threads: str, here: str) -> None:
    texts = [docstring(path, name) for path, name in TEST.findall(here)]
    assert texts or here.startswith(REASONS), "neither a test nor a reason"
    if not here.startswith(REASONS):
        cited = set(THREAD.findall(" ".join(texts).replace("vllm-ascend#", "ascend#")))
        assert cited & set(THREAD.findall(threads)), f"none of {threads} is named in the docstring of a test"


def test_the_map_is_read_as_it_is_written() -> None:
    assert len(rows()) >= 50
    assert (ROOT / "docs/incidents.md").read_text().count("::test_") == sum(
        len(TEST.findall(here)) for _, here in rows()
    )
