"""A transfer between two endpoints: the ways it goes well, and the ways it ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from pdlink.errors import InvalidRequest, TransferFailed, TransportFailure
from pdlink.events import LayerLanded, LayerWritten, MessageDropped, PeerChanged, TransferEnded
from pdlink.protocol import messages
from tests.waiting import until

from .conftest import Pair

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


def assert_same_kv(pair: Pair, start: int = 0, end: int = TOKENS) -> None:
    for layer in range(3):
        sent = pair.prefill.rows(SRC, TOKENS, layer)[:, start:end]
        assert (pair.decode.rows(DST, TOKENS, layer)[:, start:end] == sent).all()


def test_kv_arrives_when_prefill_ends_before_the_offer(pair: Pair) -> None:
    log = pair.announce("t")
    pair.compute("t", SRC, TOKENS)
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]
    assert_same_kv(pair)


def test_kv_arrives_when_the_offer_comes_before_the_request(pair: Pair) -> None:
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    until(lambda: pair.sender_state("early") == 1, "the offer waits for its request")
    log = pair.announce("t")
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]
    assert_same_kv(pair)
    assert pair.idle()


def test_layer_is_pushed_while_later_ones_are_still_to_be_written(pair: Pair) -> None:
    pair.announce("t")
    pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    sender = pair.prefill.sender
    until(lambda: pair.sender_state("writing") == 1, "the offer is there")
    sender.publish("t", SRC, TOKENS, 0)
    sender.layer_ready("t", 0, 0, TOKENS)
    until(lambda: any(isinstance(event, LayerLanded) for event in pair.events), "layer 0 has landed")
    assert [event.layer for event in pair.events if isinstance(event, LayerWritten)] == [0]
    sender.cancel("t", "enough")


def test_blocks_are_open_to_the_sender_until_their_transfer_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[str, list[int]]] = []

    def note(change: str, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        changes.append((change, sorted(blocks[0])))

    monkeypatch.setattr(pair.decode.transport, "open_blocks", partial(note, "open"))
    monkeypatch.setattr(pair.decode.transport, "close_blocks", partial(note, "close"))
    assert pair.transfer("t", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert changes == [("open", sorted(DST)), ("close", sorted(DST))]


def test_only_the_missing_range_is_written(pair: Pair) -> None:
    pair.decode.buffer.array[:] = 0xEE
    pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST[1:], 8, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert_same_kv(pair, start=8)
    assert (pair.decode.rows(DST, 8, 0) == 0xEE).all()


def test_transfer_of_nothing_brings_the_first_token(pair: Pair) -> None:
    """vllm#18632: a full prefix hit must still complete, or prefill leaks its blocks."""
    log = pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", [], TOKENS, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]


def test_single_layers_are_announced_as_they_land(pair: Pair) -> None:
    pair.announce("t")
    handler = pair.expect("t")
    receiver, sender = pair.decode.receiver, pair.prefill.sender
    landed: list[tuple[int, int]] = []
    receiver.offer("t", DST, 0, TOKENS, on_landed=lambda layer, end, _: landed.append((layer, end)))
    sender.publish("t", SRC, TOKENS, 0)
    sender.layer_ready("t", 0, 0, TOKENS)
    until(lambda: landed == [(0, TOKENS)], "layer 0 has landed")
    assert handler.calls == []
    for layer in (1, 2):
        sender.layer_ready("t", layer, 0, TOKENS)
    sender.finish("t", 1)
    assert handler.wait() == ["ready 1", "released"]
    assert sorted(landed) == [(layer, TOKENS) for layer in range(3)]


def test_layer_is_announced_up_to_its_first_token_in_flight(pair: Pair) -> None:
    """Two chunks of one layer may land in any order; the second says nothing while the first is under way."""
    handler = pair.expect("t")
    pair.announce("t")
    receiver, sender = pair.decode.receiver, pair.prefill.sender
    landed: list[tuple[int, int]] = []
    receiver.offer("t", DST, 0, TOKENS, on_landed=lambda layer, end, _: landed.append((layer, end)))
    until(lambda: pair.sender_state("writing") == 1, "the offer has come")
    pair.hub.hold = True
    sender.publish("t", SRC, TOKENS, 0)
    sender.layer_ready("t", 0, 0, 8)
    sender.layer_ready("t", 0, 8, TOKENS)
    pair.hub.land(pair.hub.open_batches[1])
    until(lambda: any(isinstance(event, LayerLanded) for event in pair.events), "the second chunk has landed")
    pair.hub.hold = False
    pair.hub.deliver_all()
    until(lambda: landed == [(0, TOKENS)], "the layer is announced once, whole")
    for layer in (1, 2):
        sender.layer_ready("t", layer, 0, TOKENS)
    sender.finish("t", 1)
    assert handler.wait() == ["ready 1", "released"]
    assert [event for event in landed if event[0] == 0] == [(0, TOKENS)]


def test_many_transfers_at_once_keep_their_bytes_apart(pair: Pair) -> None:
    handlers = {}
    for index in range(8):
        name = f"t{index}"
        pair.announce(name)
        handlers[name] = pair.expect(name)
        pair.decode.receiver.offer(name, [index, index + 8, index + 16], 0, TOKENS)
        pair.compute(name, [3 * index % 32, index + 1, index + 9, index + 17, index + 5, 31 - index], TOKENS, index)
    for index, handler in enumerate(handlers.values()):
        assert handler.wait() == [f"ready {index}", "released"]
        for layer in range(3):
            src = [3 * index % 32, index + 1, index + 9, index + 17, index + 5, 31 - index]
            sent = pair.prefill.rows(src, TOKENS, layer)
            assert (pair.decode.rows([index, index + 8, index + 16], TOKENS, layer) == sent).all()
    until(
        lambda: sum(isinstance(event, TransferEnded) for event in pair.events) == 16, "both sides of each have ended"
    )


