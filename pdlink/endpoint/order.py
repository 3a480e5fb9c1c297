"""`Order`: which bytes go next when several transfers want to.

A transport serves what it is given in order of submission, so whatever it holds nobody can overtake. It is given
only a *window* of bytes; the rest waits here, in parts that are small beside the window. When bytes land, the part
with the smallest *claim* follows:

    claim = bytes its transfer still lacks + ageing x (`born` of its transfer + `had` of its peer)

- *Shortest first.* The fewer bytes a transfer lacks, the sooner it goes: the order with the least mean time to ready.
- *Ageing.* `born` is how many bytes this link had moved when the transfer came. Among transfers to one peer, a newer
  one of S' bytes goes before a waiting one of S bytes only if it came while the link moved the next

      (S - S') / ageing    bytes,

  so after S / ageing bytes nothing that comes can go first any more, and nothing starves. Time is counted in bytes
  moved because that means the same on every link, and on a stalled one nothing ages.
- *Fair peers.* `had` is how many bytes went to the peer, on a scale where a peer that begins to wait is level with
  the one that has had least. While a transfer of S bytes waits and its peer gets nothing, newer transfers to another
  peer get at most

      S / ageing + (how much more its peer had had than the other one when it came) + one part

  before it, even if a thousand come at once. Equal claims: the peer that has had less goes first.

Three limits hold what is in flight. A peer has at most `peer_window_nbytes`, all of them share `window_nbytes`, and a
peer that does not keep up is taken out of the shared window: when its oldest part has been in flight for `OVERDUE_S`,
it is *slow*, and what it holds counts against its own window alone until it has caught up. So a stalled or slow peer
delays the others by `OVERDUE_S` (and a tick of the loop) once, and not at all while the rest of the window is enough
for them. (If the link as a whole is slower than `window_nbytes / OVERDUE_S`, every peer is slow: each has its own
window, and the transport's turns decide among peers.)

What a call costs grows with the logarithm of the number of peers. Whatever happens changes the claim of one peer, so
peers are kept ranked, and only those that something has happened to are ranked anew. While a single peer has
something to send, which is the ordinary case, nobody is ranked.

No I/O, no thread, no clock: `now` is an argument, and never goes back. Used under the endpoint's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from pdlink.config import SharingConfig

Job = TypeVar("Job")

OVERDUE_S = 0.1
"""A part that takes longer makes its peer slow. The default window lands in 4 to 30 ms at 1 to 8 GB/s."""


@dataclass(slots=True, eq=False)
class Part(Generic[Job]):
    """Bytes that are handed to the transport in one call. Waits, and then is in flight, exactly once."""

    transfer_id: str
    peer: str
    nbytes: int
    job: Job
    """Whatever the caller wants back with it."""


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Job]):
    peer: _Peer[Job]
    number: int
    """Order of coming."""
    born: int
    """Bytes the link had moved when it came."""
    lacks: int
    """Bytes that have not been released: waiting ones, and ones whose layer is still to be written."""
    parts: list[Part[Job]] = field(default_factory=list)
    """Waiting, oldest first. Most transfers have a few, and an empty deque costs as much as the rest of this."""


@dataclass(slots=True, eq=False)
class _Peer(Generic[Job]):
    had: int
    """Bytes released to it, or more: see `Order._level`."""
    waiting: list[tuple[float, int, _Transfer[Job]]] = field(default_factory=list)
    """Heap of transfers with waiting parts, by what of the claim is their own."""
    in_flight: dict[Part[Job], float] = field(default_factory=dict)
    """When each part was released, oldest first."""
    in_flight_nbytes: int = 0
    slow: bool = False
    watched: bool = False
    """Whether it is in `Order._watch`."""
    rank: tuple[_Ranking[Job], _Claim] | None = None
    """Where it can be found, if it has room for its next part."""


_Claim = tuple[float, int, int]
"""The claim of a peer's first transfer, `had` of the peer, number of the transfer: no two peers have the same."""


class _Ranking(Generic[Job]):
    """Peers, the smallest claim first. Every call costs O(log n), amortised.

    A claim that is removed stays in the heap until it comes up, or until most of the heap is such.
    """

    def __init__(self) -> None:
        self._peers: dict[_Claim, _Peer[Job]] = {}
        self._heap: list[_Claim] = []

    def put(self, claim: _Claim, peer: _Peer[Job]) -> None:
        self._peers[claim] = peer
        heappush(self._heap, claim)

    def remove(self, claim: _Claim) -> None:
        del self._peers[claim]
        if len(self._heap) > 2 * len(self._peers) + 16:
            self._heap = sorted(self._peers)

    def first(self) -> tuple[_Claim, _Peer[Job]] | None:
        heap, peers = self._heap, self._peers
        while heap and heap[0] not in peers:
            heappop(heap)
        return (heap[0], peers[heap[0]]) if heap else None


