"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pdlink.cli import main, whole_parser

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


@pytest.mark.parametrize("path", list(reference.PAGES))
def test_a_page_made_from_the_code_is_not_stale(path: str) -> None:
    fresh = reference.PAGES[path]() == (ROOT / path).read_text()  # no diff: it is long, and of no help
    assert fresh, f"{path} is stale: run `make reference` and commit it"


def test_every_option_says_what_it_is_for() -> None:
    parser = whole_parser()
    lacking = [
        f"{command.prog} {option}"
        for command in (parser, *(each for each, _ in reference._commands(parser)))
        for option, text in reference._options(command)
        if not text
    ]
    assert not [each for each in lacking if not each.startswith(("pdlink bench", "pdlink help"))]


def test_every_command_says_what_it_does() -> None:
    parser = whole_parser()
    assert not [each.prog for each, text in reference._commands(parser) if not (each.description or text)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "doctor" in script
    assert "num-prefill" not in script
    assert "on-transfer-failure" in script


def test_bash_completes_a_command(tmp_path: Path) -> None:
    script = tmp_path / "pdlink.bash"
    made = subprocess.run(
        [sys.executable, "-m", "pdlink", "completion", "bash"], capture_output=True, text=True, check=True, timeout=60
    )
    script.write_text(made.stdout)
    asked = (
        f"source {script}; COMP_WORDS=(pdlink doc); COMP_CWORD=1; COMP_TYPE=9; "
        "$(complete -p pdlink | sed -E 's/.*-F ([^ ]+).*/\\1/') pdlink doc pdlink; echo ${COMPREPLY[@]}"
    )
    found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["doctor"], found.stderr


def test_every_setting_says_what_it_is() -> None:
    rows = [line for line in (ROOT / "docs/settings.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 250
    assert [row for row in rows if not row.strip("|").split("|")[-1].strip()] == []
