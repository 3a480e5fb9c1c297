"""The documents name tests that hold a fact: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FAULTS, ASKS = 10, 8


def test_every_test_that_the_tiers_document_names_exists() -> None:
    text = (ROOT / "docs/tiers.md").read_text()
    tables = text.split("## Faults of others")[1].split("## Requirements")[0].split("\n\n")
    numbered = [[row.split("|")[1].strip() for row in table.splitlines()[2:]] for table in tables if "|---" in table]
    assert numbered[:2] == [[str(row) for row in range(1, number + 1)] for number in (FAULTS, ASKS)]
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", "".join(tables)))
    assert len(named) > FAULTS + ASKS
    assert not named - defined


def test_every_file_of_tests_that_the_tiers_document_names_exists() -> None:
    requirements = (ROOT / "docs/tiers.md").read_text().split("## Requirements")[1]
    for name in re.findall(r"`((?:tests/)?[\w/]+\.py)`", requirements):
        places = [ROOT / name, ROOT / "tests/store" / name, ROOT / "pdlink/store" / name, ROOT / "pdlink" / name]
        assert any(place.exists() for place in places), name


RULES = (8, 7, 4, 7, 7, 10, 8, 14, 4, 4, 5, 3, 3, 4, 3, 3, 4, 8, 8, 3)
"""How many rules each requirement has, R1 first."""


def rows_of_requirements() -> list[tuple[list[str], str, str]]:
    """(Rules, state, what is said of them) of each row."""
    table = (ROOT / "docs/tiers.md").read_text().split("## Requirements")[1].split("|---|---|---|---|\n")[1]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return [(list(rules_in(name)), state, said) for name, _, state, said in cells]


def rules_in(name: str) -> Iterator[str]:
    """Of `R1.2, R1.3` or `R1.4 to 1.8`."""
    for part in name.split(", "):
        first, _, last = part.removeprefix("R").partition(" to ")
        requirement, begin = first.split(".")
        end = last.removeprefix(f"{requirement}.") or begin
        yield from (f"{requirement}.{rule}" for rule in range(int(begin), int(end) + 1))


def test_every_requirement_works_is_refused_or_is_missing() -> None:
    listed = [rule for rules, _, _ in rows_of_requirements() for rule in rules]
    expected = [f"{number}.{rule}" for number, count in enumerate(RULES, 1) for rule in range(1, count + 1)]
    assert sorted(listed) == sorted(expected)
    for rules, state, said in rows_of_requirements():
        assert state in ("works", "refused", "missing"), rules
        assert said, rules
        if state == "works":
            assert re.search(r"`[\w/]*test_\w+\.py`|`pdlink bench \w+`", said), f"{rules}: no test shows it"


def test_the_readme_has_a_row_for_each_requirement_and_names_what_is_refused() -> None:
    text = (ROOT / "README.md").read_text().split("### What LMCache, HiCache and AIBrix offer")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| R")]
    assert [name for name, *_ in rows] == [f"R{number}" for number in range(1, len(RULES) + 1)]
    refused = {rules[0].partition(".")[0] for rules, state, _ in rows_of_requirements() if state == "refused"}
    works = {rules[0].partition(".")[0] for rules, state, _ in rows_of_requirements() if state == "works"}
    for name, _, does, does_not in rows:
        assert does_not != "–" or name.removeprefix("R") not in refused, name
        assert (does != "–") == (name.removeprefix("R") in works), name
