"""Several transfers share a link: what overtakes what, who delays whom, and what becomes of what still waits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pdlink.endpoint.sharing import Sharing
from pdlink.errors import TransportFailure
from pdlink.events import LayerLanded, LayerWritten, listen
from pdlink.node import report
from pdlink.observe.metrics import WorkerMetrics
from pdlink.serve.health import link_state
from tests.waiting import WAIT_S, until

from .conftest import TIMEOUTS, Handler, Node, Pair, SenderLog, layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.loopback import OpenBatch

TOKEN_NBYTES, LAYERS = 64, 3
"""Of one layer."""
SHARING = Sharing(window_nbytes=2048, peer_window_nbytes=1024, push_nbytes=512)
"""Pushes of eight tokens; a peer has two of them in flight, the link has four."""
BIG, BIG_DST, BIG_TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21
SMALL, SMALL_DST, SMALL_TOKENS = [8], [12], 4


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(sharing=SHARING)
    pair.hub.hold = True
    yield pair
    pair.close()


def begin(
    pair: Pair,
    name: str,
    src: list[int],
    dst: list[int],
    num_tokens: int,
    decode: Node | None = None,
    *,
    finish: bool = True,
) -> tuple[SenderLog, Handler]:
    """Start a transfer, and wait until all that has room is in flight."""
    log, handler = pair.announce(name), Handler()
    receiver = (decode or pair.decode).receiver
    before = pair.sender_state("writing")
    receiver.expect(name, pair.prefill.endpoint.address, handler)
    receiver.offer(name, dst, 0, num_tokens)
    until(lambda: pair.sender_state("early") + pair.sender_state("writing") > before, f"the offer of {name} is there")
    sender = pair.prefill.sender
    sender.publish(name, src, num_tokens, 0)
    for layer in range(LAYERS):
        sender.layer_ready(name, layer, 0, num_tokens)
    if finish:
        sender.finish(name, 42)
    return log, handler


def waiting(pair: Pair) -> int:
    return pair.prefill.endpoint.sender.push_nbytes()["waiting"]


def in_flight(pair: Pair) -> int:
    return pair.prefill.endpoint.sender.push_nbytes()["in_flight"]


def batches_to(pair: Pair, node: Node) -> list[OpenBatch]:
    return [batch for batch in list(pair.hub.open_batches) if batch.link.owner is node.transport]


def land_next(pair: Pair, node: Node) -> None:
    """Land the oldest batch to a node, and wait until its sender has noticed."""
    batch = batches_to(pair, node)[0]
    before = in_flight(pair) + waiting(pair)
    pair.hub.land(batch)
    until(lambda: in_flight(pair) + waiting(pair) == before - batch.nbytes, "the sender has noticed")


def landed(pair: Pair, name: str) -> list[int]:
    """Layers of this transfer's pushes that have landed."""
    events = [event for event in pair.events if isinstance(event, LayerLanded)]
    return [event.layer for event in events if event.transfer_id == name]


def test_small_transfer_overtakes_a_big_one(pair: Pair) -> None:
    _, big = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    assert in_flight(pair) == 1024
    _, small = begin(pair, "small", SMALL, SMALL_DST, SMALL_TOKENS)
    while not small.changed.is_set():
        land_next(pair, pair.decode)
        if LAYERS - 1 in landed(pair, "small"):
            break
    assert small.wait() == ["ready 42", "released"]
    assert landed(pair, "small") == [0, 1, 2]
    assert LAYERS - 1 not in landed(pair, "big")
    assert waiting(pair) > 0
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert big.wait() == ["ready 42", "released"]
    for layer in range(LAYERS):
        assert (pair.decode.rows(BIG_DST, 21, layer) == pair.prefill.rows(BIG, 21, layer)).all()
        assert (pair.decode.rows(SMALL_DST, 4, layer) == pair.prefill.rows(SMALL, 4, layer)).all()


def test_no_more_than_the_window_is_in_flight(pair: Pair) -> None:
    _, big = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    while pair.hub.open_batches:
        assert in_flight(pair) <= 1024
        assert sum(batch.nbytes for batch in pair.hub.open_batches) <= 1024
        land_next(pair, pair.decode)
    assert big.wait() == ["ready 42", "released"]
    assert pair.prefill.endpoint.sender.push_nbytes() == {"waiting": 0, "in_flight": 0}


