"""Resources of a deployment: blocks, transfers, sessions by its reports; descriptors, threads, segments by /proc.

After the last request and every deadline, all must be free.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

_ASK_S = 3.0


@dataclass(slots=True)
class HeldResources:
    """Resources that one worker reports as held."""

    blocks: int = 0
    requests: int = 0
    sender_transfers: int = 0
    receiver_transfers: int = 0
    quarantined_blocks: int = 0
    closing_peers: int = 0
    live_peers: int = 0
    moved_nbytes: int = 0
    """KV sent by this life of the worker and landed."""
    fallbacks: int = 0
    """Requests of this life of the worker that fell back."""
    unreadable: str = ""
    """Why it could not be polled."""

    @property
    def leaked(self) -> int:
        """Blocks that are not free, quarantined ones included."""
        return max(self.blocks, self.quarantined_blocks)

    @property
    def idle(self) -> bool:
        held = self.leaked + self.requests + self.sender_transfers + self.receiver_transfers + self.closing_peers
        return held == 0 and not self.unreadable

    def __str__(self) -> str:
        if self.unreadable:
            return self.unreadable
        return (
            f"{self.blocks} blocks, {self.quarantined_blocks} quarantined, {self.requests} requests, "
            f"{self.sender_transfers}+{self.receiver_transfers} transfers, {self.closing_peers} closing peers"
        )


def parse_metrics(text: str) -> list[tuple[str, str, float]]:
    """Samples: name, labels as they are written, value."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            found.append((name, labels.removesuffix("}"), float(value)))
    return found


def held(health: dict[str, Any], metrics: list[tuple[str, str, float]]) -> HeldResources:
    """The sums of a worker's /health and /metrics."""

    def total(name: str, label: str = "") -> int:
        return int(sum(value for key, labels, value in metrics if key == name and label in labels))

    return HeldResources(
        blocks=health["num_blocks"] - health["free_blocks"],
        requests=health["running"] + health["waiting"],
        sender_transfers=total("pdlink_live_transfers", 'side="sender"'),
        receiver_transfers=total("pdlink_live_transfers", 'side="receiver"'),
        quarantined_blocks=total("pdlink_quarantined_blocks"),
        closing_peers=total("pdlink_sessions", 'state="closing"'),
        live_peers=total("pdlink_sessions", 'state="live"'),
        moved_nbytes=total("pdlink_transfer_bytes_total"),
        fallbacks=total("pdlink_fallbacks_total"),
    )


async def read(session: aiohttp.ClientSession, url: str) -> HeldResources:
    """Ask one worker."""
    try:
        async with asyncio.timeout(_ASK_S):
            async with session.get(f"{url}/health") as answer:
                health = await answer.json()
            async with session.get(f"{url}/metrics") as answer:
                metrics = parse_metrics(await answer.text())
            return held(health, metrics)
    except (TimeoutError, aiohttp.ClientError, OSError, KeyError, TypeError, ValueError) as error:
        return HeldResources(unreadable=f"does not say: {type(error).__name__} {error}")


@dataclass(slots=True)
class ProcessResources:
    """Resources of one process."""

    threads: int = 0
    rss_mib: int = 0
    fds: dict[str, int] = field(default_factory=dict)
    """Open descriptors by kind, without HTTP connections, which come and go with clients."""

    @property
    def num_fds(self) -> int:
        return sum(self.fds.values())


def process(pid: int, http_ports: set[int]) -> ProcessResources:
    """Resources of a process from /proc; empty if it has ended."""
    found = ProcessResources()
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Threads:"):
                found.threads = int(line.split()[1])
            elif line.startswith("VmRSS:"):
                found.rss_mib = int(line.split()[1]) // 1024
        http = _inodes_of_ports(pid, http_ports)
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:
                continue
            kind, _, rest = target.partition(":")
            if kind == "socket" and rest.strip("[]") in http:
                continue
            name = rest if kind == "anon_inode" else kind if rest else target.split("/")[1]
            found.fds[name] = found.fds.get(name, 0) + 1
    except (FileNotFoundError, ProcessLookupError):
        return ProcessResources()
    return found


def _inodes_of_ports(pid: int, ports: set[int]) -> set[str]:
    """Inodes of TCP connections to or from these ports, in the process' network namespace; not of listeners."""
    inodes = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        local, remote = (int(columns[i].rpartition(":")[2], 16) for i in (1, 2))
        if remote and ports & {local, remote}:
            inodes.add(columns[9])
    return inodes


def segments() -> set[str]:
    """Named and System V shared memory of this machine that no living process has open.

    Not semaphores: any program that starts a pool of processes makes some for a moment.
    """
    names = {f"/dev/shm/{name}" for name in _names("/dev/shm") if not name.startswith("sem.")}
    for pid in (name for name in _names("/proc") if name.isdigit()):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        names = {name for name in names if name not in maps}
    table = Path("/proc/sysvipc/shm")
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return names | {f"sysv {row[1]} of {row[3]} bytes" for row in rows if row[6] == "0"}


async def left_behind(before: set[str], pause_s: float = 2.0) -> set[str]:
    """Segments that are not of `before` and stay without anybody who has them open.

    Other programs of this machine make some, too. They open or remove them in much less than `pause_s`, which this
    takes where it finds some.
    """
    left = segments() - before
    if left:
        await asyncio.sleep(pause_s)
        left &= segments()
    return left


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def port_of(url: str) -> int:
    """The port in a base URL that has one."""
    return int(url.rpartition(":")[2])
