"""What one transfer or session leaves behind for the others: nothing. Each of these was found by `tests/model`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zmq

from pdlink.errors import TransferFailed
from pdlink.events import PeerChanged
from pdlink.protocol import messages
from tests.loopback import LOOPBACK
from tests.waiting import until

from .conftest import TIMEOUTS, Pair

DST, TOKENS = [11, 3, 20], 21


def lost(pair: Pair) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


def test_offer_that_is_withdrawn_before_its_request_came_costs_no_session(pair: Pair) -> None:
    """It was not answered with *quiet*, so the receiver fenced the peer, and every transfer with it, after peer_s."""
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    until(lambda: pair.sender_state("early") == 1, "the offer waits for its request")
    pair.decode.receiver.cancel("t", "client left")
    assert handler.wait() == ["failed aborted: client left", "released"]
    assert lost(pair) == []


def test_offer_whose_request_never_comes_costs_no_session() -> None:
    pair = Pair(replace(TIMEOUTS, other_leg_s=0.3))
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    assert handler.wait() == ["failed no_request", "released"]
    assert lost(pair) == []
    pair.close()


def test_session_that_ends_during_the_handshake_leaves_nothing_to_fence() -> None:
    """The transport had not been told of the peer, so the end that was waited for never came."""
    pair = Pair(replace(TIMEOUTS, connect_s=0.3))
    hello = messages.Hello("stranger", pair.decode.endpoint.local.identity, (LOOPBACK,))
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(pair.prefill.endpoint.address)
    dealer.send(messages.encode(messages.Envelope(messages.VERSION, "stranger", "life", "", 1, 0, (hello,))))
    until(lambda: len(pair.prefill.endpoint.peers()) == 1, "the handshake has begun")
    until(lambda: not pair.prefill.endpoint.peers(), "it has been given up")
    assert pair.prefill.endpoint.num_closing() == 0
    context.destroy(linger=0)
    pair.close()


def test_offers_that_came_early_go_with_the_session_of_their_receiver(pair: Pair) -> None:
    """Kept, an offer would be answered with KV when its request comes: into pages of somebody who is not there."""
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    until(lambda: pair.sender_state("early") == 1, "the offer waits for its request")
    pair.decode.close()
    assert handler.wait() == ["failed shutdown", "released"]
    until(lambda: not pair.prefill.endpoint.peers(), "the session has ended")
    assert pair.sender_state("early") == 0
    with pytest.raises(TransferFailed, match="was stopped before it began"):
        pair.prefill.sender.announce("t", lambda _: None, lambda: None)


def test_session_that_breaks_at_the_last_message_of_the_handshake_is_not_called_ready(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pair.decode.endpoint._channel
    send = channel.send
    monkeypatch.setattr(channel, "send", lambda route, frame: b"invite" not in frame and send(route, frame))
    assert pair.expect("t").wait() == ["failed peer_lost: control connection is gone", "released"]
    assert not [event for event in pair.events if isinstance(event, PeerChanged) and event.state == "ready"]
    assert not pair.decode.endpoint.peers()