def test_layer_that_travels_in_several_pushes_lands_whole(pair: Pair) -> None:
    pair.hub.hold = False
    _, handler = begin(pair, "t", BIG, BIG_DST, BIG_TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    events = [event for event in pair.events if isinstance(event, LayerLanded)]
    assert [(event.layer, event.start, event.end, event.nbytes) for event in events] == [
        (layer, start, end, (end - start) * TOKEN_NBYTES)
        for layer in range(LAYERS)
        for start, end in ((0, 8), (8, 16), (16, BIG_TOKENS))
    ]
    written_s = {event.layer: event.at_s for event in pair.events if isinstance(event, LayerWritten)}
    for event in events:
        assert written_s[event.layer] <= event.asked_s <= event.submitted_s


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_what_waits_is_not_submitted_after_a_stop_and_quiet_waits_only_for_what_flies(pair: Pair, side: str) -> None:
    log, handler = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    assert waiting(pair) > 0
    submitted = list(pair.hub.open_batches)
    if side == "sender":
        pair.prefill.sender.cancel("big", "enough")
    else:
        pair.decode.receiver.cancel("big", "enough")
    until(lambda: waiting(pair) == 0, "the waiting pushes are dropped")
    assert pair.sender_state("draining") == 1
    assert not log.ended.is_set()
    for batch in submitted:
        pair.hub.land(batch)
    assert log.wait() == ["failed aborted: enough", "end"]
    assert handler.wait() == ["failed aborted: enough", "released"]
    assert pair.hub._num_submitted == len(submitted) == 2
    until(pair.idle, "nothing is held")


def test_transfer_that_only_waits_is_quiet_at_once(pair: Pair) -> None:
    begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    log, handler = begin(pair, "small", SMALL, SMALL_DST, SMALL_TOKENS)
    assert len(pair.hub.open_batches) == 2
    pair.prefill.sender.cancel("small", "enough")
    assert log.wait() == ["failed aborted: enough", "end"]
    assert handler.wait() == ["failed aborted: enough", "released"]
    assert len(pair.hub.open_batches) == 2


def test_withdrawn_blocks_whose_pushes_do_not_end_in_time_end_their_transfer(pair: Pair) -> None:
    log, handler = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS, finish=False)
    submitted = list(pair.hub.open_batches)
    pair.prefill.sender.withdraw("big", 0.05)
    until(lambda: bool(log.calls), "it has failed")
    assert log.calls == ["failed preempted: a push is in flight"], "its own blocks are read still"
    for batch in submitted:
        pair.hub.land(batch)
    assert log.wait() == ["failed preempted: a push is in flight", "end"]
    assert handler.wait() == ["failed preempted: a push is in flight", "released"]


def test_withdrawn_blocks_take_what_waits_along_and_it_is_pushed_again_from_the_new_ones(pair: Pair) -> None:
    """Preemption waits for two pushes, not for all that other transfers go before."""
    sender, new = pair.prefill.sender, [0, 3, 4, 6, 10, 13]
    log, handler = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS, finish=False)
    submitted = list(pair.hub.open_batches)
    withdrawn = threading.Thread(target=sender.withdraw, args=("big", WAIT_S))
    withdrawn.start()
    until(lambda: waiting(pair) == 0, "the waiting pushes are dropped")
    for batch in submitted:
        pair.hub.land(batch)
    withdrawn.join(WAIT_S)
    assert pair.hub._num_submitted == 2
    pair.hub.hold = False
    pair.compute("big", new, BIG_TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]
    for layer in range(LAYERS):
        assert (pair.decode.rows(BIG_DST, 21, layer) == pair.prefill.rows(new, 21, layer)).all()


def test_metrics_tell_what_waits_and_for_how_long(pair: Pair) -> None:
    metrics = WorkerMetrics()
    metrics.before_reading(lambda: metrics.link.set(link_state(report.of(pair.prefill.endpoint), 0.0)))
    stop = listen(metrics.counting)
    log, handler = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    text = metrics.exposition()[0].decode()
    assert 'pdlink_push_bytes{state="waiting"} 3008.0' in text
    assert 'pdlink_push_bytes{state="in_flight"} 1024.0' in text
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert (handler.wait(), log.wait()) == (["ready 42", "released"], ["end"])
    stop()
    text = metrics.exposition()[0].decode()
    assert "pdlink_push_wait_seconds_count 9.0" in text
    assert "pdlink_transfer_exposed_seconds_count 1.0" in text
    assert 'pdlink_transfers_total{side="sender",state="done"} 1.0' in text


