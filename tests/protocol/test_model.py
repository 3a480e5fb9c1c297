"""Both machines of one transfer under random schedules, over a pretend wire and a pretend transport.

A schedule is a list of numbers; each picks one of the moves that are possible at that moment: the engine writes a
chunk, a message arrives, a push lands or is lost, either side stops, time passes, one side finds the session cut
(messages vanish, bytes in flight do not; the other side learns of it later), the fence closes. After every move, and
after everything has come to rest:
  - the receiver's blocks are given back only when no byte of the transfer can still be written;
  - a delivered request has every byte of every layer of the range it asked for, as far as the layer's group keeps it;
  - a push reads only what is in its blocks: the tokens that a window has not left behind, the state at the end;
  - the sender's blocks are given back only when nothing reads them;
  - each side ends exactly once, and always.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.protocol import messages
from pdlink.protocol.actions import Action, Deliver, End, Fail, FencePeer, Push, Send
from pdlink.protocol.receiving import Receiving
from pdlink.protocol.sending import Sending
from pdlink.protocol.states import RECEIVER_ENDS, SENDER_ENDS, SenderState
from pdlink.reasons import ABORTED, Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 9
PUSH_NBYTES = 6
"""Three positions of a layer, which has two bytes at each, are a push."""
QUIET_S = 3.0


def _group(num_layers: int, **kind: Any) -> KVLayout:
    layout = paged_layout(
        dtype="u8", itemsize=1, num_layers=num_layers, num_blocks=9, block_tokens=4, num_heads=1, head_dim=1
    )
    layers = tuple(replace(layer, token_stride=0) for layer in layout.layers) if kind.get("state") else layout.layers
    return replace(layout, layers=layers, **kind)


ONE = KVGroups((_group(2),))
MIXED = KVGroups(
    (
        _group(1),
        _group(1, window=3, window_step=2),
        _group(1, state=True),
        _group(1, position_tokens=2),
        _group(1, window=3, window_step=2, position_tokens=2),
    )
)


class World:
    """One sender, one receiver, two ordered channels, and writes in flight."""

    def __init__(self, start: int, cached: int, groups: KVGroups = ONE, sending: type[Sending] = Sending) -> None:
        self.groups, self.num_layers = groups, groups.num_layers
        self.sender = sending("t", groups, PUSH_NBYTES)
        self.receiver = Receiving("t", groups, quiet_s=QUIET_S)
        self.start, self.cached = start, cached
        self.to_receiver: deque[messages.Body] = deque()
        self.to_sender: deque[messages.Body] = deque()
        self.connected, self.sender_knows, self.receiver_knows, self.fenced = True, False, False, False
        self.in_flight: dict[int, Push] = {}
        self.lost: set[int] = set()
        self.landed: set[tuple[int, int]] = set()
        self.written = [cached] * self.num_layers
        self.published = self.finished = self.sender_freed = self.receiver_freed = self.delivered = False
        self.failures = 0
        self.now = 0.0

    # -- the driver's part -------------------------------------------------------------------------------------------

    def run_sender(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(body=body):
                    if self.connected:
                        self.to_receiver.append(body)
                case Push() as push if self.fenced:
                    self.run_sender(self.sender.lost(push.push_id, Reason(Code.PUSH_FAILED)))
                    self.cut_sender()
                case Push() as push:
                    end = push.end * self.groups.layouts[push.group].position_tokens
                    written = min(self.written[layer] for layer in push.layers)
                    assert min(end, TOKENS) <= written, "a push read what is not written"
                    self.in_flight[push.push_id] = push
                case End():
                    assert not self.sender_freed, "sender ended twice"
                    assert self.fenced or not self.in_flight, "source freed under a push"
                    self.sender_freed = True
                case Fail():
                    pass

    def run_receiver(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(body=body):
                    if self.connected:
                        self.to_sender.append(body)
                case Deliver():
                    ranges = self.groups.needed(self.start, TOKENS)
                    wanted = {
                        (layer, token)
                        for layer, group in enumerate(self.groups.group_of)
                        for token in range(*ranges[group])
                    }
                    assert wanted <= self.landed, "delivered without all bytes"
                    self.delivered = True
                case Fail():
                    self.failures += 1
                case FencePeer():
                    self.cut_receiver()
                case End():
                    assert not self.receiver_freed, "receiver ended twice"
                    assert self.fenced or not self.in_flight, "offered blocks freed under a write in flight"
                    self.receiver_freed = True

    # -- moves -------------------------------------------------------------------------------------------------------

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self.tick]
        if not self.published:
            moves.append(self.publish)
        elif not self.finished:
            layer = min(range(self.num_layers), key=lambda index: (self.written[index], index))
            moves += [lambda step=step: self.write(layer, step) for step in (3, 4, TOKENS, TOKENS)]  # type: ignore[misc]
        if self.receiver.offered is None and self.connected:
            moves += [self.offer, self.offer]
        if self.to_receiver:
            moves += [self.receive, self.receive]
        if self.to_sender:
            moves += [self.deliver_to_sender, self.deliver_to_sender]
        for push_id in self.in_flight:
            moves.append(lambda push_id=push_id: self.land(push_id))  # type: ignore[misc]
        if self.in_flight:
            moves.append(lambda: self.lose(next(iter(self.in_flight))))
        if not self.sender_knows:
            moves.append(self.cut_sender)
        if not self.receiver_knows:
            moves.append(self.cut_receiver)
        elif not self.fenced:
            moves.append(self.fence)
        moves.append(lambda: self.run_sender(self.sender.stop(ABORTED)))
        moves.append(lambda: self.run_receiver(self.receiver.stop(ABORTED, self.now)))
        return moves

    def publish(self) -> None:
        self.published = True
        tables = tuple((0, 1, 2) for _ in self.groups.layouts)
        self.run_sender(self.sender.publish(tables, TOKENS, self.cached))

    def write(self, layer: int, step: int) -> None:
        start, end = self.written[layer], min(TOKENS, self.written[layer] + step)
        self.written[layer] = end
        if start < end:
            self.run_sender(self.sender.written(layer, start, end))
        if min(self.written) == TOKENS:
            self.finished = True
            self.run_sender(self.sender.finish(7))

    def offer(self) -> None:
        tables = self.groups.part(tuple((4, 5, 6) for _ in self.groups.layouts), self.start, TOKENS)
        self.run_receiver(self.receiver.offer(tables, self.start, TOKENS))

    def receive(self) -> None:
        body = self.to_receiver.popleft()
        match body:
            case messages.Done():
                self.run_receiver(self.receiver.done(body, self.now))
            case messages.Stop(reason=reason):
                self.run_receiver(self.receiver.stopped(Reason.of(reason), self.now))
            case messages.Quiet():
                self.run_receiver(self.receiver.quiet())

    def deliver_to_sender(self) -> None:
        body = self.to_sender.popleft()
        match body:
            case messages.Offer():
                self.run_sender(self.sender.offer(body))
            case messages.Stop(reason=reason):
                self.run_sender(self.sender.stop(Reason.of(reason)))
            case messages.Ack():
                self.run_sender(self.sender.ack())

    def land(self, push_id: int) -> None:
        push = self.in_flight.pop(push_id)
        for layer in push.layers:
            kept = self.groups.layouts[push.group].needed(0, self.written[layer])[0]
            assert push.start >= kept, "a push read what a window or a state has left behind"
            self.landed |= {(layer, token) for token in range(push.start, push.end)}
        if push_id not in self.lost:
            self.run_sender(self.sender.landed(push_id))

    def lose(self, push_id: int) -> None:
        """The transport reports an error: its bytes may still land later, so it stays in flight here."""
        if push_id not in self.lost and not self.fenced:
            self.lost.add(push_id)
            self.run_sender(self.sender.lost(push_id, Reason(Code.PUSH_FAILED)))
            self.cut_sender()

    def hang_up(self) -> None:
        self.connected = False
        self.to_receiver.clear()
        self.to_sender.clear()

    def cut_sender(self) -> None:
        if not self.sender_knows:
            self.sender_knows = True
            self.hang_up()
            self.run_sender(self.sender.stop(ABORTED))
            if self.fenced:
                self.run_sender(self.sender.fenced())

    def cut_receiver(self) -> None:
        if not self.receiver_knows:
            self.receiver_knows = True
            self.hang_up()
            self.run_receiver(self.receiver.stopped(Reason(Code.PEER_LOST), self.now))

    def fence(self) -> None:
        """The receiver has closed the data connection: nothing in flight lands any more, the sender sees errors."""
        self.fenced = True
        broken, self.in_flight = self.in_flight, {}
        self.run_receiver(self.receiver.fenced(self.now))
        for push_id in broken.keys() - self.lost:
            self.run_sender(self.sender.lost(push_id, Reason(Code.PUSH_FAILED)))
        if broken:
            self.cut_sender()
        if self.sender_knows:
            self.run_sender(self.sender.fenced())

    def tick(self) -> None:
        self.now += QUIET_S
        self.run_receiver(self.receiver.tick(self.now))

    # -- to the end --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything that is under way arrives; then the leases run out (the driver's part) and the session ends."""
        for _ in range(100):
            if self.to_sender:
                self.deliver_to_sender()
            elif self.to_receiver:
                self.receive()
            elif self.in_flight and not self.fenced and (free := self.in_flight.keys() - self.lost):
                self.land(min(free))
            else:
                break
        if self.sender.state not in SENDER_ENDS or self.receiver.state not in RECEIVER_ENDS:
            self.run_sender(self.sender.stop(ABORTED))
            self.run_receiver(self.receiver.stop(ABORTED, self.now))
            self.cut_sender()
            self.cut_receiver()
            if not self.fenced:
                self.fence()
        assert self.sender.state in SENDER_ENDS
        assert self.receiver.state in RECEIVER_ENDS
        assert self.sender_freed
        assert self.receiver_freed
        assert self.delivered == (self.failures == 0)


