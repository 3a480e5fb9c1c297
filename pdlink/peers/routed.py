"""`RoutedPeers`: the stores that routers name, prefix by prefix, as one tier, which is read only.

A record is looked for where it was noted, and nowhere else. A store is dialed when it is asked for the first time,
and the connection is closed when it was not used for long, or another one needs its place. A store that fails is left
alone for a while, and the others are asked; a look-up waits for all of them as long as for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pdlink.breaker import Breaker
from pdlink.errors import ConfigError
from pdlink.few_lines import FewLines
from pdlink.store.tiers.base import ReadOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.peers.link import PeerLink
    from pdlink.peers.tier import PeerTier

log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_OPEN = 64
"""Stores that are known at once, each with a connection or two. The one that was not used for longest makes room."""
IDLE_S = 60.0
"""A connection that was not used for so long is closed with the next look-up."""
MAX_NOTED = 1 << 16
"""Records; the oldest are forgotten."""
LOOK_S = 2.0
"""Longest wait for the answer to a look-up, which a store has in memory: nobody waits longer for a silent one."""
_DEADLINE_S = 10.0
"""Of one call; a slower one keeps further ones away."""
_FAILURES = 1


class _Peer:
    def __init__(self, tier: PeerTier) -> None:
        self.tier = tier
        self.breaker = Breaker(_DEADLINE_S, failures=_FAILURES)
        self.calls = 0
        """Under way."""
        self.used_s = 0.0


class RoutedPeers(ReadOnly):
    """Implements `Tier` and `RoutedTier`. Nothing that a peer does is an error of the tier: it is a miss."""

    name = medium = "peer"

    def __init__(self, link: PeerLink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._told = FewLines()
        self._closed = False
        self._lock = threading.Lock()
        # Guarded by `_lock`:
        self._noted: OrderedDict[bytes, str] = OrderedDict()
        """Address by key, the oldest first."""
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        """By address, the one that was noted last at the end."""

    @property
    def num_open(self) -> int:
        """Stores that are known."""
        return len(self._peers)

    def note(self, address: str, keys: Sequence[bytes]) -> None:
        """As `RoutedTier.note`. Nothing for this store itself, and with a warning for one that may not be asked."""
        if self._closed or address == self._link.address or not self._link.address:
            return
        with self._lock:
            self._close_idle()
            if address not in self._peers and not self._add(address):
                return
            self._peers[address].used_s = self._clock()  # the breaker of one that is named again and again stays
            self._peers.move_to_end(address)
            for key in keys:
                self._noted[key] = address
                self._noted.move_to_end(key)
            while len(self._noted) > MAX_NOTED:
                self._noted.popitem(last=False)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        asked = defaultdict[str, list[int]](list)
        with self._lock:
            self._close_idle()
            for index, key in enumerate(keys) if self._noted else ():
                if (address := self._noted.get(key)) is not None:
                    asked[address].append(index)
        found, until_s = [False] * len(keys), self._clock() + min(LOOK_S, self._link.timeout_s)
        for address, indices in asked.items():
            if (left_s := until_s - self._clock()) <= 0:
                break
            wanted, nothing = [keys[index] for index in indices], list[bool]()
            for index, has in zip(indices, self._call(address, partial(_ask, wanted, left_s), nothing), strict=False):
                found[index] = has
        return found

    def get(self, key: bytes, into: memoryview) -> int | None:
        """As `PeerTier.get`."""
        with self._lock:
            address = self._noted.get(key)
        return None if address is None else self._call(address, lambda tier: tier.get(key, into), None)

    def remove(self, key: bytes) -> None:
        """Do not find it there any more."""
        with self._lock:
            address = self._noted.pop(key, None)
            peer = self._peers.get(address) if address is not None else None
        if peer is not None:
            peer.tier.remove(key)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._noted.clear()

    def _call(self, address: str, call: Callable[[PeerTier], _T], otherwise: _T) -> _T:
        """What it gives; `otherwise` if the store is left alone, or fails."""
        with self._lock:
            peer, now_s = self._peers.get(address), self._clock()
            if self._closed or peer is None or not peer.breaker.allows(now_s):
                return otherwise
            number = peer.breaker.begin(now_s)
            peer.calls += 1
        failed = True
        try:
            result = call(peer.tier)
            failed = False
        except OSError as error:
            log.warning("%s: %s; it is left alone for a while", self.name, error)
            return otherwise
        else:
            return result
        finally:
            with self._lock:
                peer.used_s = now_s = self._clock()
                peer.calls -= 1
                peer.breaker.end(number, now_s, failed=failed)

    # --- With the lock

    def _add(self, address: str) -> bool:
        """Whether it is known now."""
        if len(self._peers) >= MAX_OPEN:
            idle = next((each for each, peer in self._peers.items() if not peer.calls), None)
            if idle is None:
                return False
            self._drop(idle)
        try:
            self._peers[address] = _Peer(self._link.tier(address, "source of a request"))
        except ConfigError as error:
            if (more := self._told.admits(time.monotonic())) is not None:
                log.warning("%s%s", error, more)
            return False
        return True

    def _close_idle(self) -> None:
        before_s = self._clock() - IDLE_S
        for address in [each for each, peer in self._peers.items() if not peer.calls and peer.used_s < before_s]:
            self._drop(address)

    def _drop(self, address: str) -> None:
        """Its breaker is forgotten, too. Its records stay noted, and are not found until it is noted again."""
        del self._peers[address]
        self._link.hang_up(address)


def _ask(keys: Sequence[bytes], timeout_s: float, tier: PeerTier) -> list[bool]:
    return tier.contains(keys, timeout_s)
