"""CLOCK with a small counter: LRU without moving keys on a hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key

MOST_USES = 3


class Clock:
    """A queue; a key that was used since it was looked at last goes to its end, up to `MOST_USES` times."""

    def __init__(self) -> None:
        self._keys = Queue()
        self._uses: dict[Key, int] = {}

    def insert(self, key: Key, nbytes: int) -> None:
        self._keys.push(key, nbytes)
        self._uses[key] = 0

    def touch(self, key: Key) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, MOST_USES)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = second_chance(self._keys, self._uses, may_evict)
        if victim is not None:
            self.remove(victim)
        return victim

    def remove(self, key: Key) -> None:
        if key in self._uses:
            self._keys.pop(key)
            del self._uses[key]

    def __len__(self) -> int:
        return len(self._uses)


def second_chance(keys: Queue, uses: dict[Key, int], may_evict: Callable[[Key], bool]) -> Key | None:
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
