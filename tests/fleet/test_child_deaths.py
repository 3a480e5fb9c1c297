"""A supervisor outlives its children, whatever they do and whenever: each moment of a start, and what they write."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import pytest

from pdlink.fleet import child as children
from pdlink.fleet.child import ChildFailed, Restartable, start
from pdlink.fleet.post import Post

CHILD = """
import os, signal, socket, sys, time
link, moment = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
def at(name):
    if name == moment: os.kill(os.getpid(), signal.SIGKILL)
    if name + " and closes its link" == moment: link.close(); time.sleep(600)
at("before it reads")
if moment == "never reads": time.sleep(600)
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


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When children end, one after the other; those for which there is none live."""
    left: list[str] = []

    def spawn(_: Sequence[str], link: socket.socket, module: str) -> subprocess.Popen[bytes]:
        moment = left.pop(0) if left else "never"
        command = [sys.executable, "-S", "-c", CHILD, str(link.fileno()), moment]
        return subprocess.Popen(command, pass_fds=[link.fileno()], start_new_session=True)

    monkeypatch.setattr(children, "spawn", spawn)
    monkeypatch.setattr(children, "_LAST_WORDS_S", 0.1)
    return left


@contextlib.contextmanager
def kept(settings: dict[str, Any]) -> Iterator[Callable[[], Post]]:
    """A post whose time passes quickly, looked after with each call."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.25
        return now_s

    begin = partial(start, "decode-0", "decode", settings)
    post = Post("decode-0", "decode", begin, start_timeout_s=3600.0, clock=clock)
    deadline_s = time.monotonic() + 30

    def look() -> Post:
        assert time.monotonic() < deadline_s, f"it is still {post.doing}"
        post.look()
        time.sleep(0.002)
        return post

    try:
        yield look
    finally:
        if post.child is not None:
            post.child.kill()
            post.child.close()


def child_of(post: Post) -> Restartable:
    assert post.child is not None
    return post.child


def look_for_ever(look: Callable[[], Post]) -> NoReturn:
    while True:
        look()


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("moment", [*KILLED, *OTHER_ENDS])
def test_a_supervisor_outlives_a_child_that_ends_at_any_moment_of_its_start(
    moment: str, settings: dict[str, Any], moments: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with kept(settings) as look:
        while not look().ready:
            pass
        moments += [moment, moment, "never"]
        child_of(look()).kill()
        while moments or not look().ready:
            look()
        assert look().url == "http://a"
    assert caplog.text.count("; starting it again on the same ports") == 3, caplog.text
    if moment in KILLED:
        assert caplog.text.count("was killed by SIGKILL") == 3


@pytest.mark.parametrize("moment", KILLED[:-1])
def test_a_child_that_is_killed_in_its_first_start_is_started_again_and_one_that_always_is_has_no_chance(
    moment: str, moments: list[str]
) -> None:
    moments += [moment, moment]
    with kept({}) as look:
        while not look().ready:
            pass
    moments += [moment] * 3
    with kept({}) as look, pytest.raises(ChildFailed, match="decode-0 ended before .* was killed by SIGKILL"):
        look_for_ever(look)


def test_a_child_that_ends_by_itself_in_its_first_start_is_told_at_once(moments: list[str]) -> None:
    """It would do so again: its settings are wrong, or something is missing here."""
    moments += ["says what is no JSON"]
    with kept({}) as look, pytest.raises(ChildFailed, match="^decode-0 sent .* in place of a report$"):
        look_for_ever(look)


def test_starting_a_child_that_does_not_read_costs_its_supervisor_no_time(moments: list[str]) -> None:
    moments += ["never reads"]
    with kept(LARGE) as look:
        for _ in range(20):
            assert not look().ready
        child_of(look()).kill()
        while not look().ready:
            pass
        assert look().facts["length"] > 800_000


def test_no_descriptor_is_left_of_a_process_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: (ours, theirs))

    def no_process(*_: object) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(children, "spawn", no_process)
    with pytest.raises(BlockingIOError):
        start("decode-0", "decode", {})
    assert (ours.fileno(), theirs.fileno()) == (-1, -1)
