"""S3-FIFO: a small queue in front of the main one, so that what is used once leaves early.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .queues import KeyQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key


MOST_USES = 3
"""Counted. A key with uses is passed over as often."""


class S3Fifo:
    """`small_share` of the bytes are on probation; a key used there goes on to the main queue, which is a CLOCK.

    A ghost queue remembers what left on probation, as much as the main queue's share; such a key comes back into the
    main queue.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        self._small_share = small_share
        self._small, self._main, self._ghost = KeyQueue(), KeyQueue(), KeyQueue()
        self._uses: dict[Key, int] = {}

    def insert(self, key: Key, nbytes: int) -> None:
        self._uses[key] = 0
        if key in self._ghost:
            self._ghost.pop(key)
            self._main.push(key, nbytes)
        else:
            self._small.push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, MOST_USES)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        on_probation = self._small.nbytes >= self._small_share * self._nbytes
        steps = (self._evict_small, self._evict_main, self._evict_small, self._evict_main)
        for step in steps if on_probation else steps[1:]:  # a step of the small queue may leave keys to the main one
            if (victim := step(may_evict)) is not None:
                return victim
        return None

    def _evict_main(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = _second_chance(self._main, self._uses, may_evict)
        if victim is not None:
            self.remove(victim)
        return victim

    def _evict_small(self, may_evict: Callable[[Key], bool]) -> Key | None:
        used: list[Key] = []
        victim = None
        for key in filter(may_evict, self._small):
            if not self._uses[key]:
                victim = key
                break
            used.append(key)
        for key in used:
            self._uses[key] = 0
            self._main.push(key, self._small.pop(key))
        if victim is not None:
            del self._uses[victim]
            self._ghost.push(victim, self._small.pop(victim))
            self._ghost.trim(int((1 - self._small_share) * self._nbytes))
        return victim

    def remove(self, key: Key) -> None:
        if key in self._uses:
            del self._uses[key]
            (self._small if key in self._small else self._main).pop(key)

    @property
    def _nbytes(self) -> int:
        return self._small.nbytes + self._main.nbytes

    def __len__(self) -> int:
        return len(self._uses)


def _second_chance(keys: KeyQueue, uses: dict[Key, int], may_evict: Callable[[Key], bool]) -> Key | None:
    """The first key without uses that may go. Those with uses before it lose one each and go to the end."""
    for _ in range(MOST_USES + 1):
        used: list[Key] = []
        victim = None
        for key in keys:
            if not may_evict(key):
                continue
            if not uses[key]:
                victim = key
                break
            uses[key] -= 1
            used.append(key)
        for key in used:
            keys.renew(key)
        if victim is not None or not used:
            return victim
    return None
