"""`pdlink up` as a newcomer runs it, and that nothing is left when it ends, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .deployment import Deployment, prompt_of, request, until, worker_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if int(text.rsplit(")", 1)[1].split()[1]) == pid:
            found.append(int(path.parent.name))
    return found


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_up_serves_and_leaves_nothing_behind(number: int) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "pdlink", "up", "--config", "configs/up.yaml", "--port", "0", "--decode", "2"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    text = ""
    while "Ctrl-C" not in text:
        line = process.stdout.readline()
        assert line, f"pdlink up ended early: {text}"
        text += line
    url = re.findall(r"curl -N (http://\S+)/v1/completions", text)[0]
    children = descendants(process.pid)
    assert len(children) == 4
    until(lambda: request(url + "/health").status == 200, "the proxy sees its workers")
    answer = request(url + "/v1/completions", {"model": "pdlink-tiny", "prompt": "Hello", "max_tokens": 4})
    assert answer.status == 200
    process.send_signal(number)
    status = process.wait(30)
    process.stdout.close()
    assert status == (0 if number == signal.SIGINT else -number)
    until(lambda: gone(children), "all children have ended", timeout_s=30)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_killed_worker_comes_back_and_traces_are_left_at_the_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pdlink",
        "up",
        "--port",
        "0",
        "--set",
        f"prefill.timeline={tmp_path}/{{name}}.json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    text = ""

    def read_until(words: str) -> None:
        nonlocal text
        while words not in text:
            line = process.stdout.readline() if process.stdout else ""
            assert line, f"pdlink up ended early: {text}"
            text += line

    try:
        read_until("Ctrl-C")
        [decode] = [pid for pid in descendants(process.pid) if "decode-0" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(decode, signal.SIGKILL)
        read_until("decode-0 is back after")
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0, rest
    assert "decode-0 was killed by SIGKILL; starting it again on the same ports" in text
    assert json.loads((tmp_path / "prefill-0.json").read_text())["traceEvents"]
    assert " WARNING " not in rest, "a normal end looks like one"


def test_mistyped_setting_is_named_with_the_right_one() -> None:
    command = [sys.executable, "-m", "pdlink", "prefill", "--set", "cache.num_block=5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == "pdlink: unknown setting 'cache.num_block'; did you mean 'cache.num_blocks'?\n"


def test_taken_port_is_an_error_that_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "pdlink", "proxy", "--port", port, "--decode", "http://127.0.0.1:1"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert f"cannot bind 127.0.0.1:{port}" in result.stderr
    assert "port 0 takes a free one" in result.stderr


def test_check_says_what_works_and_fails_when_the_configured_transport_does_not() -> None:
    command = [sys.executable, "-m", "pdlink", "check"]
    good = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert good.returncode == 0
    assert "mapped" in good.stdout
    bad = subprocess.run(
        [*command, "--transport", "ucx", "--set", "transport.ucx.library=off"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert bad.returncode == 1
    assert "not usable here" in bad.stdout


def test_worker_without_ucx_runs_on_mapped_memory_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settings = worker_settings("both", transport={"prefer": "ucx", "ucx": {"library": "off"}})
    with Deployment.launch({"alone": settings}, routed=False) as deployment:
        assert deployment.children["alone"].facts["transports"] == ["mapped", "tcp"]
    assert "alone: transport cannot be used: ucx" in caplog.text


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    settings = worker_settings("both", simulate_layer_s=0.1)
    with Deployment.launch({"alone": settings}, routed=False) as deployment, ThreadPoolExecutor(1) as threads:
        running = threads.submit(deployment.complete, prompt_of(20), at="alone")
        until(lambda: deployment.health("alone")["running"] == 1, "the request runs")
        deployment.kill("alone", signal.SIGTERM)
        until(lambda: deployment.health("alone")["status"] == "draining", "the worker drains")
        assert deployment.complete(prompt_of(5), at="alone").status == 503
        assert running.result(20).status == 200
        assert deployment.children["alone"].process.wait(20) == 0
