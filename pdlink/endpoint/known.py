"""`KnownPeer`: everything known of one remote worker; forgetting the worker is one deletion.

A worker that we dial is known by its control address, one that dials us by its name (or by its key, if the connection
ended before it gave a name). It has at most one live session. What outlives the session is kept for the next one:

- its *refusal*, which has a cause that somebody must fix: another model, a missing key, no common transport. Without
  a back-off every request would dial again, be refused again and compute its prompt twice. So the dialing side fails
  requests for that address at once until the next try is due. The listening side keeps refusals for /health.
- the transports that failed to connect in this life of the dialer.

Bounded: a worker without a session and without such memory is forgotten at once, and `MAX_PEERS` of the others are
kept for each side.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.errors import HandshakeRefused, TransferFailed
from pdlink.logs import printable
from pdlink.protocol import handshake
from pdlink.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.endpoint.peer import Peer

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Back-off: each refusal doubles the pause; a random factor of 0.75 to 1.25 spreads workers refused together."""

LONGEST_RECONNECT_S = 4.0
"""Longest pause if only the data connection failed: a lack of descriptors ends by itself."""

MAX_PEERS = 256
"""Workers without a session that are kept, on each side; the oldest is forgotten first."""

_FORGET_S = 600.0
"""Forget a refusal that nobody renewed for this long."""

_LOG_EVERY_S = 1.0
"""Log refused dialers this often at most: a process that connects under many names could fill the log."""

_MAX_CHARS = 200
"""Kept of each text: some of it is a peer's words."""


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """One peer that this worker cannot exchange KV with, for reports."""

    peer: str
    """Its name; empty if it gave none."""
    address: str
    """Its control address, if we dialed it; empty if it dialed us."""
    factor: str
    local: str
    remote: str
    count: int
    """Refused handshakes; requests that fail during a pause make none."""
    since_s: float
    """When the first handshake was refused, on the endpoint's clock."""
    retry_s: float
    """Seconds until the next try; 0 if it is due, or not ours to make."""


@dataclass(slots=True)
class Refusal:
    """The refused handshakes of one worker since its last session."""

    peer: str
    cause: HandshakeRefused
    since_s: float
    last_s: float
    count: int = 0
    retry_at_s: float = 0.0
    logged: bool = False


@dataclass(slots=True, eq=False)
class KnownPeer:
    """One remote worker, over all its sessions. Its byte counts and transfers belong to the session."""

    session: Peer | None = None
    """The live one."""
    refusal: Refusal | None = None
    epoch: str = ""
    """The life that `unusable` is about: a restart may cure it."""
    unusable: set[str] = field(default_factory=set)
    """Names of transports that failed to connect."""


_Table = OrderedDict[str, KnownPeer]


