"""The sender's decisions about one transfer: what to push when, and when its blocks are free.

A push needs two things: the layer is written here, and the receiver has offered the tokens. The second of the two
triggers the push. A layer is written front to back, possibly in chunks, so one position per layer is its whole state.

Groups of layers differ in the part of the offered tokens that is pushed (`KVLayout.needed`), and in their blocks. The
part of a recurrent state is the last token, so the state is pushed once, when it is that of the whole prompt. Where
several tokens make a position, it is pushed when the last of them is written, or the last one offered.

No I/O, no clock: every method returns actions for the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.protocol import messages
from pdlink.protocol.actions import Action, End, Fail, Push, Send
from pdlink.protocol.reasons import WINDOW_BLOCKS
from pdlink.protocol.states import SENDER, SENDER_ENDS, SenderEvent, SenderState

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from pdlink.kv.groups import KVGroups, Tables


class Sending:
    """State of one transfer on the sender.

    Driven by this worker (`publish`, `extend`, `withdraw`, `written`, `finish`, `stop`), the peer's messages
    (`offer`, `ack`, `stop`) and the transport (`landed`, `dropped`, `lost`, `fenced`).
    """

    def __init__(self, transfer_id: str, groups: KVGroups) -> None:
        self.transfer_id = transfer_id
        self.state = SenderState.WAITING
        self.reason = ""
        self.blocks: Tables | None = None
        """Source block tables by group, from token 0 on; None until `publish`."""
        self.offered: messages.Offer | None = None
        self.num_tokens = 0
        self._groups, self._group_of = groups, groups.group_of
        self._num_layers = groups.num_layers
        self._needed: tuple[tuple[int, int], ...] = ()
        """Per group: offered positions [first, last) that the receiver needs; empty before the offer."""
        self._written = [0] * self._num_layers
        """Per layer: tokens [0, n) are in the source blocks."""
        self._pushed: list[int] = []
        """Per layer: of the positions that are needed, those before n have been handed to the transport. Empty before
        the offer."""
        self._in_flight: dict[int, Push] = {}
        self._next_push_id = 0
        self._first_token: int | None = None

    # -- this worker -------------------------------------------------------------------------------------------------

    def publish(self, blocks: Tables, num_tokens: int, num_cached_tokens: int) -> list[Action]:
        """The blocks are reserved; their first `num_cached_tokens` tokens are written already, in all layers."""
        if self.state not in (SenderState.WAITING, SenderState.WRITING) or self.blocks is not None:
            return []
        self.blocks = blocks
        self.num_tokens = num_tokens
        self._written = [num_cached_tokens] * self._num_layers
        return self._check_range() or self._push_ready(range(self._num_layers))

    def extend(self, blocks: Tables) -> None:
        """Append blocks: an engine may reserve them chunk by chunk."""
        if self.blocks is not None:
            self.blocks = tuple(old + new for old, new in zip(self.blocks, blocks, strict=True))

    def withdraw(self) -> None:
        """The engine takes the published blocks away (preemption). It publishes the request again, or stops it.

        Nothing may be in flight, since it would read the old blocks. Landed pushes count.
        """
        self.blocks = None
        self._first_token = None

    def written(self, layer: int, start: int, end: int) -> list[Action]:
        """Tokens [start, end) of `layer` are in the source blocks now."""
        if self.state not in (SenderState.WAITING, SenderState.WRITING) or self.blocks is None:
            return []
        if start != self._written[layer]:
            return self.stop(f"layer {layer} was written from token {start}, expected {self._written[layer]}")
        self._written[layer] = end
        return self._push_ready((layer,))

    def finish(self, first_token: int) -> list[Action]:
        """Prefill has ended and sampled `first_token`. Every layer must be written by now."""
        if self.state not in (SenderState.WAITING, SenderState.WRITING):
            return []
        complete = sum(position >= self.num_tokens for position in self._written)
        if self.blocks is None or complete < self._num_layers:
            return self.stop(f"prefill ended with {complete} of {self._num_layers} layers written")
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
            return self.stop(f"offer of {offer.num_layers} layers; the model here has {self._num_layers}")
        theirs = self._groups if theirs is None else theirs
        if any(
            ours.window and ours.window_step % its.window_step
            for ours, its in zip(self._groups.layouts, theirs.layouts, strict=True)
        ):
            return self.stop(WINDOW_BLOCKS)  # this side may have given up what the receiver's first block begins with
        self.offered = offer
        self._needed = theirs.needed(offer.start, offer.end)
        self._pushed = [self._needed[group][0] for group in self._group_of]
        self._move(SenderEvent.OFFER)
        return self._check_range() or self._push_ready(range(self._num_layers)) + self._complete()

    def ack(self) -> list[Action]:
        """The receiver has everything."""
        if self.state is not SenderState.SENT:
            return []
        self._move(SenderEvent.ACK)
        return [End("")]

    def stop(self, reason: str) -> list[Action]:
        """Fail this transfer, for this worker or the receiver: send *stop*, and *quiet* when nothing is in flight."""
        if self.state in SENDER_ENDS or self.state is SenderState.DRAINING:
            return []
        self.reason = reason
        self._move(SenderEvent.STOP)
        return [Send(messages.Stop(self.transfer_id, reason)), Fail(reason), *self._quiet()]

    # -- the transport -----------------------------------------------------------------------------------------------

    def landed(self, push_id: int) -> list[Action]:
        push = self._in_flight.pop(push_id)
        if self.state is SenderState.DRAINING:
            return self._quiet()
        actions: list[Action] = []
        if self.offered is not None and self.offered.per_layer:
            # Pushes of one layer land in any order: announce tokens only up to the first one in flight.
            starts = [other.start for other in self._in_flight.values() if other.layer == push.layer]
            position = min(starts, default=self._pushed[push.layer])
            if position > push.start:
                end = min(position * self._groups.layouts[push.group].position_tokens, self.offered.end)
                actions.append(Send(messages.Landed(self.transfer_id, push.layer, end, self._first_token)))
        return actions + self._complete()

    def dropped(self, push_id: int) -> list[Action]:
        """Part of this push was taken back, and nothing of it is in flight any more.

        The transfer was stopped, or its blocks are withdrawn; then its tokens are pushed again from the new blocks.
        """
        push = self._in_flight.pop(push_id, None)
        if self.state is SenderState.DRAINING:
            return self._quiet()
        if push is not None:
            self._pushed[push.layer] = min(self._pushed[push.layer], push.start)
        return []

    def lost(self, push_id: int, reason: str) -> list[Action]:
        """This push failed: its bytes may be written partly, or even later, so it stays in flight until `fenced`."""
        if push_id not in self._in_flight:
            return []
        return self.stop(reason)

    def fenced(self) -> list[Action]:
        """The data connection is closed: nothing is in flight."""
        self._in_flight.clear()
        actions = self.stop("peer_lost")
        if self.state is SenderState.DRAINING:
            self._move(SenderEvent.FENCED)
            actions.append(End(self.reason))
        return actions

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Pushes in flight, and lost ones."""
        return len(self._in_flight)

    def stages(self, handed: Container[int]) -> str:
        """How far each layer is, a character each: `.` not all written, `w` written and waiting for the offer or for
        room, `f` in flight, `l` landed. handed: layers of which the transport has a part.
        """
        end = self.num_tokens if self.offered is None else self.offered.end
        handed_over = self._handed_over()
        pushed = {push.layer for push in self._in_flight.values()}
        return "".join(
            "f" if layer in handed
            else "w" if layer in pushed
            else "l" if handed_over[layer]
            else "w" if self.blocks is not None and self._written[layer] >= end
            else "."
            for layer in range(self._num_layers)
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Of all that the receiver needs; 0 before the offer."""
        return self._groups.nbytes_of(self._needed) if self._needed else 0

    def _handed_over(self) -> list[bool]:
        """Per layer: whether the transport has been handed all that the receiver needs."""
        if not self._pushed:
            return [False] * self._num_layers
        return [self._pushed[layer] >= self._needed[group][1] for layer, group in enumerate(self._group_of)]

    def _move(self, event: SenderEvent) -> None:
        self.state = SENDER[self.state, event]

    def _check_range(self) -> list[Action]:
        """Stop if the offer exceeds this prompt. Nothing before both are known."""
        if self.offered is None or self.blocks is None:
            return []
        start, end = self.offered.start, self.offered.end
        if not 0 <= start <= end <= self.num_tokens:
            return self.stop(f"offer of tokens [{start}, {end}); the prompt here has {self.num_tokens}")
        if end < self.num_tokens and start < end and not self._groups.keeps_all:
            return self.stop(f"offer of tokens [{start}, {end}); windows and states are those of {self.num_tokens}")
        return []

    def _push_ready(self, layers: Sequence[int]) -> list[Action]:
        if self.offered is None or self.blocks is None or self.state is not SenderState.WRITING:
            return []
        actions: list[Action] = []
        offer, blocks = self.offered, self.blocks
        for layer in layers:
            group = self._group_of[layer]
            first, last = self._needed[group]
            start, end = self._pushed[layer], last
            if self._written[layer] < offer.end:
                end = min(last, self._written[layer] // self._groups.layouts[group].position_tokens)
            if start < end:
                push = Push(self._next_push_id, layer, start, end, blocks[group], offer, group, first)
                self._next_push_id += 1
                self._in_flight[push.push_id] = push
                self._pushed[layer] = end
                actions.append(push)
        return actions

    def _complete(self) -> list[Action]:
        if self.state is not SenderState.WRITING or self._first_token is None or self._in_flight:
            return []
        assert self.offered is not None
        self._move(SenderEvent.COMPLETE)
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
        self._move(SenderEvent.QUIET)
        return [Send(messages.Quiet(self.transfer_id)), End(self.reason)]


def offer_problem(offer: messages.Offer, groups: KVGroups) -> str:
    """Why this offer is invalid; empty if it is valid. groups: the receiver's, from its handshake."""
    if not 0 <= offer.start <= offer.end:
        return f"offer of tokens [{offer.start}, {offer.end})"
    problem = groups.problem(offer.blocks, offer.start, offer.end)
    return f"offer {problem}" if problem else ""