class Order(Generic[Job]):
    """The waiting parts of every transfer over one transport, and the credits of those in flight."""

    def __init__(self, sharing: SharingConfig) -> None:
        self._sharing = sharing
        self._ageing = sharing.ageing
        self._first_come = sharing.order == "fcfs"
        self._transfers: dict[str, _Transfer[Job]] = {}
        self._peers: dict[str, _Peer[Job]] = {}
        self._contending: dict[str, _Peer[Job]] = {}
        """Peers with waiting parts."""
        self._changed: set[_Peer[Job]] = set()
        """Peers that something has happened to since they were ranked."""
        self._in_window: _Ranking[Job] = _Ranking()
        """Peers in the shared window that have room for their next part."""
        self._on_their_own: _Ranking[Job] = _Ranking()
        """Slow peers that have room for their next part."""
        self._by_had: _Ranking[Job] = _Ranking()
        """All of those, with `had` in place of the claim."""
        self._watch: list[tuple[float, int, _Peer[Job]]] = []
        """Heap of the peers that may become slow, by a time: when its oldest part was released, or earlier."""
        self._level = 0
        """The least `had` among the peers that could have been served last: where a peer that joins them begins."""
        self._num_transfers = 0
        self._moved = 0
        """Bytes released so far."""
        self._shared_nbytes = 0
        """In flight to peers that are not slow."""
        self.waiting_nbytes = 0
        self.in_flight_nbytes = 0

    def add(self, part: Part[Job], total_nbytes: int) -> None:
        """This part may go. total_nbytes: of its whole transfer; read when the first part of a transfer comes."""
        peer = self._peers.get(part.peer)
        if peer is None:
            peer = self._peers[part.peer] = _Peer(self._level)
        transfer = self._transfers.get(part.transfer_id)
        if transfer is None:
            self._num_transfers += 1
            transfer = _Transfer(peer, self._num_transfers, self._moved, total_nbytes)
            self._transfers[part.transfer_id] = transfer
        transfer.parts.append(part)
        self.waiting_nbytes += part.nbytes
        if len(transfer.parts) == 1:
            if not peer.waiting:
                self._contending[part.peer] = peer
                self._join(peer)
            heappush(peer.waiting, (self._own(transfer), transfer.number, transfer))
            self._changed.add(peer)

    def next(self, now: float) -> Part[Job] | None:
        """The part that goes now, counted as in flight from here on; None if nothing waits that has room.

        Call until it says None: after `add`, after `ended`, and now and then: a peer becomes slow by time alone.
        """
        if not self._contending:
            return None
        if len(self._contending) == 1:
            (peer,) = self._contending.values()
            if not self._fits(peer):
                return None
            self._level = max(self._level, peer.had)
            return self._release(peer, now) if peer.slow or self._shared_fits(peer, now) else None
        self._rank()
        least = self._by_had.first()
        if least is None:
            return None
        self._level = max(self._level, least[1].had)
        shared, own = self._in_window.first(), self._on_their_own.first()
        if shared and not self._shared_fits(shared[1], now):
            shared = None
        first = shared if own is None or (shared is not None and shared < own) else own
        return self._release(first[1], now) if first else None

    def ended(self, part: Part[Job], now: float) -> None:
        """A released part has landed, or the transport has given it up: its credits are free."""
        peer = self._peers[part.peer]
        blocked = bool(peer.waiting) and not self._fits(peer)
        del peer.in_flight[part]
        peer.in_flight_nbytes -= part.nbytes
        self.in_flight_nbytes -= part.nbytes
        if not peer.slow:
            self._shared_nbytes -= part.nbytes
        elif not self._overdue(peer, now):
            peer.slow = False
            self._shared_nbytes += peer.in_flight_nbytes
            self._watch_over(peer)
            self._changed.add(peer)
        if blocked:
            self._join(peer)  # what it could not take, others got: it has nothing to make up for
            self._changed.add(peer)

    def drop(self, transfer_id: str) -> list[Part[Job]]:
        """Forget a transfer; returns its parts that were waiting, which will not go. Those in flight go on."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return []
        if not transfer.parts:
            return []
        parts, transfer.parts = transfer.parts, []
        self.waiting_nbytes -= sum(part.nbytes for part in parts)
        peer = transfer.peer
        peer.waiting = [entry for entry in peer.waiting if entry[2] is not transfer]
        heapify(peer.waiting)
        if not peer.waiting:
            del self._contending[parts[0].peer]
        self._changed.add(peer)
        return parts

    def forget(self, peer: str) -> None:
        """This peer is gone: its transfers were dropped, and every part of it has ended."""
        gone = self._peers.get(peer)
        if gone is not None and not gone.in_flight:
            del self._peers[peer]
            self._rank()
            self._watch = [entry for entry in self._watch if entry[2] is not gone]
            heapify(self._watch)

    def check(self) -> None:
        """Raise AssertionError unless the sums are those of the parts."""
        parts = [part for transfer in self._transfers.values() for part in transfer.parts]
        assert self.waiting_nbytes == sum(part.nbytes for part in parts)
        assert set(self._contending) == {part.peer for part in parts}
        shared = 0
        for name, peer in self._peers.items():
            assert peer.in_flight_nbytes == sum(part.nbytes for part in peer.in_flight)
            assert {id(entry[2]) for entry in peer.waiting} == {
                id(transfer) for transfer in self._transfers.values() if transfer.peer is peer and transfer.parts
            }, name
            shared += 0 if peer.slow else peer.in_flight_nbytes
        assert self._shared_nbytes == shared
        assert {id(peer) for _, _, peer in self._watch} == {id(peer) for peer in self._peers.values() if peer.watched}
        assert all(since <= next(iter(peer.in_flight.values()), since) for since, _, peer in self._watch)
        assert all(peer.watched or peer.slow for peer in self._peers.values() if peer.in_flight)
        assert self.in_flight_nbytes == sum(peer.in_flight_nbytes for peer in self._peers.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _own(self, transfer: _Transfer[Job]) -> float:
        """What of the claim does not depend on the peer."""
        return transfer.number if self._first_come else transfer.lacks + self._ageing * transfer.born

    def _rank(self) -> None:
        for peer in self._changed:
            if peer.rank is not None:
                ranking, claim = peer.rank
                ranking.remove(claim)
                self._by_had.remove((claim[1], *claim[1:]))
                peer.rank = None
            if peer.waiting and self._fits(peer):
                own, number, _ = peer.waiting[0]
                claim = (own if self._first_come else own + self._ageing * peer.had, peer.had, number)
                ranking = self._on_their_own if peer.slow else self._in_window
                ranking.put(claim, peer)
                self._by_had.put((claim[1], *claim[1:]), peer)
                peer.rank = ranking, claim
        self._changed.clear()

    def _join(self, peer: _Peer[Job]) -> None:
        if peer.had < self._level:
            peer.had = self._level

    def _fits(self, peer: _Peer[Job]) -> bool:
        """Its next part, into its window. A part that is larger than the window goes alone."""
        if not peer.in_flight:
            return True
        part = peer.waiting[0][2].parts[0]
        return peer.in_flight_nbytes + part.nbytes <= self._sharing.peer_window_nbytes

    def _shared_fits(self, peer: _Peer[Job], now: float) -> bool:
        part = peer.waiting[0][2].parts[0]
        if self._shared_has_room(part):
            return True
        self._find_slow(now)
        return self._shared_has_room(part)

    def _find_slow(self, now: float) -> None:
        """Take the peers that do not keep up out of the shared window."""
        while self._watch and now - self._watch[0][0] > OVERDUE_S:
            _, _, peer = heappop(self._watch)
            peer.watched = False
            if self._overdue(peer, now):
                peer.slow = True
                self._shared_nbytes -= peer.in_flight_nbytes
                self._changed.add(peer)
            else:
                self._watch_over(peer)

    def _watch_over(self, peer: _Peer[Job]) -> None:
        if peer.in_flight and not peer.watched:
            heappush(self._watch, (next(iter(peer.in_flight.values())), id(peer), peer))
            peer.watched = True

    def _shared_has_room(self, part: Part[Job]) -> bool:
        return not self._shared_nbytes or self._shared_nbytes + part.nbytes <= self._sharing.window_nbytes

    @staticmethod
    def _overdue(peer: _Peer[Job], now: float) -> bool:
        return bool(peer.in_flight) and now - next(iter(peer.in_flight.values())) > OVERDUE_S

    def _release(self, peer: _Peer[Job], now: float) -> Part[Job]:
        transfer = peer.waiting[0][2]
        part = transfer.parts.pop(0)
        transfer.lacks -= part.nbytes
        if transfer.parts:
            heapreplace(peer.waiting, (self._own(transfer), transfer.number, transfer))
        else:
            heappop(peer.waiting)
            if not peer.waiting:
                del self._contending[part.peer]
        peer.had += part.nbytes
        peer.in_flight[part] = now
        peer.in_flight_nbytes += part.nbytes
        if not peer.slow:
            self._shared_nbytes += part.nbytes
            if not peer.watched:
                self._watch_over(peer)
        self._changed.add(peer)
        self._moved += part.nbytes
        self.waiting_nbytes -= part.nbytes
        self.in_flight_nbytes += part.nbytes
        return part
