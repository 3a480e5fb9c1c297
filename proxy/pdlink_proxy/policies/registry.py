"""Policies by the name that settings give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.config.by_path import make_by_path
from pdlink.errors import ConfigError

from .base import Policy
from .consistent_hash import ConsistentHash
from .cost import Cost
from .least_loaded import LeastLoaded
from .prefix import Prefix
from .round_robin import RoundRobin
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
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
    if ":" not in name:
        known = ", ".join(POLICIES)
        raise ConfigError(f"policy: got {name!r}; expected {known}, or path.to.module:Class; use one of them")
    policy = make_by_path("policy", name, "expected a class that takes no arguments")
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy: got {name!r}; expected subclasses of {Policy.__module__}.Policy; make it one")
    return policy