def play(world: World, schedule: list[int]) -> None:
    for number in schedule:
        moves = world.moves()
        moves[number % len(moves)]()
    world.settle()


SCHEDULES = st.lists(st.integers(0, 10_000), max_size=40)
RANGES = st.sampled_from([(0, 0), (0, 4), (4, 0), (8, 8), (TOKENS, 4)])


@settings(max_examples=1500, deadline=None)
@given(SCHEDULES, RANGES, st.sampled_from([ONE, MIXED]))
def test_no_schedule_frees_blocks_under_a_write_or_delivers_less_than_all(
    schedule: list[int], ranges: tuple[int, int], groups: KVGroups
) -> None:
    play(World(*ranges, groups), schedule)


@pytest.mark.parametrize("groups", [ONE, MIXED], ids=["one group", "several groups"])
def test_undisturbed_transfer_is_delivered(groups: KVGroups) -> None:
    world = World(0, 0, groups)
    world.publish()
    world.offer()
    world.deliver_to_sender()
    while not world.finished:
        world.write(min(range(world.num_layers), key=world.written.__getitem__), 4)
    world.settle()
    assert world.delivered
    assert world.sender.state is SenderState.DONE


class _QuietAtStop(Sending):
    """Planted bug: says quiet at stop, with pushes still in flight."""

    def _quiet(self) -> list[Action]:
        self._in_flight.clear()
        return super()._quiet()

    def landed(self, push_id: int) -> list[Action]:
        return super().landed(push_id) if push_id in self._in_flight else []


