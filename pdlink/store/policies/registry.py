"""Eviction policies by the name that settings give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.config.by_path import make_by_path
from pdlink.errors import ConfigError

from .adaptive import Adaptive
from .lfu import Lfu
from .queues import Fifo, Lru, Mru
from .s3fifo import S3Fifo

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import EvictionPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "adaptive": Adaptive,
    "fifo": Fifo,
    "lfu": Lfu,
    "lru": Lru,
    "mru": Mru,
    "s3fifo": S3Fifo,
}
DEFAULT_POLICY = "adaptive"
_VERBS = ("insert", "touch", "evict", "remove", "__len__")


def make_policy(name: str) -> EvictionPolicy:
    """A new policy. name: one of `POLICIES`, or `path.to.module:Class`, a class that takes no arguments.

    Raises ConfigError for any other.
    """
    if name in POLICIES:
        return POLICIES[name]()
    if ":" not in name:
        known = ", ".join(POLICIES)
        raise ConfigError(f"cache_policy: got {name!r}; expected {known}, or path.to.module:Class; use one of them")
    policy: EvictionPolicy = make_by_path("cache_policy", name, "expected a class that takes no arguments")
    if missing := [verb for verb in _VERBS if not hasattr(policy, verb)]:
        raise ConfigError(
            f"cache_policy: got {name!r}, which has no {', '.join(missing)}; expected the verbs {', '.join(_VERBS)}; "
            "add what is missing"
        )
    return policy
