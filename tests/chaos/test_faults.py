"""Faults done to processes that are no workers: what happens to them, and what is called a finding."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdlink.config import WorkerConfig
from pdlink.config.listen import ListenConfig, place_of
from pdlink.fleet import child
from pdlink.fleet.child import Child
from pdlink_bench.chaos import faults
from pdlink_bench.chaos.faults import LocalDeployment
from pdlink_bench.chaos.schedule import PROXY, Fault, Kind
from tests.waiting import WAIT_S

OBEDIENT = "trap 'exit 0' TERM; while :; do sleep 0.02; done"
STUBBORN = "trap '' TERM; while :; do sleep 0.02; done"


def wait_for_trap(pid: int) -> None:
    """Return when SIGTERM would not end this shell as it would any process."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn:", "SigCgt:"))]
        if any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks):
            return
        time.sleep(0.002)
    raise AssertionError("the shell sets no trap")


def port_given(settings: dict[str, Any]) -> int:
    """Of HTTP."""
    if isinstance(settings["listen"], str):
        return place_of(settings["listen"]).port
    return ListenConfig.model_validate(settings["listen"]).port


class Started:
    """Stands in for `pdlink.fleet.child.start`: shells that are ready at once."""

    def __init__(self) -> None:
        self.script = OBEDIENT
        self.settings: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, label: str, role: str, settings: dict[str, Any], module: str = "pdlink") -> Child:
        self.settings.append((label, settings))
        ours, theirs = socket.socketpair()
        port = port_given(settings) or 10_000 + len(self.settings)
        facts = {"url": f"http://127.0.0.1:{port}", "port": port, "control_port": port + 1000}
        theirs.sendall(json.dumps(facts).encode() + b"\n")
        theirs.close()
        shell = subprocess.Popen(["sh", "-c", self.script])
        if "trap" in self.script:
            wait_for_trap(shell.pid)
        return Child(label, role, settings, shell, ours, {}, module)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(faults, "start", found)
    monkeypatch.setattr(child, "start", found)  # for `Child.again`
    return found


@pytest.fixture
async def local(started: Started) -> AsyncIterator[LocalDeployment]:
    timeouts = {"drain_s": 0.2}  # and eight seconds more, which no shell here takes
    prefill, decode = (
        WorkerConfig.model_validate({"role": role, "timeouts": timeouts}) for role in ("prefill", "decode")
    )
    deployment = LocalDeployment(prefill, decode, 1, 2)
    await deployment.open()
    yield deployment
    await deployment.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what is waited for is another process
            await asyncio.sleep(0.02)


async def test_what_is_killed_comes_back_on_its_ports(local: LocalDeployment, started: Started) -> None:
    url = local.url_of("decode-1")
    assert local.begin(Fault(0.0, Kind.KILL, "decode-1"))
    assert local.states()["decode-1"] == "away"
    await local.settled()
    assert local.states()["decode-1"] == "up"
    assert local.url_of("decode-1") == url
    label, settings = started.settings[-1]
    assert (label, f"http://127.0.0.1:{port_given(settings)}") == ("decode-1", url)
    assert local.findings == []
    assert local.done == {"kill": 1}


async def test_a_target_that_is_away_is_left_alone(local: LocalDeployment) -> None:
    assert local.begin(Fault(0.0, Kind.STOP, "prefill-0", for_s=0.3))
    assert not local.begin(Fault(0.0, Kind.KILL, "prefill-0"))
    await local.settled()
    assert local.done == {"stop": 1, "skipped": 1}
    assert local.states()["prefill-0"] == "up"


async def test_times_without_any_worker_of_a_role_are_noted(local: LocalDeployment) -> None:
    local.begin(Fault(0.0, Kind.STOP, "decode-0", for_s=0.5))
    await local.settled()
    assert local.outages == [], "the other decode worker was there"
    local.begin(Fault(0.0, Kind.STOP, "prefill-0", for_s=0.5))
    await local.settled()
    await until(lambda: local.outages)
    assert len(local.outages) == 1


async def test_the_proxys_absences_are_noted(local: LocalDeployment) -> None:
    local.begin(Fault(0.0, Kind.KILL, PROXY))
    await local.settled()
    [(gone_s, back_s)] = local.absences
    assert gone_s < back_s


async def test_a_process_that_drains_and_leaves_is_no_finding(local: LocalDeployment) -> None:
    local.begin(Fault(0.0, Kind.TERM, "prefill-0"))
    await local.settled()
    assert local.findings == []
    assert local.done == {"term": 1}


async def test_a_process_that_does_not_drain_is_a_finding(
    local: LocalDeployment, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_DRAIN_SLACK_S", 0.3)
    started.script = STUBBORN
    local.begin(Fault(0.0, Kind.KILL, "prefill-0"))
    await local.settled()
    started.script = OBEDIENT
    local.begin(Fault(0.0, Kind.TERM, "prefill-0"))
    await local.settled()
    assert len(local.findings) == 1
    assert "prefill-0 did not leave within" in local.findings[0]


async def test_a_process_that_ends_by_itself_is_a_finding_and_comes_back(
    local: LocalDeployment, started: Started
) -> None:
    started.script = "sleep 0.3; exit 7"
    local.begin(Fault(0.0, Kind.KILL, "decode-0"))
    await local.settled()
    started.script = OBEDIENT
    await until(lambda: local.findings)
    await local.settled()
    assert local.findings == ["decode-0 ended by itself with status 7"]
    assert local.states()["decode-0"] == "up"
