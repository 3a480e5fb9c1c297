"""Sessions: handshake, loss, restart, and that nothing is left of a peer that has gone."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
import zmq

from pdlink.endpoint.channel import Received
from pdlink.endpoint.peer import PeerState
from pdlink.events import PeerChanged
from pdlink.protocol import messages
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.messages import VERSION
from tests.waiting import WAIT_S, until

from .conftest import TIMEOUTS, Handler, Node, Pair, layout

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21
SHORT = replace(TIMEOUTS, peer_s=1.0, lease_s=1.5)
"""A lease that a test can wait for; a thread of a busy machine stands still for less than that."""


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"kv": layout(8), "model": "other"}, "model differs: local other, remote m"),
        ({"kv": layout(8, dtype="bfloat16")}, "dtype differs: local bfloat16, remote float32"),
        ({"kv": layout(8, num_layers=4)}, "num_layers differs: local 4, remote 3"),
    ],
    ids=["model", "dtype", "layers"],
)
def test_worker_that_does_not_fit_is_refused_by_name(pair: Pair, node: dict, reason: str) -> None:  # type: ignore[type-arg]
    other = Node(pair.hub, "other", timeouts=TIMEOUTS, **node).open()
    handler = Handler()
    other.receiver.expect("t", pair.prefill.endpoint.address, handler)
    assert handler.wait()[0].endswith(reason)
    assert not other.endpoint.peers()
    other.close()


def test_sessions_are_reused(pair: Pair) -> None:
    assert pair.transfer("t", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert pair.transfer("u", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert len([event for event in pair.events if isinstance(event, PeerChanged)]) == 2


def test_prefill_that_is_not_there_fails_the_transfer_at_once(pair: Pair) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    handler = Handler()
    pair.decode.receiver.expect("t", address, handler)
    assert handler.wait() == [f"failed not_connected: cannot connect to {address}", "released"]


def test_prefill_that_never_answers_fails_the_transfer_by_the_deadline() -> None:
    """vllm#26171: a handshake that does not end must not hold the request."""
    pair = Pair(replace(TIMEOUTS, connect_s=0.3))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        handler = Handler()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        pair.decode.receiver.expect("t", address, handler)
        assert handler.wait() == ["failed not_connected: no answer to the handshake within 0.3 s", "released"]
    pair.close()


@pytest.mark.parametrize("address", ["ipc:///x", "tcp://", "tcp://256.1.1.1:x", ""])
def test_address_that_is_none_fails_the_transfer(pair: Pair, address: str) -> None:
    handler = Handler()
    pair.decode.receiver.expect("t", address, handler)
    assert handler.wait()[0].startswith("failed not_connected: cannot dial")


def test_closed_prefill_fails_its_transfers_and_its_successor_on_the_same_port_works(pair: Pair) -> None:
    """smg#2503: a worker restarted on the same address is a new one; nobody else is restarted."""
    assert pair.transfer("t", SRC, DST, TOKENS) == ["ready 42", "released"]
    _, handler = pair.begin("u", DST, TOKENS)
    port = pair.prefill.port
    pair.prefill.close()
    assert handler.wait()[0].startswith("failed ")
    until(lambda: pair.decode.endpoint.num_closing() == 0, "the old session is fenced")
    pair.prefill = Node(pair.hub, "prefill", layout(4), TIMEOUTS).open(port)
    assert pair.transfer("v", SRC, DST, TOKENS) == ["ready 42", "released"]


def test_closed_decode_frees_the_senders_blocks_and_its_successor_works(pair: Pair) -> None:
    """vllm#46283 seen from the other side: nothing is held for a receiver that is gone."""
    log, _ = pair.fly("t", SRC, DST, TOKENS)
    pair.decode.close()
    assert log.wait()[-1] == "end"
    assert not any(pair.prefill.endpoint.sender.states().values())
    pair.hub.hold = False
    pair.decode = Node(pair.hub, "decode", layout(8), TIMEOUTS).open()
    assert pair.transfer("u", SRC, DST, TOKENS) == ["ready 42", "released"]


