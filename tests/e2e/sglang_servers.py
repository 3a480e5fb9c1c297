"""Real SGLang servers for the tests, on CPUs, and pdlink's proxy before a pair of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlink.config import ProxyConfig
from pdlink.serve import up
from pdlink.serve.ports import free_ports
from tests.e2e.deployment import until
from tests.e2e.vllm_servers import MODEL, Answer, body_of, die_with_parent, post

ROOT = Path(__file__).parents[2]
READY_S = 300.0
FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--page-size", "16"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--context-length", "8192", "--host", "127.0.0.1"),
    *("--chunked-prefill-size", "256", "--served-model-name", MODEL, "--watchdog-timeout", "600"),
]


@dataclass(eq=False)
class SglangServer:
    """One server and everything it started; ends with `kill`."""

    name: str
    model: Path
    log: Path
    flags: list[str]
    bootstrap_port: int = field(default_factory=lambda: free_ports(1))
    port: int = field(default_factory=lambda: free_ports(1))
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> SglangServer:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--port", str(self.port), *FLAGS, *self.flags]
        if "--disaggregation-mode" in self.flags:
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        settings = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT / 'tests/sglang_cpu'}:{ROOT}",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self

    def wait_ready(self) -> SglangServer:
        deadline_s = time.monotonic() + READY_S
        while not self.answers():
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} has ended: {self.tail()}"
            assert time.monotonic() < deadline_s, f"{self.name} is not ready: {self.tail()}"
            time.sleep(0.5)
        return self

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def num_prefill_passes(self) -> int:
        """Forward passes over prompts that its scheduler has logged."""
        return self.log.read_text(errors="replace").count("Prefill batch")

    def kill(self) -> None:
        """SIGKILL of all its processes, which ends them without a chance to say so."""
        if self.process is not None:
            for child in self._processes():
                child.kill()
            self.process.wait(30)

    def _processes(self) -> list[Any]:
        import psutil

        assert self.process is not None
        try:
            first = psutil.Process(self.process.pid)
            return [*first.children(recursive=True), first]
        except psutil.NoSuchProcess:
            return []


@dataclass
class SglangPair:
    prefill: SglangServer
    decode: SglangServer
    proxy: up.Child

    @staticmethod
    def of(place: Path) -> SglangPair:
        backend = ["--disaggregation-transfer-backend", "pdlink"]
        # SGLang's default keeps retracted requests in memory that only CUDA pins.
        backend += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        servers = [
            SglangServer(
                role, place / "model", place / f"{role}.log", [*backend, "--disaggregation-mode", role]
            ).start()
            for role in ("prefill", "decode")
        ]
        children: list[up.Child] = []
        try:
            prefill, decode = (server.wait_ready() for server in servers)
            config = ProxyConfig(port=0, dialect="sglang", prefill=(prefill.url,), decode=(decode.url,))
            children.append(up.start("proxy", "proxy", config.model_dump(mode="json")))
            children[0].wait_ready(60)
            pair = SglangPair(prefill, decode, children[0])
            pair.wait_routed()
        except BaseException:
            up.stop(children, 20)
            for server in servers:
                server.kill()
            raise
        return pair

    @property
    def url(self) -> str:
        return str(self.proxy.facts["url"])

    def wait_routed(self) -> None:
        until(lambda: _is_well(self.url), "the proxy sees its servers", 120)

    def tokens(self, prompt: list[int]) -> list[int]:
        """Through the proxy."""
        return tokens_of(self.url, prompt)

    def stop(self) -> None:
        up.stop([self.proxy], 20)
        for server in (self.prefill, self.decode):
            server.kill()


def complete(url: str, prompt: list[int]) -> Answer:
    return post(f"{url}/v1/completions", body_of(prompt))


def tokens_of(url: str, prompt: list[int]) -> list[int]:
    (tokens,) = complete(url, prompt).tokens
    return tokens


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
