"""`pdlink up --engine vllm` and `sglang` as a newcomer runs them, with a program in the engine's place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.proxy.fakes import command
from tests.waiting import until

from .deployment import request
from .test_up import descendants, gone

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PORTS = {"vllm": "control_port", "sglang": "bootstrap_port"}
"""The port setting that each engine has beside those of HTTP."""
READY_PATH = {"vllm": "/health", "sglang": "/v1/models"}


def up(executable: Path, *flags: str) -> subprocess.Popen[str]:
    """The engine is the name of the program."""
    engine = executable.name
    settings = {"executable": executable, "model": "/m", "prefill_port": 0, "decode_port": 0, PORTS[engine]: 0}
    more = [text for key, value in settings.items() for text in ("--set", f"{engine}.{key}={value}")]
    line = [sys.executable, "-m", "pdlink", "up", "--engine", engine, "--listen", "127.0.0.1:0", *more, *flags]
    place = {**os.environ, "TMPDIR": str(executable.parent)}  # what a killed one cannot remove is left there
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=place)


def text_until(process: subprocess.Popen[str], end: str) -> str:
    assert process.stdout is not None
    text = ""
    while end not in text:
        line = process.stdout.readline()
        assert line, f"pdlink up ended early: {text}"
        text += line
    return text


@pytest.mark.parametrize(
    ("engine", "number"),
    [("vllm", signal.SIGINT), ("vllm", signal.SIGKILL), ("sglang", signal.SIGINT)],
    ids=["vllm-Ctrl-C", "vllm-SIGKILL", "sglang-Ctrl-C"],
)
def test_up_serves_with_another_engines_servers_and_leaves_nothing_behind(
    engine: str, number: int, tmp_path: Path
) -> None:
    process = up(command(tmp_path, engine), "--prefill", "2", "--decode", "2")
    text = text_until(process, "Ctrl-C")
    url = re.findall(r"curl -N (http://\S+)/v1/completions", text)[0]
    children = descendants(process.pid)
    assert len(children) == 5
    until(lambda: request(url + "/health").status == 200, "the proxy sees its servers")
    answer = request(url + "/v1/completions", {"model": "pdlink-tiny", "prompt": "Hello", "max_tokens": 4})
    assert answer.status == 200
    assert answer.text == "0.0 0.1 0.2 0.3 "
    assert "X-Pdlink-Prefill" in answer.headers
    process.send_signal(number)
    status = process.wait(30)
    assert status == (0 if number == signal.SIGINT else -number)
    until(lambda: gone(children), "all children have ended")
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_dies_is_started_again_and_the_rest_stays(engine: str, tmp_path: Path) -> None:
    process = up(command(tmp_path, engine))
    text = text_until(process, "Ctrl-C")
    prefill = int(re.findall(r"prefill-0 +http://\S+:(\d+)", text)[0])
    (victim,) = (pid for pid in descendants(process.pid) if f"{prefill}" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(victim, signal.SIGKILL)
    assert "prefill-0 was killed by SIGKILL" in text_until(process, "prefill-0 is back")
    with urllib.request.urlopen(f"http://127.0.0.1:{prefill}{READY_PATH[engine]}", timeout=10) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_ctrl_c_while_servers_start_ends_them(tmp_path: Path) -> None:
    slow = tmp_path / "vllm"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    process = up(slow)
    text_until(process, "starting prefill-0")
    children = descendants(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert gone(children)


def test_a_server_that_cannot_start_and_a_missing_vllm_say_why(tmp_path: Path) -> None:
    process = up(command(tmp_path, fails="ValueError: no such layout"))
    errors, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended before it was ready" in errors
    assert "no such layout" in errors
    process = up(tmp_path / "none" / "vllm")
    errors, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "vllm.executable" in errors
