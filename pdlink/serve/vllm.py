"""vLLM servers as children: command lines, start, end.

They have no socket to us: a server is ready when its /health answers 200, its output goes to a file, and the kernel
ends it when this process ends (PR_SET_PDEATHSIG). A server is a process group: the engine's processes end with the
API server, or are killed with the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.config import environment_with
from pdlink.errors import ConfigError
from pdlink.serve.keeper import ChildFailed, how_it_ended
from pdlink.serve.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import VllmConfig

CONNECTORS: dict[str, tuple[dict[str, str], str]] = {
    "pdlink": ({"kv_connector": "PDLinkConnector", "kv_connector_module_path": "pdlink.integrations.vllm"}, "vllm"),
    "nixl": ({"kv_connector": "NixlConnector"}, "vllm-nixl"),
    "nixl-push": ({"kv_connector": "NixlPushConnector"}, "vllm-nixl"),
}
"""`VllmConfig.connector` to vLLM's settings for it, and the proxy's dialect."""

MADE = Path(".venv-vllm/bin/vllm")
"""Installed by `make vllm`."""

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TAIL_LINES = 15
_POLL_S = 0.25


class VllmMissing(ConfigError):
    """`pdlink up --engine vllm` finds no vLLM, or none that works with pdlink; the message has what to install."""

    code = "vllm_missing"


class ServerFailed(ChildFailed):
    """A vLLM server ended, or was not ready in time; the message has the end of its output."""


def find_executable(configured: str | None) -> str:
    """The `vllm` command. Raises VllmMissing."""
    if configured is not None:
        found = shutil.which(configured)
        if found is None:
            raise VllmMissing(f"vllm.executable: got {configured}, which is not an executable program")
        return found
    beside = Path(sys.executable).with_name("vllm")
    for place in (beside, "vllm", MADE):
        found = shutil.which(place)
        if found is not None:
            return found
    raise VllmMissing(
        f"vLLM is not installed: no {beside}, no `vllm` on PATH, no {MADE} here. `make vllm` installs the build for "
        "CPUs, `pip install vllm` the one for GPUs; vllm.executable names one that is elsewhere"
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One server before it is started."""

    label: str
    role: str
    url: str
    control: tuple[str, ...]
    """Control addresses of its connector, by rank; none for a server that only dials."""
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    """Added to our own."""


def plan(config: VllmConfig, num_prefill: int, num_decode: int, *, executable: str, model: str) -> list[Plan]:
    """The servers of a deployment. Ports of 0 are chosen here; the servers bind them later."""
    found = []
    for role, count in (("prefill", num_prefill), ("decode", num_decode)):
        ranks = config.prefill_ranks if role == "prefill" else config.decode_ranks
        devices = config.prefill_devices if role == "prefill" else config.decode_devices
        first_port = config.prefill_port if role == "prefill" else config.decode_port
        if devices and len(devices) != count:
            raise ConfigError(f"vllm.{role}_devices: {len(devices)} entries for {count} {role} servers")
        for index in range(count):
            label = f"{role}-{index}"
            port = first_port + index if first_port else free_ports(1)
            control_port = config.control_port + index * ranks if config.control_port else free_ports(ranks)
            transfer = _transfer_config(config, role, label, control_port)
            dialed = role == "prefill" and config.connector == "pdlink"
            host = transfer["kv_connector_extra_config"].get("advertise_host") or config.host
            more = config.prefill_args if role == "prefill" else config.decode_args
            environment = dict(config.environment)
            if config.connector != "pdlink":
                environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(ranks))
            if devices:
                environment["CUDA_VISIBLE_DEVICES"] = devices[index]
            found.append(
                Plan(
                    label,
                    role,
                    f"http://{config.host}:{port}",
                    tuple(f"tcp://{host}:{control_port + rank}" for rank in range(ranks)) if dialed else (),
                    (
                        *(executable, "serve", model, "--served-model-name", config.model_name),
                        *("--host", config.host, "--port", str(port)),
                        "--disable-uvicorn-access-log",  # the proxy asks /health twice a second
                        *(("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()),
                        *(*config.args, *more),
                        *("--kv-transfer-config", json.dumps(transfer)),
                    ),
                    environment,
                )
            )
    return found


def _transfer_config(config: VllmConfig, role: str, label: str, control_port: int) -> dict[str, Any]:
    extra = dict(config.connector_config)
    if config.connector == "pdlink":
        extra = {"control_host": config.host, **extra, "name": label}
        if role == "prefill":
            extra["control_port"] = control_port
    return {
        **CONNECTORS[config.connector][0],
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": config.on_transfer_failure,
        "kv_connector_extra_config": extra,
        **config.transfer_config,
    }


def proxy_settings(config: VllmConfig, plans: Sequence[Plan]) -> dict[str, Any]:
    unequal = config.prefill_ranks != config.decode_ranks and config.connector == "pdlink"
    return {
        "dialect": CONNECTORS[config.connector][1],
        "prefill": [plan.url for plan in plans if plan.role == "prefill"],
        "decode": [plan.url for plan in plans if plan.role == "decode"],
        "control": {plan.url: list(plan.control) for plan in plans if plan.control},
        "decode_ranks": config.decode_ranks if unequal else None,
    }


class Server:
    doing = "vLLM is loading"

    def __init__(self, plan: Plan, log_dir: Path) -> None:
        self.label, self.role = plan.label, plan.role
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
            with urllib.request.urlopen(f"{self._plan.url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError, ValueError):
            return False

    def tail(self) -> str:
        """The end of its output, for people."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
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


def _die_with_parent(parent: int) -> Any:
    libc = ctypes.CDLL(None)

    def run() -> None:  # in the child before exec: must not allocate much or take locks
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return run
