"""What the sender decides, one fact a test."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import paged_layout
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, End, Fail, Push, Send
from pdlink.protocol.sending import Sending, cut
from pdlink.protocol.states import SenderState
from pdlink.reasons import ABORTED, Code, Reason

LAYERS = 3
LAYOUT = paged_layout(
    dtype="u8", itemsize=1, num_layers=LAYERS, num_blocks=4, block_tokens=4, num_heads=1, head_dim=2
)
TOKEN_NBYTES = 12
LOST = Reason(Code.PUSH_FAILED, "timeout")


def sending() -> Sending:
    return Sending("t", KVGroups((LAYOUT,)))


def offer(start: int, end: int, num_layers: int = LAYERS) -> messages.Offer:
    return messages.Offer("t", start, end, (tuple(range(-(-end // 4) - start // 4)),), num_layers)


def pushes(actions: list[Action]) -> list[Push]:
    return [action for action in actions if isinstance(action, Push)]


def write_all(machine: Sending, tokens: int) -> list[Action]:
    return [action for layer in range(LAYERS) for action in machine.written(layer, 0, tokens)]


def test_layer_is_pushed_when_it_is_written_after_the_offer() -> None:
    machine = sending()
    machine.offer(offer(0, 8))
    machine.publish(((1, 2),), 8, 0)
    assert pushes(machine.written(0, 0, 8)) == [
        Push(0, range(1), 0, 8, 8 * TOKEN_NBYTES // LAYERS, (1, 2), offer(0, 8))
    ]


def test_layer_is_pushed_when_the_offer_comes_after_it_was_written() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    assert machine.written(0, 0, 8) == []
    assert pushes(machine.offer(offer(0, 8))) == [
        Push(0, range(1), 0, 8, 8 * TOKEN_NBYTES // LAYERS, (1, 2), offer(0, 8))
    ]


def test_chunks_of_a_layer_are_pushed_without_gap_or_overlap() -> None:
    """sglang#33970: every chunk but the last could be read while it was being written."""
    machine = sending()
    machine.publish(((1, 2, 3),), 12, 0)
    machine.written(0, 0, 5)
    first = pushes(machine.offer(offer(2, 12)))
    then = pushes(machine.written(0, 5, 9)) + pushes(machine.written(0, 9, 12))
    assert [(push.start, push.end) for push in first + then] == [(2, 5), (5, 9), (9, 12)]


def test_cached_prefix_is_pushed_at_once_for_all_layers() -> None:
    machine = sending()
    machine.offer(offer(0, 8))
    (push,) = pushes(machine.publish(((1, 2),), 8, 4))
    assert (push.layers, push.start, push.end, push.nbytes) == (range(LAYERS), 0, 4, 4 * TOKEN_NBYTES)


def test_layers_share_a_push_while_it_is_small_and_they_are_neighbours_with_the_same_positions() -> None:
    machine = Sending("t", KVGroups((LAYOUT,)), push_nbytes=64)
    machine.publish(((1, 2),), 8, 0)
    for layer in range(LAYERS):
        machine.written(layer, 0, 8)
    found = pushes(machine.offer(offer(0, 8)))
    assert [(push.layers, push.nbytes) for push in found] == [(range(2), 64), (range(2, 3), 32)]
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    for layer, end in enumerate((8, 4, 8)):
        machine.written(layer, 0, end)
    assert [push.layers for push in pushes(machine.offer(offer(0, 8)))] == [range(1), range(1, 2), range(2, 3)]


def test_large_push_is_cut_where_blocks_begin_on_both_sides() -> None:
    ours, theirs = (KVGroups((replace(LAYOUT, block_tokens=tokens),)) for tokens in (2, 4))
    machine = Sending("t", ours, push_nbytes=20)
    machine.publish((tuple(range(8)),), 16, 0)
    machine.offer(messages.Offer("t", 3, 16, ((0, 1, 2, 3),), LAYERS, per_layer=True), theirs)
    found = pushes(machine.written(0, 0, 16))
    assert [(push.layers, push.start, push.end, push.nbytes) for push in found] == [
        (range(1), 3, 8, 20),
        (range(1), 8, 16, 32),
    ]


def test_layer_is_announced_once_and_with_the_last_of_its_pushes() -> None:
    """Pushes land in any order, and the next chunk may be pushed before the last one has landed."""
    machine = Sending("t", KVGroups((LAYOUT,)), push_nbytes=16)
    machine.publish(((1, 2, 3),), 12, 0)
    machine.offer(msgspec.structs.replace(offer(0, 12), per_layer=True))
    first, second, third = pushes(machine.written(0, 0, 4) + machine.written(0, 4, 12))
    assert machine.landed(third.push_id) == []
    assert machine.landed(first.push_id) == []
    assert machine.landed(second.push_id) == [Send(messages.Landed("t", 0, 12, None))]


def test_layers_that_share_a_push_are_announced_together() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 8)
    (push,) = pushes(machine.offer(msgspec.structs.replace(offer(0, 8), per_layer=True)))
    assert machine.landed(push.push_id) == [Send(messages.Landed("t", layer, 8, None)) for layer in range(LAYERS)]


