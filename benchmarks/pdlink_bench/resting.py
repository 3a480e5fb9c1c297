"""A plugin of vLLM and SGLang for servers that share few cores: spinning threads sleep instead.

Prefill and decode are meant for separate machines. On one machine with few cores spinning threads take the cores of
computing ones, so a benchmark would measure the kernel's scheduler. Two kinds are known (vLLM 0.32, nixl 1.5.1):
  - a worker of vLLM polls its queue for a second after every message, calling sched_yield (SpinCondition in
    distributed/device_communicators/shm_broadcast.py), and decode's gets messages while a request waits for its KV;
  - NIXL's progress thread polls its descriptors with a timeout of 0 (`pthrDelay` in nixl/_api.py), idle or not: one
    core of every server. With a delay it sleeps in poll(), and an event wakes it at once.
Every system gets the same plugin.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pdlink.config import environment_with

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FEW_CORES = 8
"""Below this many, servers rest by default: two of them have four threads that spin and two that compute."""

_PLUGIN = """
def rest():
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    shipped = SpinCondition.__init__
    def __init__(self, is_reader, context, notify_address, busy_loop_s=0.0):
        shipped(self, is_reader, context, notify_address, busy_loop_s=0.001)
    SpinCondition.__init__ = __init__
    rest_nixl()

def rest_nixl():
    try:
        from nixl import _bindings
    except ImportError:
        return
    class RestingConfig(_bindings.nixlAgentConfig):
        def __setattr__(self, name, value):
            super().__setattr__(name, 1000 if name == "pthrDelay" else value)  # microseconds
    _bindings.nixlAgentConfig = RestingConfig
"""

_ENTRY_POINTS = """[vllm.general_plugins]
resting = pdlink_resting:rest
[sglang.srt.plugins]
resting = pdlink_resting:rest_nixl
"""


def plugin(folder: Path) -> Path:
    """Writes the plugin below `folder`; what is returned goes on PYTHONPATH, and must stay while servers start."""
    home = folder / "resting"
    about = home / "pdlink_resting-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (home / "pdlink_resting.py").write_text(_PLUGIN, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pdlink-resting\nVersion: 1\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS, "utf-8")
    return home


def environment(folder: Path, others: Mapping[str, str] | None = None) -> dict[str, str]:
    """What makes a server rest that otherwise has this process's environment and `others`."""
    home = plugin(folder)
    before = environment_with(others or {}).get("PYTHONPATH")
    return {**(others or {}), "PYTHONPATH": f"{home}{os.pathsep}{before}" if before else str(home)}
