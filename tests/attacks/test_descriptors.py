"""A worker that has no descriptor left turns new sessions away, keeps those it has, and recovers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdlink.transport.ucx import UcxTransport

from .descriptors import MOST_SPARE


# Not mapped memory: both workers are in one process here, and a writer over mapped memory refuses its own process.
@pytest.mark.parametrize("kind", ["tcp", "ucx-tcp", "ucx-shm"])
def test_a_worker_without_descriptors_keeps_its_sessions_and_recovers(kind: str) -> None:
    if kind.startswith("ucx") and not (probe := UcxTransport().probe()).ok:
        pytest.skip(probe.reason)
    child = subprocess.run(
        [sys.executable, "-m", "tests.attacks.descriptors", kind],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    print(child.stdout)
    outcomes = child.stdout.splitlines()
    assert len(outcomes) == MOST_SPARE
    if not kind.startswith("ucx"):  # whose sessions take more, in ways of their own
        assert outcomes[-1].endswith(": ready"), "with so many left it goes on as ever"
