"""What one process of a proxy gets of the settings of all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

from pdlink.config import ProxyConfig
from pdlink.fleet import processes
from pdlink.fleet.child import Child
from pdlink.fleet.post import Post
from pdlink.fleet.processes import PLACE, _reload

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def running(number: int) -> Post:
    """One that runs."""
    process = create_autospec(subprocess.Popen, instance=True)
    process.poll.return_value = None
    link = create_autospec(socket.socket, instance=True)
    settings = {"listen": "127.0.0.1:1", PLACE: {"number": number}}
    child = Child(f"proxy-{number}", "proxy", settings, process, link, {})
    found = Post(child.label, "proxy", lambda: child)
    found.look()
    return found


def test_settings_read_again_are_divided_by_the_processes_that_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their number is no setting that a running proxy takes."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("pdlink_proxy.siblings.tell", lambda _, __, ___, settings: told.append(settings))
    posts = [running(number) for number in range(2)]
    _reload(posts, tmp_path, lambda: ProxyConfig(processes=4, queue_size=10))
    for number, each in enumerate(posts):
        assert isinstance(each.child, Child)
        kept = each.child.settings
        assert (kept["queue_size"], kept["listen"], kept[PLACE]) == (5, "127.0.0.1:1", {"number": number})
    assert [settings["queue_size"] for settings in told] == [5, 5]


def test_a_hang_up_while_processes_start_is_heard_when_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it ends a process: the supervisor died, and with it all that it had started."""
    done: list[str] = []

    def start(posts: list[Post], _: float) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        done.append("started")
        monkeypatch.setattr(Post, "facts", {"line": "ready"})

    monkeypatch.setattr(processes, "await_all", start)
    monkeypatch.setattr(processes, "_reload", lambda posts, *_: done.append(f"read again for {len(posts)}"))
    monkeypatch.setattr(processes, "keep", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    try:
        processes.run_proxy(ProxyConfig(processes=2, listen="127.0.0.1:0"), None, done.append)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done == ["started", "ready, 2 processes", "read again for 2", "read again for 2"]
