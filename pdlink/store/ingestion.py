"""Which records go on to the tiers below RAM, and when: what the store asks on a put and a hit."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.store.eviction import Key

HISTORY_KEYS = 1 << 18
"""Remembered by `second_sight`, about 130 bytes each. Four times as many as the tier below holds are enough."""


class Ingestion(Protocol):
    """Each answer is whether to write the record below now, if it is not there yet."""

    def on_put(self, key: Key) -> bool:
        """It came into RAM, computed or loaded."""

    def on_hit(self, key: Key) -> bool:
        """It was used in RAM."""


class All:
    """Write-through: most hits below, most writes."""

    def on_put(self, _key: Key) -> bool:
        return True

    def on_hit(self, _key: Key) -> bool:
        return False


class SecondSight:
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


INGESTIONS: dict[str, Callable[[], Ingestion]] = {"all": All, "second_sight": SecondSight}


def make_ingestion(name: str) -> Ingestion:
    """Raises ConfigError for a name that is not in `INGESTIONS`."""
    if name not in INGESTIONS:
        raise ConfigError(f"ingestion: got {name!r}; expected {', '.join(INGESTIONS)}; use one of them")
    return INGESTIONS[name]()
