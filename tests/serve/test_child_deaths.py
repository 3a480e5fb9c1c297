"""A supervisor outlives its children, whatever they do and whenever: each moment of a start, and what they write."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pdlink.serve import up
from pdlink.serve.keeper import Keeper
from pdlink.serve.up import Child, start, stop

CHILD = """
import os, signal, socket, sys, time
link, moment = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
def at(name):
    if name == moment: os.kill(os.getpid(), signal.SIGKILL)
    if name + " and closes its link" == moment: link.close(); time.sleep(600)
at("before it reads")
text = link.recv(1)
at("after one byte")
while not text.endswith(b"\\n"): text += link.recv(1 << 16)
at("after its settings")
link.sendall(b'{"doing": "loading"}\\n')
at("after a word")
link.sendall(b'{"doing": "load')
at("within a word")
if moment == "says what is no JSON": link.sendall(b'\\x00{{{\\n[]\\n')
else: link.sendall(b'ing"}\\n{"url": "http://a", "length": %d}\\n' % len(text))
at("when it is ready")
link.recv(1)
"""
KILLED = [
    "before it reads",
    "after one byte",
    "after its settings",
    "after a word",
    "within a word",
    "when it is ready",
]
OTHER_ENDS = ["before it reads and closes its link", "within a word and closes its link", "says what is no JSON"]
LARGE = {"prefill": ["http://a-worker-with-a-long-name:8000"] * 20_000}
"""Settings of 800 KB, more than a socket's buffer holds."""

Spawns = Callable[..., None]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Spawns:
    """Children end at these moments, one after the other; the others live."""
    moments: list[str] = []

    def spawn(_: Sequence[str], link: socket.socket) -> subprocess.Popen[bytes]:
        moment = moments.pop(0) if moments else "never"
        command = [sys.executable, "-S", "-c", CHILD, str(link.fileno()), moment]
        return subprocess.Popen(command, pass_fds=[link.fileno()], start_new_session=True)

    monkeypatch.setattr(up, "spawn", spawn)
    monkeypatch.setattr(up, "_LAST_WORDS_S", 0.1)
    return lambda *given: moments.extend(given)


@contextlib.contextmanager
def started(settings: dict[str, Any]) -> Iterator[Child]:
    child = start("decode-0", "decode", settings)
    try:
        yield child
    finally:
        child.kill()
        stop([child], 1)


def kept_until_back(child: Child, keeper: Keeper, caplog: pytest.LogCaptureFixture) -> str:
    """Look after it, with time that passes quickly, until it is back; returns what was logged."""
    deadline_s = time.monotonic() + 30
    while "is back after" not in caplog.text:
        assert time.monotonic() < deadline_s, caplog.text
        keeper.look()
        if child.process.poll() is None:
            time.sleep(0.01)
    return caplog.text


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("moment", [*KILLED, *OTHER_ENDS])
def test_a_supervisor_outlives_a_child_that_ends_at_any_moment_of_its_start(
    moment: str, settings: dict[str, Any], ends: Spawns, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.25
        return now_s

    with started(settings) as child:
        child.wait_ready(20)
        ends(moment, moment)
        keeper = Keeper(child, 3600.0, clock=clock)
        child.kill()
        text = kept_until_back(child, keeper, caplog)
        assert child.facts["url"] == "http://a"
    assert text.count("could not be started again") == (0 if moment == "when it is ready" else 2), text
    if moment in KILLED:
        assert "was killed by SIGKILL" in text


def test_starting_a_child_that_does_not_read_costs_its_supervisor_no_time(ends: Spawns) -> None:
    with started(LARGE) as child:
        assert child.process.poll() is None, "it has not been waited for"
        child.wait_ready(20)
        assert child.facts["length"] > 800_000


def test_no_descriptor_is_left_of_a_process_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: (ours, theirs))

    def no_process(*_: object) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(up, "spawn", no_process)
    with pytest.raises(BlockingIOError):
        start("decode-0", "decode", {})
    assert (ours.fileno(), theirs.fileno()) == (-1, -1)
