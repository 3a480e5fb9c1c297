"""Completion of shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdlink.cli import main


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
        [sys.executable, "-m", "pdlink", "completion", "bash"], capture_output=True, text=True, check=True, timeout=99
    )
    script.write_text(made.stdout)
    asked = (
        f"source {script}; COMP_WORDS=(pdlink doc); COMP_CWORD=1; COMP_TYPE=9; "
        "$(complete -p pdlink | sed -E 's/.*-F ([^ ]+).*/\\1/') pdlink doc pdlink; echo ${COMPREPLY[@]}"
    )
    found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["doctor"], found.stderr
