"""What one process of a proxy gets of the settings of all."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

from pdlink.config import ProxyConfig
from pdlink.fleet.child import Child
from pdlink.fleet.post import Here
from pdlink.fleet.processes import PLACE, _reload

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def place(number: int) -> Here:
    """One that runs."""
    process = create_autospec(subprocess.Popen, instance=True)
    process.poll.return_value = None
    link = create_autospec(socket.socket, instance=True)
    settings = {"listen": "127.0.0.1:1", PLACE: {"number": number}}
    found = Here(lambda: child)
    child = found.child = Child(f"proxy-{number}", "proxy", settings, process, link, {})
    return found


def test_settings_read_again_are_divided_by_the_processes_that_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their number is no setting that a running proxy takes."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("pdlink_proxy.siblings.tell", lambda _, __, ___, settings: told.append(settings))
    places = [place(number) for number in range(2)]
    _reload(places, tmp_path, lambda: ProxyConfig(processes=4, queue_size=10))
    for number, each in enumerate(places):
        assert isinstance(each.child, Child)
        kept = each.child.settings
        assert (kept["queue_size"], kept["listen"], kept[PLACE]) == (5, "127.0.0.1:1", {"number": number})
    assert [settings["queue_size"] for settings in told] == [5, 5]
