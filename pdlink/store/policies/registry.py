"""Eviction policies by the name that settings give."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

from .adaptive import Adaptive
from .arc import Arc
from .clock import Clock
from .fifo import Fifo
from .lfu import Lfu
from .lru import Lru
from .mru import Mru
from .s3fifo import S3Fifo
from .w_tinylfu import WTinyLfu

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "arc": Arc,
    "clock": Clock,
    "fifo": Fifo,
    "lfu": Lfu,
    "lru": Lru,
    "mru": Mru,
    "s3fifo": S3Fifo,
    "w_tinylfu": WTinyLfu,
}
DEFAULT_POLICY = "adaptive"
_VERBS = ("insert", "touch", "evict", "remove", "__len__")


def make_policy(name: str) -> Policy:
    """A new policy. name: one of `POLICIES`, or `path.to.module:Class`, a class that takes no arguments.

    Raises ConfigError for any other.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(POLICIES)
        raise ConfigError(f"cache_policy: got {name!r}; limit {known}, or path.to.module:Class; use one of them")
    try:
        policy: Policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cache_policy: got {name!r}, which cannot be made ({error}); limit a class that takes no arguments; "
            "put its module on PYTHONPATH"
        ) from error
    if missing := [verb for verb in _VERBS if not hasattr(policy, verb)]:
        raise ConfigError(
            f"cache_policy: got {name!r}, which has no {', '.join(missing)}; limit the verbs {', '.join(_VERBS)}; "
            "add what is missing"
        )
    return policy