def test_lost_peer_takes_what_waits_for_it_along(pair: Pair) -> None:
    log, handler = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    also, _ = begin(pair, "small", SMALL, SMALL_DST, SMALL_TOKENS)
    pair.hub.fail_peer(pair.hub.open_batches[0].link, "reset")
    assert log.wait()[-1] == also.wait()[-1] == "end"
    assert handler.wait()[-1] == "released"
    assert pair.hub._num_submitted == 2
    assert pair.prefill.endpoint.sender.push_nbytes() == {"waiting": 0, "in_flight": 0}


def test_deadline_of_a_push_counts_from_when_it_is_handed_over(pair: Pair) -> None:
    _, handler = begin(pair, "big", BIG, BIG_DST, BIG_TOKENS)
    while pair.hub.open_batches:
        pair.hub.advance(1.0)  # eight pushes one after the other take longer than the 5 s that each may
        assert all(batch.deadline_s == batch.submitted_s + 5.0 for batch in pair.hub.open_batches)
        land_next(pair, pair.decode)
    assert handler.wait() == ["ready 42", "released"]


def test_stalled_peer_does_not_stop_another(pair: Pair) -> None:
    other = Node(pair.hub, "decode-2", layout(8), TIMEOUTS).open()
    try:
        begin(pair, "stalled", BIG, BIG_DST, BIG_TOKENS)
        assert len(batches_to(pair, pair.decode)) == 2
        _, handler = begin(pair, "moving", BIG, BIG_DST, BIG_TOKENS, decode=other)
        while batches := batches_to(pair, other):
            assert len(batches) == 2 or waiting(pair) == LAYERS * BIG_TOKENS * TOKEN_NBYTES - 1024
            land_next(pair, other)
        assert handler.wait() == ["ready 42", "released"]
        assert len(batches_to(pair, pair.decode)) == 2
    finally:
        pair.hub.hold = False
        pair.hub.deliver_all()
        other.close()


# -- layers that may go at the same moment ---------------------------------------------------------------------------


def offered_last(pair: Pair, name: str, dst: list[int], num_tokens: int) -> Handler:
    """Offer for what is written already; returns when as much of it as has room is handed over."""
    handler = pair.expect(name)
    pair.decode.receiver.offer(name, dst, 0, num_tokens)
    until(lambda: pair.sender_state("writing") > 0, "the offer is there")
    return handler


def flying_nbytes(pair: Pair) -> list[int]:
    return [batch.nbytes for batch in pair.hub.open_batches]


def test_32_small_layers_that_are_written_before_the_offer_go_in_one_native_call() -> None:
    pair = Pair(num_layers=32)
    pair.hub.hold = True
    try:
        log = pair.announce("t")
        pair.compute("t", SMALL, SMALL_TOKENS)
        handler = offered_last(pair, "t", SMALL_DST, SMALL_TOKENS)
        assert flying_nbytes(pair) == [32 * SMALL_TOKENS * TOKEN_NBYTES]
        pair.hub.step()
        assert not landed(pair, "t")
        pair.hub.deliver_all()
        assert handler.wait() == ["ready 42", "released"]
        assert log.wait() == ["end"]
        events = [event for event in pair.events if isinstance(event, LayerLanded)]
        assert [(event.layer, event.start, event.end) for event in events] == [
            (n, 0, SMALL_TOKENS) for n in range(32)
        ]
        assert {event.nbytes for event in events} == {SMALL_TOKENS * TOKEN_NBYTES}
        assert len({(event.asked_s, event.submitted_s, event.at_s) for event in events}) == 1
        for layer in range(32):
            assert (pair.decode.rows(SMALL_DST, 4, layer) == pair.prefill.rows(SMALL, 4, layer)).all()
    finally:
        pair.close()


def test_layers_share_no_more_than_a_push(pair: Pair) -> None:
    """Two layers of 256 bytes fill one of 512; the third goes alone."""
    pair.announce("t")
    pair.compute("t", SMALL, SMALL_TOKENS)
    handler = offered_last(pair, "t", SMALL_DST, SMALL_TOKENS)
    assert flying_nbytes(pair) == [512, 256]
    land_next(pair, pair.decode)
    assert landed(pair, "t") == [0, 1]
    land_next(pair, pair.decode)
    assert handler.wait() == ["ready 42", "released"]


