"""The servers of other engines that `pdlink up` starts, in place of its own workers."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.config import VllmConfig
from pdlink.serve import sglang, vllm
from pdlink.serve.keeper import log
from pdlink.serve.servers import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import SglangServersConfig, UpConfig
    from pdlink.serve.servers import Plan
    from pdlink.serve.up import Child


def start(
    config: UpConfig,
    servers: VllmConfig | SglangServersConfig,
    children: list[Child | Server],
    held: contextlib.ExitStack,
    hold: Callable[[contextlib.ExitStack, str, int, str], int],
) -> dict[str, Any]:
    """Start the engine's servers; returns the proxy's settings for them.

    held: closed after they end. hold: binds a port until its stack is closed. Raises ConfigError.
    """
    engine, count = config.engine, (config.num_prefill, config.num_decode)
    program = (vllm if engine == "vllm" else sglang).find_executable(servers.executable)
    directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix=f"pdlink-{engine}-")))
    model = servers.model
    if model is None:
        from pdlink.serve.checkpoint import write_checkpoint

        log.info("writing a small model")
        model = str(directory / "model")
        write_checkpoint(Path(model))
    log_dir = Path(servers.log_dir or directory)
    log_dir.mkdir(parents=True, exist_ok=True)
    plans: list[Plan]
    if isinstance(servers, VllmConfig):
        plans = vllm.plan(servers, *count, executable=program, model=model)
        settings = vllm.proxy_settings(servers, plans)
    else:
        plans = sglang.plan(servers, *count, executable=program, model=model)
        settings = sglang.proxy_settings(plans)
    with contextlib.ExitStack() as tried:  # an engine finds a taken port after it has loaded the model
        for plan in plans:
            hold(tried, servers.host, int(plan.url.rsplit(":", 1)[1]), f"{engine}.{plan.role}_port")
    log.info("the servers' own output: %s/*.log", log_dir)
    children.extend(Server(plan, log_dir) for plan in plans)  # one by one, so that a failure ends earlier ones
    return settings


def describe(servers: VllmConfig | SglangServersConfig) -> str:
    """What moves the KV, for people."""
    if isinstance(servers, VllmConfig):
        return f"vLLM with {servers.connector}'s connector"
    return f"SGLang with {servers.backend}'s transfer backend"