class _DoneWhenPushed(Sending):
    """Planted bug: says done when the last push was posted, not when it landed."""

    def _push_ready(self, layers: object) -> list[Action]:
        actions = super()._push_ready(layers)  # type: ignore[arg-type]
        self._in_flight.clear()
        return actions

    def landed(self, push_id: int) -> list[Action]:
        return []


class _LostIsQuiet(Sending):
    """Planted bug: treats a push that failed as one that has ended."""

    def lost(self, push_id: int, reason: Reason) -> list[Action]:
        self._in_flight.pop(push_id, None)
        return super().stop(reason)

    def landed(self, push_id: int) -> list[Action]:
        return super().landed(push_id) if push_id in self._in_flight else []


class _AllOfEveryGroup(Sending):
    """Planted bug: pushes the offered tokens of every group, also those that a window has left behind."""

    def offer(self, offer: messages.Offer, theirs: KVGroups | None = None) -> list[Action]:
        actions = super().offer(offer, theirs)
        self._pushed = [min(offer.start, first) for first in self._pushed]
        return actions


class _EveryPositionBegun(Sending):
    """Planted bug: pushes a position when the first of its tokens is written."""

    def _push_ready(self, layers: object) -> list[Action]:
        written = self._written
        self._written = [token + token % 2 for token in written]
        actions = super()._push_ready(layers)  # type: ignore[arg-type]
        self._written = written
        return actions


class _StateWithEveryChunk(Sending):
    """Planted bug: pushes a state when it is written first, which may be before the last chunk."""

    def _push_ready(self, layers: object) -> list[Action]:
        for layer, group in enumerate(self._groups.group_of):
            if self._groups.layouts[group].state and self.offered is not None and self._written[layer]:
                self._pushed[layer] = min(self._pushed[layer], self._written[layer] - 1)
        return super()._push_ready(layers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mutant",
    [_QuietAtStop, _DoneWhenPushed, _LostIsQuiet, _AllOfEveryGroup, _EveryPositionBegun, _StateWithEveryChunk],
)
def test_model_catches_planted_bugs(mutant: type[Sending]) -> None:
    """A search ends at its first find, after 500 schedules in the mean: so many that none goes by unseen."""

    @settings(max_examples=20_000, deadline=None, database=None, phases=[Phase.generate])
    @given(SCHEDULES, RANGES)
    def search(schedule: list[int], ranges: tuple[int, int]) -> None:
        play(World(*ranges, MIXED, sending=mutant), schedule)

    with pytest.raises(AssertionError):
        search()