def test_receiver_that_cancels_gets_its_blocks_back_when_the_sender_is_quiet(pair: Pair) -> None:
    log, handler = pair.fly("t", SRC, DST, TOKENS)
    pair.decode.receiver.cancel("t", "client left")
    until(lambda: pair.sender_state("draining") == 1, "the sender drains")
    assert pair.decode.endpoint.receiver.num_quarantined() == len(DST)
    pair.hub.deliver_all()
    assert handler.wait() == ["failed aborted: client left", "released"]
    assert log.wait() == ["failed aborted: client left", "end"]
    assert pair.idle()


def test_sender_that_cancels_tells_the_receiver(pair: Pair) -> None:
    log, handler = pair.begin("t", DST, TOKENS)
    pair.prefill.sender.cancel("t", "preempted")
    assert handler.wait() == ["failed aborted: preempted", "released"]
    assert log.wait() == ["failed aborted: preempted", "end"]


def test_prefill_that_skips_a_layer_fails_the_transfer(pair: Pair) -> None:
    """vllm#31057: per-layer hooks that did not run must not look like a complete transfer."""
    pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    sender = pair.prefill.sender
    sender.publish("t", SRC, TOKENS, 0)
    sender.layer_ready("t", 0, 0, TOKENS)
    sender.layer_ready("t", 2, 0, TOKENS)
    sender.finish("t", 42)
    assert handler.wait() == ["failed not_written: prefill ended with 2 of 3 layers written", "released"]


def test_push_that_fails_fences_the_peer_and_the_next_transfer_works(pair: Pair) -> None:
    """vllm#50754: a write that could not be posted must reach the receiver at once."""
    pair.hub.fail_next = 1
    log = pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait()[0].startswith("failed ")
    assert log.wait()[-1] == "end"
    pair.announce("u")
    again = pair.expect("u")
    pair.decode.receiver.offer("u", DST, 0, TOKENS)
    pair.compute("u", SRC, TOKENS)
    assert again.wait() == ["ready 42", "released"]
    assert_same_kv(pair)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([11, 3, 32], "offer names a block outside 0..31"),
        ([11, 3, -1], "offer names a block outside 0..31"),
        ([11, 3, 11], "offer names a block twice"),
        ([11, 3], "offer of 2 blocks; tokens [0, 21) take 3"),
    ],
)
def test_offer_that_cannot_be_written_is_refused(pair: Pair, blocks: list[int], reason: str) -> None:
    pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", blocks, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == [f"failed bad_offer: {reason}", "released"]


def test_transfer_id_is_good_for_one_attempt(pair: Pair) -> None:
    """sglang#40125: a repeated id must be refused and leave the first one alone."""
    pair.announce("t")
    handler = pair.expect("t")
    with pytest.raises(InvalidRequest, match="was used before"):
        pair.announce("t")
    with pytest.raises(InvalidRequest, match="was used before"):
        pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    until(pair.idle, "both sides are done")
    with pytest.raises(InvalidRequest, match="was used before"):
        pair.announce("t")


def test_stop_that_overtakes_the_request_still_ends_it(pair: Pair) -> None:
    pair.decode.receiver.cancel("t", "prefill refused")
    with pytest.raises(TransferFailed, match="prefill refused"):
        pair.expect("t")


def test_receiver_that_gave_up_early_refuses_the_request_that_comes_later(pair: Pair) -> None:
    handler = pair.expect("t")
    until(lambda: pair.sender_state("early") == 1, "the sender knows of it")
    pair.decode.receiver.cancel("t", "client left")
    assert handler.wait() == ["failed aborted: client left", "released"]
    until(lambda: pair.sender_state("early") == 0, "the sender has forgotten it")
    with pytest.raises(TransferFailed, match="client left"):
        pair.announce("t")


def test_news_about_unknown_transfers_is_counted_and_dropped(pair: Pair) -> None:
    handler = pair.expect("t")
    peer = pair.decode.endpoint.peers()[0]
    until(lambda: peer.state.value == "ready", "the handshake is done")
    with pair.decode.endpoint.lock:
        for index in range(100):
            pair.decode.endpoint.sessions.send(peer, messages.Ack(f"unknown-{index}"))
    until(lambda: sum(isinstance(event, MessageDropped) for event in pair.events) == 100, "all are dropped")
    pair.decode.receiver.cancel("t", "enough")
    handler.wait()


def test_blocks_that_cannot_be_closed_wait_for_the_fence_of_their_session(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something may still be placed in them: the request goes on, the session does not."""

    def close_blocks(*_: object) -> None:
        raise TransportFailure("the GPU still copies")

    monkeypatch.setattr(pair.decode.transport, "close_blocks", close_blocks)
    _, handler = pair.begin("t", DST, TOKENS)
    close_peer, closing = pair.decode.transport.close_peer, list[str]()
    monkeypatch.setattr(pair.decode.transport, "close_peer", closing.append)
    pair.compute("t", SRC, TOKENS)
    until(lambda: handler.calls == ["ready 42"] and bool(closing), "its KV is here, and its session ends")
    until(lambda: pair.decode.endpoint.num_closing() == 1, "the fence is waited for")
    assert not handler.changed.is_set()
    close_peer(closing[0])
    assert handler.wait() == ["ready 42", "released"]
    lost = [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]
    assert "the GPU still copies" in lost
