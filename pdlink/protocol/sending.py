"""The sender's decisions about one transfer: what to push when, and when its blocks are free.

A push needs two things: the layer is written here, and the receiver has offered the tokens. The second of the two
triggers the push. A layer is written front to back, possibly in chunks, so one position per layer is its whole state.

A push is what the transport gets in one call. Each call costs a wake-up of the other side, so layers that may go at
the same moment share one while it is small; and a transport serves calls in order, so large ones are cut.

Groups of layers differ in the part of the offered tokens that is pushed (`KVLayout.needed`), and in their blocks. The
part of a recurrent state is the last token, so the state is pushed once, when it is that of the whole prompt. Where
several tokens make a position, it is pushed when the last of them is written, or the last one offered.

No I/O, no clock: every method returns actions for the driver.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from pdlink.protocol import messages
from pdlink.protocol.actions import Action, End, Fail, Push, Send
from pdlink.protocol.states import SENDER, SENDER_ENDS, SenderEvent, SenderState
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from pdlink.kv.groups import BlocksByGroup, KVGroups


SHARED_NBYTES = 2**20
"""Size limit of a push that several layers share. Moving as many bytes takes 0.1 ms or more; handing over a push
takes up to 0.05 ms (measured, 2 cores)."""

PUSH_NBYTES = 4 * 2**20
"""Larger pushes are cut, unless said otherwise."""


class Sending:
    """State of one transfer on the sender.

    Driven by this worker (`publish`, `extend`, `withdraw`, `written`, `finish`, `stop`), the peer's messages
    (`offer`, `ack`, `stop`) and the transport (`landed`, `dropped`, `lost`, `fenced`).
    """

    def __init__(self, transfer_id: str, groups: KVGroups, push_nbytes: int = PUSH_NBYTES) -> None:
        """push_nbytes: pushes of more are cut, between blocks, into pushes of about this size."""
        self.transfer_id = transfer_id
        self.state = SenderState.WAITING
        self.reason: Reason | None = None
        self.blocks: BlocksByGroup | None = None
        """Source blocks by group, from token 0 on; None until `publish`."""
        self.offered: messages.Offer | None = None
        self.num_tokens = 0
        self.nbytes = 0
        """Of all that the receiver needs; 0 before the offer."""
        self._groups, self._group_of = groups, groups.group_of
        self._num_layers = groups.num_layers
        self._push_nbytes, self._shared_nbytes = push_nbytes, min(push_nbytes, SHARED_NBYTES)
        self._needed: tuple[tuple[int, int], ...] = ()
        """Per group: offered positions [first, last) that the receiver needs; empty before the offer."""
        self._block_tokens: tuple[int, ...] = ()
        """Per group: where blocks begin on both sides; empty before the offer."""
        self._written = [0] * self._num_layers
        """Per layer: tokens [0, n) are in the source blocks."""
        self._pushed: list[int] = []
        """Per layer: of the positions that are needed, those before n have been handed to the transport. Empty before
        the offer."""
        self._in_flight: dict[int, Push] = {}
        self._flying = [0] * self._num_layers
        """Per layer: pushes in flight that have some of it."""
        self._next_push_id = 0
        self._first_token: int | None = None

    # -- this worker -------------------------------------------------------------------------------------------------

    def publish(self, blocks: BlocksByGroup, num_tokens: int, num_cached_tokens: int) -> list[Action]:
        """The blocks are reserved; their first `num_cached_tokens` tokens are written already, in all layers."""
        if self.state not in (SenderState.WAITING, SenderState.WRITING) or self.blocks is not None:
            return []
        self.blocks = blocks
        self.num_tokens = num_tokens
        self._written = [num_cached_tokens] * self._num_layers
        return self._check_range() or self._push_ready(range(self._num_layers))

    def extend(self, blocks: BlocksByGroup) -> None:
        """Append blocks: an engine may reserve them chunk by chunk."""
        if self.blocks is not None:
            self.blocks = tuple(old + new for old, new in zip(self.blocks, blocks, strict=True))

    def withdraw(self) -> set[int]:
        """The engine takes the published blocks away (preemption). It publishes the request again, or stops it.

        Nothing may be in flight, since it would read the old blocks. Returns the layers that are pushed again, from
        their first token on: all but those which the receiver was told of. An engine may have written to the blocks
        before it said so (vLLM's runner V2 zeroes them first), and what landed last may be others' bytes.
        """
        self.blocks = None
        self._first_token = None
        if self.state is not SenderState.WRITING or self.offered is None:
            return set()
        told = self._handed_over() if self.offered.per_layer else [False] * self._num_layers
        again = {layer for layer in range(self._num_layers) if not told[layer]}
        for layer in again:
            self._pushed[layer] = self._needed[self._group_of[layer]][0]
        return again

    def written(self, layer: int, start: int, end: int) -> list[Action]:
        """Tokens [start, end) of `layer` are in the source blocks now."""
        if self.state not in (SenderState.WAITING, SenderState.WRITING) or self.blocks is None:
            return []
        if start != self._written[layer]:
            words = f"layer {layer} was written from token {start}, expected {self._written[layer]}"
            return self.stop(Reason(Code.NOT_WRITTEN, words))
        self._written[layer] = end
        return self._push_ready((layer,))

    def finish(self, first_token: int) -> list[Action]:
        """Prefill has ended and sampled `first_token`. Every layer must be written by now."""
        if self.state not in (SenderState.WAITING, SenderState.WRITING):
            return []
        complete = sum(position >= self.num_tokens for position in self._written)
        if self.blocks is None or complete < self._num_layers:
            words = f"prefill ended with {complete} of {self._num_layers} layers written"
            return self.stop(Reason(Code.NOT_WRITTEN, words))
        self._first_token = first_token
        return self._complete()

    # -- the receiver's messages -------------------------------------------------------------------------------------

    def offer(self, offer: messages.Offer, theirs: KVGroups | None = None) -> list[Action]:
        """The receiver's blocks, and its missing tokens. A second offer is ignored.

        theirs: the receiver's groups, whose blocks may have another size; by default as here.
        """
        if self.state is not SenderState.WAITING:
            return []
        if offer.num_layers != self._num_layers:
            words = f"{offer.num_layers} layers; the model here has {self._num_layers}"
            return self.stop(Reason(Code.BAD_OFFER, words))
        theirs = self._groups if theirs is None else theirs
        if any(
            ours.window and ours.window_step % its.window_step
            for ours, its in zip(self._groups.layouts, theirs.layouts, strict=True)
        ):
            # This side may have given up what the receiver's first block begins with.
            return self.stop(Reason(Code.WINDOW_BLOCKS))
        self.offered = offer
        self._needed = theirs.needed(offer.start, offer.end)
        self.nbytes = self._groups.nbytes_of(self._needed)
        self._pushed = [self._needed[group][0] for group in self._group_of]
        self._block_tokens = tuple(
            math.lcm(ours.block_tokens, its.block_tokens)
            for ours, its in zip(self._groups.layouts, theirs.layouts, strict=True)
        )
        self.state = SENDER[self.state, SenderEvent.OFFER]
        return self._check_range() or self._push_ready(range(self._num_layers)) + self._complete()

    def ack(self) -> list[Action]:
        """The receiver has everything."""
        if self.state is not SenderState.SENT:
            return []
        self.state = SENDER[self.state, SenderEvent.ACK]
        return [End(None)]

    def stop(self, reason: Reason) -> list[Action]:
        """Fail this transfer, for this worker or the receiver: send *stop*, and *quiet* when nothing is in flight."""
        if self.state in SENDER_ENDS or self.state is SenderState.DRAINING:
            return []
        self.reason = reason
        self.state = SENDER[self.state, SenderEvent.STOP]
        return [Send(messages.Stop.because(self.transfer_id, reason)), Fail(reason), *self._quiet()]

    # -- the transport -----------------------------------------------------------------------------------------------

    def landed(self, push_id: int) -> list[Action]:
        """This push is visible at the receiver. A layer is announced with the last of its pushes."""
        push = self._in_flight.pop(push_id)
        if self.state is SenderState.DRAINING:
            return self._quiet()
        offer, actions = push.offer, list[Action]()
        for layer in push.layers:
            self._flying[layer] -= 1
            if offer.per_layer and not self._flying[layer] and self._pushed[layer] == self._needed[push.group][1]:
                actions.append(Send(messages.Landed(self.transfer_id, layer, offer.end, self._first_token)))
        if self._first_token is not None and not self._in_flight:
            actions += self._complete()
        return actions

    def dropped(self, push_id: int) -> list[Action]:
        """This push was taken back before the transport had it.

        The transfer was stopped, or its blocks are withdrawn; then its tokens are pushed again from the new blocks.
        """
        push = self._in_flight.pop(push_id, None)
        if self.state is SenderState.DRAINING:
            return self._quiet()
        if push is not None:
            for layer in push.layers:
                self._flying[layer] -= 1
                self._pushed[layer] = min(self._pushed[layer], push.start)
        return []

    def lost(self, push_id: int, reason: Reason) -> list[Action]:
        """This push failed: its bytes may be written partly, or even later, so it stays in flight until `fenced`."""
        if push_id not in self._in_flight:
            return []
        return self.stop(reason)

    def fenced(self) -> list[Action]:
        """The data connection is closed: nothing is in flight."""
        self._in_flight.clear()
        actions = self.stop(Reason(Code.PEER_LOST))
        if self.state is SenderState.DRAINING:
            self.state = SENDER[self.state, SenderEvent.FENCED]
            actions.append(End(self.reason))
        return actions

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Pushes in flight, and lost ones."""
        return len(self._in_flight)

    def stages(self, handed: Container[int]) -> str:
        """How far each layer is, a character each: `.` not all written, `w` written and waiting for the offer or for
        room, `f` in flight, `l` landed. handed: layers of which the transport has a push.
        """
        end = self.num_tokens if self.offered is None else self.offered.end
        handed_over = self._handed_over()
        return "".join(
            "f" if layer in handed
            else "w" if self._flying[layer]
            else "l" if handed_over[layer]
            else "w" if self.blocks is not None and self._written[layer] >= end
            else "."
            for layer in range(self._num_layers)
        )  # fmt: skip

    def _handed_over(self) -> list[bool]:
        """Per layer: whether the transport has been handed all that the receiver needs."""
        if not self._pushed:
            return [False] * self._num_layers
        return [self._pushed[layer] >= self._needed[group][1] for layer, group in enumerate(self._group_of)]

    def _check_range(self) -> list[Action]:
        """Stop if the offer exceeds this prompt. Nothing before both are known."""
        if self.offered is None or self.blocks is None:
            return []
        start, end = self.offered.start, self.offered.end
        if not 0 <= start <= end <= self.num_tokens:
            words = f"tokens [{start}, {end}); the prompt here has {self.num_tokens}"
            return self.stop(Reason(Code.BAD_OFFER, words))
        if end < self.num_tokens and start < end and not self._groups.keeps_all:
            words = f"tokens [{start}, {end}); windows and states are those of {self.num_tokens}"
            return self.stop(Reason(Code.BAD_OFFER, words))
        return []

    def _push_ready(self, layers: Sequence[int]) -> list[Action]:
        if self.offered is None or self.blocks is None or self.state is not SenderState.WRITING:
            return []
        pushes: list[Push] = []
        offer, blocks = self.offered, self.blocks
        for layer in layers:
            group, token_nbytes = self._group_of[layer], self._groups.layer_nbytes[layer]
            first, last = self._needed[group]
            start, end = self._pushed[layer], last
            if self._written[layer] < offer.end:
                end = min(last, self._written[layer] // self._groups.layouts[group].position_tokens)
            if start >= end:
                continue
            self._pushed[layer] = end
            ranges = [(start, end)]
            if (end - start) * token_nbytes > self._push_nbytes:
                ranges = cut(start, end, token_nbytes, self._block_tokens[group], self._push_nbytes)
            self._flying[layer] += len(ranges)
            for begin, stop in ranges:
                alone, nbytes = range(layer, layer + 1), (stop - begin) * token_nbytes
                pushes.append(
                    Push(self._next_push_id, alone, begin, stop, nbytes, blocks[group], offer, group, first)
                )
                self._next_push_id += 1
        if len(pushes) > 1:
            pushes = joined(pushes, self._shared_nbytes)
        for push in pushes:
            self._in_flight[push.push_id] = push
        return [*pushes]

    def _complete(self) -> list[Action]:
        if self.state is not SenderState.WRITING or self._first_token is None or self._in_flight:
            return []
        assert self.offered is not None
        self.state = SENDER[self.state, SenderEvent.COMPLETE]
        done = messages.Done(
            transfer_id=self.transfer_id,
            start=self.offered.start,
            end=self.offered.end,
            num_layers=sum(self._handed_over()),
            nbytes=self.nbytes,
            first_token=self._first_token,
        )
        return [Send(done)]

    def _quiet(self) -> list[Action]:
        if self._in_flight:
            return []
        self.state = SENDER[self.state, SenderEvent.QUIET]
        return [Send(messages.Quiet(self.transfer_id)), End(self.reason)]


class Lease(NamedTuple):
    """The promise to keep one transfer's memory for its receiver while that gives signs of life, up to a limit.

    Kept on this side's clock, never on that of another host. Until a receiver holds it, nothing renews it. A sign of
    life of a peer renews all its leases. At its limit a lease ends for good.
    """

    limit_s: float
    """The lease ends then in any case."""
    length_s: float
    """The lease ends after this much silence."""
    from_s: float
    """Silence counts from here, or from the peer's last sign of life if that is later."""

    def ended(self, now: float, heard_s: float | None) -> Code | None:
        """Why the lease is over: DEADLINE, LEASE_EXPIRED, or None. heard_s: last sign of life of its receiver."""
        if now >= self.limit_s:
            return Code.DEADLINE
        renewed_s = self.from_s if heard_s is None else max(self.from_s, heard_s)
        return Code.LEASE_EXPIRED if now >= renewed_s + self.length_s else None


def cut(start: int, end: int, token_nbytes: int, block_tokens: int, push_nbytes: int) -> list[tuple[int, int]]:
    """[start, end) in about equal ranges; all but the first begin at multiples of `block_tokens`.

    As few ranges as `push_nbytes` allows; rounding may make one larger, by less than a block.
    """
    count = -(-(end - start) * token_nbytes // push_nbytes)
    if count <= 1:
        return [(start, end)]
    step = -(-(end - start) // count // block_tokens) * block_tokens
    first = start // block_tokens * block_tokens + step
    edges = [start, *range(first, end, step), end]
    return list(zip(edges, edges[1:], strict=False))


def joined(pushes: Sequence[Push], most_nbytes: int) -> list[Push]:
    """The same positions of neighbouring layers in one push, up to `most_nbytes`."""
    made = [pushes[0]]
    for push in pushes[1:]:
        last, layer = made[-1], push.layers.start
        alike = (last.layers.stop, last.group, last.start, last.end) == (layer, push.group, push.start, push.end)
        if alike and last.nbytes + push.nbytes <= most_nbytes:
            layers = range(last.layers.start, push.layers.stop)
            made[-1] = replace(last, layers=layers, nbytes=last.nbytes + push.nbytes)
        else:
            made.append(push)
    return made
