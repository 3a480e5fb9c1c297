"""Least recently used first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import KeyQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key


class Lru:
    """Strong where the cache holds a good part of what comes again; one scan empties it."""

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
