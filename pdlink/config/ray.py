"""A whole deployment on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pdlink.config.proxy import OF_JOINING
from pdlink.config.section import Seconds, Section, no_use
from pdlink.config.up import SIDES, UpConfig

Resources = dict[str, Annotated[float, Field(gt=0)]]

_KEYS = ("key_file", "allow_file", "http_key_file", "token_file", "insecure")


class RayConfig(Section):
    """Where `pdlink ray up` puts its workers."""

    address: str = "auto"
    """HOST:PORT of the cluster's head; `auto` is the cluster that this host is a node of."""
    prefill_resources: Resources = {"CPU": 1.0}
    """What Ray keeps for each prefill worker, on one node: CPU, GPU, memory (bytes), or resources of your own. Their
    sizes are not enforced, but for GPU, which says what the worker sees."""
    decode_resources: Resources = {"CPU": 1.0}
    """The same for each decode worker."""
    place_timeout_s: Seconds = 30.0
    """Longest wait for room when the deployment starts. What no node can ever hold is refused at once."""
    lost_after_s: Seconds = 3.0
    """Silence of an actor after which its worker is started on another node."""


class RayUpConfig(UpConfig):
    """`pdlink ray up`: a whole deployment, its workers on a Ray cluster."""

    ray: RayConfig = RayConfig()
    """The cluster."""

    @model_validator(mode="after")
    def _on_ray(self) -> RayUpConfig:
        if self.engine != "builtin":
            raise ValueError(f"engine: got {self.engine!r}; expected builtin with `pdlink ray up`; leave it out")
        if self.share_store:
            raise ValueError(
                "share_store: is one process beside all workers, which are on many hosts here; start `pdlink store` "
                "on each of them and set prefill.tiers.store and decode.tiers.store"
            )
        if self.proxy.processes > 1:
            raise ValueError(f"proxy.processes: got {self.proxy.processes}; expected 1 with `pdlink ray up`")
        made = "is made by `pdlink ray up`, which gives every process keys"
        no_use(self.proxy, "proxy.", (*OF_JOINING, "worker_key_file", "token_file"), made)
        for side in SIDES:
            worker = getattr(self, side)
            no_use(worker.security, f"{side}.security.", _KEYS, made)
            no_use(worker.join, f"{side}.join.", ("proxies",), "is the proxy that `pdlink ray up` starts")
            no_use(worker, f"{side}.", ("listen",), "is made of the node's address and free ports")
        return self
