"""Which records go on to the tiers below RAM, and when: what the store asks on a put, a hit and an eviction."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.store.policies.base import Key

HOT_HITS = 2
HISTORY_KEYS = 1 << 18
"""Remembered by `second_sight`, about 130 bytes each. Four times as many as the tier below holds are enough."""


class Ingestion(Protocol):
    """Each answer is whether to write the record below now, if it is not there yet."""

    @property
    def writes_back(self) -> bool:
        """Whether `on_evict` is ever True."""

    def on_put(self, key: Key) -> bool:
        """It came into RAM, computed or loaded."""

    def on_hit(self, key: Key) -> bool:
        """It was used in RAM."""

    def on_evict(self, key: Key) -> bool:
        """RAM drops it; its bytes must be kept until they are written."""

    def clear(self) -> None:
        """RAM drops all, which nobody wants to be kept."""


class All:
    """Write-through: most hits below, most writes."""

    writes_back = False

    def on_put(self, _key: Key) -> bool:
        return True

    def on_hit(self, _key: Key) -> bool:
        return False

    def on_evict(self, _key: Key) -> bool:
        return False

    def clear(self) -> None:
        pass


class Evicted(All):
    """Write-back: RAM and the tier below hold different records. What is in RAM alone ends with the process."""

    writes_back = True

    def on_put(self, _key: Key) -> bool:
        return False

    def on_evict(self, _key: Key) -> bool:
        return True


class Hot(All):
    """With the second hit in RAM. Starves the tier below where RAM is too small for two hits."""

    def __init__(self) -> None:
        self._hits: dict[Key, int] = {}

    def on_put(self, _key: Key) -> bool:
        return False

    def on_hit(self, key: Key) -> bool:
        self._hits[key] = hits = self._hits.get(key, 0) + 1
        return hits == HOT_HITS

    def on_evict(self, key: Key) -> bool:
        self._hits.pop(key, None)
        return False

    def clear(self) -> None:
        self._hits = {}


class SecondSight(All):
    """When it is wanted a second time, however long RAM kept it. A third to a sixth of the writes of `All`."""

    def __init__(self, history_keys: int = HISTORY_KEYS) -> None:
        self._history_keys = history_keys
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def on_put(self, key: Key) -> bool:
        seen = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._history_keys:
            self._seen.popitem(last=False)
        return seen

    def on_hit(self, _key: Key) -> bool:
        return True


INGESTIONS: dict[str, Callable[[], Ingestion]] = {
    "all": All,
    "evicted": Evicted,
    "hot": Hot,
    "second_sight": SecondSight,
}


def make_ingestion(name: str) -> Ingestion:
    """Raises ConfigError for a name that is not in `INGESTIONS`."""
    if name not in INGESTIONS:
        raise ConfigError(f"ingestion: got {name!r}; expected {', '.join(INGESTIONS)}; use one of them")
    return INGESTIONS[name]()
