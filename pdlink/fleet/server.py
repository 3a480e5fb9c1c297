"""Servers of other engines as children: start, end, last words.

They have no socket to us: a server is ready when it answers 200, its output goes to a file, and the kernel
ends it when this process ends (PR_SET_PDEATHSIG). A server is a process group: the engine's processes end with the
API server, or are killed with the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.config import environment_with
from pdlink.errors import ConfigError
from pdlink.fleet.child import ChildFailed, how_it_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TAIL_LINES = 15
_POLL_S = 0.25


class ServerFailed(ChildFailed):
    """A server ended, or was not ready in time; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server before it is started."""

    label: str
    role: str
    url: str
    control: tuple[str, ...]
    """Control addresses of its connector, by rank; none for a server that only dials, and for SGLang's."""
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    """Added to our own."""
    ready_path: str = "/health"
    """What answers 200 once the server can serve."""


class EngineMissing(ConfigError):
    """`pdlink up --engine ...` does not find that engine; the message has what to install."""

    code = "engine_missing"


def find_program(name: str, engine: str, configured: str | None) -> str:
    """The command of an engine: as configured, beside this Python, on PATH, or made by `make` here.

    Raises EngineMissing.
    """
    if configured is not None:
        found = shutil.which(configured)
        if found is None:
            raise EngineMissing(f"{name}.executable: got {configured}, which is not an executable program")
        return found
    beside, made = Path(sys.executable).with_name(name), Path(f".venv-{name}/bin/{name}")
    for place in (beside, name, made):
        found = shutil.which(place)
        if found is not None:
            return found
    raise EngineMissing(
        f"{engine} is not installed: no {beside}, no `{name}` on PATH, no {made} here. `make {name}` installs the "
        f"build for CPUs, `pip install {name}` the one for GPUs; {name}.executable names one that is elsewhere"
    )


def devices_of(setting: str, devices: Sequence[str], count: int, role: str) -> list[dict[str, str]]:
    """The environment that gives each server of a side its devices. Raises ConfigError for another number of them."""
    if devices and len(devices) != count:
        raise ConfigError(f"{setting}: {len(devices)} entries for {count} {role} servers")
    return [{"CUDA_VISIBLE_DEVICES": devices[index]} if devices else {} for index in range(count)]


class Server:
    """One that runs, from its constructor to `close`."""

    doing = "loading"

    def __init__(self, plan: ServerPlan, log_dir: Path) -> None:
        self.label, self.role = plan.label, plan.role
        self.warnings: list[str] = []
        self.facts: dict[str, Any] = {"url": plan.url}
        if plan.control:
            self.facts["control"] = ", ".join(plan.control)
        self.log_path = log_dir / f"{plan.label}.log"
        self._plan = plan
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._plan.command,
                env=environment_with(self._plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own group; and Ctrl-C reaches this process only
                preexec_fn=_die_with_parent(os.getpid()),
            )

    def look(self) -> bool:
        """Whether it answers. Raises ServerFailed if it has ended."""
        if self._answers():
            return True
        if self.process.poll() is not None:
            how = how_it_ended(self.process.returncode)
            raise ServerFailed(f"{self.label} ended before it was ready: it {how}; {self.tail()}")
        return False

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ServerFailed if it ends, or does not answer in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.look():
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"{self.label} was not ready within {timeout_s:.0f} s; {self.tail()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._plan.url + self._plan.ready_path, timeout=1) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code == HTTPStatus.UNAUTHORIZED  # it is there, and wants a key
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def tail(self) -> str:
        """The end of its output, for people."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:
            return f"{self.log_path} cannot be read: {error.strerror}"
        return "\n  ".join([f"the end of {self.log_path}:", *lines])

    def again(self) -> None:
        """Start it again, on the same ports."""
        self.kill()  # the rest of its group
        self.process = self._started()

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """End every process of its group now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def run() -> None:  # in the child before exec: must not allocate much or take locks
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return run
