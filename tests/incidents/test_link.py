"""What went wrong between two workers elsewhere, played between two endpoints here. `docs/incidents.md` has the list.

Each test is named after the fact it holds and carries the thread that reported the opposite.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pdlink.protocol import messages
from pdlink.protocol.deadlines import Deadlines
from tests.attacks.stranger import Stranger
from tests.endpoint.conftest import TIMEOUTS, Handler, Node, Pair, layout
from tests.waiting import WAIT_S, until

TOKENS = 13
SRC = [3, 0, 9, 4]
DST = [5, 1]


def begin(pair: Pair, transfer_id: str, dst: list[int] | None = None, start: int = 0) -> Handler:
    handler = pair.expect(transfer_id)
    pair.decode.receiver.offer(transfer_id, DST if dst is None else dst, start, TOKENS)
    return handler


def transfer(pair: Pair, transfer_id: str) -> list[str]:
    return pair.transfer(transfer_id, SRC, DST, TOKENS)


def in_flight(pair: Pair, transfer_id: str) -> Handler:
    """A transfer whose three layers are on their way and do not arrive."""
    return pair.fly(transfer_id, SRC, DST, TOKENS)[1]


def same_bytes(pair: Pair, dst: list[int], num_tokens: int = TOKENS) -> bool:
    return all(
        (pair.decode.rows(dst, num_tokens, layer) == pair.prefill.rows(SRC, num_tokens, layer)).all()
        for layer in range(3)
    )


# -- leaks -----------------------------------------------------------------------------------------------------------


def test_two_thousand_transfers_leave_no_descriptor_thread_or_entry(pair: Pair) -> None:
    """nixl#1722, sglang#21078: handles and files per transfer; one link died after 92,700 of them."""

    def holdings() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for number in range(20):
        transfer(pair, f"warm-{number}")
    gc.collect()  # what earlier tests left may still go; nothing here may grow
    before = holdings()
    for number in range(2000):
        assert transfer(pair, f"t-{number}") == ["ready 42", "released"]
    until(pair.idle, "nothing is held")
    assert all(now <= then for now, then in zip(holdings(), before, strict=True)), (before, holdings())
    (peer,) = pair.prefill.endpoint.peers()
    assert not peer.outbox


def test_everything_of_a_dead_peer_is_dropped_although_nobody_takes_its_place(pair: Pair) -> None:
    """vllm#58063: mappings of a dead prefill were kept until a new one shook hands, which it could not."""
    handler = in_flight(pair, "t")
    pair.prefill.close()
    assert handler.wait()[-1] == "released"
    until(lambda: not pair.decode.endpoint.peers(), "the session is gone")
    until(lambda: pair.decode.endpoint.num_closing() == 0, "and its data connection")
    pair.hub.hold = False
    pair.prefill = Node(pair.hub, "prefill", layout(4), TIMEOUTS).open()


def test_receiver_that_dies_before_the_first_write_leaves_no_block_held(pair: Pair) -> None:
    """vllm#46283: held for a signal that only the other side could give. Here from decode's side, prefill dies."""
    for round_number in range(3):
        handler = begin(pair, f"t-{round_number}")
        until(lambda: pair.sender_state("early") == 1, "the offer is there")
        pair.prefill.close()
        assert handler.wait()[-1] == "released"
        pair.prefill = Node(pair.hub, "prefill", layout(4), TIMEOUTS).open()
        random = np.random.default_rng(7)
        pair.prefill.buffer.array[:] = random.integers(0, 256, pair.prefill.buffer.nbytes, np.uint8)
    assert transfer(pair, "after") == ["ready 42", "released"]


# -- deadlock --------------------------------------------------------------------------------------------------------


def test_peer_that_is_stopped_with_full_queues_does_not_hold_up_the_end(pair: Pair) -> None:
    """rtx6kpro#48, lmcache#5088: a blocking send, or LINGER, kept the process for ever."""
    assert transfer(pair, "t") == ["ready 42", "released"]
    (peer,) = pair.decode.endpoint.peers()
    with pair.prefill.endpoint.lock:  # its loop stands still and reads nothing
        for number in range(10_500):
            with pair.decode.endpoint.lock:
                pair.decode.endpoint.sessions.send(peer, messages.Ack(f"unknown-{number}"))
        started_s = time.monotonic()
        pair.decode.endpoint.close()
        assert time.monotonic() - started_s < WAIT_S / 2, "two seconds for the fences, on a busy machine"
    pair.decode = Node(pair.hub, "decode", layout(8), TIMEOUTS).open()


def test_receiver_that_is_slow_to_offer_does_not_delay_another(pair: Pair) -> None:
    """vllm#12723: prefill stood still because one decode did not take its KV yet."""
    slow = pair.expect("slow")
    log = pair.announce("slow")
    pair.compute("slow", SRC, TOKENS)
    for number in range(20):
        assert transfer(pair, f"t-{number}") == ["ready 42", "released"]
    assert (slow.calls, log.calls) == ([], [])
    pair.decode.receiver.offer("slow", DST, 0, TOKENS)
    assert slow.wait() == ["ready 42", "released"]


