"""Pairs that do not fit: told once, tried again after growing pauses, shown until they fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pdlink.endpoint.known import FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_RECONNECT_S, MAX_PEERS, KnownPeers
from pdlink.endpoint.peer import Peer
from pdlink.errors import HandshakeRefused, TransferFailed
from pdlink.events import PeerChanged
from pdlink.protocol.handshake import CONNECTION_FACTOR
from tests.waiting import until

from .conftest import TIMEOUTS, Handler, Node, Pair, layout

REFUSAL = HandshakeRefused("model", "a", "b")


@dataclass
class Time:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Book:
    time: Time = field(default_factory=Time)

    def __post_init__(self) -> None:
        self.known = KnownPeers("decode", self.time, jitter=lambda: 0.5)

    def refused(self, address: str = "tcp://a:1", refusal: HandshakeRefused = REFUSAL) -> float:
        """Be refused; how long is the pause?"""
        self.known.refused_by(address, "prefill", refusal)
        return next(entry.retry_s for entry in self.known.refusals() if entry.address == address)


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def other(pair: Pair) -> Iterator[Node]:
    """A decode worker that does not fit the pair's prefill worker."""
    node = Node(pair.hub, "other", layout(8), TIMEOUTS, model="other").open()
    yield node
    node.close()


def expect(pair: Pair, node: Node, transfer_id: str) -> list[str]:
    handler = Handler()
    node.receiver.expect(transfer_id, pair.prefill.endpoint.address, handler)
    return handler.wait()


def lost(pair: Pair, name: str) -> int:
    return sum(
        isinstance(event, PeerChanged) and (event.peer, event.state) == (name, "lost") for event in pair.events
    )


def test_pauses_grow_up_to_a_limit(book: Book) -> None:
    pauses = [book.refused() for _ in range(100)]
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == max(pauses) == LONGEST_PAUSE_S


def test_a_connection_that_failed_is_tried_again_soon(book: Book) -> None:
    """A worker that had no descriptors left has some again, and nobody has to mend anything."""
    refusal = HandshakeRefused(CONNECTION_FACTOR, "Too many open files", "mapped")
    assert max(book.refused(refusal=refusal) for _ in range(100)) == LONGEST_RECONNECT_S


def test_pauses_differ_between_workers_that_were_refused_together() -> None:
    pauses = set()
    for share in (0.0, 0.3, 0.99):
        known = KnownPeers("decode", Time(), jitter=lambda share=share: share)  # type: ignore[misc]
        known.refused_by("tcp://a:1", "prefill", REFUSAL)
        pauses.add(known.refusals()[0].retry_s)
    assert len(pauses) == 3
    assert all(0.75 * FIRST_PAUSE_S <= pause <= 1.25 * FIRST_PAUSE_S for pause in pauses)


def test_a_try_is_let_through_when_its_pause_is_over(book: Book) -> None:
    book.refused()
    with pytest.raises(TransferFailed, match="^refused: model differs: local a, remote b; next try in 1.0 s$"):
        book.known.check("tcp://a:1")
    book.known.check("tcp://b:1")
    book.time.now_s += FIRST_PAUSE_S
    book.known.check("tcp://a:1")
    assert book.known.refusals()[0].retry_s == 0.0


def test_refused_peers_kept_are_bounded_and_the_oldest_goes_first(book: Book) -> None:
    for number in range(2 * MAX_PEERS):
        book.refused(f"tcp://a:{number}")
        book.known.refused(f"d{number}", f"d{number}", REFUSAL)
    entries = book.known.refusals()
    assert len(entries) == 2 * MAX_PEERS
    assert entries[0].address == f"tcp://a:{MAX_PEERS}"


def test_peer_that_nobody_tries_any_more_is_forgotten(book: Book) -> None:
    book.refused("tcp://a:1")
    book.time.now_s += 599
    book.refused("tcp://b:1")
    book.time.now_s += 2
    assert [entry.address for entry in book.known.refusals()] == ["tcp://b:1"]