def test_silent_peer_is_lost_and_its_blocks_wait_for_the_fence() -> None:
    """nixl#2047: a peer that is alive but stalled. Here its whole transport is stopped in the middle of a write."""
    pair = Pair(replace(TIMEOUTS, peer_s=2.0))
    _, handler = pair.fly("t", SRC, DST, TOKENS)
    pair.hub.stop(pair.prefill.transport)
    with pair.prefill.endpoint.lock:  # its loop stands still: no heartbeats
        until(lambda: bool(handler.calls), "the request falls back")
        assert handler.calls == ["failed peer_lost: silent for 2.0 s"]
        assert pair.decode.endpoint.receiver.num_quarantined() == len(DST)
        pair.hub.resume(pair.prefill.transport)
    assert handler.wait() == ["failed peer_lost: silent for 2.0 s", "released"]
    pair.close()


def test_offer_without_a_request_is_given_up_after_the_lease() -> None:
    pair = Pair(SHORT)
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    assert handler.wait() == ["failed no_request", "released"]
    pair.close()


@pytest.mark.parametrize("prefill_first", [False, True])
def test_a_leg_waits_for_the_other_one_for_less_than_a_lease(prefill_first: bool) -> None:
    """`lease_s` is how long somebody who was heard may be silent; a leg that was never heard is another matter."""
    timeouts = Deadlines(heartbeat_s=0.05, peer_s=WAIT_S, connect_s=5.0, lease_s=4 * WAIT_S, other_leg_s=0.2)
    pair = Pair(timeouts)
    if prefill_first:
        assert pair.announce("t").wait() == ["failed no_receiver", "end"]
    else:
        assert pair.expect("t").wait() == ["failed no_request", "released"]
    assert not any(pair.prefill.endpoint.sender.states().values())
    pair.close()


@pytest.mark.parametrize("expected_first", [False, True])
def test_an_attempt_that_is_complete_answers_for_its_other_prompts_at_once(pair: Pair, expected_first: bool) -> None:
    """Two servers that make different tokens of one request waited for each other until the lease had ended."""
    ours = []
    if expected_first:
        ours.append(pair.expect("xfer-1-bbbb"))
        until(lambda: pair.sender_state("early") == 1, "it waits")
    log = pair.announce("xfer-1-aaaa")
    pair.prefill.endpoint.sender.complete("xfer-1", 1)
    if not expected_first:
        ours.append(pair.expect("xfer-1-bbbb"))
    assert ours[0].wait() == ["failed other_prompt", "released"]
    assert log.wait() == ["failed other_prompt", "end"], "nobody will ask for it"
    assert not any(pair.prefill.endpoint.sender.states().values())


def test_prompts_of_one_list_are_not_taken_for_other_ones(pair: Pair) -> None:
    first = pair.expect("xfer-1-bbbb"), pair.announce("xfer-1-bbbb")
    waiting = pair.expect("xfer-1-cccc")
    stranger = pair.expect("xfer-2-cccc")
    until(lambda: pair.sender_state("early") == 2, "they wait")
    pair.announce("xfer-1-cccc")
    pair.prefill.endpoint.sender.complete("xfer-1", 2)
    assert pair.expect("xfer-1-dddd").wait() == ["failed other_prompt", "released"]
    assert [heard.calls for heard in (*first, waiting, stranger)] == [[]] * 4
    assert pair.sender_state("early") == 1


def test_request_without_a_receiver_is_given_up_after_the_lease() -> None:
    pair = Pair(SHORT)
    assert pair.announce("t").wait() == ["failed no_receiver", "end"]
    pair.close()


def test_live_receiver_keeps_the_senders_lease_beyond_its_length() -> None:
    """vllm#35764: a queue in front of decode must not cost the KV; heartbeats renew the lease."""
    pair = Pair(SHORT)
    log = pair.announce("t")
    handler = pair.expect("t")
    pair.compute("t", SRC, TOKENS)
    assert not log.ended.wait(3 * SHORT.lease_s)
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    pair.close()