# -- stale and foreign KV --------------------------------------------------------------------------------------------


def test_blocks_of_an_aborted_transfer_are_given_back_only_when_its_write_has_ended(pair: Pair) -> None:
    """sglang#32564: pages of an aborted request were given to the next one while its write was under way."""
    handler = in_flight(pair, "a")
    pair.decode.receiver.cancel("a", "client left")
    until(lambda: "failed aborted: client left" in handler.calls, "the request is over")
    for batch in list(pair.hub.open_batches)[:2]:
        pair.hub.land(batch)
        assert handler.calls == ["failed aborted: client left"], "a third write may still come"
    pair.hub.deliver_all()
    assert handler.wait() == ["failed aborted: client left", "released"]
    pair.hub.hold = False
    assert transfer(pair, "b") == ["ready 42", "released"]
    assert same_bytes(pair, DST)


def reference_nobody_knows(pair: Pair) -> None:
    """No request ever comes for this id."""


def reference_used_before(pair: Pair) -> None:
    assert transfer(pair, "t2") == ["ready 42", "released"]
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Offer("t2", 0, TOKENS, ((5, 1),), 3))
        # Which of the two depends on whether the transfer is forgotten by then.
        assert stranger.hear(messages.Stop).reason in ("already_sent", "taken_by_another_receiver")


def reference_out_of_range(pair: Pair) -> None:
    pair.announce("wide")
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Offer("wide", 0, TOKENS, ((5, 32),), 3))
        assert "outside" in stranger.hear(messages.Stop).reason


@pytest.mark.parametrize("ask", [reference_nobody_knows, reference_used_before, reference_out_of_range])
def test_kv_that_is_not_there_is_an_error_and_never_somebody_elses(ask: Callable[[Pair], None]) -> None:
    """vllm#52234: each of these was answered 200, one of them with the previous prompt's answer."""
    pair = Pair(replace(TIMEOUTS, other_leg_s=0.3))
    try:
        ask(pair)
        before = pair.decode.buffer.array.copy()
        handler = begin(pair, "unknown")
        assert handler.wait() == ["failed no_request", "released"]
        assert (pair.decode.buffer.array == before).all(), "not a byte was written"
    finally:
        pair.close()


def test_offer_that_comes_after_the_lease_gets_nothing_of_what_the_blocks_hold_by_then() -> None:
    """aws-do-eks#84: decode queued longer than the lease, and 8 of 42 answers were made of reused blocks."""
    pair = Pair(replace(TIMEOUTS, other_leg_s=0.3))
    try:
        log = pair.announce("late")
        pair.compute("late", SRC, TOKENS)
        assert log.wait() == ["failed no_receiver", "end"]
        pair.prefill.buffer.array[:] = 0xEE  # somebody else has the blocks now
        handler = begin(pair, "late")
        assert handler.wait() == ["failed no_receiver", "released"]
        assert not (pair.decode.buffer.array == 0xEE).any()
    finally:
        pair.close()


def test_first_tokens_of_concurrent_transfers_stay_with_their_transfer(pair: Pair) -> None:
    """sglang#17259: a shared slot for first tokens, reused, gave one request's token to another."""
    handlers = {}
    for number in range(16):
        pair.announce(f"t-{number}")
        handlers[number] = begin(pair, f"t-{number}", [2 * number, 2 * number + 1])
    for number in reversed(range(16)):
        pair.compute(f"t-{number}", SRC, TOKENS, first_token=1000 + number)
    assert {number: handler.wait() for number, handler in handlers.items()} == {
        number: [f"ready {1000 + number}", "released"] for number in range(16)
    }


def test_prefill_that_was_refused_cannot_signal_success(pair: Pair) -> None:
    """sglang#30233: a prompt that prefill aborted still went to decode, with the KV of one token."""
    log, handler = pair.begin("t", DST, TOKENS)
    sender = pair.prefill.sender
    sender.publish("t", SRC, TOKENS, 0)
    sender.cancel("t", "capacity_exceeded")
    sender.finish("t", 42)
    assert handler.wait() == ["failed aborted: capacity_exceeded", "released"]
    assert log.wait() == ["failed aborted: capacity_exceeded", "end"]


def test_prefill_that_loses_its_blocks_after_the_last_layer_says_so(pair: Pair) -> None:
    """vllm#48141: preempted between the last layer and the end, prefill sent nothing and said nothing."""
    pair.announce("t")
    handler = begin(pair, "t")
    sender = pair.prefill.sender
    sender.publish("t", SRC, TOKENS, 0)
    for layer in range(3):
        sender.layer_ready("t", layer, 0, TOKENS)
    sender.cancel("t", "preempted")
    assert handler.wait() == ["failed aborted: preempted", "released"]


# -- hangs -----------------------------------------------------------------------------------------------------------


