"""`pdlink ray up`: workers on a Ray cluster, and a proxy beside this process.

Ray finds room, starts an actor in it for each worker, and says when that dies. The workers are processes of their own
(`launcher.py`), which dial the proxy as soon as they are ready, wherever that is: so a worker that comes back under
another address is found without a list. When this process ends, its actors do, and with them the workers.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING

from pdlink.launch import placing, secrets
from pdlink.launch.cluster import RayCluster
from pdlink.launch.post import Plan, Post, log
from pdlink.protocol.auth import ControlAddress
from pdlink.serve.keeper import ChildFailed, Keeper
from pdlink.serve.process import bind
from pdlink.serve.up import START_TIMEOUT_S, Child, start, stop, worker_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.config.ray import RayUpConfig
    from pdlink.launch.secrets import Keys

__all__ = ["log", "up"]

_LOOK_S = 0.1
_WORD_S = 5.0
"""Interval of progress lines while workers start."""
_PROXY = "proxy"
_END_S = 5.0


class _Stopped(BaseException):
    """SIGINT or SIGTERM. A BaseException, so that no handler of errors catches it."""


def up(config: RayUpConfig, say: Callable[[str], None]) -> None:
    """Run the deployment until SIGINT or SIGTERM. Raises ConfigError, PlacementFailed and ChildFailed.

    say: prints the summary when all are ready; progress is logged.
    """
    stopping = False

    def tell(*_: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise _Stopped

    plans = _plans(config)
    keys = secrets.make([_PROXY, *(plan.label for plan in plans)])
    cluster = RayCluster(config.ray.address, keys)
    began_s = time.monotonic()
    posts: list[Post] = []
    proxies: list[Child] = []
    with contextlib.ExitStack() as held:
        held.callback(cluster.close)
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has handlers of its own by now
            signal.signal(number, tell)
        try:
            nodes = cluster.nodes()
            for plan in plans:
                placing.check(plan.label, plan.setting, plan.need, nodes)
            door = held.enter_context(bind(cluster.host, 0, "proxy.discover"))
            address = str(ControlAddress(cluster.host, door.getsockname()[1], keys[_PROXY].pair.public))
            proxies.append(_start_proxy(config, keys[_PROXY], address, held))
            for plan in plans:
                plan.settings["join"]["proxies"] = [address]
                posts.append(Post(cluster, plan, config.ray.lost_after_s))
            _await_all(config, cluster, posts, proxies[0])
            say(_picture(posts, proxies[0], time.monotonic() - began_s))
            keeper = Keeper(proxies[0], START_TIMEOUT_S, config.max_failed_starts)
            while True:
                keeper.look()
                for post in posts:
                    post.look()
                    if config.max_failed_starts is not None and post.num_failures >= config.max_failed_starts:
                        raise ChildFailed(f"{post.plan.label}: failure {post.num_failures} (max_failed_starts)")
                time.sleep(_LOOK_S)
        except _Stopped:
            return
        finally:
            stopping = True
            log.info("stopping; running requests have up to %g s", config.proxy.drain_s)
            stop(proxies, config.proxy.drain_s + 5)
            drain_s = max(config.prefill.timeouts.drain_s, config.decode.timeouts.drain_s) + _END_S
            cluster.stop([post.actor for post in posts if post.ready], drain_s, drain_s + _END_S)
            for post in posts:
                post.end()


def _plans(config: RayUpConfig) -> list[Plan]:
    sides = (
        ("prefill", config.prefill, config.num_prefill, config.ray.prefill_resources),
        ("decode", config.decode, config.num_decode, config.ray.decode_resources),
    )
    return [
        Plan(label, side, settings, f"ray.{side}_resources", dict(need))
        for side, worker, count, need in sides
        for label, settings in worker_settings(side, worker, count).items()
    ]


def _start_proxy(config: RayUpConfig, keys: Keys, address: str, held: contextlib.ExitStack) -> Child:
    """address: where workers dial it."""
    files = secrets.Unnamed(keys)
    held.callback(files.close)
    door = f"register:{address.partition('?')[0]}"
    bound = held.enter_context(bind(config.proxy.host, config.proxy.port, "proxy.port"))
    settings = {
        **config.proxy.model_dump(mode="json"),
        "port": bound.getsockname()[1],
        "discover": [*config.proxy.discover, door],
        "key_file": files.key_file,
        "allow_file": files.allow_file,
        "worker_key_file": files.http_key_file,
    }
    return start(_PROXY, "proxy", settings)


def _await_all(config: RayUpConfig, cluster: RayCluster, posts: Sequence[Post], proxy: Child) -> None:
    """Return when all are ready, and log their progress. Raises PlacementFailed, and ChildFailed."""
    began_s = said_s = time.monotonic()
    proxy_ready, told = False, set[str]()
    while not (proxy_ready and all(post.ready for post in posts)):
        proxy_ready = proxy_ready or proxy.look()
        for post in posts:
            post.look()
            if post.ready and post.plan.label not in told:
                told.add(post.plan.label)
                log.info("%s is ready after %.1f s: %s", post.plan.label, time.monotonic() - began_s, post.url)
        now_s = time.monotonic()
        waited_s = now_s - began_s
        homeless = [post for post in posts if post.actor is None and not post.ready and not post.num_failures]
        if homeless and waited_s > config.ray.place_timeout_s:
            plan = homeless[0].plan
            raise placing.no_room(plan.label, plan.setting, plan.need, cluster.nodes(), waited_s)
        if waited_s > config.ray.place_timeout_s + START_TIMEOUT_S:
            waiting = ", ".join(f"{post.plan.label} ({post.doing})" for post in posts if not post.ready)
            raise ChildFailed(f"not ready within {waited_s:.0f} s: {waiting or 'proxy'}")
        if now_s - said_s > _WORD_S:
            said_s = now_s
            doing = "; ".join(f"{post.plan.label}: {post.doing}" for post in posts if not post.ready)
            log.info("%.0f s: %s", waited_s, doing or f"proxy: {proxy.doing}")
        time.sleep(_LOOK_S)
    _warn_once(posts)


def _warn_once(posts: Sequence[Post]) -> None:
    """Log what workers warned of in their start: each text once, with the labels of all of them."""
    labels_of: dict[str, list[str]] = {}
    for post in posts:
        for text in post.state.warnings if post.state is not None else ():
            labels_of.setdefault(text, []).append(post.plan.label)
    for text, labels in labels_of.items():
        log.warning("%s: %s", ", ".join(labels), text)


def _picture(posts: Sequence[Post], proxy: Child, took_s: float) -> str:
    """All processes with their addresses, and a line to try it with."""
    facts: Mapping[str, str] = posts[0].state.facts if posts[0].state is not None else {}
    model, url = facts.get("model", ""), proxy.facts["url"]
    lines = [f"ready in {took_s:.1f} s: model {model}", ""]
    for post in posts:
        node = post.state.node[:8] if post.state is not None else ""
        lines.append(f"  {post.plan.label:<12}{post.url:<28}node {node}")
    lines.append(f"  {'proxy':<12}{url}")
    body = json.dumps({"model": model, "prompt": "The KV cache crosses over", "max_tokens": 32, "stream": True})
    lines += ["", "try it:", f"  curl -N {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"]
    lines += ["", "Ctrl-C stops everything."]
    return "\n".join(lines)
