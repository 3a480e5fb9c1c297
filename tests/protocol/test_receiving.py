"""What the receiver decides, one fact a test."""

from __future__ import annotations

import pytest

from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import paged_layout
from pdlink.protocol import messages
from pdlink.protocol.actions import Deliver, DeliverLayer, End, Fail, FencePeer, Send
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.states import ReceiverState
from pdlink.reasons import ABORTED, Code, Reason

LAYERS = 3
GROUPS = KVGroups(
    (paged_layout(dtype="u8", itemsize=1, num_layers=LAYERS, num_blocks=9, block_tokens=4, num_heads=1, head_dim=2),)
)
TOKEN_NBYTES = 12
LOST, PREEMPTED = Reason(Code.PEER_LOST), Reason(Code.PREEMPTED)


def offered(start: int = 2, end: int = 8, *, per_layer: bool = False) -> Receiving:
    machine = Receiving("t", GROUPS, quiet_s=3.0)
    machine.offer(((5, 6),), start, end, per_layer=per_layer)
    return machine


def done(start: int = 2, end: int = 8, num_layers: int = LAYERS, nbytes: int = 72) -> messages.Done:
    return messages.Done("t", start, end, num_layers, nbytes, 42)


def test_complete_transfer_is_acknowledged_and_delivered_once() -> None:
    machine = offered()
    assert machine.done(done(), 0.0) == [Send(messages.Ack("t")), Deliver(42), End(None)]
    assert machine.done(done(), 0.0) == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (done(num_layers=2), "layers 2 of 3"),
        (done(nbytes=50), "bytes 50 of 72"),
        (done(start=4, nbytes=48), "start 4 of 2, bytes 48 of 72"),
    ],
)
def test_done_that_is_not_what_was_offered_fails_the_transfer(told: messages.Done, words: str) -> None:
    machine = offered()
    expected = [Send(messages.Stop("t", f"incomplete: {words}")), Fail(Reason(Code.INCOMPLETE, words))]
    assert machine.done(told, 0.0) == expected
    assert machine.state is ReceiverState.DRAINING


def test_receiver_keeps_blocks_until_sender_is_quiet() -> None:
    machine = offered()
    assert machine.stop(ABORTED, 0.0) == [Send(messages.Stop("t", "aborted")), Fail(ABORTED)]
    assert machine.tick(2.9) == []
    assert machine.quiet() == [End(ABORTED)]
    assert machine.state is ReceiverState.FAILED
    assert machine.quiet() == []


def test_receiver_keeps_blocks_until_the_fence_when_the_sender_stays_silent() -> None:
    machine = offered()
    machine.stop(ABORTED, 0.0)
    assert machine.tick(3.0) == [FencePeer(Reason(Code.PEER_LOST, "not quiet in time"))]
    assert machine.tick(9.0) == []
    assert machine.state is ReceiverState.DRAINING
    assert machine.fenced(9.0) == [End(ABORTED)]
    assert machine.fenced(9.0) == []


def test_stop_from_the_sender_is_not_the_end_either() -> None:
    machine = offered()
    assert machine.stop(PREEMPTED, 0.0, tell=False) == [Fail(PREEMPTED)]
    assert machine.state is ReceiverState.DRAINING
    assert machine.quiet() == [End(PREEMPTED)]


def test_done_that_crosses_our_stop_proves_that_nothing_is_in_flight() -> None:
    machine = offered()
    machine.stop(ABORTED, 0.0)
    assert machine.done(done(), 0.0) == [End(ABORTED)]


def test_payload_is_that_of_the_offered_range() -> None:
    assert offered(2, 8).nbytes == 6 * TOKEN_NBYTES
    assert Receiving("t", GROUPS, quiet_s=3.0).nbytes == 0


def test_second_offer_changes_nothing() -> None:
    machine = offered()
    first = machine.offered
    assert machine.offer(((7, 8),), 0, 8) == []
    assert machine.offered is first


def test_transfer_without_offer_fails_at_once() -> None:
    machine = Receiving("t", GROUPS, quiet_s=3.0)
    assert machine.stop(ABORTED, 0.0) == [Send(messages.Stop("t", "aborted")), Fail(ABORTED), End(ABORTED)]


def test_lost_peer_fails_the_request_before_and_frees_blocks_after_the_fence() -> None:
    machine = offered()
    assert machine.stop(LOST, 0.0, tell=False) == [Fail(LOST)]
    assert machine.fenced(1.0) == [End(LOST)]


def test_quiet_without_a_stop_means_nothing() -> None:
    machine = offered()
    assert machine.quiet() == []
    assert machine.state is ReceiverState.OFFERED


def test_news_after_the_end_changes_nothing() -> None:
    machine = offered()
    machine.done(done(), 0.0)
    after = [
        machine.stop(ABORTED, 0.0),
        machine.stop(ABORTED, 0.0, tell=False),
        machine.quiet(),
        machine.fenced(0.0),
        machine.tick(99.0),
    ]
    assert after == [[], [], [], [], []]
    assert machine.state is ReceiverState.READY


def test_landed_layers_are_delivered_and_nonsense_is_ignored() -> None:
    machine = offered(per_layer=True)
    end = machine.offered.end if machine.offered else 0
    assert machine.landed(1, end) == [DeliverLayer(1, end, None)]
    assert machine.landed(1, end, 65) == [DeliverLayer(1, end, 65)]
    for layer, tokens in ((99, 4), (-1, 4), (1, 0), (1, end + 1), (1, -5)):
        assert machine.landed(layer, tokens) == [], (layer, tokens)
    assert offered().landed(1, end) == [], "nobody asked for single layers"
