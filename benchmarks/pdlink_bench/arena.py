"""All of an arena's memory at once, so that a benchmark does not measure how it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.store.store import Store


def take_whole(store: Store) -> None:
    """The store's keeper would take its time for this. Raises OSError if there is not enough."""
    store.buffer.commit(store.buffer.nbytes)
    with store._lock:
        store._catalog.grow(store.buffer.nbytes)
