"""Policies by the name that settings give."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

from .base import Policy
from .consistent_hash import ConsistentHash
from .cost import Cost
from .least_loaded import LeastLoaded
from .power_of_two import PowerOfTwo
from .prefix import Prefix
from .round_robin import RoundRobin
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "session": Session,
    "prefix": Prefix,
    "cost": Cost,
}


def make_policy(name: str) -> Policy:
    """A new policy. name: one of `POLICIES`, or `path.to.module:Class`, a `Policy` that takes no arguments.

    Raises ConfigError for any other.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(POLICIES)
        raise ConfigError(f"policy: got {name!r}; limit {known}, or path.to.module:Class; use one of them")
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"policy: got {name!r}, which cannot be made ({error}); limit a class that takes no arguments; put its "
            "module on PYTHONPATH"
        ) from error
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy: got {name!r}; limit subclasses of {Policy.__module__}.Policy; make it one")
    return policy