def test_a_peers_words_cannot_forge_lines_or_fill_memory(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    book.known.refused_by("tcp://a:1", "prefill", HandshakeRefused("model", "x" * 4096, "b\n2026 CRITICAL\x1b[2J"))
    (entry,) = book.known.refusals()
    assert len(entry.local) == 200
    assert entry.remote == "b?2026 CRITICAL?[2J"
    assert all(line.isprintable() for line in caplog.messages)


def test_log_of_refused_dialers_gets_a_line_a_second(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        book.known.refused(f"d{number}", f"d{number}", REFUSAL)
    assert len(caplog.messages) == 1


def session(name: str, *, dialed: bool = False, epoch: str = "life") -> Peer:
    peer = Peer(1, "", 1, dialed=dialed, since_s=0.0, heard_s=0.0, address=name if dialed else "", name=name)
    peer.epoch = epoch
    return peer


def test_worker_without_memory_is_forgotten_with_its_session(book: Book) -> None:
    for number in range(1000):
        for peer in (session(f"tcp://a:{number}", dialed=True), session(f"d{number}")):
            book.known.begin(peer)
            book.known.end(peer)
    assert (book.known.dialed, book.known.accepted) == ({}, {})


def test_flood_of_refused_dialers_does_not_forget_live_sessions(book: Book) -> None:
    live = [session(f"live-{number}") for number in range(10)]
    for peer in live:
        book.known.begin(peer)
        book.known.transport_failed(peer, "mapped")
    for number in range(4 * MAX_PEERS):
        book.known.refused(f"d{number}", f"d{number}", REFUSAL)
    assert book.known.sessions() == live
    assert all(book.known.unusable(peer) == {"mapped"} for peer in live)
    assert len(book.known.accepted) == len(live) + MAX_PEERS


def test_failed_transports_outlive_the_session_but_not_the_life_of_the_dialer(book: Book) -> None:
    first = session("d")
    book.known.begin(first)
    book.known.transport_failed(first, "mapped")
    book.known.end(first)
    assert book.known.unusable(session("d")) == {"mapped"}
    assert book.known.unusable(session("d", epoch="another life")) == set()


def test_old_session_that_ends_late_does_not_end_its_successor(book: Book) -> None:
    old, new = session("d"), session("d")
    book.known.begin(old)
    book.known.begin(new)
    book.known.end(old)
    assert book.known.sessions(dialed=False) == [new]


def test_a_refused_pair_is_not_dialed_again_until_its_pause_is_over(pair: Pair, other: Node) -> None:
    first = expect(pair, other, "t")
    assert first == ["failed refused:model: model differs: local other, remote m", "released"]
    dials = lost(pair, "prefill")
    for number in range(20):
        with pytest.raises(TransferFailed, match="^refused: model differs: local other, remote m; next try in "):
            expect(pair, other, f"u{number}")
    assert lost(pair, "prefill") == dials
    assert not any(other.endpoint.receiver.states().values())
    assert [entry.count for entry in other.endpoint.refused()] == [1]


def test_both_workers_show_whom_they_do_not_fit(pair: Pair, other: Node) -> None:
    expect(pair, other, "t")
    (here,) = other.endpoint.refused()
    assert (here.peer, here.address) == ("prefill", pair.prefill.endpoint.address)
    assert (here.factor, here.local, here.remote, here.count) == ("model", "other", "m", 1)
    assert 0 < here.retry_s <= 1.25 * FIRST_PAUSE_S
    (there,) = pair.prefill.endpoint.refused()
    assert (there.peer, there.address, there.retry_s) == ("other", "", 0.0)
    assert (there.factor, there.local, there.remote, there.count) == ("model", "m", "other", 1)


def test_a_refusal_is_one_warning_on_each_side_and_one_when_the_pair_fits(
    pair: Pair, other: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelno >= logging.WARNING and record.name.startswith("pdlink")
        ]

    monkeypatch.setattr("pdlink.endpoint.known.FIRST_PAUSE_S", 0.0)
    for number in range(3):
        expect(pair, other, f"t{number}")
    assert sorted(text.split(";")[0] for text in warnings()) == [
        f"other: no KV from prefill ({pair.prefill.endpoint.address}): model differs: local other, remote m",
        "prefill: no KV to other: model differs: local m, remote other",
    ]
    caplog.clear()
    other.close()
    mended = Node(pair.hub, "other", layout(8), TIMEOUTS).open()
    handler = Handler()
    mended.receiver.expect("u", pair.prefill.endpoint.address, handler)
    until(lambda: not pair.prefill.endpoint.refused(), "prefill knows that they fit")
    assert len(warnings()) == 1
    assert warnings()[0].startswith("prefill: other fits now; it was refused 3 times in ")
    mended.close()
