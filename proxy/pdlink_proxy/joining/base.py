"""The verbs of what a client has of a stream."""

from __future__ import annotations

import zlib
from typing import Protocol

_FRAMES = 32
"""Pieces kept as they are; so many are packed: 0.5 us and 15 bytes for an event of 186 bytes, to read it 7.4 us."""
_LUMP_NBYTES = 2048
"""A piece of this size is packed at once."""
_FAST = 1
"""Level of zlib; 6 takes twice as long for 3 % less."""


class Diverged(ValueError):
    """Another worker answers in other words."""


class Had(Protocol):
    """What the client has of one stream."""

    @property
    def mark(self) -> bytes:
        """In the payload of every event that counts."""

    @property
    def said(self) -> bool:
        """A token of the answer is among it, as far as it was read."""

    def sent(self, data: bytes) -> None:
        """The client gets these whole events."""

    def take(self) -> bytes:
        """The events that were sent and not read yet."""

    def read(self, payload: bytes) -> str:
        """The client has this event. Returns a name of what cannot be continued, or nothing."""

    def begin(self) -> None:
        """Another worker makes the whole answer again: what follows are its events."""

    def joined(self, document: bytes) -> bytes:
        """Its event as the client's next one, without what the client has; empty if nothing is left. Raises
        Diverged."""


class Packed:
    """Remembers events as they were sent, packed in lumps, and reads them only if a worker dies: to read each event
    of every stream took a quarter of a streamed token's CPU."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._frames: list[bytes] = []

    def sent(self, data: bytes) -> None:
        self._frames.append(data)
        if len(self._frames) >= _FRAMES or len(data) >= _LUMP_NBYTES:
            self._packed.append(zlib.compress(b"".join(self._frames), _FAST))
            self._frames.clear()

    def take(self) -> bytes:
        found = b"".join((*map(zlib.decompress, self._packed), *self._frames))
        self._packed.clear()
        self._frames.clear()
        return found
