"""First in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lru import Lru

if TYPE_CHECKING:
    from .base import Key


class Fifo(Lru):
    """Use changes nothing."""

    def touch(self, key: Key) -> None:
        pass
