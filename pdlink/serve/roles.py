"""A worker and a proxy as processes: settings in, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pdlink.config import is_loopback
from pdlink.errors import ConfigError, EngineFailure
from pdlink.events import listen
from pdlink.observe import traces
from pdlink.observe.timeline import Timeline
from pdlink.serve.process import bind, raise_descriptor_limit, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import ProxyConfig, WorkerConfig
    from pdlink.serve.process import Parent


log = logging.getLogger(__name__)


def run_worker(config: WorkerConfig, parent: Parent | None, say: Callable[[str], None]) -> None:
    """Run one worker until SIGTERM or the end of its parent. Raises ConfigError and others before it is ready."""
    from pdlink.engine.places import find_model
    from pdlink.protocol.auth import ControlAddress
    from pdlink.serve import health, keys
    from pdlink.transport.choice import check_kinds

    raise_descriptor_limit()
    check_kinds(config.transport)
    security = config.security
    credentials, http_key = keys.load_credentials(security), keys.http_key(security)
    tls = keys.server_tls(security.tls_cert, security.tls_key)
    find_model(config.model)
    bound = bind(config.host, config.port)
    if parent is not None:
        parent.doing("loading torch")
    from pdlink.serve.app import build_app
    from pdlink.serve.worker import Worker

    worker = Worker(config, keys.worker_name(config, credentials, bound.getsockname()[1]), credentials)
    if http_key is None and not is_loopback(config.host):
        log.warning("host %s without security.http_key_file: HTTP is open to anybody who reaches it", config.host)
    if security.insecure:
        log.warning("security.insecure: anybody who reaches this worker's ports can read and write its KV cache")
    trace_path = traces.path_of(config.timeline, worker.name) if config.timeline is not None else None
    if parent is not None:
        parent.doing(f"loading the model {config.model.name}")
    worker.open()
    trace = Timeline(worker.name)
    stop_tracing = listen(trace) if trace_path is not None else None

    def ready(url: str) -> dict[str, Any]:
        control, transports = worker.node.address, worker.node.transports
        return {
            "name": worker.name,
            "url": url,
            "control": control,
            "control_port": ControlAddress.parse(control).port,
            "transports": transports,
            "model": worker.model.name,
            "line": f"{worker.name} ready on {url}, control {control}, KV over {' or '.join(transports)}",
        }

    async def drain() -> None:
        if health.problem(worker):
            return
        drain_s = config.timeouts.drain_s
        say(f"{worker.name} draining {worker.num_requests} requests, at most {drain_s:g} s")
        await asyncio.to_thread(worker.drain, drain_s)

    def reload() -> None:
        if security.allow_file is None:
            return
        try:
            worker.node.allow(keys.load_allow_list(security.allow_file))
        except ConfigError as error:
            log.error("the allow-list is unchanged: %s", error)

    app = build_app(worker, http_key)
    try:
        asyncio.run(serve(app, bound, parent, ready=ready, drain=drain, say=say, tls=tls, reload=reload))
        problem = health.problem(worker)
    finally:
        worker.close()
        if trace_path is not None and stop_tracing is not None:
            stop_tracing()
            traces.write(trace, trace_path)
    if problem:
        raise EngineFailure(f"{worker.name} cannot go on: {problem}")


def run_proxy(config: ProxyConfig, parent: Parent | None, say: Callable[[str], None]) -> None:
    """Run the proxy until SIGTERM or the end of its parent."""
    from pdlink.serve import keys
    from pdlink_proxy.app import ROUTER, build_app

    tls = keys.server_tls(config.tls_cert, config.tls_key)
    bound = bind(config.host, config.port)
    app = build_app(config)
    if not config.decode:
        log.warning("decode: no decode workers, so every request is answered 503; --decode URL names one")
    elif not config.prefill:
        what = (
            "decode computes every prompt"
            if config.on_no_prefill == "decode_only"
            else "every request is answered 503"
        )
        log.warning("prefill: no prefill workers, so %s; --prefill URL names one", what)
    if not app[ROUTER].api_keys and not is_loopback(config.host):
        log.warning("host %s without api_keys: the proxy is open to anybody who reaches it", config.host)

    def ready(url: str) -> dict[str, Any]:
        workers = f"{len(config.prefill)} prefill and {len(config.decode)} decode workers"
        return {"name": "proxy", "url": url, "line": f"proxy ready on {url} before {workers}"}

    asyncio.run(serve(app, bound, parent, ready=ready, drain=app[ROUTER].drain, say=say, tls=tls))
