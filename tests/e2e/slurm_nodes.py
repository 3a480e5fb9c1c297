"""Slurm with several nodes on this machine: a controller, and a slurmd for each node on a port of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from pdlink.fleet.ports import free_ports

from .deployment import until

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
_CONF = """
ClusterName=pdlink
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
NodeName=node[1-{count}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=1000
PartitionName=all Nodes=node[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """What is missing here; empty if nothing is."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "its nodes are started by root"


class Slurm:
    """Up from the constructor to `close`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        host = socket.gethostname().partition(".")[0]
        port = free_ports(count + 1)
        conf = folder / "slurm.conf"
        conf.write_text(
            _CONF.format(host=host, port=port, folder=folder, count=count, first=port + 1, last=port + count)
        )
        self._environment = {**os.environ, "SLURM_CONF": str(conf)}
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(256))
        key.chmod(0o400)
        own = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._daemons = [
            subprocess.Popen(["munged", "--force", "--foreground", f"--socket={folder}/munge.sock", *own])
        ]
        until((folder / "munge.sock").exists, "munged listens")
        self._daemons.append(subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], stderr=subprocess.DEVNULL))
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(1, count + 1):
            name = f"node{number}"
            (folder / f"spool-{name}").mkdir()
            command = ["slurmd", "-D", "-f", str(conf), "-N", name]
            self.nodes[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=self._environment)
        until(lambda: self.ask("sinfo", "--noheader", "-N", "-o", "%t").count("idle") == count, "all are idle", 90.0)

    def ask(self, *words: str, **environment: str) -> str:
        """What a command of Slurm prints; empty if it fails."""
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, check=False, env={**self._environment, **environment}
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def submit(self, *words: str, **environment: str) -> str:
        """The id of the new job."""
        found = self.ask("sbatch", "--parsable", f"--output={self.folder}/%x-%A_%a.out", *words, **environment)
        assert found.isdigit(), words
        return found

    def states(self) -> dict[str, tuple[str, str]]:
        """Job, or job_index, to its state and node."""
        lines = self.ask("squeue", "--noheader", "--array", "-o", "%i %T %N").splitlines()
        return {words[0]: (words[1], words[2] if len(words) > 2 else "") for words in map(str.split, lines)}

    def kill(self, node: str) -> None:
        """All of the node's processes, at once."""
        jobs = [job for job, (_, where) in self.states().items() if where == node]
        ids = [self.ask("squeue", "--noheader", "-j", job, "-o", "%A") for job in jobs]
        doomed = [self.nodes[node].pid]
        parents = _parents()
        for pid in parents:
            if any(f"slurmstepd: [{job}." in _command(pid) for job in ids):
                doomed += [pid, *_below(pid, parents)]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[node].wait()

    def close(self) -> None:
        for job in self.states():
            self.ask("scancel", job)
        with contextlib.suppress(AssertionError):
            until(lambda: not self.states(), "all jobs have ended", 45.0)
        for daemon in [*self.nodes.values(), *reversed(self._daemons)]:
            daemon.terminate()
        deadline_s = time.monotonic() + 20.0
        for daemon in [*self.nodes.values(), *self._daemons]:
            try:
                daemon.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _parents() -> dict[int, int]:
    """Process to its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    children = [child for child, parent in parents.items() if parent == pid]
    return [each for child in children for each in (child, *_below(child, parents))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
