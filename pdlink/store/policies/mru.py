"""Most recently used first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lru import Lru

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key


class Mru(Lru):
    """For loops over more than fits, where LRU never hits."""

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = self._keys.newest(may_evict)
        if victim is not None:
            self._keys.pop(victim)
        return victim
