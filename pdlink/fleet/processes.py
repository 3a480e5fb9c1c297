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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.config.listen import HostPort
from pdlink.config.proxy import RateLimit
from pdlink.errors import ConfigError
from pdlink.fleet.child import START_TIMEOUT_S, Child, start, stop
from pdlink.fleet.keeping import await_all, keep, until_stopped
from pdlink.fleet.post import Post
from pdlink.serve import roles
from pdlink.serve.process import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import ProxyConfig
    from pdlink.serve.process import Parent

log = logging.getLogger("pdlink.proxy")

PLACE = "place"
"""The field of a child's settings that says which one it is, and where the others are."""


def run_proxy(
    config: ProxyConfig,
    parent: Parent | None,
    say: Callable[[str], None],
    place: dict[str, Any] | None = None,
    reread: Callable[[], ProxyConfig] | None = None,
) -> None:
    """As `pdlink.serve.roles.run_proxy`, in this process or in several. place: this is one of them."""
    if place is None and config.processes > 1:
        _run_processes(config, parent, say, reread)
    else:
        roles.run_proxy(config, parent, say, place, reread)


def _run_processes(
    config: ProxyConfig,
    parent: Parent | None,
    say: Callable[[str], None],
    reread: Callable[[], ProxyConfig] | None,
) -> None:
    """Run them until SIGTERM, SIGINT or the end of the parent. reread: loads the settings again, on SIGHUP. Raises
    ConfigError and ChildFailed before all are ready."""
    posts: list[Post] = []
    is_ready = is_asked = False

    def reload(*_: object) -> None:
        nonlocal is_asked
        is_asked = not is_ready
        if is_ready:
            _reload(posts, directory, reread)

    signal.signal(signal.SIGHUP, reload)  # before any start: by default it ends a process
    with contextlib.ExitStack() as held:
        bound = held.enter_context(bind(*config.at, "listen", shared=True))
        directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pdlink-proxy-")))
        listen = str(HostPort(config.at.host, bound.getsockname()[1]))
        for index in range(config.processes):
            label = f"proxy-{index}"
            place = {"directory": str(directory), "number": index, "processes": config.processes}
            settings = {**_share(config, config.processes).model_dump(mode="json"), "listen": listen, PLACE: place}
            begin = partial(start, label, "proxy", settings)
            posts.append(Post(label, "proxy", begin, start_timeout_s=START_TIMEOUT_S))
        try:
            with until_stopped():
                await_all(posts, START_TIMEOUT_S)
                facts = {**posts[0].facts, "name": "proxy"}
                facts["line"] = f"{facts['line']}, {config.processes} processes"
                say(facts["line"])
                is_ready = True
                if is_asked:  # while they started, perhaps after the settings were read
                    reload()
                if parent is not None:
                    parent.ready(facts)
                keep(posts, parent.ended if parent is not None else lambda: False)
        finally:
            stop([post.child for post in posts if post.child is not None and not post.away], config.drain_s + 5)


def _share(config: ProxyConfig, processes: int) -> ProxyConfig:
    """The settings of one of so many: bounds are for all together, and it is one router of several.

    processes: the running ones, which settings that were read again do not change.
    """

    def part(number: int) -> int:
        return math.ceil(number / processes)

    def limit(of_all: RateLimit) -> RateLimit:
        return RateLimit(requests=part(of_all.requests), tokens=part(of_all.tokens))

    return config.model_copy(
        update={
            "queue_size": part(config.queue_size),
            "max_connections": part(config.max_connections),
            "rate_limit": limit(config.rate_limit),
            "rate_limits": {key: limit(of_all) for key, of_all in config.rate_limits.items()},
            "routers": config.routers * processes,
        }
    )


def _reload(posts: list[Post], directory: Path, reread: Callable[[], ProxyConfig] | None) -> None:
    from pdlink_proxy.siblings import tell

    settings = None
    try:
        settings = _share(reread(), len(posts)).model_dump(mode="json") if reread is not None else None
    except ConfigError as error:
        log.error("the settings are unchanged: %s", error)
    for number, post in enumerate(posts):
        child = post.child
        assert isinstance(child, Child), "it has been ready"
        if settings is not None:  # also for one that is started again
            kept = {name: child.settings[name] for name in ("listen", PLACE)}
            child.settings = {**settings, **kept}
        if child.process.poll() is None:
            if settings is not None:
                try:
                    tell(directory, number, "adopt", settings)
                except OSError as error:
                    log.error("%s has the settings from before: %s", child.label, error)
            child.process.send_signal(signal.SIGHUP)
