"""`PeerTier`: the memory of another node's store as a tier, which is read only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from pdlink.store.tiers.base import ReadOnly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.peers.link import PeerLink

_MAX_HIDDEN = 10_000


class PeerTier(ReadOnly):
    """Implements `Tier`. A miss until the link is open, and after `close`."""

    def __init__(self, link: PeerLink, address: str) -> None:
        self._link, self._address = link, address
        self.name = self.medium = f"peer {address.removeprefix('tcp://').partition('?')[0]}"
        self._closed = False
        self._lock = threading.Lock()
        self._hidden: OrderedDict[bytes, None] = OrderedDict()
        """Records that were removed here, or are not what they say; the oldest are forgotten."""

    def contains(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """As `Tier.contains`. timeout_s: of an answer, if the link's is too long."""
        if self._closed or not keys:
            return [False] * len(keys)
        held = self._link.ask(self._address, keys, timeout_s)
        with self._lock:
            return [here and key not in self._hidden for key, here in zip(keys, held, strict=True)]

    def get(self, key: bytes, into: memoryview) -> int | None:
        """As `Tier.get`; `into` is a slot of the store's arena. What came is verified by the record's own checksum.

        Returns when nobody can write to `into` any more. That takes as long as a peer stands still in a write to
        mapped memory.
        """
        with self._lock:
            hidden = self._closed or key in self._hidden
        return len(into) if not hidden and self._link.pull(self._address, key, into) else None

    def remove(self, key: bytes) -> None:
        """Do not find it there any more."""
        with self._lock:
            self._hidden[key] = None
            if len(self._hidden) > _MAX_HIDDEN:
                self._hidden.popitem(last=False)

    def close(self) -> None:
        self._closed = True
