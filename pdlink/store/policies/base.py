"""What the store asks of an eviction policy.

A policy holds keys and sizes, never payload; it has no clock and no lock. Nobody tells it the capacity: `evict` is
only called when something does not fit, so what is resident then is the capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

Key = bytes


class EvictionPolicy(Protocol):
    """Decides which resident key goes next. A verb is O(1), amortised, plus the keys that `evict` must pass over.

    A request's keys are inserted and touched *suffix first*: the last chunk before the one it builds on. So the head
    of a prefix, without which the rest is worth nothing, is the newest, and no policy needs a tree.
    """

    def insert(self, key: Key, nbytes: int) -> None:
        """The key, which was not resident, is."""

    def touch(self, key: Key) -> None:
        """A resident key was used. Others are ignored."""

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        """The key to drop, no longer resident when this returns; None if there is none.

        may_evict: False for keys that are leased or pinned. They are passed over and keep their places.
        """

    def remove(self, key: Key) -> None:
        """A key left for another reason than room (expired, corrupt, cleared). Unknown ones are ignored."""

    def __len__(self) -> int:
        """Resident keys."""
