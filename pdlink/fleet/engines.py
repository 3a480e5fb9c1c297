"""The servers of other engines that `pdlink up` starts, in place of its own workers."""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.config import VllmConfig
from pdlink.fleet import sglang, vllm
from pdlink.fleet.child import log
from pdlink.fleet.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import SglangServersConfig, UpConfig


class Prepared(NamedTuple):
    """A server that `start` starts."""

    label: str
    role: str
    start: Callable[[], Server]


def prepare(
    config: UpConfig,
    servers: VllmConfig | SglangServersConfig,
    held: contextlib.ExitStack,
    hold: Callable[[contextlib.ExitStack, str, int, str], int],
) -> tuple[list[Prepared], dict[str, Any]]:
    """The engine's servers, and the proxy's settings for them.

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
    return [Prepared(plan.label, plan.role, partial(Server, plan, log_dir)) for plan in plans], settings


def describe(servers: VllmConfig | SglangServersConfig) -> str:
    """What moves the KV, for people."""
    if isinstance(servers, VllmConfig):
        return f"vLLM with {servers.connector}'s connector"
    return f"SGLang with {servers.backend}'s transfer backend"
