"""W-TinyLFU: new keys pass a window, and leave it only in place of one that is used less.

Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM TOS 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Key

PROTECTED_SHARE = 0.8
"""Of the bytes behind the window, for keys that were used there."""


class WTinyLfu:
    """`window_share` of the bytes for new keys (LRU); behind it a segmented LRU, ruled by a sketch of use counts."""

    def __init__(self, window_share: float = 0.1) -> None:
        self._window_share = window_share
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._sketch = Sketch()

    def insert(self, key: Key, nbytes: int) -> None:
        self._sketch.add(key, len(self) + 1)
        self._window.push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._probation:
            self._protected.push(key, self._probation.pop(key))
            most = PROTECTED_SHARE * (self._probation.nbytes + self._protected.nbytes)
            while self._protected.nbytes > most and (oldest := self._protected.oldest(_any)) is not None:
                self._probation.push(oldest, self._protected.pop(oldest))
        elif key in self._window:
            self._window.renew(key)
        elif key in self._protected:
            self._protected.renew(key)
        else:
            return
        self._sketch.add(key, len(self))

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        most = self._window_share * (self._window.nbytes + self._probation.nbytes + self._protected.nbytes)
        new = self._oldest_beyond(most)
        victim = self._probation.oldest(may_evict)
        if victim is None:
            victim = self._protected.oldest(may_evict)
        if victim is None:
            victim = self._window.oldest(may_evict)
        elif new is not None and may_evict(new):
            if self._sketch.uses(new) > self._sketch.uses(victim):
                self._probation.push(new, self._window.pop(new))
            else:
                victim = new
        if victim is not None:
            self.remove(victim)
        return victim

    def _oldest_beyond(self, nbytes: float) -> Key | None:
        """The one key by which the window is too large. What came while nothing was evicted goes on freely."""
        while (oldest := self._window.oldest(_any)) is not None and self._window.nbytes > nbytes:
            if self._window.nbytes - self._window[oldest] <= nbytes:
                return oldest
            self._probation.push(oldest, self._window.pop(oldest))
        return None

    def remove(self, key: Key) -> None:
        for keys in (self._window, self._probation, self._protected):
            if key in keys:
                keys.pop(key)

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)


class Sketch:
    """About how often a key was seen lately: four counters each up to 15, of which the least counts, halved in turns.

    Grows with the number of resident keys, and forgets everything when it does.
    """

    _ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
    _MOST = 15
    _COUNTERS_PER_KEY = 32
    _KEYS_PER_COUNTER = 0.3
    """Added until all counters are halved: five to ten for each resident key."""
    _HALF = bytes(count // 2 for count in range(256))

    def __init__(self) -> None:
        self._grow(64)

    def _grow(self, num_keys: int) -> None:
        self._bits = (2 * self._COUNTERS_PER_KEY * num_keys - 1).bit_length()
        self._counts = bytearray(1 << self._bits)
        self._num_added = 0

    def add(self, key: Key, num_resident: int) -> None:
        """The key was used once more."""
        if self._COUNTERS_PER_KEY * num_resident > len(self._counts):
            self._grow(num_resident)
        counts, places = self._counts, self._places(key)
        least = min(counts[place] for place in places)
        if least < self._MOST:
            for place in places:  # the others are of more than this key
                if counts[place] == least:
                    counts[place] += 1
        self._num_added += 1
        if self._num_added >= self._KEYS_PER_COUNTER * len(self._counts):
            self._counts = self._counts.translate(self._HALF)
            self._num_added //= 2

    def uses(self, key: Key) -> int:
        """At least as often as it was seen since the last halving, as far as counters go."""
        return min(self._counts[place] for place in self._places(key))

    def _places(self, key: Key) -> list[int]:
        mixed, shift = int.from_bytes(key[:8], "little"), 64 - self._bits
        return [(mixed * odd & 0xFFFFFFFFFFFFFFFF) >> shift for odd in self._ODD]


def _any(_: Key) -> bool:
    return True
