"""A worker and a proxy as processes: settings in, serve, drain, leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pdlink.serve.process import bind, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import ProxyConfig, WorkerConfig
    from pdlink.serve.process import Parent


def run_worker(config: WorkerConfig, parent: Parent | None, say: Callable[[str], None]) -> None:
    """Run one worker until it is told to stop. Raises ConfigError and the like before it is ready."""
    from pdlink.serve.app import build_app
    from pdlink.serve.worker import Worker

    bound = bind(config.host, config.port)
    worker = Worker(config, config.name or f"{config.role}-{bound.getsockname()[1]}")
    worker.open()

    def ready(url: str) -> dict[str, Any]:
        control = worker.endpoint.address
        transports = [transport.name for transport in worker.endpoint.transports]
        return {
            "name": worker.name,
            "url": url,
            "control": control,
            "control_port": int(control.rsplit(":", 1)[1]),
            "transports": transports,
            "model": worker.model.name,
            "line": f"{worker.name} ready on {url}, control {control}, KV over {' or '.join(transports)}",
        }

    async def drain() -> None:
        drain_s = config.timeouts.drain_s
        say(f"{worker.name} draining {worker.num_requests} requests, at most {drain_s:g} s")
        await asyncio.to_thread(worker.drain, drain_s)

    try:
        asyncio.run(serve(build_app(worker), bound, parent, ready=ready, drain=drain, say=say))
    finally:
        worker.close()


def run_proxy(config: ProxyConfig, parent: Parent | None, say: Callable[[str], None]) -> None:
    """Run the proxy until it is told to stop."""
    from pdlink_proxy.app import ROUTER, build_app

    bound = bind(config.host, config.port)
    app = build_app(config)

    def ready(url: str) -> dict[str, Any]:
        workers = f"{len(config.prefill)} prefill and {len(config.decode)} decode workers"
        return {"name": "proxy", "url": url, "line": f"proxy ready on {url} before {workers}"}

    asyncio.run(serve(app, bound, parent, ready=ready, drain=app[ROUTER].drain, say=say))