def test_lost_ack_costs_one_lease_and_nothing_else() -> None:
    """mori#655: one lost ack wedged a peer for good."""
    pair = Pair(replace(TIMEOUTS, peer_s=1.0, lease_s=1.5))
    try:
        with Stranger(pair).join() as stranger:
            log = pair.announce("t")
            stranger.say(messages.Offer("t", 0, TOKENS, ((5, 1),), 3))
            pair.compute("t", SRC, TOKENS)
            assert stranger.hear(messages.Done).first_token == 42
            assert log.wait()[-1] == "end"
            assert transfer(pair, "next") == ["ready 42", "released"]
    finally:
        pair.close()


def test_death_of_one_prefill_is_none_of_the_others_business(pair: Pair) -> None:
    """sglang#13657: one dead prefill made healthy decodes fail their health checks."""
    other = Node(pair.hub, "other", layout(4), TIMEOUTS).open()
    doomed = in_flight(pair, "doomed")
    handler = Handler()
    pair.decode.receiver.expect("well", other.endpoint.address, handler)
    pair.decode.receiver.offer("well", [7, 8], 0, TOKENS)
    other.sender.announce("well", lambda reason: None, lambda: None)
    pair.prefill.close()
    assert doomed.wait()[-1] == "released"
    pair.hub.hold = False
    sender = other.sender
    sender.publish("well", SRC, TOKENS, 0)
    for layer in range(3):
        sender.layer_ready("well", layer, 0, TOKENS)
    sender.finish("well", 7)
    assert handler.wait() == ["ready 7", "released"]
    assert pair.decode.endpoint.failure == ""
    pair.prefill = other


# -- abort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["before publish", "after a layer", "with the end", "after the end"])
def test_abort_at_any_moment_ends_each_side_once(pair: Pair, who: str, when: str) -> None:
    """vllm#25067, vllm#53079: an abort in the tick of the end, and a second end, took the engine down."""
    log = pair.announce("t")
    handler = begin(pair, "t")
    sender = pair.prefill.sender

    def abort() -> None:
        if who == "prefill":
            sender.cancel("t", "abort")
        else:
            pair.decode.receiver.cancel("t", "abort")

    if when == "before publish":
        abort()
    sender.publish("t", SRC, TOKENS, 0)
    sender.layer_ready("t", 0, 0, TOKENS)
    if when == "after a layer":
        abort()
    for layer in (1, 2):
        sender.layer_ready("t", layer, 0, TOKENS)
    sender.finish("t", 42)
    if when == "with the end":
        abort()
    ended = (handler.wait(), log.wait())
    abort()
    until(pair.idle, "nothing is held")
    assert transfer(pair, "next") == ["ready 42", "released"]  # so that news of a second end would have come
    for calls, last in zip(ended, ("released", "end"), strict=True):
        assert calls.count(last) == 1
        assert calls[-1] == last
        assert len(calls) <= 2
    if when == "after the end":
        assert ended == (["ready 42", "released"], ["end"])


# -- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "dst"), [(0, [5, 1]), (1, [5, 1]), (7, [5, 1]), (8, [1]), (12, [1]), (13, [])])
def test_tokens_are_paired_by_position_whatever_decode_has_already(pair: Pair, cached: int, dst: list[int]) -> None:
    """vllm#50558, ascend#13474: blocks were paired by count, so one block more or less meant other tokens' KV."""
    pair.decode.buffer.array[:] = 0x55
    pair.announce("t")
    handler = begin(pair, "t", dst, cached)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    for layer in range(3):
        want = pair.prefill.rows(SRC, TOKENS, layer)
        got = pair.decode.rows(DST, TOKENS, layer)
        assert (got[:, cached:] == want[:, cached:]).all()
        assert (got[:, :cached] == 0x55).all(), "what decode has is not touched"


# -- restarts --------------------------------------------------------------------------------------------------------


def test_restart_between_two_heartbeats_is_noticed() -> None:
    """lmcache#4642: a server that came back before the next heartbeat was taken for the old one."""
    slow = Deadlines(
        heartbeat_s=2 * WAIT_S, peer_s=5 * WAIT_S, connect_s=WAIT_S, lease_s=6 * WAIT_S, request_s=7 * WAIT_S
    )
    pair = Pair(slow)
    try:
        assert transfer(pair, "t") == ["ready 42", "released"]
        old, port = pair.prefill.endpoint.epoch, pair.prefill.port
        pair.prefill.close()
        pair.prefill = Node(pair.hub, "prefill", layout(4), slow).open(port)
        until(lambda: not pair.decode.endpoint.peers(), "the old life is gone")
        assert transfer(pair, "u") == ["ready 42", "released"]
        assert [peer.epoch for peer in pair.decode.endpoint.peers()] == [pair.prefill.endpoint.epoch] != [old]
    finally:
        pair.close()


def test_eight_workers_that_start_at_once_get_ports_of_their_own(pair: Pair) -> None:
    """vllm#44061, sglang#13066: ports were computed, or found free, and bound by somebody else meanwhile."""
    nodes = [Node(pair.hub, f"node-{number}", layout(4), TIMEOUTS) for number in range(8)]
    threads = [threading.Thread(target=node.open) for node in nodes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len({node.port for node in nodes}) == 8
    finally:
        for node in nodes:
            node.close()