def test_done_is_said_only_when_every_push_has_landed_and_the_first_token_is_known() -> None:
    machine = sending()
    machine.offer(offer(2, 8))
    machine.publish(((1, 2),), 8, 0)
    ids = [push.push_id for push in pushes(write_all(machine, 8))]
    assert machine.finish(42) == []
    assert [machine.landed(ids[2]), machine.landed(ids[0])] == [[], []]
    assert machine.landed(ids[1]) == [Send(messages.Done("t", 2, 8, LAYERS, 6 * TOKEN_NBYTES, 42))]
    assert machine.state is SenderState.SENT
    assert machine.ack() == [End(None)]
    assert machine.ack() == []


def test_offer_of_nothing_still_completes() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    write_all(machine, 8)
    assert machine.finish(7) == []
    assert machine.offer(offer(8, 8)) == [Send(messages.Done("t", 8, 8, LAYERS, 0, 7))]


def test_prefill_that_skipped_a_layer_cannot_say_done() -> None:
    """vllm#31057: hooks skipped by a graph must not announce a complete transfer."""
    machine = sending()
    machine.offer(offer(0, 8))
    machine.publish(((1, 2),), 8, 0)
    for layer in (0, 2):
        for push in pushes(machine.written(layer, 0, 8)):
            machine.landed(push.push_id)
    reason = Reason(Code.NOT_WRITTEN, "prefill ended with 2 of 3 layers written")
    assert machine.finish(1) == [
        Send(messages.Stop.because("t", reason)),
        Fail(reason),
        Send(messages.Quiet("t")),
        End(reason),
    ]


def test_layer_written_twice_or_out_of_order_stops_the_transfer() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    machine.written(0, 0, 4)
    assert Fail(Reason(Code.NOT_WRITTEN, "layer 0 was written from token 0, expected 4")) in machine.written(0, 0, 4)


def test_offer_beyond_the_prompt_stops_the_transfer() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    assert Fail(Reason(Code.BAD_OFFER, "tokens [0, 9); the prompt here has 8")) in machine.offer(offer(0, 9))


def test_offer_for_another_number_of_layers_stops_the_transfer() -> None:
    reason = Reason(Code.BAD_OFFER, "4 layers; the model here has 3")
    assert Fail(reason) in sending().offer(offer(0, 8, num_layers=4))


def test_sender_is_quiet_only_after_its_last_push_has_ended() -> None:
    machine = sending()
    machine.offer(offer(0, 8))
    machine.publish(((1, 2),), 8, 0)
    first, second, third = pushes(write_all(machine, 8))
    assert machine.stop(ABORTED) == [Send(messages.Stop("t", "aborted")), Fail(ABORTED)]
    assert machine.landed(first.push_id) == []
    assert machine.landed(third.push_id) == []
    assert machine.landed(second.push_id) == [Send(messages.Quiet("t")), End(ABORTED)]


def test_nothing_is_pushed_after_a_stop() -> None:
    machine = sending()
    machine.offer(offer(0, 8))
    machine.publish(((1, 2),), 8, 0)
    machine.written(0, 0, 8)
    machine.stop(ABORTED)
    assert machine.written(1, 0, 8) == []


def test_lost_push_keeps_its_blocks_until_the_fence() -> None:
    machine = sending()
    machine.offer(offer(0, 8))
    machine.publish(((1, 2),), 8, 0)
    first, second, third = pushes(write_all(machine, 8))
    assert machine.lost(first.push_id, LOST) == [Send(messages.Stop("t", "push_failed: timeout")), Fail(LOST)]
    assert machine.landed(second.push_id) == []
    assert machine.landed(third.push_id) == []
    assert machine.state is SenderState.DRAINING
    assert machine.num_in_flight == 1
    assert machine.fenced() == [End(LOST)]
    assert machine.num_in_flight == 0
    assert machine.fenced() == []


def test_end_of_a_prefill_changes_nothing_once_all_was_said() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    write_all(machine, 8)
    machine.finish(7)
    machine.offer(offer(8, 8))
    assert machine.state is SenderState.SENT
    machine.withdraw()
    assert machine.finish(7) == []
    assert machine.ack() == [End(None)]


def test_news_after_the_end_changes_nothing() -> None:
    machine = sending()
    machine.stop(ABORTED)
    assert machine.state is SenderState.FAILED
    after = [
        machine.ack(),
        machine.stop(ABORTED),
        machine.fenced(),
        machine.offer(offer(0, 8)),
        machine.finish(1),
    ]
    assert after == [[], [], [], [], []]


def test_dropped_push_leaves_a_stopped_transfer_quiet() -> None:
    machine = sending()
    machine.publish(((1, 2),), 8, 0)
    machine.offer(offer(0, 8))
    machine.written(0, 0, 8)
    machine.written(1, 0, 8)
    machine.stop(ABORTED)
    assert machine.dropped(1) == []
    assert machine.landed(0) == [Send(messages.Quiet("t")), End(ABORTED)]
    assert machine.dropped(0) == []


