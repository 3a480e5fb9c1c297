"""Least frequently used first."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .queues import KeyQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key

MOST_USES = 255
"""Counted; which also bounds the queues that `evict` looks at."""


class Lfu:
    """Counts uses, for as long as a key is resident. Among equals the least recently used goes."""

    def __init__(self) -> None:
        self._uses: dict[Key, int] = {}
        self._keys: defaultdict[int, KeyQueue] = defaultdict(KeyQueue)
        """By number of uses; none is empty."""

    def insert(self, key: Key, nbytes: int) -> None:
        self._uses[key] = 0
        self._keys[0].push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._uses:
            nbytes = self._take(key)
            self._uses[key] = min(self._uses[key] + 1, MOST_USES)
            self._keys[self._uses[key]].push(key, nbytes)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        for uses in sorted(self._keys):
            if (victim := self._keys[uses].oldest(may_evict)) is not None:
                self.remove(victim)
                return victim
        return None

    def remove(self, key: Key) -> None:
        if key in self._uses:
            self._take(key)
            del self._uses[key]

    def _take(self, key: Key) -> int:
        uses = self._uses[key]
        nbytes = self._keys[uses].pop(key)
        if not self._keys[uses]:
            del self._keys[uses]
        return nbytes

    def __len__(self) -> int:
        return len(self._uses)
