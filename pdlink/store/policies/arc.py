"""ARC: recency and frequency share the room, and what is missed decides how.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003; here over bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key


class Arc:
    """Keys seen once and keys seen again, with a ghost queue for each; together the ghosts are as large as they."""

    def __init__(self) -> None:
        self._once, self._again = Queue(), Queue()
        self._once_ghost, self._again_ghost = Queue(), Queue()
        self._once_nbytes = 0.0
        """What `_once` may have."""

    def insert(self, key: Key, nbytes: int) -> None:
        once, again = self._once_ghost, self._again_ghost
        if key in once:
            step = nbytes * max(1.0, again.nbytes / once.nbytes)
            self._once_nbytes = min(float(self._nbytes), self._once_nbytes + step)
            once.pop(key)
            self._again.push(key, nbytes)
        elif key in again:
            step = nbytes * max(1.0, once.nbytes / again.nbytes)
            self._once_nbytes = max(0.0, self._once_nbytes - step)
            again.pop(key)
            self._again.push(key, nbytes)
        else:
            self._once.push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._once:
            self._again.push(key, self._once.pop(key))
        elif key in self._again:
            self._again.renew(key)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        capacity = self._nbytes
        sides = [(self._once, self._once_ghost), (self._again, self._again_ghost)]
        if self._once.nbytes <= self._once_nbytes:
            sides.reverse()
        for keys, ghost in sides:
            if (victim := keys.oldest(may_evict)) is not None:
                ghost.push(victim, keys.pop(victim))
                self._once_ghost.trim(max(0, capacity - self._once.nbytes))
                self._again_ghost.trim(max(0, capacity - self._once_ghost.nbytes))
                return victim
        return None

    def remove(self, key: Key) -> None:
        for keys in (self._once, self._again):
            if key in keys:
                keys.pop(key)

    @property
    def _nbytes(self) -> int:
        return self._once.nbytes + self._again.nbytes

    def __len__(self) -> int:
        return len(self._once) + len(self._again)
