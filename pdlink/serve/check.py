"""`pdlink check`: which transports work on this machine, and why the others do not."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pdlink import __version__
from pdlink.transport.base import Site
from pdlink.transport.choice import TRANSPORTS, candidates

if TYPE_CHECKING:
    from pdlink.config import WorkerConfig


def check(config: WorkerConfig) -> int:
    """Print the report; 1 if the configured transport (with auto: every one) cannot work here, else 0.

    Which of them count is up to where the KV is: `engine.device`.
    """
    console = Console()
    kind, _, index = config.engine.device.partition(":")
    site = Site("host" if kind == "cpu" else "cuda", int(index or 0))
    wanted = candidates(config.transport, site.memory)
    probes = {}
    table = Table(title="transports", title_justify="left")
    for column in ("transport", "usable", "reach", "moves", "trusts with", "what"):
        table.add_column(column, overflow="fold")
    for one in (*wanted, *(other for other in TRANSPORTS if other not in wanted)):
        made = one.configured(config.transport, site)
        probe = probes[one] = made.probe()
        what = ", ".join(f"{key} {value}" for key, value in probe.facts.items()) if probe.ok else probe.reason
        usable = "[green]yes" if probe.ok else "[red]no"
        table.add_row(made.name, usable, made.reach, ", ".join(made.memory), made.trust, what)
    console.print(table)
    machine = Table(title="machine", title_justify="left", show_header=False)
    for name, value in _machine().items():
        machine.add_row(name, value)
    console.print(machine)
    chosen = f"transport.kind = {config.transport.kind}, engine.device = {config.engine.device}"
    first = next((one.name for one in wanted if probes[one].ok), None)
    if first is not None:
        console.print(f"{chosen}: [green]usable[/green], {first} comes first")
        return 0
    console.print(f"{chosen}: [red]not usable here[/red]")
    for one in wanted:
        console.print(f"  {one.name}: {probes[one].reason}")
    return 1


def _machine() -> dict[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    rdma = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    versions = {name: _version(name) for name in ("torch", "transformers", "pyzmq", "numba", "libucx-cu13")}
    import torch

    return {
        "pdlink": f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "CPU cores": str(os.cpu_count()),
        "CUDA": f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no device",
        "RDMA": ", ".join(rdma) or "no device",
        "lockable memory": locked + ("" if locked == "unlimited" else " (RDMA needs `ulimit -l unlimited`)"),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
