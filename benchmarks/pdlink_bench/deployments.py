"""The systems of `pdlink bench serving`: two servers and a proxy each, which stand still between their turns."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdlink.config import ProxyConfig, SglangServersConfig, VllmConfig, WorkerConfig
from pdlink.errors import PdlinkError
from pdlink.fleet import sglang, vllm
from pdlink.fleet.child import Child, start, stop
from pdlink.fleet.server import Server

from . import resting, sglang_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU_ARGS = ("--enforce-eager", "--max-num-batched-tokens", "8192", "--block-size", "128")
SGLANG_CPU_ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--skip-server-warmup", "--page-size", "16"),
    *("--max-total-tokens", "32768", "--chunked-prefill-size", "8192", "--watchdog-timeout", "600"),
)
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
PATIENT = {"peer_s": 30.0}
"""A process that gets little of a loaded machine is slow, not gone."""
NIXL_PATIENT = {"kv_lease_duration": 600}
"""The same for NIXL: its prefill gives KV up after 30 s by itself, and a first handshake may last as long. A decode
server that registers for a push after that waits for 480 s (vLLM 0.32)."""
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
MODEL = "bench"
START_TIMEOUT_S = 600.0
WAIT_S = 60.0


class SystemFailed(Exception):
    """A system could not be started, or does not answer."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all systems of one run have in common."""

    engine: str
    directory: Path
    log_dir: Path
    longest: int
    """Tokens of the longest prompt and its answer."""
    model: str | None = None
    """None writes one."""
    executable: str | None = None
    """The command of another engine; None looks for it."""
    args: tuple[str, ...] | None = None
    """Of another engine's servers; None is those for CPUs."""
    dtype: str = "bfloat16"
    rest: bool = False
    """Whether threads of vLLM and NIXL that spin while they wait are to sleep (`resting.py`)."""


@dataclass(slots=True)
class Deployment:
    """One system. Its servers and its proxy are children of this process, each in a group of its own."""

    name: str
    children: list[Child | Server] = field(default_factory=list)
    model: str = MODEL
    alone: dict[str, Any] = field(default_factory=dict)
    """What a request must say that the prefill server is to answer by itself."""
    waits: tuple[str, str] | None = None
    """Name and label of samples of the prefill server's /metrics: seconds for which answers were held back until
    their KV had arrived. None for an engine that answers when the prompt is computed."""

    @property
    def prefill_url(self) -> str:
        return str(self.children[0].facts["url"])

    @property
    def proxy_url(self) -> str:
        return str(self.children[-1].facts["url"])

    def waited_s(self) -> float:
        """So far, of all its answers; see `waits`. Raises OSError."""
        if self.waits is None:
            return 0.0
        name, label = self.waits
        with urllib.request.urlopen(f"{self.prefill_url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)

    def stop_time(self) -> None:
        """Stop every process of it, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue, and wait until the proxy sees its workers again. Raises SystemFailed."""
        self._signal(signal.SIGCONT)
        deadline_s = time.monotonic() + WAIT_S
        while not _healthy(self.proxy_url):
            if time.monotonic() > deadline_s:
                raise SystemFailed(f"{self.name}: its proxy sees no workers {WAIT_S:.0f} s after it was continued")
            time.sleep(0.1)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        stop(self.children, 10.0)

    def _signal(self, number: int) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)


def launch(names: Sequence[str], options: Options, into: list[Deployment]) -> None:
    """Start systems, all at once where there are cores for it; each is in `into` as soon as it has a process.

    Raises SystemFailed.
    """
    at_once = len(names) if (os.cpu_count() or 1) >= resting.FEW_CORES else 1
    try:
        for first in range(0, len(names), at_once):
            begun = []
            for name in names[first : first + at_once]:
                deployment = Deployment(name)
                into.append(deployment)
                begun.append((deployment, _START[options.engine](deployment, options)))
            for deployment, settings in begun:
                _complete(deployment, settings)
            if first + at_once < len(names):
                into[-1].stop_time()  # the next one starts faster
    except PdlinkError as error:
        raise SystemFailed(str(error)) from error


def _complete(deployment: Deployment, settings: dict[str, Any]) -> None:
    """Its proxy, when its servers are ready."""
    for child in deployment.children:
        child.wait_ready(START_TIMEOUT_S)
    urls = {child.role: [child.facts["url"]] for child in deployment.children}
    proxy = ProxyConfig(listen="127.0.0.1:0", retries=0, connect_timeout_s=10.0, summary_s=0).model_dump(mode="json")
    deployment.children.append(start(f"proxy of {deployment.name}", "proxy", {**proxy, **urls, **settings}))
    deployment.children[-1].wait_ready(START_TIMEOUT_S)
    deployment.go_on()