class KnownPeers:
    """Every worker an endpoint knows. Used under the endpoint's lock."""

    def __init__(self, name: str, now_s: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        """name: of this worker, for the log. jitter: numbers in [0, 1)."""
        self._name, self._now_s, self.jitter = name, now_s, jitter
        self.dialed: _Table = OrderedDict()
        """By control address; the worker refused last at the end, as in `accepted`."""
        self.accepted: _Table = OrderedDict()
        """By name, or by key."""
        self._logged_s = float("-inf")

    # -- sessions ----------------------------------------------------------------------------------------------------

    def sessions(self, *, dialed: bool = True, accepted: bool = True) -> list[Peer]:
        """Live sessions: dialed ones, accepted ones, or both."""
        tables = (self.dialed,) * dialed + (self.accepted,) * accepted
        return [known.session for table in tables for known in table.values() if known.session is not None]

    def begin(self, peer: Peer) -> None:
        """This is the worker's live session."""
        table, key = self._place(peer)
        table.setdefault(key, KnownPeer()).session = peer

    def end(self, peer: Peer) -> None:
        """The session is over."""
        table, key = self._place(peer)
        known = table.get(key)
        if known is not None and known.session is peer:
            known.session = None
            table.move_to_end(key)
            self._trim(table, key)

    def _place(self, peer: Peer) -> tuple[_Table, str]:
        return (self.dialed, peer.address) if peer.dialed else (self.accepted, peer.name)

    @staticmethod
    def _trim(table: _Table, key: str) -> None:
        """Forget this worker if nothing is left to know; if too many have no session, forget the oldest of them."""
        known = table[key]
        if known.session is None and known.refusal is None and not known.unusable:
            del table[key]
        if len(table) > MAX_PEERS:
            idle = [other for other, known in table.items() if known.session is None]
            if len(idle) > MAX_PEERS:
                del table[idle[0]]

    # -- transports --------------------------------------------------------------------------------------------------

    def unusable(self, peer: Peer) -> set[str]:
        """Names of transports that failed to connect in this life of a dialer."""
        known = self.accepted.get(peer.name)
        return known.unusable if known is not None and known.epoch == peer.epoch else set()

    def transport_failed(self, peer: Peer, transport: str) -> None:
        """Remember it for the next sessions with this life of a dialer."""
        known = self.accepted.setdefault(peer.name, KnownPeer())
        if known.epoch != peer.epoch:
            known.epoch, known.unusable = peer.epoch, set()
        known.unusable.add(transport)
        self._trim(self.accepted, peer.name)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def check(self, address: str) -> None:
        """Raise TransferFailed if the worker at this address refused us and the next try is not due yet."""
        known = self.dialed.get(address)
        if known is not None and known.refusal is not None:
            left_s = known.refusal.retry_at_s - self._now_s()
            if left_s > 0:
                cause = known.refusal.cause
                words = f"{cause}; next try in {left_s:.1f} s"
                raise TransferFailed(f"refused: {words}", Reason.refused(cause.factor, words))

    def refused_by(self, address: str, peer: str, cause: HandshakeRefused) -> None:
        """The listener at this address and this worker do not fit. peer: its name, if known."""
        now = self._now_s()
        refusal = self._refuse(self.dialed, address, peer, cause, now)
        longest_s = LONGEST_RECONNECT_S if cause.factor == handshake.CONNECTION_FACTOR else LONGEST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2 ** min(refusal.count - 1, 30), longest_s) * (0.75 + 0.5 * self.jitter())
        refusal.retry_at_s = now + pause_s
        if not refusal.logged:
            refusal.logged = True
            whom = f"{refusal.peer} ({address})" if refusal.peer else address
            log.warning(
                "%s: no KV from %s: %s; next try in %.1f s, then in growing steps up to %.0f s",
                self._name, whom, refusal.cause, pause_s, longest_s,
            )  # fmt: skip

    def refused(self, key: str, peer: str, cause: HandshakeRefused, *, logged: bool = False) -> None:
        """A dialer was refused. key: its name, or its public key. logged: the log has it already."""
        now = self._now_s()
        refusal = self._refuse(self.accepted, key, peer, cause, now)
        refusal.logged |= logged
        if not refusal.logged and now - self._logged_s >= _LOG_EVERY_S:
            refusal.logged, self._logged_s = True, now
            log.warning("%s: no KV to %s: %s", self._name, refusal.peer or "a worker that dialed", refusal.cause)

    def fits(self, peer: Peer) -> None:
        """A session with this worker is ready: drop its refusals."""
        table, key = self._place(peer)
        for each in {key} if peer.dialed else {key, peer.public_key} - {""}:
            known = table.get(each)
            if known is None or known.refusal is None:
                continue
            refusal, known.refusal = known.refusal, None
            self._trim(table, each)
            if refusal.logged:
                log.warning(
                    "%s: %s fits now; it was refused %d times in %.0f s (%s)",
                    self._name, peer.name, refusal.count, self._now_s() - refusal.since_s, refusal.cause.factor,
                )  # fmt: skip

    def forget_refusals(self, factor: str = "") -> None:
        """End the back-off of workers refused because of this factor, or of all of them."""
        self._forget(lambda refusal: refusal.cause.factor == (factor or refusal.cause.factor))

    def refusals(self) -> list[RefusedPeer]:
        """Listeners that refused us, then dialers that we refused; in each group the latest last."""
        now = self._now_s()
        self._forget(lambda refusal: now - refusal.last_s > _FORGET_S)
        return [
            RefusedPeer(
                peer=refusal.peer,
                address=key if table is self.dialed else "",
                factor=refusal.cause.factor,
                local=refusal.cause.local,
                remote=refusal.cause.remote,
                count=refusal.count,
                since_s=refusal.since_s,
                retry_s=max(0.0, refusal.retry_at_s - now),
            )
            for table in (self.dialed, self.accepted)
            for key, known in table.items()
            if (refusal := known.refusal) is not None
        ]

    def _refuse(self, table: _Table, key: str, peer: str, cause: HandshakeRefused, now: float) -> Refusal:
        cause = HandshakeRefused(*(printable(text, _MAX_CHARS) for text in (cause.factor, cause.local, cause.remote)))
        known = table.setdefault(key, KnownPeer())
        refusal = known.refusal
        if refusal is None or now - refusal.last_s > _FORGET_S:
            refusal = known.refusal = Refusal(peer, cause, now, now)
        if refusal.cause.factor != cause.factor:  # another cause than before
            refusal.logged = False
        refusal.peer, refusal.cause, refusal.last_s = peer or refusal.peer, cause, now
        refusal.count += 1
        table.move_to_end(key)
        self._trim(table, key)
        return refusal

    def _forget(self, over: Callable[[Refusal], bool]) -> None:
        for table in (self.dialed, self.accepted):
            for key, known in list(table.items()):
                if known.refusal is not None and over(known.refusal):
                    known.refusal = None
                    self._trim(table, key)