@pytest.mark.parametrize("per_layer", [False, True])
def test_what_is_withdrawn_is_pushed_again_from_the_new_blocks_but_for_layers_that_were_told(per_layer: bool) -> None:
    """What landed last may have been read from blocks that others had got by then."""
    machine = sending()
    machine.publish(((1, 2, 3),), 12, 0)
    machine.offer(msgspec.structs.replace(offer(0, 12), per_layer=per_layer))
    machine.written(0, 0, 12)
    machine.written(1, 0, 4)
    told = machine.landed(0)
    machine.landed(1)
    assert bool(told) == per_layer
    assert machine.withdraw() == ({1, 2} if per_layer else {0, 1, 2})
    assert [(p.layers, p.start, p.end) for p in pushes(machine.publish(((7, 8, 9),), 12, 12))] == [
        (range(1 if per_layer else 0, 3), 0, 12)
    ]


def test_dropped_push_of_withdrawn_blocks_is_made_again_from_the_new_ones() -> None:
    machine = sending()
    machine.publish(((1, 2, 3),), 12, 0)
    machine.offer(offer(0, 12))
    machine.written(0, 0, 4)
    machine.landed(0)
    machine.written(0, 4, 8)
    machine.written(0, 8, 12)
    assert machine.dropped(1) == machine.dropped(2) == []
    machine.withdraw()
    assert [(p.layers, p.start, p.end) for p in pushes(machine.publish(((7, 8, 9),), 12, 12))] == [
        (range(3), 0, 12),
    ]


def test_stage_of_each_layer_says_whether_computing_or_the_link_is_late() -> None:
    machine = sending()
    assert machine.stages(()) == "..."
    machine.publish(((1, 2),), 8, 0)
    machine.written(0, 0, 8)
    machine.written(1, 0, 4)
    assert machine.stages(()) == "w..", "written, and nobody has offered blocks for it"
    (first, second) = pushes(machine.offer(offer(0, 8)))
    assert machine.stages({0}) == "fw.", "layer 1 waits for room on its transport"
    machine.landed(first.push_id)
    machine.landed(second.push_id)
    assert machine.stages(()) == "l..", "half of layer 1 is not computed yet"
    machine.written(1, 4, 8)
    assert machine.stages({1}) == "lf."


def test_several_tokens_to_a_position_are_pushed_when_the_last_of_them_is_written() -> None:
    """And what has landed of a layer is told in tokens."""
    machine = Sending("t", KVGroups((replace(LAYOUT, position_tokens=4),)))
    machine.offer(msgspec.structs.replace(offer(0, 4), end=14, per_layer=True))
    machine.publish(((1, 2),), 14, 0)
    first, then = machine.written(0, 0, 9), machine.written(0, 9, 14)
    assert [(push.start, push.end) for push in pushes(first + then)] == [(0, 2), (2, 4)]
    assert machine.landed(0) == []
    assert machine.landed(1) == [Send(messages.Landed("t", 0, 14, None))]


def test_a_window_begins_where_the_receivers_blocks_do() -> None:
    """The receiver's prefix cache shares whole blocks, so the first one of a window is filled from its beginning."""
    ours, theirs = (KVGroups((replace(LAYOUT, window=3, window_step=step),)) for step in (8, 4))
    machine = Sending("t", ours)
    machine.offer(messages.Offer("t", 0, 16, ((7,),), LAYERS), theirs)
    begun = pushes(machine.publish(((0, 0, 5, 6),), 16, 16))
    assert {(push.start, push.end, push.first) for push in begun} == {(12, 16, 12)}
    assert machine.nbytes == 4 * TOKEN_NBYTES == theirs.nbytes_of(theirs.needed(0, 16))


def test_a_window_that_the_sender_may_have_given_up_is_not_sent() -> None:
    ours, theirs = (KVGroups((replace(LAYOUT, window=3, window_step=step),)) for step in (4, 8))
    machine = Sending("t", ours)
    actions = machine.offer(messages.Offer("t", 0, 16, ((7, 8),), LAYERS), theirs)
    assert actions[0] == Send(messages.Stop("t", "window_blocks"))
    assert machine.state is SenderState.FAILED


@given(
    start=st.integers(0, 5000),
    length=st.integers(1, 5000),
    token_nbytes=st.integers(1, 5000),
    block=st.sampled_from([1, 4, 16, 48, 128]),
    most_nbytes=st.integers(1, 1 << 20),
)
def test_ranges_of_a_cut_push_cover_it_and_begin_with_blocks(
    start: int, length: int, token_nbytes: int, block: int, most_nbytes: int
) -> None:
    ranges = cut(start, start + length, token_nbytes, block, most_nbytes)
    assert (ranges[0][0], ranges[-1][1]) == (start, start + length)
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))
    assert all(low < high for low, high in ranges)
    assert all(low % block == 0 for low, _ in ranges[1:])
    assert all((high - low) * token_nbytes < most_nbytes + block * token_nbytes for low, high in ranges)
    assert len(ranges) <= -(-length * token_nbytes // most_nbytes) + 1