def _start_vllm(deployment: Deployment, options: Options) -> dict[str, Any]:
    model = options.model or _checkpoint(options.directory / "model")
    args = options.args if options.args is not None else CPU_ARGS
    config = VllmConfig(
        connector=deployment.name,  # type: ignore[arg-type]  # the command line offers no other
        model_name=MODEL,
        prefill_port=0,
        decode_port=0,
        control_port=0,
        args=("--dtype", options.dtype, "--max-model-len", str(max(8192, options.longest)), *args),
        environment={
            **(CPU_ENVIRONMENT if options.args is None else {}),
            **(resting.environment(options.directory) if options.rest else {}),
        },
        transfer_config={"kv_buffer_device": "cpu"} if options.args is None else {},
        connector_config={"timeouts": PATIENT} if deployment.name == "pdlink" else NIXL_PATIENT,
        on_transfer_failure="fail",  # a request that went another way must not be counted
    )
    log_dir = options.log_dir / deployment.name
    log_dir.mkdir(parents=True, exist_ok=True)
    plans = vllm.plan(config, 1, 1, executable=vllm.find_executable(options.executable), model=model)
    deployment.children.extend(Server(plan, log_dir) for plan in plans)
    return vllm.proxy_settings(config, plans)


def _start_own(deployment: Deployment, options: Options) -> dict[str, Any]:
    deployment.model = "pdlink-tiny"
    for role in ("prefill", "decode"):
        model = {"path": options.model, "dtype": options.dtype, "max_tokens": max(8192, options.longest)}
        config = WorkerConfig.model_validate(
            {
                "role": role,
                "name": f"bench-{role}",
                "model": {**model, "num_layers": 16, "name": deployment.model},
                "cache": {"num_blocks": 2048},
                "engine": {"max_batched_tokens": 8192},
                "on_transfer_failure": "fail",
                "summary_s": 0,
            }
        )
        deployment.children.append(start(role, role, config.model_dump(mode="json")))
    return {}


def _start_sglang(deployment: Deployment, options: Options) -> dict[str, Any]:
    model = options.model or _checkpoint(options.directory / "model")
    on_cpu = options.args is None
    own = sglang_cpu.environment() if on_cpu else {}
    config = SglangServersConfig(
        backend=deployment.name,  # type: ignore[arg-type]  # the command line offers no other
        model_name=MODEL,
        prefill_port=0,
        decode_port=0,
        bootstrap_port=0,
        args=("--dtype", options.dtype, "--context-length", str(max(8192, options.longest)))
        + ("--disable-radix-cache", "--enable-metrics")
        + (SGLANG_CPU_ARGS if options.args is None else options.args),
        decode_args=("--disaggregation-decode-retraction-backup", "cpu_tensor") if on_cpu else (),
        environment=(resting.environment(options.directory, own) if options.rest else own)
        | {f"PDLINK_TIMEOUTS__{name.upper()}": str(seconds) for name, seconds in PATIENT.items()},
    )
    log_dir = options.log_dir / deployment.name
    log_dir.mkdir(parents=True, exist_ok=True)
    # Its name for a transfer to nobody, with which it warms itself up (disaggregation/utils.py of SGLang 0.5.23).
    deployment.alone = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_port": 1, "bootstrap_room": 1}
    deployment.waits = "sglang:per_stage_req_latency_seconds_sum", 'stage="prefill_transfer_kv_cache"'
    plans = sglang.plan(config, 1, 1, executable=sglang.find_executable(options.executable), model=model)
    deployment.children.extend(Server(plan, log_dir) for plan in plans)
    return sglang.proxy_settings(plans)


_START = {"vllm": _start_vllm, "sglang": _start_sglang, "builtin": _start_own}


def _checkpoint(path: Path) -> str:
    """The Llama that the figures in README are of: 16 layers of 8 heads of 64."""
    from pdlink.serve.checkpoint import write_checkpoint

    if not path.exists():
        write_checkpoint(path, num_layers=16, hidden=512, intermediate=1024, heads=8, kv_heads=8, head_dim=64)
    return str(path)


def _healthy(proxy_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{proxy_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
