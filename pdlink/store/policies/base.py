"""What the store asks of an eviction policy.

A policy holds keys and sizes, never payload; it has no clock and no lock. Nobody tells it the capacity: `evict` is
only called when something does not fit, so what is resident then is the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class KeyQueue:
    """Keys from oldest to newest, with their sizes: what policies are made of."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self.nbytes = 0

    def push(self, key: Key, nbytes: int) -> None:
        """As the newest; the key is not in here."""
        self._sizes[key] = nbytes
        self.nbytes += nbytes

    def pop(self, key: Key) -> int:
        """Take the key out; its size. Raises KeyError."""
        nbytes = self._sizes.pop(key)
        self.nbytes -= nbytes
        return nbytes

    def renew(self, key: Key) -> None:
        """Make it the newest. Raises KeyError."""
        self._sizes.move_to_end(key)

    def oldest(self, may_evict: Callable[[Key], bool]) -> Key | None:
        """The first key that may go."""
        return next(filter(may_evict, self._sizes), None)

    def newest(self, may_evict: Callable[[Key], bool]) -> Key | None:
        """The last key that may go."""
        return next(filter(may_evict, reversed(self._sizes)), None)

    def trim(self, nbytes: int) -> None:
        """Forget the oldest until at most `nbytes` are left."""
        while self.nbytes > nbytes:
            self.nbytes -= self._sizes.popitem(last=False)[1]

    def __getitem__(self, key: Key) -> int:
        return self._sizes[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)
