"""`pdlink check`: which transports work on this machine, and why the others do not."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdlink import __version__
from pdlink.extras import missing
from pdlink.observe.plain import add_row, plain
from pdlink.transport.base import Site
from pdlink.transport.choice import TRANSPORTS, candidates

if TYPE_CHECKING:
    from pdlink.config import WorkerConfig
    from pdlink.transport.base import Probe, Transport


class Transports(NamedTuple):
    """What was found about each transport."""

    wanted: tuple[type[Transport], ...]
    """What counts: of the settings, and for where the KV is (`engine.device`); the preferred one first."""
    made: dict[type[Transport], Transport]
    """All there are; not open."""
    probes: dict[type[Transport], Probe]

    @property
    def first(self) -> str | None:
        """The one that would be used; None if none works."""
        return next((one.name for one in self.wanted if self.probes[one].ok), None)


def probed(config: WorkerConfig) -> Transports:
    """Try every transport."""
    kind, _, index = config.engine.device.partition(":")
    site = Site("host" if kind == "cpu" else "cuda", int(index or 0))
    wanted = tuple(candidates(config.transport, site))
    order = (*wanted, *(other for other in TRANSPORTS if other not in wanted))
    made = {one: one.configured(config.transport, site) for one in order}
    return Transports(wanted, made, {one: transport.probe() for one, transport in made.items()})


def check(config: WorkerConfig) -> int:
    """Print the report; 1 if the configured transport (with auto: every one) cannot work here, else 0."""
    console = Console()
    transports = probed(config)
    console.print(transports_table(transports))
    for names, what in facts(transports):
        console.print(plain(f"{', '.join(names)}: {what}"))
    console.print(machine_table())
    chosen = f"transport.kind = {config.transport.kind}, engine.device = {config.engine.device}"
    if transports.first is not None:
        console.print(Text.assemble(plain(f"{chosen}: "), ("usable", "green"), f", {transports.first} comes first"))
        return 0
    console.print(Text.assemble(plain(f"{chosen}: "), ("not usable here", "red")))
    for one in transports.wanted:
        console.print(plain(f"  {one.name}: {transports.probes[one].reason}"))
    return 1


def transports_table(transports: Transports) -> Table:
    table = Table(title="transports", title_justify="left")
    for column in ("transport", "usable", "reach", "moves", "trusts with"):
        table.add_column(column, overflow="fold")
    for one, made in transports.made.items():
        usable = Text("yes", "green") if transports.probes[one].ok else Text("no", "red")
        add_row(table, made.name, usable, made.reach, ", ".join(made.memory), made.trust)
    return table


def facts(transports: Transports) -> list[tuple[list[str], str]]:
    """What was found, or why a transport cannot be used, each once with the transports that it is said of."""
    found: dict[str, list[str]] = {}
    for one, made in transports.made.items():
        probe = transports.probes[one]
        what = ", ".join(f"{key} {value}" for key, value in probe.facts.items()) if probe.ok else probe.reason
        found.setdefault(what, []).append(made.name)
    return [(names, what) for what, names in found.items()]


def machine_table() -> Table:
    table = Table(title="machine", title_justify="left", show_header=False)
    for name, value in machine().items():
        add_row(table, name, value)
    return table


def machine() -> dict[str, str]:
    """Facts for people."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    rdma = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    versions = {name: _version(name) for name in ("torch", "transformers", "pyzmq", "numba", "libucx-cu13")}
    return {
        "pdlink": f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "CPU cores": str(os.cpu_count()),
        "CUDA": _cuda_devices(),
        "RDMA": ", ".join(rdma) or "no device",
        "lockable memory": locked + ("" if locked == "unlimited" else " (RDMA needs `ulimit -l unlimited`)"),
    }


def _cuda_devices() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return missing("torch")
    return f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no device"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
