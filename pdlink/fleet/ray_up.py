"""`pdlink ray up`: workers on a Ray cluster, and a proxy beside this process.

Ray finds room, starts an actor in it for each worker, and says when that dies. The workers are processes of their own
(`launcher.py`), which dial the proxy as soon as they are ready, wherever that is: so a worker that comes back under
another address is found without a list. When this process ends, its actors do, and with them the workers.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING

from pdlink.endpoint.token import credentials_of
from pdlink.errors import ConfigError
from pdlink.fleet import placing
from pdlink.fleet.child import START_TIMEOUT_S, start, stop
from pdlink.fleet.keeping import await_all, keep, log, picture, until_stopped
from pdlink.fleet.post import ClusterAway, Here, Post, PostPlan
from pdlink.fleet.ray_cluster import RayCluster
from pdlink.fleet.secrets import Unnamed
from pdlink.fleet.up import worker_settings
from pdlink.protocol.auth import ControlAddress
from pdlink.serve.process import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config.ray import RayUpConfig

_PROXY = "proxy"
_END_S = 5.0


def up(config: RayUpConfig, say: Callable[[str], None]) -> None:
    """Run the deployment until SIGINT or SIGTERM. Raises ConfigError, PlacementFailed and ChildFailed.

    say: prints the summary when all are ready; progress is logged.
    """
    plans = _plans(config)
    token = secrets.token_hex(32)
    cluster = RayCluster(config.ray.address, token)
    began_s = time.monotonic()
    workers: list[Post] = []
    proxies: list[Post] = []
    with contextlib.ExitStack() as held:
        held.callback(cluster.close)
        try:
            with until_stopped():  # Ray has handlers of its own by now
                try:
                    nodes = cluster.nodes()
                except ClusterAway as error:
                    raise ConfigError(
                        f"ray.address: {config.ray.address} does not answer ({error}); look at `ray status`"
                    ) from None
                for plan in plans:
                    placing.check(plan.label, plan.setting, plan.need, nodes)
                door = held.enter_context(bind(cluster.host, 0, "proxy.discover"))
                address = str(ControlAddress(cluster.host, door.getsockname()[1], credentials_of(token).keys.public))
                proxies.append(_proxy(config, token, address, held))
                for plan in plans:
                    plan.settings["join"]["proxies"] = [address]
                    workers.append(
                        Post(
                            cluster,
                            plan,
                            lost_after_s=config.ray.lost_after_s,
                            place_timeout_s=config.ray.place_timeout_s,
                            max_failures=config.max_failed_starts,
                        )
                    )
                posts = [*workers, *proxies]
                await_all(posts, config.ray.place_timeout_s + START_TIMEOUT_S)
                model = workers[0].report.facts["model"] if workers[0].report is not None else ""
                say(picture(posts, model, f"ready in {time.monotonic() - began_s:.1f} s: model {model}"))
                keep(posts)
        finally:
            log.info("stopping; running requests have up to %g s", config.proxy.drain_s)
            stop([post.actor for post in proxies if post.actor is not None], config.proxy.drain_s + 5)
            drain_s = max(config.prefill.timeouts.drain_s, config.decode.timeouts.drain_s) + _END_S
            cluster.stop([post.actor for post in workers if post.ready], drain_s, drain_s + _END_S)
            for post in workers:
                post.end()


def _plans(config: RayUpConfig) -> list[PostPlan]:
    sides = (
        ("prefill", config.prefill, config.num_prefill, config.ray.prefill_resources),
        ("decode", config.decode, config.num_decode, config.ray.decode_resources),
    )
    return [
        PostPlan(label, side, settings, f"ray.{side}_resources", dict(need))
        for side, worker, count, need in sides
        for label, settings in worker_settings(side, worker, count).items()
    ]


def _proxy(config: RayUpConfig, token: str, address: str, held: contextlib.ExitStack) -> Post:
    """address: where workers dial it."""
    file = Unnamed(token)
    held.callback(file.close)
    door = f"register:{address.partition('?')[0]}"
    bound = held.enter_context(bind(*config.proxy.at, "proxy.listen"))
    settings = {
        **config.proxy.model_dump(mode="json"),
        "listen": str(config.proxy.at._replace(port=bound.getsockname()[1])),
        "discover": [*config.proxy.discover, door],
        "token_file": file.path,
    }
    begin = partial(start, _PROXY, "proxy", settings)
    plan = PostPlan(_PROXY, "proxy")
    return Post(Here(begin), plan, start_timeout_s=START_TIMEOUT_S, max_failures=config.max_failed_starts)
