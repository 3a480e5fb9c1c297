"""What a peer does not read waits in order, within bounds, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdlink.endpoint import sessions
from pdlink.endpoint.channel import QueueFull
from pdlink.endpoint.peer import Peer
from pdlink.events import PeerChanged
from pdlink.protocol import messages
from pdlink.protocol.messages import VERSION, Envelope
from tests.attacks.stranger import Stranger
from tests.waiting import until

from .conftest import Node, Pair

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


def losses(pair: Pair) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


class Jam:
    """Lets a node's queues be full, for routes that are chosen."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jammed: Callable[[str], bool] = lambda route: False
        self.num_refused = 0
        channel = node.endpoint._channel
        send = channel.send

        def send_if_there_is_room(route: str, frame: bytes) -> bool:
            if self.jammed(route):
                self.num_refused += 1
                raise QueueFull
            return send(route, frame)

        monkeypatch.setattr(channel, "send", send_if_there_is_room)


@pytest.fixture
def strangers(pair: Pair) -> Iterator[list[Stranger]]:
    with Stranger(pair, name="one").join() as one, Stranger(pair, name="two").join() as two:
        for stranger in (one, two):
            stranger.say(messages.Expect(stranger.name))
        until(lambda: pair.sender_state("early") == 2, "both are in")
        yield [one, two]


def peer_called(pair: Pair, name: str) -> Peer:
    return next(peer for peer in pair.prefill.endpoint.peers() if peer.name == name)


def say(pair: Pair, peer: Peer, reason: str, count: int = 1) -> None:
    with pair.prefill.endpoint.lock:
        for number in range(count):
            pair.prefill.endpoint.sessions.send(peer, messages.Stop(f"t-{number}", reason))


def test_frames_that_found_a_full_queue_come_later_and_in_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    jam = Jam(pair.prefill, monkeypatch)
    jam.jammed = lambda route: True
    log, handler = pair.announce("t"), pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    until(lambda: jam.num_refused > 2 and pair.sender_state("sent") == 1, "it has said done")
    assert pair.prefill.endpoint.queued_nbytes() > 0
    jam.jammed = lambda route: False
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]
    assert losses(pair) == []
    until(lambda: pair.prefill.endpoint.queued_nbytes() == 0, "nothing waits")


def test_peer_that_reads_nothing_is_lost_as_a_slow_consumer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By real sockets: it makes us answer, and does not read what we say."""
    monkeypatch.setattr(sessions, "MAX_PEER_QUEUED_NBYTES", 2**20)
    with Stranger(pair, name="deaf", reads=False).join() as deaf:
        deaf.say(messages.Stop("over", "x" * 190))
        deaf.hear(messages.Quiet)
        for _ in range(400):
            bodies = tuple(messages.Expect("over") for _ in range(1000))
            to = deaf.victim.endpoint.epoch
            deaf.raw(
                messages.encode(Envelope(VERSION, deaf.name, deaf.epoch, to, deaf.session, deaf.num_said, bodies))
            )
            deaf.num_said += 1
        until(lambda: bool(losses(pair)), "it is lost")
        (reason,) = losses(pair)
        assert reason.startswith("slow consumer: "), reason
        assert pair.transfer("another", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert pair.prefill.endpoint.queued_nbytes() == 0


def test_of_all_that_do_not_read_the_worst_is_lost(
    pair: Pair, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_QUEUED_NBYTES", 100_000)
    jam = Jam(pair.prefill, monkeypatch)
    one, two = peer_called(pair, "one"), peer_called(pair, "two")
    jam.jammed = lambda route: route in (one.route, two.route)
    say(pair, one, "x" * 900, 60)
    until(lambda: one.queued_nbytes > 50_000, "one has much to read")
    assert losses(pair) == []
    say(pair, two, "x" * 900, 45)
    until(lambda: bool(losses(pair)), "somebody is lost")
    (reason,) = losses(pair)
    assert reason.startswith("slow consumer: ")
    assert [peer.name for peer in pair.prefill.endpoint.peers()] == ["two"]
    assert pair.prefill.endpoint.queued_nbytes() == two.queued_nbytes > 0


def test_what_waits_for_a_peer_goes_with_its_session(
    pair: Pair, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    jam = Jam(pair.prefill, monkeypatch)
    one = peer_called(pair, "one")
    jam.jammed = lambda route: route == one.route
    say(pair, one, "x" * 900, 60)
    until(lambda: one.queued_nbytes > 50_000, "it has much to read")
    strangers[0].say(messages.Bye("enough"))
    until(lambda: bool(losses(pair)), "it is lost")
    until(lambda: pair.prefill.endpoint.queued_nbytes() == 0, "nothing waits for it")


def test_what_is_said_together_leaves_in_frames_of_bounded_size(pair: Pair, strangers: list[Stranger]) -> None:
    """A queue that counts frames bounds bytes only if these are small."""
    one = strangers[0]
    say(pair, peer_called(pair, "one"), "x" * 900, 900)
    sizes, heard = [], 0
    while heard < 900:
        frame = one.socket.recv()
        sizes.append(len(frame))
        heard += sum(isinstance(body, messages.Stop) for body in messages.decode(frame).bodies)
    assert max(sizes) <= 64 * 2**10
