"""A deployment that has nothing but ::1: workers, their proxy, and what they publish."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import until

from .deployment import Deployment, prompt_of, request, worker_settings

pytestmark = pytest.mark.e2e

EVENTS = {"endpoint": "tcp://[::1]:0", "replay_endpoint": "tcp://[::1]:0"}
TIERS = {"max_local_cpu_size": 0}


def settings(role: str, kind: str, **more: Any) -> dict[str, Any]:
    return worker_settings(role, listen="::1", transport={"kind": kind}, tiers=TIERS, kv_events=EVENTS, **more)


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    workers = {role: settings(role, request.param) for role in ("prefill", "decode")}
    with Deployment.launch(workers, {"listen": "[::1]:0"}) as made:
        yield made


def test_a_prompt_travels_and_is_told_of_over_ipv6(deployment: Deployment) -> None:
    prompt = prompt_of(100)
    answer = deployment.complete(prompt)
    assert (answer.status, answer.headers["X-Pdlink-KV"]) == (200, "transferred")
    assert answer.text == deployment.complete(prompt, at="decode").text
    urls = [deployment.url(label) for label in ("proxy", "prefill", "decode")]
    assert all(re.fullmatch(r"http://\[::1\]:\d+", url) for url in urls)
    health = deployment.health("prefill")
    assert health["control"].startswith("tcp://[::1]:")
    assert all(re.fullmatch(r"tcp://\[::1\]:\d+,tcp://\[::1\]:\d+", each) for each in health["kv_events"])


def test_up_and_doctor_on_an_ipv6_address() -> None:
    command = [sys.executable, "-m", "pdlink", "up", "--listen", "[::1]:0", "--set", "prefill.listen=::1"]
    command += ["--set", "decode.listen=::1", "--store", "--set", "store.listen=::1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            text = ""
            while "Ctrl-C" not in text:
                line = process.stdout.readline()
                assert line, f"it ended early: {text}"
                text += line
            url = re.findall(r"curl -N (http://\S+)/v1/completions", text)[0]
            assert url.startswith("http://[::1]:")
            until(lambda: request(url + "/health").status == 200, "the proxy sees its workers")
            asked = subprocess.run(
                [sys.executable, "-m", "pdlink", "doctor", url.removeprefix("http://")],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert asked.returncode == 0, asked.stdout + asked.stderr
        finally:
            process.kill()
