"""What the documents name is there: links, files, commands, settings, targets of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdlink import cli
from pdlink.config import ProxyConfig, StoreConfig, UpConfig, WorkerConfig, settings_of

ROOT = Path(__file__).parents[1]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
each_document = pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def wrong_links(text: str, folder: Path) -> list[str]:
    wrong = []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose):
        name, _, anchor = link.partition("#")
        there = text if not name else (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""
        if (name and not (folder / name).exists()) or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    return wrong


def test_a_wrong_link_is_found() -> None:
    assert wrong_links("# A b\n[1](#a-b) [2](#c) [3](gone.md)", ROOT) == ["#c", "gone.md"]


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    assert not wrong_links(path.read_text(), path.parent)


@each_document
def test_files_commands_and_targets_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    folders = "tests|pdlink|proxy|configs|benchmarks|tools|csrc|docs|examples"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]
    commands = re.findall(r"(?:`|^    (?:\$ )?)pdlink ([a-z]+)\b", text, re.MULTILINE)
    domain = {"records"}  # a name in docs/wire.md, `pdlink records`, that nobody types
    assert not set(commands) - set(cli._parser([]).commands) - {"help", "version"} - domain
    targets = re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)
    assert not set(targets) - set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)


@each_document
def test_tests_that_are_named_exist(path: Path) -> None:
    for file, name in named_tests(path.read_text()):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_each_complaint_has_a_way_to_see_that_it_is_gone() -> None:
    rows = [line.strip("|").split("|") for line in (ROOT / "docs/complaints.md").read_text().splitlines()]
    told = [
        [cell.strip() for cell in row] for row in rows if len(row) == 4 and row[0].strip() not in ("was", "---", "")
    ]
    assert len(told) >= 35
    assert [row[0] for row in told if not row[2]] == []
    assert len([row for row in told if named_tests(row[3])]) >= 30


@each_document
def test_settings_that_are_named_exist(path: Path) -> None:
    known = {key for kind in (WorkerConfig, ProxyConfig, StoreConfig, UpConfig) for key in settings_of(kind)}
    named = re.findall(r"--set ([a-z_.0-9]+)=", path.read_text())
    assert not set(named) - known


def test_the_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text().partition("## Run it for real")[2].partition("\n\n`--model")[0]
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert not set(cli._parser([]).commands) - {word for cell in cells for word in re.findall("[a-z]+", cell)}
