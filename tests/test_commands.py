"""Every command on a page of docs/, and in the README, runs, or a reason says why not here.

A command is a line of a code block that begins with a program. `make lint` looks at its options. Those of pages that
tell people what to type are run against a real deployment, with its addresses; what serves, installs or needs more
than this machine is in `NOT_RUN`, with where it is tried instead.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.deployment import Deployment, worker_settings
from tests.tools import tool

lint = tool("lint")

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md"))]
TYPED = ["index.md", "troubleshooting.md", "monitoring.md", "deploy.md", "cli.md"]
"""Pages whose commands are run."""
PROGRAMS = re.compile(r"(pdlink|make|curl|pip|python3?|vllm|docker|kubectl|systemctl|cp|/opt/pdlink/bin/pip)\s")

NOT_RUN = {
    r"pdlink up\b": "serves until Ctrl-C: tests/e2e/test_up.py and tests/e2e/test_up_engines.py",
    r"pdlink (prefill|decode|both|proxy)\b": "serves until Ctrl-C: tests/test_deploy.py and others",
    r"pdlink store\b": "serves until Ctrl-C: tests/e2e/test_store.py",
    r"pdlink keygen\b": "tests/serve/test_keys.py",
    r"pdlink cache (lookup|pin|move|clear)\b": "needs prompts that are kept: tests/serve/test_cache_routes.py",
    r"pdlink cache stats .*,": "asks two ranks: tests/serve/test_cache_routes.py",
    r"pdlink plan\b": "takes a trace: tests/plan/test_command.py",
    r"pdlink bench curves\b": "measures a server: tests/bench/test_curves.py",
    r"pdlink bench transfer\b": "takes minutes: tests/bench/test_transfer.py",
    r"pdlink explain req-": "needs the id of an answer: `test_a_request_is_explained_as_the_page_says`",
    r"pdlink timeline .*--request": "as `pdlink explain`",
    r"pdlink doctor --config": "tests/e2e/test_doctor.py",
    r"make\b": "sets up an environment: `make lint` looks for the targets",
    r"pip|/opt/pdlink/bin/pip|python3 -m venv|cp|systemctl|docker|kubectl": "installs: tests/test_deploy.py",
    r"python -m sglang": "tests/e2e/test_sglang.py",
    r"python examples": "tests/node/test_example.py and tests/store/test_cache.py",
    r"vllm serve": "tests/e2e/test_vllm.py",
    r"pdlink vllm": "tests/e2e/test_vllm_two_hosts.py, with real servers",
    r"pdlink sglang": "tests/fleet/test_alone.py and tests/e2e/test_sglang.py",
    r"curl -H \"Authorization": "changes workers: tests/proxy/test_membership.py",
}
"""Beginning of a command, and why it is not run here."""


class Command(NamedTuple):
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(path: Path) -> list[Command]:
    return [Command(path.name, text) for text in lint.commands_of(path, PROGRAMS)]


COMMANDS = [command for path in PAGES for command in commands_of(path)]


def why_not(command: Command) -> str | None:
    return next((why for begin, why in NOT_RUN.items() if re.match(begin, command.text)), None)


RUN = [command for command in COMMANDS if command.page in TYPED and why_not(command) is None]


def test_commands_are_found_on_the_pages_that_people_type_from() -> None:
    found = {command.page for command in COMMANDS}
    assert set(TYPED) <= found
    assert len(RUN) >= 8
    assert Command("troubleshooting.md", "pdlink doctor 127.0.0.1:8000") in RUN


def test_each_reason_is_of_a_command() -> None:
    unused = [begin for begin in NOT_RUN if not any(re.match(begin, command.text) for command in COMMANDS)]
    assert unused == []


def test_tests_that_reasons_name_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", " ".join(NOT_RUN.values()))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_command_that_is_not_run_here_is_tried_elsewhere() -> None:
    tried = {command.text for command in RUN}
    assert [
        str(each)
        for each in COMMANDS
        if why_not(each) is None and each.text not in tried and "pdlink cache" not in each.text
    ] == []


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    workers = {"prefill-0": worker_settings("prefill"), "decode-0": worker_settings("decode")}
    with Deployment.launch(workers) as deployment:
        deployment.complete("One request, so that there is something to see.")
        yield deployment


def run(line: str, deployment: Deployment, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a shell, as it stands on the page, but for the addresses."""
    for port, label in (("8000", "proxy"), ("8100", "prefill-0"), ("8200", "decode-0")):
        line = line.replace(f"127.0.0.1:{port}", deployment.url(label).removeprefix("http://"))
    line = re.sub(r"^pdlink\b", f"{shlex.quote(sys.executable)} -m pdlink", line)
    shell = ["bash", "-o", "pipefail", "-c", line]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(map(str, (ROOT, ROOT / "proxy")))}
    return subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=env)


@pytest.mark.parametrize("command", list(dict.fromkeys(each.text for each in RUN)))
def test_a_command_runs_as_it_stands_on_its_page(command: str, deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 128\n")  # that one page reads
    result = run(command, deployment, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_what_pages_show_of_an_answer_is_what_comes(deployment: Deployment, tmp_path: Path) -> None:
    shown = (ROOT / "docs/index.md").read_text()
    [command] = [each.text for each in commands_of(ROOT / "docs/index.md") if each.text.startswith("curl")]
    answer = run(command, deployment, tmp_path).stdout
    expected = re.findall(r"^    (X-[\w-]+): (.*)$", shown, re.MULTILINE)
    assert [name for name, _ in expected] == ["X-Request-Id", "X-Pdlink-Prefill", "X-Pdlink-Decode", "X-Pdlink-KV"]
    for name, value in expected[1:]:
        assert f"{name}: {value}" in answer
    [command] = [each.text for each in commands_of(ROOT / "docs/troubleshooting.md") if each.text.startswith("curl")]
    assert run(command, deployment, tmp_path).stdout.strip() == "X-Pdlink-KV: transferred"
    said = json.loads(run("pdlink top 127.0.0.1:8000 --json", deployment, tmp_path).stdout)
    assert said["verdict"]["level"] == "ok"
    doctor = run("pdlink doctor 127.0.0.1:8000", deployment, tmp_path).stdout
    assert "✓ nothing wrong was found" in doctor
    assert "✓ nothing wrong was found" in (ROOT / "docs/troubleshooting.md").read_text()


def test_a_request_is_explained_as_the_page_says(deployment: Deployment, tmp_path: Path) -> None:
    name = deployment.complete("Explain this").headers["X-Request-Id"]
    address = deployment.url("proxy").removeprefix("http://")
    for command in commands_of(ROOT / "docs/index.md"):
        if command.text.startswith(("pdlink explain", "pdlink timeline")):
            line = re.sub(r"req-\w+", name, command.text)
            line += f" --proxy {address}" if "explain" in line else ""
            result = run(line, deployment, tmp_path)
            assert result.returncode == 0, result.stderr
