"""A proxy of several processes on one port: started, watched, started again, told to reload, drained together.

Each of them listens on the port by itself (SO_REUSEPORT), and the kernel spreads connections over them. They are
routers that share nothing: each has its part of what is limited, and chooses among two workers drawn by chance. This
process holds the port and serves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.config.proxy import RateLimit
from pdlink.errors import ConfigError
from pdlink.serve.keeper import ChildFailed, Keeper
from pdlink.serve.process import bind
from pdlink.serve.up import START_TIMEOUT_S, Child, start, stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import ProxyConfig
    from pdlink.serve.process import Parent

log = logging.getLogger("pdlink.proxy")

_LOOK_S = 0.1
PLACE = "place"
"""The field of a child's settings that says which one it is, and where the others are."""


def run_processes(
    config: ProxyConfig,
    parent: Parent | None,
    say: Callable[[str], None],
    reread: Callable[[], ProxyConfig] | None = None,
) -> None:
    """Run them until SIGTERM, SIGINT or the end of the parent. reread: loads the settings again, on SIGHUP. Raises
    ConfigError and ChildFailed before all are ready."""
    if config.dialect == "lmcache":
        raise ConfigError(
            f"processes: got {config.processes}; limit 1 with dialect lmcache, whose workers tell one address "
            "(notify) that KV has arrived; leave it out"
        )
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: stopping.append(got))
    with contextlib.ExitStack() as held:
        bound = held.enter_context(bind(config.host, config.port, shared=True))
        directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pdlink-proxy-")))
        port = bound.getsockname()[1]
        children: list[Child] = []
        try:
            for index in range(config.processes):
                place = {"directory": str(directory), "number": index, "processes": config.processes}
                settings = {**_share(config).model_dump(mode="json"), "port": port, PLACE: place}
                children.append(start(f"proxy-{index}", "proxy", settings))
            for child in children:
                _await(child, stopping)
            if stopping:
                return
            signal.signal(signal.SIGHUP, lambda *_: _reload(children, directory, reread))
            facts = {**children[0].facts, "name": "proxy"}
            facts["line"] = f"{facts['line']}, {config.processes} processes"
            say(facts["line"])
            if parent is not None:
                parent.ready(facts)
            keepers = [Keeper(child, START_TIMEOUT_S) for child in children]
            while not stopping and not (parent is not None and parent.ended()):
                for keeper in keepers:
                    keeper.look()
                time.sleep(_LOOK_S)
        finally:
            stop(children, config.drain_s + 5)


def _share(config: ProxyConfig) -> ProxyConfig:
    """The settings of one of them: bounds are for all together, and it is one router of several."""

    def part(number: int) -> int:
        return math.ceil(number / config.processes)

    def limit(of_all: RateLimit) -> RateLimit:
        return RateLimit(requests=part(of_all.requests), tokens=part(of_all.tokens))

    return config.model_copy(
        update={
            "queue_size": part(config.queue_size),
            "max_connections": part(config.max_connections),
            "rate_limit": limit(config.rate_limit),
            "rate_limits": {key: limit(of_all) for key, of_all in config.rate_limits.items()},
            "routers": config.routers * config.processes,
        }
    )


def _await(child: Child, stopping: list[int]) -> None:
    """Until it is ready, or all are to stop. Raises ChildFailed."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not stopping and not child.look():
        if time.monotonic() > deadline_s:
            raise ChildFailed(f"{child.label} was not ready within {START_TIMEOUT_S:.0f} s")
        time.sleep(_LOOK_S)


def _reload(children: list[Child], directory: Path, reread: Callable[[], ProxyConfig] | None) -> None:
    from pdlink_proxy.siblings import tell

    settings = None
    try:
        settings = _share(reread()).model_dump(mode="json") if reread is not None else None
    except ConfigError as error:
        log.error("the settings are unchanged: %s", error)
    for number, child in enumerate(children):
        if settings is not None:  # also for one that is started again
            kept = {name: child.settings[name] for name in ("port", PLACE)}
            child.settings = {**settings, **kept}
        if child.process.poll() is None:
            if settings is not None:
                try:
                    tell(directory, number, "adopt", settings)
                except OSError as error:
                    log.error("%s has the settings from before: %s", child.label, error)
            child.process.send_signal(signal.SIGHUP)
