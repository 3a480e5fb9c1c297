"""The receiver's decisions about one transfer: what it offered, whether all of it landed, when its blocks are free.

The receiver trusts its own counts only: the offer names tokens and layers, and only a `Done` with the same numbers
makes the request ready. After a stop its blocks are quarantined until the sender's *quiet* or, if that does not come
in time, until the data connection is closed.

No I/O, no clock: `now` is an argument, every method returns actions for the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.protocol import messages
from pdlink.protocol.actions import Action, Deliver, DeliverLayer, End, Fail, FencePeer, Send
from pdlink.protocol.states import RECEIVER, RECEIVER_ENDS, ReceiverEvent, ReceiverState
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from pdlink.kv.groups import BlocksByGroup, KVGroups


class Receiving:
    """State of one transfer on the receiver.

    Driven by this worker (`offer`, `stop`, `tick`), the peer's messages (`landed`, `done`, `stop`, `quiet`) and
    the transport (`fenced`).
    """

    def __init__(self, transfer_id: str, groups: KVGroups, *, quiet_s: float) -> None:
        """quiet_s: longest wait for *quiet* after a stop."""
        self.transfer_id = transfer_id
        self.state = ReceiverState.EXPECTED
        self.reason: Reason | None = None
        self.offered: messages.Offer | None = None
        self.nbytes = 0
        """Of all that is offered for."""
        self._groups, self._num_layers = groups, groups.num_layers
        self._quiet_s = quiet_s
        self._quiet_by_s = float("inf")

    # -- this worker -------------------------------------------------------------------------------------------------

    def offer(
        self,
        blocks: BlocksByGroup,
        start: int,
        end: int,
        *,
        per_layer: bool = False,
        verify: messages.Verify = "off",
    ) -> list[Action]:
        """The request's blocks are reserved: offer the blocks that hold the missing tokens [start, end), by group."""
        if self.state is not ReceiverState.EXPECTED:
            return []
        self.offered = messages.Offer(self.transfer_id, start, end, blocks, self._num_layers, per_layer, verify)
        self.nbytes = self._groups.nbytes_of(self._groups.needed(start, end))
        self.state = RECEIVER[self.state, ReceiverEvent.OFFER]
        return [Send(self.offered)]

    def stop(self, reason: Reason, now: float, *, tell: bool = True) -> list[Action]:
        """This worker ends the transfer (abort, deadline): send *stop*. tell: False if the sender has ended it."""
        if self.state in RECEIVER_ENDS or self.state is ReceiverState.DRAINING:
            return []
        self.reason = reason
        self.state = RECEIVER[self.state, ReceiverEvent.STOP]
        actions: list[Action] = [Send(messages.Stop.because(self.transfer_id, reason))] if tell else []
        actions.append(Fail(reason))
        if self.state is ReceiverState.FAILED:
            actions.append(End(reason))
        else:
            self._quiet_by_s = now + self._quiet_s
        return actions

    def tick(self, now: float) -> list[Action]:
        """Close the data connection if *quiet* did not come in time."""
        if self.state is ReceiverState.DRAINING and now >= self._quiet_by_s:
            self._quiet_by_s = float("inf")
            return [FencePeer(Reason(Code.PEER_LOST, "not quiet in time"))]
        return []

    # -- the sender's messages ---------------------------------------------------------------------------------------

    def landed(self, layer: int, end: int, first_token: int | None = None) -> list[Action]:
        """The offered tokens before `end` are visible in `layer`. Ignored if not asked for or not offered."""
        offer = self.offered
        if self.state is not ReceiverState.OFFERED or offer is None or not offer.per_layer:
            return []
        if not 0 <= layer < self._num_layers or not offer.start < end <= offer.end:
            return []
        return [DeliverLayer(layer, end, first_token)]

    def done(self, done: messages.Done, now: float, mismatch: str = "") -> list[Action]:
        """Everything is visible. mismatch: the difference that verification found, if any."""
        if self.state is ReceiverState.DRAINING:  # the sender ended before it read our stop: nothing is in flight
            return self._end(ReceiverEvent.QUIET)
        if self.state is not ReceiverState.OFFERED or self.offered is None:
            return []
        expected = (self.offered.start, self.offered.end, self._num_layers, self.nbytes)
        reported = (done.start, done.end, done.num_layers, done.nbytes)
        if reported != expected:
            names = ("start", "end", "layers", "bytes")
            wrong = ", ".join(
                f"{name} {theirs} of {ours}"
                for name, ours, theirs in zip(names, expected, reported, strict=True)
                if ours != theirs
            )
            return self.stop(Reason(Code.INCOMPLETE, wrong), now)
        if mismatch:
            return self.stop(Reason(Code.CHECKSUM, mismatch), now)
        self.state = RECEIVER[self.state, ReceiverEvent.DONE]
        return [Send(messages.Ack(self.transfer_id)), Deliver(done.first_token), End(None)]

    def quiet(self) -> list[Action]:
        """Nothing of this transfer is in flight on the sender, nor will be."""
        return self._end(ReceiverEvent.QUIET)

    # -- the transport -----------------------------------------------------------------------------------------------

    def fenced(self, now: float) -> list[Action]:
        """The data connection is closed: the peer cannot reach our pages any more."""
        return self.stop(Reason(Code.PEER_LOST), now, tell=False) + self._end(ReceiverEvent.FENCED)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _end(self, event: ReceiverEvent) -> list[Action]:
        if self.state is not ReceiverState.DRAINING:
            return []
        self.state = RECEIVER[self.state, event]
        return [End(self.reason)]
