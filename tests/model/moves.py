"""What may happen in a world: the moves that a schedule picks from, good and bad."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pdlink.events import listen
from pdlink.reasons import Code, Reason

from .dice import Dice
from .engine import MAX_TOKENS
from .world import Transfer, World

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from .network import Frame

KINDS = (b"quiet", b"done", b"stop", b"\xa3ack", b"expect", b"offer", b"welcome", b"invite", b"bye")
"""Frames are told apart by the tags of their bodies; "ack" with its length, as it is a part of "loopback"."""


class Played(World):
    """A world in which a schedule is played."""

    # -- playing -----------------------------------------------------------------------------------------------------

    def play(self, schedule: Sequence[int]) -> None:
        stop_listening = listen(self._on_event)
        try:
            moves = PROFILES[self.profile]
            for number in schedule:
                dice = Dice(number)
                move = dice.one(moves)
                self.counts[move] += 1
                getattr(self, f"move_{move}")(dice)
                self.check()
            self.settle()
        finally:
            stop_listening()

    # -- moves: nothing is wrong -------------------------------------------------------------------------------------

    def move_calm(self, dice: Dice) -> None:
        self.calm(land=True)
        while self.pending and dice.below(4):
            self._dispatch(self.pending.pop(0))

    def move_slow(self, dice: Dice) -> None:
        """Time in which no byte moves, but everything else does; in a gentle world not for long."""
        now = self.hub.now_s
        land = self.profile == "gentle" and any(batch.submitted_s < now - 1.0 for batch in self.hub.open_batches)
        self.calm(land=land)

    def move_request(self, dice: Dice) -> None:
        """The router sends both legs of a new transfer."""
        if len(self.pending) > 6:
            return
        number = len(self.transfers) + 1
        transfer_id = f"t{number}"
        num_tokens = 1 + dice.below(MAX_TOKENS - 1)
        transfer = Transfer(
            transfer_id,
            number,
            dice.one(self.prefills),
            dice.one(self.decodes),
            num_tokens,
            (0, 0, num_tokens // 2)[dice.below(3)],
            (0, num_tokens // 2, num_tokens, 0)[dice.below(4)],
            (2, 3, MAX_TOKENS)[dice.below(3)],
            recompute=bool(dice.below(2)),
        )
        self._send_legs(transfer, dice)

    def move_dispatch(self, dice: Dice) -> None:
        """A leg arrives at its worker."""
        if self.pending:
            self._dispatch(self.pending.pop(dice.below(len(self.pending))))

    def move_engine(self, dice: Dice) -> None:
        if running := self.running:
            self.step_engine(dice.one(running))

    def move_busy(self, dice: Dice) -> None:
        """An engine begins a pass that takes long: transfers of its requests wait, their sessions live."""
        if (running := self.running) and not dice.below(4):
            dice.one(running).busy_until_s = self.hub.now_s + (4.0, 10.0, 20.0)[dice.below(3)]

    def move_turn(self, dice: Dice) -> None:
        if running := self.running:
            self.turn(dice.one(running))

    def move_deliver(self, dice: Dice) -> None:
        waiting = [item for item in self.network.connections if item.num_waiting]
        if waiting:
            connection = dice.one(waiting)
            to_listener = bool(connection.to_listener) and (not connection.to_dialer or bool(dice.below(2)))
            self.deliver(connection, to_listener, 1 + dice.below(3))

    def move_land(self, dice: Dice) -> None:
        """Some runs of some batch become visible."""
        if self.hub.open_batches:
            batch = dice.one(self.hub.open_batches)
            self.hub.land(batch, (1, 2, None)[dice.below(3)], report=bool(dice.below(3)))

    def move_cancel(self, dice: Dice) -> None:
        """Somebody does not want a transfer any more: the client, the router or an engine."""
        if not self.transfers:
            return
        transfer = dice.one(self.transfers[-4:])
        prefill, decode = self.nodes[transfer.prefill], self.nodes[transfer.decode]
        transfer.disturbed = True
        who = dice.below(4)
        transfer_id = transfer.transfer_id
        if who == 0 and decode.runs:
            self.act(decode, lambda: decode.endpoint.receiver.cancel(transfer_id, Reason(Code.REQUEST_FAILED)))
        elif who == 1 and decode.runs:
            decode.engine.abort(transfer_id)
        elif who == 2 and prefill.runs:
            prefill.engine.abort(transfer_id)
        elif prefill.runs:
            self.act(prefill, lambda: prefill.endpoint.sender.cancel(transfer_id, Reason(Code.PREEMPTED)))

    def move_lose_leg(self, dice: Dice) -> None:
        """A leg never reaches its worker; the router may tell the other side."""
        if self.pending:
            self._lose(self.pending.pop(dice.below(len(self.pending))), tell=bool(dice.below(2)))

    # -- moves: faults -----------------------------------------------------------------------------------------------

    def move_wait(self, dice: Dice) -> None:
        """Time passes for all, and only some get a turn."""
        self.advance((0.5, 1.0, 2.0)[dice.below(3)])
        for node in self.running:
            if dice.below(2):
                self.turn(node)

    def move_crash(self, dice: Dice) -> None:
        node = dice.one(self.nodes)
        if node.alive and dice.below(2):
            self._crash(node, lose=bool(dice.below(2)))

    def move_restart(self, dice: Dice) -> None:
        dead = [index for index, node in enumerate(self.nodes) if not node.alive]
        if dead:
            self._restart(dice.one(dead))

    def move_fence(self, dice: Dice) -> None:
        """A data connection that is to be closed is."""
        if running := self.running:
            dice.one(running).transport.close_now()

    def move_stop(self, dice: Dice) -> None:
        """SIGSTOP, or SIGCONT: in the middle of a run."""
        node = dice.one(self.nodes)
        if node.runs:
            node.stopped = True
            self.hub.stop(node.transport)
        elif node.alive:
            self._resume(node)

    def move_cut(self, dice: Dice) -> None:
        if self.network.connections:
            connection = dice.one(self.network.connections)
            self.network.cut(connection)
            if dice.below(2):
                self.notify(connection)

    def move_notice(self, dice: Dice) -> None:
        noticed = [item for item in self.network.connections if item.notices]
        if noticed:
            self.notify(dice.one(noticed))

    def move_full(self, dice: Dice) -> None:
        """The next frame that a worker wants to send finds the queue full."""
        dice.one(self.nodes).port.full = True

    def move_break(self, dice: Dice) -> None:
        """A data connection fails, perhaps with a batch half written; what was under way may land later."""
        if self.hub.open_batches:
            batch = dice.one(self.hub.open_batches)
            if batch.link.writer is not None and not batch.link.writer._stopped:
                self.hub.tear(batch, dice.below(1 + len(batch.runs)))

    def move_fail(self, dice: Dice) -> None:
        """A data connection fails while nothing is under way, or something; or the next batch cannot be posted."""
        if not dice.below(3):
            self.hub.fail_next = 1
            return
        links = [link for node in self.running for link in self.hub.links(node.transport).values()]
        if links:
            self.hub.fail_peer(dice.one(links), "reset")

    def move_stale(self, dice: Dice) -> None:
        """Bytes of a batch that has failed are written after all; a shut gate keeps them out."""
        failed = [item for item in self.tracked if item.batch.reported]
        if failed:
            item = dice.one(failed)
            self.hub.stale_write(item.batch, dice.below(len(item.batch.runs)))

    def move_jump(self, dice: Dice) -> None:
        """A clock jumps forward, as after the suspension of a virtual machine."""
        dice.one(self.nodes).time.jump((1.0, 5.0, 60.0)[dice.below(3)])

    def move_skip(self, dice: Dice) -> None:
        """The hook of a layer does not run (vllm#31057)."""
        for node in self.running:
            for request in node.engine.requests.values():
                if node.role == "prefill" and not dice.below(2):
                    request.skips = True
                    self.transfers[request.number - 1].disturbed = True

    def move_leave(self, dice: Dice) -> None:
        """A worker is told to stop: it ends its sessions and is gone when they are fenced; then a new one starts."""
        node = dice.one(self.nodes)
        if node.runs and not dice.below(2):
            self.act(node, node.endpoint.leave)
            for _ in range(1 + dice.below(3)):
                self.turn(node)
                self.check()
            self._crash(node, lose=False)
            self._restart(self.nodes.index(node))

    def move_reuse(self, dice: Dice) -> None:
        """Somebody sends a transfer id a second time, to the same or to other workers."""
        if self.transfers and len(self.pending) <= 6:
            old = dice.one(self.transfers)
            old.disturbed = True
            prefill = old.prefill if dice.below(2) else dice.one(self.prefills)
            decode = old.decode if dice.below(2) else dice.one(self.decodes)
            transfer = Transfer(
                old.transfer_id,
                old.number,
                prefill,
                decode,
                old.num_tokens,
                0,
                0,
                old.chunk,
                old.recompute,
                disturbed=True,
            )
            self._send_legs(transfer, dice, new=False)

    # -- moves: what TCP does not do ---------------------------------------------------------------------------------

    def _some_frame(self, dice: Dice) -> tuple[deque[Frame], int] | None:
        """A frame under way, by its queue and place; more often one that tells of an end."""
        frames = [
            (queue, index)
            for item in self.network.connections
            for queue in (item.to_listener, item.to_dialer)
            for index in range(len(queue))
        ]
        ends = [(queue, index) for queue, index in frames if queue[index].tells_of_an_end]
        return dice.one((ends if dice.below(2) else frames) or frames) if frames else None

    def move_drop(self, dice: Dice) -> None:
        """A frame is lost: one under way, or the next of a kind."""
        if dice.below(2):
            self.network.doomed = dice.one(KINDS)
        elif (found := self._some_frame(dice)) is not None:
            queue, index = found
            del queue[index]

    def move_repeat(self, dice: Dice) -> None:
        if (found := self._some_frame(dice)) is not None:
            queue, index = found
            queue.append(queue[index])

    def move_swap(self, dice: Dice) -> None:
        if (found := self._some_frame(dice)) is not None:
            queue, index = found
            queue.rotate(1 + index)

    def move_replay(self, dice: Dice) -> None:
        """A frame of the past comes again, best in another session between the same two addresses."""
        places = [
            (item is old, item, to_listener, frame)
            for old, to_listener, frame in self.history
            for item in self.network.connections
            if item.open and (item.address, item.dialer.address) == (old.address, old.dialer.address)
        ]
        if places:
            elsewhere = [place for place in places if not place[0]]
            kind = dice.one(KINDS[:3])
            ends = [place for place in elsewhere if kind in place[3].content]
            _, connection, to_listener, frame = dice.one((ends if dice.below(2) else elsewhere) or places)
            queue = connection.to_listener if to_listener else connection.to_dialer
            queue.appendleft(frame) if dice.below(2) else queue.append(frame)


_GENTLE = "calm calm slow request request dispatch dispatch dispatch engine engine engine turn turn deliver deliver"
_GENTLE += " deliver deliver land land land cancel lose_leg busy"
_FAULTS = " wait wait crash restart restart stop cut cut notice notice break fail full stale stale jump skip leave"
_FAULTS += " reuse fence"
_LOSSES = " drop drop repeat repeat drop swap replay replay replay"
PROFILES: dict[str, list[str]] = {
    "gentle": _GENTLE.split(),
    "lossy": (_GENTLE + " " + _GENTLE + _LOSSES).split(),
    "faulty": (_GENTLE + " " + _GENTLE + _FAULTS).split(),
    "harsh": (_GENTLE + " " + _GENTLE + _FAULTS + _LOSSES).split(),
}


def random_schedule(seed: int, profile: str = "") -> tuple[int, str, list[int]]:
    """(shape, profile, schedule) of a seed: the same everywhere and always. profile: any, unless given."""
    chance = random.Random(f"{seed}/{profile}")
    profile = profile or chance.choice(list(PROFILES))
    return chance.randrange(10_000), profile, [chance.randrange(2**40) for _ in range(chance.randrange(20, 120))]


def play(shape: int, profile: str, schedule: Sequence[int]) -> Played:
    """One whole run; raises Violation if anything was not as it must be."""
    world = Played(shape, profile)
    world.play(schedule)
    return world
