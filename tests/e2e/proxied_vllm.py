"""A pair of real vLLM servers behind the real proxy, and its client."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdlink.config import ProxyConfig, VllmConfig
from pdlink.fleet import vllm
from pdlink.fleet.child import Child, start, stop
from pdlink.fleet.server import Server
from pdlink.serve.checkpoint import write_checkpoint
from pdlink_bench import resting
from tests.waiting import until

from .deployment import Answer, request

READY_S = 300.0


@dataclass
class Pair:
    connector: str
    servers: list[Server]
    proxy: Child

    def url(self, role: str) -> str:
        facts = {server.role: server.facts for server in self.servers} | {"proxy": self.proxy.facts}
        return str(facts[role]["url"])

    def ask(self, at: str, path: str, body: dict[str, Any]) -> Answer:
        return request(self.url(at) + path, {"model": "m", **body}, timeout_s=120)

    def events(self, at: str, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer."""
        text = json.dumps({"model": "m", "stream": True, "stream_options": {"include_usage": True}, **body})
        asked = urllib.request.Request(self.url(at) + path, text.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            *events, done = [line[6:] for line in answer.read().split(b"\n") if line.startswith(b"data: ")]
        assert done == b"[DONE]"
        return [json.loads(event) for event in events]

    def running(self, role: str) -> float:
        return self.sum_of(role, "vllm:num_requests_running", "vllm:num_requests_waiting{")

    def sum_of(self, role: str, *names: str, having: str = "") -> float:
        """Over all samples whose name begins so, with this in their labels."""
        with urllib.request.urlopen(self.url(role) + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names) and having in line)


@contextlib.contextmanager
def proxied(
    folder: Path,
    connector: Literal["pdlink", "nixl"] = "pdlink",
    *args: str,
    tiers: dict[str, Any] | None = None,
) -> Iterator[Pair]:
    """args: more of every server. tiers: of every server's connector. The model is written to `folder`."""
    write_checkpoint(folder / "model")
    config = VllmConfig(
        connector=connector,
        model_name="m",
        args=(
            *("--dtype", "float32", "--max-model-len", "4096", "--block-size", "32", "--enforce-eager"),
            *("--max-num-batched-tokens", "256", "--enable-prompt-tokens-details", *args),
        ),
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **resting.environment(folder),  # NixlConnector takes minutes on two cores otherwise
        },
        connector_config={} if tiers is None else {"tiers": tiers},
        transfer_config={} if connector == "pdlink" else {"kv_buffer_device": "cpu"},
        on_transfer_failure="fail",
        prefill_port=0,
        decode_port=0,
        control_port=0,
    )
    executable = vllm.find_executable(None)
    plans = vllm.plan(config, 1, 1, executable=executable, model=str(folder / "model"))
    children: list[Server | Child] = []
    try:
        servers = [Server(plan, folder) for plan in plans]
        children += servers
        for server in servers:
            server.wait_ready(READY_S)
        settings = ProxyConfig(listen="127.0.0.1:0", on_no_prefill="decode_only", connect_timeout_s=10).model_dump(
            mode="json"
        )
        proxy = start("proxy", "proxy", {**settings, **vllm.proxy_settings(config, plans)})
        children.append(proxy)
        proxy.wait_ready(60)
        made = Pair(connector, servers, proxy)
        until(lambda: request(made.url("proxy") + "/health").status == 200, "the proxy sees its servers", 60)
        yield made
    finally:
        stop(children, 20)
