"""What is said during one turn of the loop leaves as one frame, and as several only where it must."""

from __future__ import annotations

import time

import pytest

from pdlink.endpoint import driver
from pdlink.endpoint.peer import PeerState
from pdlink.events import MessageDropped, PeerChanged
from pdlink.protocol import messages
from tests.attacks.stranger import Stranger
from tests.waiting import until

from .conftest import Handler, Node, Pair

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


def frames_of(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[messages.Envelope]:
    """Everything that this node sends from now on, but for heartbeats."""
    sent: list[messages.Envelope] = []
    channel = node.endpoint._channel
    send = channel.send

    def remember(route: str, frame: bytes) -> bool:
        assert len(frame) <= messages.MAX_FRAME_NBYTES
        envelope = messages.decode(frame)
        if envelope.bodies != (messages.Heartbeat(),):
            sent.append(envelope)
        return send(route, frame)

    monkeypatch.setattr(channel, "send", remember)
    return sent


def connect(pair: Pair) -> None:
    pair.expect("first")
    until(lambda: pair.sender_state("early") == 1, "the session is there")


def reasons(pair: Pair) -> list[str]:
    """For which messages were dropped."""
    return [event.reason for event in pair.events if isinstance(event, MessageDropped)]


def losses(pair: Pair) -> int:
    return sum(peer.state is PeerState.LOST for peer in pair.decode.endpoint.peers())


def test_a_frame_holds_what_was_said_in_one_turn_in_that_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(pair)
    sent = frames_of(pair.decode, monkeypatch)
    with pair.decode.endpoint.lock:  # the loop cannot go round in between
        for number in range(100):
            pair.expect(f"t-{number}")
    until(lambda: pair.sender_state("early") == 101, "all have arrived")
    said = [body for envelope in sent for body in envelope.bodies if isinstance(body, messages.Expect)]
    assert [body.transfer_id for body in said] == [f"t-{number}" for number in range(100)]
    assert len([envelope for envelope in sent if messages.Expect in map(type, envelope.bodies)]) == 1


def test_what_was_said_does_not_wait_for_every_callback_of_the_turn(pair: Pair) -> None:
    connect(pair)
    heard: list[bool] = []

    def say() -> None:
        pair.expect("second")
        said_s = time.monotonic()
        until(lambda: time.monotonic() > said_s + 2 * driver._FLUSH_S, "some time has passed")

    def listen() -> None:
        until(lambda: pair.sender_state("early") == 2, "the other side has heard of it")
        heard.append(True)

    endpoint = pair.decode.endpoint
    with endpoint.lock:
        endpoint.work.defer(say)
        endpoint.work.defer(listen)
    until(lambda: heard == [True], "both callbacks have run")


def test_more_than_a_frame_may_hold_goes_in_several(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(pair)
    sent, count = frames_of(pair.decode, monkeypatch), 2 * messages.MAX_BODIES + 1
    with pair.decode.endpoint.lock:
        for number in range(count):
            pair.expect(f"t-{number}")
    until(lambda: pair.sender_state("early") == count + 1, "all have arrived")
    assert max(len(envelope.bodies) for envelope in sent) <= messages.MAX_BODIES
    numbers = [envelope.number for envelope in sent]
    assert numbers == sorted(set(numbers))
    assert losses(pair) == 0


def test_offers_that_do_not_fit_into_one_frame_cost_no_session(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq ends a connection over which a larger frame comes."""
    connect(pair)
    sent, blocks = frames_of(pair.decode, monkeypatch), range(2**20, 2**20 + 450_000)
    handlers: list[Handler] = []
    with pair.decode.endpoint.lock:
        for name in ("a", "b"):
            handlers.append(pair.expect(name))
            pair.decode.receiver.offer(name, list(blocks), 0, 8 * len(blocks))
    for handler in handlers:  # refused, as the decode worker has no such blocks, but read
        assert handler.wait()[0].startswith("failed bad_offer: offer names a block outside")
    assert len([envelope for envelope in sent if messages.Offer in map(type, envelope.bodies)]) == 2
    assert len(pair.decode.endpoint.peers()) == 1
    assert losses(pair) == 0


def test_worker_that_answers_in_its_callback_is_heard_in_the_same_frame(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transfer after the other costs one frame each way and transfer, not two."""
    connect(pair)

    class Next(Handler):
        def released(self) -> None:
            pair.expect("next")
            super().released()

    pair.announce("t")
    handler = Next()
    pair.decode.receiver.expect("t", pair.prefill.endpoint.address, handler)
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    sent = frames_of(pair.decode, monkeypatch)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    until(lambda: any(messages.Ack("t") in envelope.bodies for envelope in sent), "it is acknowledged")
    (envelope,) = [envelope for envelope in sent if messages.Ack("t") in envelope.bodies]
    assert messages.Expect("next") in envelope.bodies


def test_note_to_a_transport_that_has_none_ends_its_session(pair: Pair) -> None:
    connect(pair)
    [peer] = pair.decode.endpoint.peers()
    with pair.decode.endpoint.lock:
        pair.decode.endpoint.sessions.say(peer.key, b"x")
        pair.decode.endpoint.sessions.say("nobody#1", b"x")
    until(lambda: not pair.prefill.endpoint.peers(), "the session is over")
    lost = [event for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]
    assert any("got a note of 1 bytes" in event.reason for event in lost)


def test_note_before_the_session_is_ready_reaches_no_transport(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(type(pair.prefill.transport), "heard", lambda _self, peer, _data: heard.append(peer))
    with Stranger(pair) as stranger:
        stranger.hello()
        stranger.hear(messages.Welcome)
        stranger.say(messages.Note(b"x"))
        until(lambda: "before_handshake" in reasons(pair), "it is dropped")
        assert not heard