def test_large_push_between_small_ones_is_cut(pair: Pair) -> None:
    pair.hub.hold = False
    log, sender = pair.announce("t"), pair.prefill.sender
    sender.publish("t", BIG, BIG_TOKENS, 0)
    for layer, end in ((0, 4), (1, BIG_TOKENS), (2, 4)):
        sender.layer_ready("t", layer, 0, end)
    submitted = pair.hub._num_submitted
    handler = offered_last(pair, "t", BIG_DST, BIG_TOKENS)
    until(lambda: sorted(landed(pair, "t")) == [0, 1, 1, 1, 2], "what was written has landed")
    assert pair.hub._num_submitted == submitted + 5
    for layer in (0, 2):
        sender.layer_ready("t", layer, 4, BIG_TOKENS)
    sender.finish("t", 42)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]
    events = [event for event in pair.events if isinstance(event, LayerLanded)]
    assert sorted((event.layer, event.start, event.end) for event in events) == [
        (0, 0, 4), (0, 4, 8), (0, 8, 16), (0, 16, BIG_TOKENS),
        (1, 0, 8), (1, 8, 16), (1, 16, BIG_TOKENS),
        (2, 0, 4), (2, 4, 8), (2, 8, 16), (2, 16, BIG_TOKENS),
    ]  # fmt: skip
    assert sum(event.nbytes for event in events) == LAYERS * BIG_TOKENS * TOKEN_NBYTES
    for layer in range(LAYERS):
        assert (pair.decode.rows(BIG_DST, 21, layer) == pair.prefill.rows(BIG, 21, layer)).all()


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("flies", [False, True])
def test_stop_takes_back_a_shared_push_that_waits_and_waits_for_one_that_flies(side: str, *, flies: bool) -> None:
    one = Sharing(window_nbytes=512, peer_window_nbytes=512, push_nbytes=512)
    pair = Pair(sharing=one, num_layers=5)
    pair.hub.hold = True
    try:
        if not flies:
            begin(pair, "other", SMALL, SMALL_DST, 2, finish=False)
        other = list(pair.hub.open_batches)
        log = pair.announce("t")
        pair.compute("t", BIG, SMALL_TOKENS)
        handler = pair.expect("t")
        pair.decode.receiver.offer("t", BIG_DST[:1], 0, SMALL_TOKENS)
        until(lambda: waiting(pair) > 0, "what has no room waits")
        assert waiting(pair) == (768 if flies else 1280)
        if side == "sender":
            pair.prefill.sender.cancel("t", "enough")
        else:
            pair.decode.receiver.cancel("t", "enough")
        until(lambda: waiting(pair) == 0, "the waiting pushes are dropped")
        if flies:
            assert not log.ended.is_set()
            assert flying_nbytes(pair) == [512]
            pair.hub.deliver_all()
        assert log.wait() == ["failed aborted: enough", "end"]
        assert handler.wait() == ["failed aborted: enough", "released"]
        assert list(pair.hub.open_batches) == other
        assert landed(pair, "t") == ([0, 1] if flies else [])
    finally:
        pair.close()


def test_withdrawn_blocks_wait_for_the_push_that_layers_share(pair: Pair) -> None:
    sender, new = pair.prefill.sender, [13]
    pair.announce("t")
    sender.publish("t", SMALL, SMALL_TOKENS, 0)
    for layer in range(2):
        sender.layer_ready("t", layer, 0, SMALL_TOKENS)
    handler = offered_last(pair, "t", SMALL_DST, SMALL_TOKENS)
    assert flying_nbytes(pair) == [512]
    withdrawn = threading.Thread(target=sender.withdraw, args=("t", WAIT_S))
    withdrawn.start()
    assert withdrawn.is_alive()
    pair.hub.hold = False
    pair.hub.deliver_all()
    withdrawn.join(WAIT_S)
    assert not withdrawn.is_alive()
    pair.compute("t", new, SMALL_TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert sorted(landed(pair, "t")) == [0, 0, 1, 1, 2]  # what has landed is pushed again


def test_refused_shared_push_ends_the_session_and_is_waited_for_until_the_fence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise TransportFailure("no route")

    log = pair.announce("t")
    pair.compute("t", SMALL, SMALL_TOKENS)
    handler = pair.expect("t")
    monkeypatch.setattr(pair.prefill.transport, "submit", refuse)
    pair.decode.receiver.offer("t", SMALL_DST, 0, SMALL_TOKENS)
    assert log.wait() == ["failed push_failed: refused: no route", "end"]
    assert handler.wait()[-1] == "released"
    until(pair.idle, "nothing is held")
    assert pair.prefill.endpoint.sender.push_nbytes() == {"waiting": 0, "in_flight": 0}
    monkeypatch.undo()
    pair.hub.hold = False
    until(lambda: pair.decode.endpoint.num_closing() == 0, "the old session is fenced")
    _, again = begin(pair, "again", SMALL, SMALL_DST, SMALL_TOKENS)
    assert again.wait() == ["ready 42", "released"]
