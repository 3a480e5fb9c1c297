"""The policy of one queue, and the queue that others are made of, too."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .base import Key


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


class Lru:
    """Least recently used first. Strong where the cache holds a good part of what comes again; a scan empties it."""

    def __init__(self) -> None:
        self._keys = KeyQueue()

    def insert(self, key: Key, nbytes: int) -> None:
        self._keys.push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._keys:
            self._keys.renew(key)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = self._keys.oldest(may_evict)
        if victim is not None:
            self._keys.pop(victim)
        return victim

    def remove(self, key: Key) -> None:
        if key in self._keys:
            self._keys.pop(key)

    def __len__(self) -> int:
        return len(self._keys)
