"""`pdlink check`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pdlink import __version__
from pdlink.transport.choice import device_probes, probes

if TYPE_CHECKING:
    from pdlink.config import WorkerConfig


def check(config: WorkerConfig) -> int:
    """Print the report; 1 if the configured transport (with auto: every one) cannot work here, else 0.

    Which of them count is up to where the KV is: `engine.device`.
    """
    console = Console()
    kind, _, index = config.engine.device.partition(":")
    usable, on_device = probes(config.transport), device_probes(config.transport, int(index or 0))
    found = usable + [probe for probe in on_device if probe.transport not in {one.transport for one in usable}]
    if kind != "cpu":
        usable = on_device
    table = Table(title="transports", title_justify="left")
    for column in ("transport", "usable", "what"):
        table.add_column(column, overflow="fold")
    for probe in found:
        facts = ", ".join(f"{key} {value}" for key, value in probe.facts.items())
        table.add_row(probe.transport, "[green]yes" if probe.ok else "[red]no", facts if probe.ok else probe.reason)
    console.print(table)
    machine = Table(title="machine", title_justify="left", show_header=False)
    for name, value in _machine().items():
        machine.add_row(name, value)
    console.print(machine)
    wanted = [probe for probe in usable if config.transport.kind in ("auto", probe.transport.removesuffix("-cuda"))]
    chosen = f"transport.kind = {config.transport.kind}, engine.device = {config.engine.device}"
    if any(probe.ok for probe in wanted):
        first = next(probe.transport for probe in wanted if probe.ok)
        console.print(f"{chosen}: [green]usable[/green], {first} comes first")
        return 0
    console.print(f"{chosen}: [red]not usable here[/red]")
    for probe in wanted:
        console.print(f"  {probe.transport}: {probe.reason}")
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
