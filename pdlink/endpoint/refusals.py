"""Who does not fit, and why: told once, tried again after growing pauses, and shown in /health until it works.

A refusal has a cause that somebody has to mend: another model, a key that is missing, no common transport. Until then
every request would dial again, be refused again and compute its prompt twice. So the dialing side remembers whom it
was refused by, and fails at once what asks for that address before the next try is due. The listening side remembers
whom it refused, for its /health.

Both lists are bounded. An entry goes when a session with that peer gets ready, or when nobody has tried for long.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.endpoint.peer import printable
from pdlink.errors import HandshakeRefused, TransferFailed
from pdlink.protocol import auth, handshake

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.endpoint.peer import Peer

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before the second try, and at most; doubled by each refusal, then multiplied by 0.75 to 1.25 at random, so that
workers that were refused together do not come back together."""

LONGEST_RECONNECT_S = 4.0
"""The longest pause where only the data connection failed: a lack of descriptors ends by itself, nobody mends it."""

MAX_PEERS = 256
"""Remembered on each of the two sides; the one that tried longest ago goes first."""

_FORGET_S = 600.0
"""After a peer's last refusal: it does not run any more, or nobody wants its KV."""

_TOLD_EVERY_S = 1.0
"""Of peers that connected to us: a process that connects under many names could fill the log."""

_MAX_CHARS = 200
"""Kept of each text: some of it is a peer's words."""


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """One peer that this worker cannot exchange KV with, as this worker sees it."""

    peer: str
    """Its name; empty if it did not get as far as to say one."""
    address: str
    """Its control address, if we dialed it; empty if it dialed us."""
    factor: str
    local: str
    remote: str
    count: int
    """Handshakes that were refused; what fails during a pause makes none."""
    since_s: float
    """When the first of them was refused, on the endpoint's clock."""
    retry_s: float
    """Seconds until the next try is let through; 0 if it is due, or not ours to make."""


@dataclass(slots=True)
class _Entry:
    peer: str
    refusal: HandshakeRefused
    since_s: float
    last_s: float
    count: int = 0
    retry_at_s: float = 0.0
    told: bool = False


class Refusals:
    """Of one endpoint; used under its lock."""

    def __init__(self, name: str, now_s: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        """name: of this worker, for the log. jitter: numbers in [0, 1)."""
        self._name, self._now_s, self.jitter = name, now_s, jitter
        self._dialed: OrderedDict[str, _Entry] = OrderedDict()
        """By control address, the one refused last at the end."""
        self._accepted: OrderedDict[str, _Entry] = OrderedDict()
        """By name, or by key where that was all that was seen."""
        self._told_s = float("-inf")

    def by_listener(self, address: str, peer: str, refusal: HandshakeRefused) -> None:
        """The worker at this address and this one do not fit. peer: its name, if known."""
        now = self._now_s()
        entry = self._enter(self._dialed, address, peer, refusal, now)
        longest_s = LONGEST_RECONNECT_S if refusal.factor == handshake.CONNECTION_FACTOR else LONGEST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2 ** min(entry.count - 1, 30), longest_s) * (0.75 + 0.5 * self.jitter())
        entry.retry_at_s = now + pause_s
        if not entry.told:
            entry.told = True
            whom = f"{entry.peer} ({address})" if entry.peer else address
            log.warning(
                "%s: no KV from %s: %s; next try in %.1f s, then in growing steps up to %.0f s",
                self._name, whom, entry.refusal, pause_s, longest_s,
            )  # fmt: skip

    def of_dialer(self, key: str, peer: str, refusal: HandshakeRefused, *, told: bool = False) -> None:
        """A worker that dialed us was refused. key: its name, or what else tells it from others.

        told: the log has it already.
        """
        now = self._now_s()
        entry = self._enter(self._accepted, key, peer, refusal, now)
        entry.told |= told
        if not entry.told and now - self._told_s >= _TOLD_EVERY_S:
            entry.told, self._told_s = True, now
            log.warning("%s: no KV to %s: %s", self._name, entry.peer or "a worker that dialed", entry.refusal)

    def check(self, address: str) -> None:
        """Raise TransferFailed if the worker at this address refused us and the next try is not due yet."""
        entry = self._dialed.get(address)
        if entry is not None:
            left_s = entry.retry_at_s - self._now_s()
            if left_s > 0:
                raise TransferFailed(f"refused: {entry.refusal}; next try in {left_s:.1f} s")

    def fits(self, peer: Peer) -> None:
        """A session with this peer is ready."""
        entries, keys = (
            (self._dialed, [peer.address]) if peer.dialed else (self._accepted, [peer.name, peer.public_key])
        )
        for key in keys:
            entry = entries.pop(key, None) if key else None
            if entry is not None and entry.told:
                log.warning(
                    "%s: %s fits now; it was refused %d times in %.0f s (%s)",
                    self._name, peer.name, entry.count, self._now_s() - entry.since_s, entry.refusal.factor,
                )  # fmt: skip

    def forget_keys(self) -> None:
        """Our allow-list has changed: who was refused because of it may try at once."""
        for entries in (self._dialed, self._accepted):
            for key in [key for key, entry in entries.items() if entry.refusal.factor == auth.KEY_FACTOR]:
                del entries[key]

    def all(self) -> list[RefusedPeer]:
        """Whom we were refused by, then whom we refused, the latest last."""
        now = self._now_s()
        found = []
        for entries, dialed in ((self._dialed, True), (self._accepted, False)):
            self._forget(entries, now)
            for key, entry in entries.items():
                refusal = entry.refusal
                found.append(
                    RefusedPeer(
                        peer=entry.peer,
                        address=key if dialed else "",
                        factor=refusal.factor,
                        local=refusal.local,
                        remote=refusal.remote,
                        count=entry.count,
                        since_s=entry.since_s,
                        retry_s=max(0.0, entry.retry_at_s - now),
                    )
                )
        return found

    def _enter(
        self, entries: OrderedDict[str, _Entry], key: str, peer: str, refusal: HandshakeRefused, now: float
    ) -> _Entry:
        self._forget(entries, now)
        texts = (refusal.factor, refusal.local, refusal.remote)
        refusal = HandshakeRefused(*(printable(text, _MAX_CHARS) for text in texts))
        entry = entries.setdefault(key, _Entry(peer, refusal, now, now))
        entries.move_to_end(key)
        if entry.refusal.factor != refusal.factor:  # one cause was mended, and there is another
            entry.told = False
        entry.peer, entry.refusal, entry.last_s = peer or entry.peer, refusal, now
        entry.count += 1
        if len(entries) > MAX_PEERS:
            entries.popitem(last=False)
        return entry

    @staticmethod
    def _forget(entries: OrderedDict[str, _Entry], now: float) -> None:
        while entries and now - next(iter(entries.values())).last_s > _FORGET_S:
            entries.popitem(last=False)
