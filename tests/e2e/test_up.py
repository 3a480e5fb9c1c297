"""`pdlink up` as a newcomer runs it, and that nothing is left when it ends, however it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdlink_bench.chaos.ledger import segments
from tests.nursery import WHOLE_END
from tests.waiting import WAIT_S, until

from ..store.process import process
from .deployment import TIMEOUTS, Deployment, of_store, prompt_of, request, worker_settings

pytestmark = pytest.mark.e2e


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
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not any(map(runs, pids))


def segments_of(pids: list[int]) -> set[str]:
    """Shared memory that these processes have open, by the names of `pdlink_bench.chaos.ledger.segments`.

    Other tests and programs of this machine make some, too, and leave it when they like.
    """
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    named = {line[5] for line in lines if len(line) > 5 and line[5].startswith("/dev/shm/")}
    sysv = {line[4] for line in lines if len(line) > 5 and line[5].startswith("/SYSV")}
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]] if sysv else []
    return named | {f"sysv {row[1]} of {row[3]} bytes" for row in rows if row[1] in sysv}


class Up:
    """`pdlink up` on free ports, ready; a context manager."""

    def __init__(self) -> None:
        command = [
            sys.executable,
            "-m",
            "pdlink",
            "up",
            "--config",
            "configs/up.yaml",
            "--listen",
            "127.0.0.1:0",
        ]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root
        )
        self.text = ""

    def __enter__(self) -> Up:
        self.read_until("Ctrl-C")
        self.url = re.findall(r"curl -N (http://\S+)/v1/completions", self.text)[0]
        until(lambda: request(self.url + "/health").status == 200, "the proxy sees its workers")
        answer = request(self.url + "/v1/completions", {"model": "pdlink-tiny", "prompt": "Hello", "max_tokens": 4})
        assert answer.status == 200
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read_until(self, words: str) -> None:
        assert self.process.stdout is not None
        while words not in self.text:
            line = self.process.stdout.readline()
            assert line, f"pdlink up ended early: {self.text}"
            self.text += line


def test_a_killed_worker_comes_back_and_ctrl_c_leaves_nothing() -> None:
    with Up() as site:
        children = descendants(site.process.pid)
        assert len(children) == 3
        [decode] = [pid for pid in children if "decode-0" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(decode, signal.SIGKILL)
        site.read_until("decode-0 is back after")
        children = descendants(site.process.pid)
        held = segments_of(children)
        site.process.send_signal(signal.SIGINT)
        rest = site.process.communicate(timeout=120)[0]
    assert site.process.returncode == 0, rest
    assert "decode-0 was killed by SIGKILL; starting it again on the same ports" in site.text
    said = [line for line in rest.splitlines() if "ok again" not in line]  # of the proxy, a moment later
    assert " WARNING " not in "\n".join(said), "a normal end looks like one"
    until(lambda: gone(children), "all children have ended")
    until(lambda: not segments() & held, "no shared memory is left behind")


def test_children_end_when_up_is_killed() -> None:
    with Up() as site:
        children = descendants(site.process.pid)
        assert len(children) == 3
        held = segments_of(children)
        site.process.kill()
        until(lambda: gone(children), "all children have ended")
    until(lambda: not segments() & held, "no shared memory is left behind")


def test_mistyped_setting_is_named_with_the_right_one() -> None:
    command = [sys.executable, "-m", "pdlink", "prefill", "--set", "cache.num_block=5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr == "pdlink: unknown setting 'cache.num_block'; did you mean 'cache.num_blocks'?\n"


def test_taken_port_is_an_error_that_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "pdlink", "proxy", "--listen", f"127.0.0.1:{port}", "--decode", "http://a"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert f"cannot bind 127.0.0.1:{port}" in result.stderr
    assert "port 0 takes a free port" in result.stderr


def test_check_says_what_works_and_fails_when_the_configured_transport_does_not() -> None:
    command = [sys.executable, "-m", "pdlink", "check"]
    good = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert good.returncode == 0
    assert "mapped" in good.stdout
    bad = subprocess.run(
        [*command, "--transport", "ucx", "--set", "transport.ucx.library=off"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert bad.returncode == 1
    assert "not usable here" in bad.stdout


def test_worker_without_ucx_runs_on_mapped_memory_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settings = worker_settings("both", transport={"ucx": {"library": "off"}})
    with Deployment.launch({"alone": settings}, routed=False) as deployment:
        assert deployment.children["alone"].facts["transports"] == ["mapped", "tcp"]
    assert "alone: transport cannot be used: ucx" in caplog.text


def test_processes_that_are_stopped_tell_of_no_leaked_objects(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHOLE_END, "1")
    disk = {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": 0.1, "max_local_cpu_size": 0.1}
    with process(tmp_path, tiers=disk) as store:
        workers = {role: worker_settings(role, tiers=of_store(store.path, 32)) for role in ("prefill", "decode")}
        with Deployment.launch(workers) as deployment:
            deployment.wait_store_answers(*workers)
            assert deployment.complete(prompt_of(70)).status == 200
            for children in ([*deployment.children.values()], [store.child]):
                for child in children:
                    child.terminate()
                for child in children:
                    assert child.process.wait(WAIT_S) == 0
    assert "leaked" not in capfd.readouterr().err


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    settings = worker_settings("both", timeouts={**TIMEOUTS, "drain_s": WAIT_S})
    launched = Deployment.launch({"alone": settings}, routed=False, holdable=("alone",))
    with launched as deployment, ThreadPoolExecutor(1) as threads:
        deployment.hold("alone", "layer 2")
        running = threads.submit(deployment.complete, prompt_of(20), at="alone")
        until(lambda: deployment.health("alone")["running"] == 1, "the request runs")
        assert [request(deployment.url("alone") + path).status for path in ("/readyz", "/livez")] == [200, 200]
        deployment.kill("alone", signal.SIGTERM)
        until(lambda: deployment.health("alone")["status"] == "draining", "the worker drains")
        assert request(deployment.url("alone") + "/readyz").status == 503
        assert request(deployment.url("alone") + "/livez").status == 200, "it must not be killed for that"
        assert deployment.complete(prompt_of(5), at="alone").status == 503
        assert not running.done()
        deployment.let_go()
        assert running.result(WAIT_S).status == 200
        assert deployment.children["alone"].process.wait(WAIT_S) == 0
