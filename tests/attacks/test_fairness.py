"""However much one connection sends, the loop goes on to listen to the others, and to the clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdlink.endpoint import sessions
from pdlink.events import MessageDropped, PeerChanged
from pdlink.protocol import messages
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.messages import VERSION, Envelope
from tests.endpoint.conftest import Handler, Pair
from tests.waiting import WAIT_S, until

from .stranger import Stranger

SRC, DST, TOKENS = [3, 0, 9, 4], [5, 1], 13
TIMEOUTS = Deadlines(heartbeat_s=0.05, peer_s=4.0, connect_s=6.0, lease_s=7.0, request_s=60.0)
NUM_FRAMES = 500
"""Of 3.8 MB: decoding each takes 35 ms, so all of them many times `peer_s`."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(TIMEOUTS)
    yield pair
    pair.close()


def large_frame(name: str = "flood", epoch: str = "e" * 16) -> bytes:
    blocks = tuple(range(2**20, 2**20 + 760_000))
    body = messages.Offer("t", 0, 1, (blocks,), 3)
    return messages.encode(Envelope(VERSION, name, epoch, "d" * 16, 7, 0, (body,)))


def flood(stranger: Stranger, frame: bytes) -> threading.Thread:
    def send() -> None:
        for _ in range(NUM_FRAMES):
            stranger.socket.send(frame, copy=False)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def losses(pair: Pair) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


def dropped(pair: Pair, reason: str) -> int:
    return sum(isinstance(event, MessageDropped) and event.reason == reason for event in pair.events)


def test_large_frames_of_a_stranger_are_not_read(pair: Pair) -> None:
    """Nothing but a hello is for somebody who has no session, and that is smaller."""
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    with Stranger(pair) as stranger:
        thread = flood(stranger, large_frame())
        assert pair.transfer("meanwhile", SRC, DST, TOKENS) == ["ready 42", "released"]
        thread.join(WAIT_S)
        until(lambda: dropped(pair, "too_long") == NUM_FRAMES, "all have come and were dropped")
    assert losses(pair) == []


def test_large_frames_of_one_session_do_not_starve_another(pair: Pair) -> None:
    """Each has to be decoded before it can be dropped; in between the others are heard, and time is looked at."""
    assert pair.transfer("before", SRC, DST, TOKENS) == ["ready 42", "released"]
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Expect("mine"))
        until(lambda: pair.sender_state("early") == 1, "it is in")
        thread = flood(stranger, large_frame(stranger.name, stranger.epoch))
        for number in range(5):
            assert pair.transfer(f"meanwhile-{number}", SRC, DST, TOKENS) == ["ready 42", "released"]
        until(lambda: dropped(pair, "old_session") >= 20, "it is being flooded")
        assert losses(pair) in ([], ["silent for 4.0 s"]), "but for the one that floods, who sends no heartbeat"
        assert len([peer for peer in pair.decode.endpoint.peers() if peer.name == "prefill"]) == 1
        stranger.socket.close(linger=0)
        thread.join(WAIT_S)


def test_hello_that_no_listener_would_take_is_not_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_HELLO_NBYTES", 100)
    handler = Handler()
    pair.decode.receiver.expect("t", pair.prefill.endpoint.address, handler)
    failed, released = handler.wait()
    assert "hello: got " in failed
    assert "bytes; expected at most 100" in failed
    assert released == "released"