def test_hostile_frames_do_not_disturb_a_running_link(pair: Pair) -> None:
    context = zmq.Context()
    stray = context.socket(zmq.DEALER)
    stray.connect(pair.prefill.endpoint.address)
    for frame in (b"", b"\x80\x04\x95", b"\xdd\xff\xff\xff\xff", b"x" * 100_000):
        stray.send(frame)
    assert pair.transfer("t", SRC, DST, TOKENS) == ["ready 42", "released"]
    context.destroy(linger=0)


def test_close_ends_within_its_time_with_transfers_under_way(pair: Pair) -> None:
    log, _ = pair.fly("t", SRC, DST, TOKENS)
    pair.prefill.endpoint.close()
    assert log.ended.is_set()
    pair.prefill.endpoint.close()


def test_a_hundred_restarts_of_either_side_under_load_need_nobody_elses() -> None:
    """smg#2503, vllm#49238: both workers come back again and again on their ports, with layers in flight."""
    pair = Pair()
    for round_ in range(50):
        for side in ("prefill", "decode"):
            name = f"{side}-{round_}"
            _, cut = pair.fly(f"{name}-cut", SRC, DST, TOKENS)
            old, port = getattr(pair, side), getattr(pair, side).port
            old.close()
            pair.hub.hold = False
            setattr(pair, side, Node(pair.hub, side, old.layout, TIMEOUTS).open(port))
            if side == "prefill":
                assert cut.wait()[-1] == "released"
            for again in ("first", "second"):
                assert pair.transfer(f"{name}-{again}", SRC, DST, TOKENS) == ["ready 42", "released"]
    until(pair.idle, "nothing is held")
    assert len(pair.prefill.endpoint.peers()) == len(pair.decode.endpoint.peers()) == 1
    assert pair.prefill.endpoint.num_closing() == pair.decode.endpoint.num_closing() == 0
    pair.close()


def test_engine_that_computes_for_long_does_not_cost_the_session() -> None:
    """Heartbeats come from the endpoint's own thread: Python that never waits delays them, but does not stop them."""
    pair = Pair(replace(TIMEOUTS, peer_s=1.5))
    assert pair.transfer("t", SRC, DST, TOKENS) == ["ready 42", "released"]
    end_s = time.monotonic() + 3 * pair.timeouts.peer_s

    def compute() -> None:
        while time.monotonic() < end_s:
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert pair.transfer("u", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert not [event for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]
    pair.close()


def test_finished_prompt_nobody_offers_for_is_given_up_when_others_wait_for_its_blocks() -> None:
    """vllm#57104, vllm#44560: two full workers, each holding what the other waits for, must not stand still."""
    pair = Pair(replace(TIMEOUTS, offer_s=0.2))
    log = pair.announce("t")
    handler = pair.expect("t")
    pair.compute("t", SRC, TOKENS)
    until(lambda: pair.sender_state("waiting") == 1, "prefill has finished and waits for an offer")
    assert not log.ended.wait(0.6)  # three times as long: nobody needs the blocks
    pair.prefill.short_of_blocks = True
    assert log.wait() == ["failed no_offer", "end"]
    assert handler.wait() == ["failed no_offer", "released"]
    pair.close()


def test_bye_of_a_successor_ends_the_session_with_its_predecessor(pair: Pair) -> None:
    """lmcache#4642: a worker restarted between two heartbeats is noticed by its first word."""
    handler = pair.expect("t")
    peer = pair.decode.endpoint.peers()[0]
    until(lambda: peer.state is PeerState.READY, "the handshake is done")
    bye = messages.Bye("unknown session")
    frame = messages.Envelope(VERSION, "prefill", "a new life", pair.decode.endpoint.epoch, peer.session, 0, (bye,))
    with pair.decode.endpoint.lock:
        pair.decode.endpoint.turn([Received(peer.route, messages.encode(frame))])
    assert handler.wait() == ["failed peer_lost: prefill was restarted", "released"]
