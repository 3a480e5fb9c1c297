"""A worker, a store and a proxy as processes: settings in, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pdlink.config import is_loopback
from pdlink.errors import ConfigError, EngineFailure
from pdlink.serve import collector
from pdlink.serve.process import bind, raise_descriptor_limit, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import ProxyConfig, StoreConfig, WorkerConfig
    from pdlink.protocol.auth import AllowList
    from pdlink.serve.process import Parent


log = logging.getLogger(__name__)


def run_worker(config: WorkerConfig, parent: Parent | None, say: Callable[[str], None]) -> None:
    """Run one worker until SIGTERM or the end of its parent. Raises ConfigError and others before it is ready."""
    collector.pause()
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
    bound = bind(config.listen.host, config.listen.port, "listen")
    name = keys.worker_name(config, credentials, bound.getsockname()[1])
    if parent is not None:
        parent.doing("loading torch")
    from pdlink.serve.app import build_app
    from pdlink.serve.worker import Worker

    worker = Worker(config, name, credentials)
    if http_key is None and not is_loopback(config.listen.host):
        log.warning(
            "listen %s without security.http_key_file: HTTP is open to anybody who reaches it", config.listen.host
        )
    if security.insecure:
        log.warning("security.insecure: anybody who reaches this worker's ports can read and write its KV cache")
    if parent is not None:
        parent.doing(f"loading the model {config.model.name}")
    worker.open()

    def ready(url: str) -> dict[str, Any]:
        control, transports = worker.node.address, worker.node.transports
        store = f", store {worker.peers.address}" if worker.peers is not None else ""
        return {
            "name": worker.name,
            "url": url,
            "control": control,
            "control_port": ControlAddress.parse(control).port,
            "transports": transports,
            "model": worker.model.name,
            "line": f"{worker.name} ready on {url}, control {control}, KV over {' or '.join(transports)}{store}",
        }

    async def drain() -> None:
        if not health.problem(worker):
            drain_s = config.timeouts.drain_s
            say(f"{worker.name} draining {worker.num_requests} requests, at most {drain_s:g} s")
            worker.draining = True
            await asyncio.to_thread(worker.drain, drain_s)

    def reload() -> None:
        if security.allow_file is not None:
            _reload(security.allow_file, worker.allow)

    app = build_app(worker, http_key)
    try:
        with collector.over_requests_only():
            asyncio.run(serve(app, bound, parent, ready=ready, drain=drain, say=say, tls=tls, reload=reload))
        problem = health.problem(worker)
    finally:
        worker.close()
    if problem:
        raise EngineFailure(f"{worker.name} cannot go on: {problem}")


def _reload(allow_file: str, allow: Callable[[AllowList], None]) -> None:
    from pdlink.serve import keys

    try:
        allow(keys.load_allow_list(allow_file))
    except ConfigError as error:
        log.error("the allow-list is unchanged: %s", error)


def run_store(config: StoreConfig, parent: Parent | None, say: Callable[[str], None]) -> None:
    """Run one store until SIGTERM or the end of its parent. Raises ConfigError, and OSError (no memory)."""
    collector.pause()
    from pdlink.config import SecurityConfig, read_secrets
    from pdlink.peers.opening import make_link, tiers_of
    from pdlink.protocol.deadlines import Deadlines
    from pdlink.serve import keys
    from pdlink.serve.kv_events import open_publisher, tell_shared_records
    from pdlink.serve.store_app import build_app
    from pdlink.store.opening import disk_directory, make_store
    from pdlink.store.preimages import PreimageFile
    from pdlink.store.server.listener import Listener
    from pdlink.store.socket_path import store_path

    raise_descriptor_limit()
    path = store_path("socket", config.socket)
    http_key = None if config.http_key_file is None else read_secrets(config.http_key_file, "http_key_file")[0]
    bound = bind(config.listen.host, config.listen.port, "listen")
    if http_key is None and not is_loopback(config.listen.host):
        log.warning("listen %s without http_key_file: HTTP is open to anybody who reaches it", config.listen.host)
    credentials = keys.load_credentials(SecurityConfig(key_file=config.key_file, allow_file=config.allow_file))
    link = make_link(
        config.tiers,
        config.listen.link,
        config.transport,
        config.name,
        credentials,
        insecure=config.insecure,
        deadlines=Deadlines(),
    )
    store = make_store(config.tiers, config.name, peers=tiers_of(link, config.tiers))
    store.open()
    listener = Listener(store, path)
    publisher = file = None
    try:
        publisher = open_publisher(config.kv_events, config.name, listener.incarnation.hex())
        if publisher is not None:
            directory = disk_directory(config.tiers, config.name)
            file = PreimageFile(directory / "preimages") if directory is not None else None
            tell_shared_records(publisher, store, file)
            listener.events = publisher.address
        if link is not None:
            link.open(store)
        listener.open()

        def ready(url: str) -> dict[str, Any]:
            line = f"{config.name} ready on {url}, for workers at {path}, with {', '.join(store.places)}"
            asked = link.address if link is not None else ""
            line += f", asked at {asked}" if asked else ""
            return {"name": config.name, "url": url, "socket": str(path), "line": line, "store": asked}

        async def drain() -> None:
            """Workers go on without a store."""
            await asyncio.to_thread(listener.close)

        def reload() -> None:
            if link is not None and config.allow_file is not None:
                _reload(config.allow_file, link.allow)

        app = build_app(config.name, store, listener, http_key, loopback=is_loopback(config.listen.host))
        with collector.over_requests_only():
            asyncio.run(serve(app, bound, parent, ready=ready, drain=drain, say=say, reload=reload))
    finally:
        listener.close()
        if link is not None:
            link.close()
        store.close()
        if publisher is not None:
            publisher.close()
        if file is not None:
            file.close()


def run_proxy(
    config: ProxyConfig,
    parent: Parent | None,
    say: Callable[[str], None],
    place: dict[str, Any] | None = None,
    reread: Callable[[], ProxyConfig] | None = None,
) -> None:
    """Run a proxy until SIGTERM or the end of its parent. place: it is one of several processes (`SiblingPlace`).
    reread: loads the settings again, on SIGHUP."""
    collector.pause()
    from pdlink import _http

    _http.take_arenas_from_large_pages()  # before there are many; with the move below 9 % of a small request's CPU
    from pdlink.serve import keys
    from pdlink_proxy.app import ROUTER, build_app
    from pdlink_proxy.front import FrontRunner
    from pdlink_proxy.siblings import SiblingPlace, Siblings

    tls = keys.server_tls(config.tls_cert, config.tls_key)
    bound = bind(*config.at, "listen", shared=place is not None)
    app = build_app(config, Siblings(SiblingPlace(**place)) if place is not None else None)
    if config.discover or config.both:
        pass  # what `discover` lists may change; plain servers serve whole requests
    elif not config.decode:
        log.warning("decode: no decode workers, so every request is answered 503; --decode URL names one")
    elif not config.prefill:
        what = (
            "decode computes every prompt"
            if config.on_no_prefill == "decode_only"
            else "every request is answered 503"
        )
        log.warning("prefill: no prefill workers, so %s; --prefill URL names one", what)
    if not app[ROUTER].services.entry.api_keys and not is_loopback(config.at.host):
        log.warning("listen %s without api_keys: the proxy is open to anybody who reaches it", config.listen)

    def ready(url: str) -> dict[str, Any]:
        plain = f", {len(config.both)} plain servers" if config.both else ""
        workers = (
            f"{len(config.prefill)} prefill and {len(config.decode)} decode workers{plain}, none of them asked yet"
        )
        if config.discover:
            workers = f"the workers of {', '.join(config.discover)}"
        return {"name": "proxy", "url": url, "line": f"proxy ready on {url} in front of {workers}"}

    router = app[ROUTER]

    def reload() -> None:
        if reread is not None:
            try:
                router.adopt(reread())
            except ConfigError as error:
                log.error("the settings are unchanged: %s", error)
        router.reload()

    keep_freed_memory()
    _http.move_heap_to_large_pages()
    serving = serve(
        app, bound, parent, ready=ready, drain=router.drain, say=say, tls=tls, reload=reload, runner_of=FrontRunner
    )
    with collector.over_requests_only():
        asyncio.run(serving)


def keep_freed_memory() -> None:
    """Let glibc keep up to 62 MiB of freed memory: it gives back what is above twice the largest block that it has
    mapped and freed, of 32 MiB at most. Without such a block every prompt of some KB takes new pages from the system:
    4.5 page faults for one of 16 KB."""
    bytearray(31 << 20)
