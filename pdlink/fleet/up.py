"""`pdlink up`: prefill workers, decode workers and a proxy as child processes of this one.

A dead process is started again on the same ports (`post.py`), and nothing else: its peers recognise the new epoch.
This process binds the ports first and keeps them bound, without listening: a taken port shows before any model is
loaded, and no other process gets one while its worker is away.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlink.config.listen import ListenConfig, is_numeric
from pdlink.config.model import SMALL_MODEL
from pdlink.fleet import engines
from pdlink.fleet.child import START_TIMEOUT_S, start, stop
from pdlink.fleet.keeping import await_all, keep, log, picture, until_stopped
from pdlink.fleet.post import Post
from pdlink.serve.process import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import UpConfig, WorkerConfig

_ROLES = ("prefill", "decode")
_STORE_END_S = 60.0
"""A store writes what waits for its tiers first."""


def up(config: UpConfig, say: Callable[[str], None]) -> None:
    """Run the deployment until SIGINT or SIGTERM. Raises ConfigError and ChildFailed.

    say: prints the summary when all are ready; progress is logged.
    """
    stores: list[Post] = []
    workers: list[Post] = []
    proxies: list[Post] = []
    began_s = time.monotonic()
    with contextlib.ExitStack() as held:
        try:
            with until_stopped():
                at = config.proxy.at
                at = at._replace(port=_hold(held, at.host, at.port, "proxy.listen"))
                settings = {**config.proxy.model_dump(mode="json"), "listen": str(at)}
                servers = config.servers
                if servers is not None:
                    timeout_s = servers.start_timeout_s
                    started, more = engines.prepare(config, servers, held, _hold)
                    workers += [_post(config, each.label, each.role, each.start, timeout_s) for each in started]
                    settings |= more
                else:
                    timeout_s = START_TIMEOUT_S
                    _start_own(config, stores, workers, held)
                await_all([*stores, *workers], timeout_s)
                settings |= {role: [post.url for post in workers if post.role == role] for role in _ROLES}
                proxies.append(_own(config, "proxy", "proxy", settings))
                await_all(proxies, START_TIMEOUT_S)
                say(_picture(config, workers, [*stores, *proxies], time.monotonic() - began_s))
                keep([*stores, *workers, *proxies])
        finally:
            # The proxy first: its requests need the workers, and it would warn about workers that leave.
            if workers:
                log.info("stopping; running requests have up to %g s", config.proxy.drain_s)
            _stop(proxies, config.proxy.drain_s + 5)
            _stop(workers, max(config.prefill.timeouts.drain_s, config.decode.timeouts.drain_s) + 5)
            _stop(stores, _STORE_END_S)


def worker_settings(side: str, worker: WorkerConfig, count: int) -> dict[str, dict[str, Any]]:
    """Label to settings of every worker of one side. Ports other than 0 count up."""
    settings = worker.model_dump(mode="json")
    found = {}
    for index in range(count):
        label = worker.name or f"{side}-{index}"
        own: dict[str, Any] = {"name": worker.name if worker.security.key_file else label}
        http, control = (port and port + index for port in (worker.listen.port, worker.listen.control_port))
        own["listen"] = worker.listen.on(http=http or None, control=control or None).model_dump()
        found[label] = settings | own
    return found


def _post(config: UpConfig, label: str, role: str, start: Callable[[], Any], timeout_s: float) -> Post:
    return Post(label, role, start, start_timeout_s=timeout_s, max_failures=config.max_failed_starts)


def _own(config: UpConfig, label: str, role: str, settings: dict[str, Any]) -> Post:
    """For a process of pdlink."""
    return _post(config, label, role, partial(start, label, role, settings), START_TIMEOUT_S)


def _stop(posts: Sequence[Post], timeout_s: float) -> None:
    stop([post.child for post in posts if post.child is not None and not post.away], timeout_s)


def _hold(held: contextlib.ExitStack, host: str, port: int, setting: str) -> int:
    """Bind a port, free or configured, for a child to listen on. Raises ConfigError if it is taken."""
    bound = bind(host, port, setting)
    held.callback(bound.close)
    found: int = bound.getsockname()[1]
    return found


def _start_own(config: UpConfig, stores: list[Post], workers: list[Post], held: contextlib.ExitStack) -> None:
    from pdlink.engine.places import find_model

    sides = {"prefill": (config.prefill, config.num_prefill), "decode": (config.decode, config.num_decode)}
    for worker, _ in sides.values():
        find_model(worker.model)
    plans = [
        (label, side, settings)
        for side, (worker, count) in sides.items()
        for label, settings in worker_settings(side, worker, count).items()
    ]
    for _, side, settings in plans:  # all ports before the first model is loaded
        listen = ListenConfig.model_validate(settings["listen"])
        listen = listen.on(http=_hold(held, listen.host, listen.port, f"{side}.listen"))
        if is_numeric(listen.control_host) or listen.control_host == "localhost":
            control = _hold(held, listen.control_host, listen.control_port, f"{side}.listen.control")
            listen = listen.on(control=control)
        settings["listen"] = listen.model_dump()
    if config.share_store:
        settings = config.store.model_dump(mode="json")
        listen = config.store.listen
        settings["listen"] = listen.on(http=_hold(held, listen.host, listen.port, "store.listen")).model_dump()
        stores.append(_own(config, config.store.name, "store", settings))
        for _, _, settings in plans:
            settings["tiers"] = {**settings["tiers"], "store": config.store.socket}
    workers += [_own(config, *plan) for plan in plans]


def _picture(config: UpConfig, workers: Sequence[Post], others: Sequence[Post], took_s: float) -> str:
    servers, note = config.servers, ""
    if servers is not None:
        model, how = servers.model_name, engines.describe(servers)
    else:
        facts = workers[0].facts
        model, how = facts["model"], f"KV over {' or '.join(facts['transports'])}"
        if config.prefill.model.path == SMALL_MODEL["path"]:
            note = "The model is tiny and knows a few sentences about pdlink; `--model` takes yours."
    return picture([*workers, *others], model, f"ready in {took_s:.1f} s: model {model}, {how}", note)
