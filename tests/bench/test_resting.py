"""The plugin that lets waiting threads of vLLM and NIXL sleep, with modules in the place of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlink_bench import resting

VLLM = """
class SpinCondition:
    def __init__(self, is_reader, context, notify_address, busy_loop_s=1):
        self.busy_loop_s = busy_loop_s
"""
NIXL = """
class nixlAgentConfig:
    pass
"""
SERVER = """
from importlib.metadata import entry_points
for plugin in entry_points(group="vllm.general_plugins"):
    plugin.load()()
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
print(SpinCondition(True, None, "ipc://x").busy_loop_s)
try:
    from nixl import _bindings
except ImportError:
    pass
else:
    config = _bindings.nixlAgentConfig()
    config.pthrDelay, config.lthrDelay = 0, 7
    print(config.pthrDelay, config.lthrDelay)
"""


def served(tmp_path: Path, *, with_nixl: bool) -> str:
    """What a process says that loads vLLM's plugins as a server does."""
    place = tmp_path / "vllm" / "distributed" / "device_communicators"
    place.mkdir(parents=True)
    (place / "shm_broadcast.py").write_text(VLLM)
    if with_nixl:
        (tmp_path / "nixl").mkdir()
        (tmp_path / "nixl" / "_bindings.py").write_text(NIXL)
    path = f"{resting.plugin(tmp_path)}{os.pathsep}{tmp_path}"
    command = [sys.executable, "-S", "-c", SERVER]
    ran = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode()


def test_servers_find_the_plugin_and_rest(tmp_path: Path) -> None:
    assert served(tmp_path, with_nixl=True) == "0.001\n1000 7\n"


def test_servers_without_nixl_rest_too(tmp_path: Path) -> None:
    assert served(tmp_path, with_nixl=False) == "0.001\n"


def test_what_is_on_the_path_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert resting.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)[1:] == ["/elsewhere"]
    monkeypatch.delenv("PYTHONPATH")
    assert os.pathsep not in resting.environment(tmp_path)["PYTHONPATH"]
