"""A peer that was let in over tcp may write to the blocks that it is offered now, and to no other byte of the pool.

By hand at the port of a guarded transport, and through a real session whose prefill worker turns hostile.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pdlink
from pdlink.config import TransportConfig
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.kv.plan import warm_up
from pdlink.memory.buffers import Buffer
from pdlink.transport.tcp import TcpTransport
from tests.conformance.transports.side import Side, join, run_list
from tests.endpoint.conftest import TIMEOUTS, Handler, Receives, Sends
from tests.waiting import until

from .wire import FRAME_MAGIC, HEADER, OUTSIDE, PLACED, RUN, Attacker

BLOCK_NBYTES, NUM_BLOCKS, NUM_LAYERS = 4096, 32, 2
PLANE_NBYTES = BLOCK_NBYTES * NUM_BLOCKS
LAYOUT = paged_layout(
    dtype="u8", itemsize=1, num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS, block_tokens=16, num_heads=4, head_dim=64
)
"""Four planes, K and V of each layer, in which blocks follow one another."""


@pytest.fixture
def owner() -> Iterator[Side]:
    with contextlib.closing(Side(TcpTransport())) as side:
        side.add_buffer(LAYOUT.extent(0), seed=1)
        side.transport.guard(KVGroups((LAYOUT,)))
        yield side


@pytest.fixture
def attack() -> Iterator[Callable[[bytes], Attacker]]:
    with contextlib.ExitStack() as stack:

        def make(invitation: bytes) -> Attacker:
            attacker = Attacker(invitation).hello()
            stack.callback(attacker.socket.close)
            return attacker

        yield make


def at(block: int, plane: int = 0) -> int:
    return plane * PLANE_NBYTES + block * BLOCK_NBYTES


def test_blocks_that_are_open_are_written_in_every_plane(owner: Side, attack: Callable[[bytes], Attacker]) -> None:
    """Shows that the attacks below fail for the reason they are meant to fail for."""
    by_hand = attack(owner.transport.invite("hand"))
    owner.transport.open_blocks("hand", [[7, 31, 30]])
    expected = owner.buffers[0].array.copy()
    runs = [(0, at(7, plane) + 5, 9) for plane in range(4)] + [(0, at(30), 2 * BLOCK_NBYTES)]
    for _, offset, nbytes in runs:
        expected[offset : offset + nbytes] = 1
    by_hand.frame(runs, b"\1" * sum(run[2] for run in runs))
    assert by_hand.answer() == (PLACED, 0, 7)
    np.testing.assert_array_equal(owner.buffers[0].array, expected)


NOT_OPEN: dict[str, list[tuple[int, int, int]]] = {
    "a page that is offered to nobody": [(0, at(9), 4)],
    "a page that is offered to somebody else": [(0, at(20), 4)],
    "a byte before": [(0, at(7) - 1, 2)],
    "a byte after": [(0, at(8) - 1, 2)],
    "another plane": [(0, at(9, 3), 4)],
    "the last of many": [(0, at(7) + index * 8, 4) for index in range(400)] + [(0, at(6), 4)],
    "beyond a plane, into the next": [(0, at(31) + 100, BLOCK_NBYTES)],
    "everything": [(0, 0, PLANE_NBYTES)],
    "a byte of the last plane": [(0, at(31, 3) - 1, 1)],
}


@pytest.mark.parametrize("what", NOT_OPEN)
@pytest.mark.parametrize("open_blocks", [[], [7, 31]], ids=["nothing open", "two open"])
def test_a_write_outside_of_what_is_offered_ends_the_session_and_changes_nothing(
    owner: Side, attack: Callable[[bytes], Attacker], what: str, open_blocks: list[int]
) -> None:
    before = owner.snapshot()
    owner.transport.invite("somebody else")
    owner.transport.open_blocks("somebody else", [[20]])
    liar = attack(owner.transport.invite("liar"))
    if open_blocks:
        owner.transport.open_blocks("liar", [open_blocks])
    runs = NOT_OPEN[what]
    liar.frame(runs, b"evil" * (sum(run[2] for run in runs) // 4))
    assert [answer[0] for answer in liar.heard()] in ([OUTSIDE], [])  # a reset may overtake the answer
    assert "offered" in owner.wait_failed("liar")
    assert owner.snapshot() == before


def test_a_block_is_open_until_it_is_closed(owner: Side, attack: Callable[[bytes], Attacker]) -> None:
    by_hand = attack(owner.transport.invite("hand"))
    owner.transport.open_blocks("hand", [[3, 4]])
    assert by_hand.frame([(0, at(3), 4)], b"kept").answer() == (PLACED, 0, 7)
    owner.transport.close_blocks("hand", [[3]])
    assert by_hand.frame([(0, at(4), 4)], b"kept", sequence=1).answer() == (PLACED, 1, 7)
    before = owner.snapshot()
    by_hand.frame([(0, at(4), 4), (0, at(3), 4)], b"evilevil", sequence=2)
    owner.wait_failed("hand")
    assert owner.snapshot() == before


def test_a_close_of_blocks_that_are_another_peers_by_now_leaves_them_open(
    owner: Side, attack: Callable[[bytes], Attacker]
) -> None:
    first, second = (attack(owner.transport.invite(name)) for name in ("first", "second"))
    owner.transport.open_blocks("first", [[3]])
    owner.transport.open_blocks("second", [[3]])
    owner.transport.close_blocks("first", [[3]])
    owner.transport.close_blocks("nobody", [[3]])
    assert second.frame([(0, at(3), 4)], b"kept").answer() == (PLACED, 0, 7)
    first.frame([(0, at(3), 4)], b"evil")
    owner.wait_failed("first")


@pytest.mark.parametrize("block", [NUM_BLOCKS, -1, 2**62])
def test_a_block_that_does_not_exist_is_refused_and_nothing_is_opened(
    owner: Side, attack: Callable[[bytes], Attacker], block: int
) -> None:
    liar = attack(owner.transport.invite("liar"))
    for change in (owner.transport.open_blocks, owner.transport.close_blocks):
        with pytest.raises(ValueError, match=f"no block {block} among {NUM_BLOCKS}"):
            change("liar", [[3, block]])
    liar.frame([(0, at(3), 4)], b"evil")
    assert "offered" in owner.wait_failed("liar")


@pytest.mark.parametrize("page", [BLOCK_NBYTES, 256], ids=["long runs", "packed runs"])
def test_nothing_more_of_a_frame_is_placed_when_its_block_is_closed(
    owner: Side, attack: Callable[[bytes], Attacker], page: int
) -> None:
    """The block is the next request's when `close_blocks` returns; the rest of the frame comes a minute later."""
    slow = attack(owner.transport.invite("slow"))
    owner.transport.open_blocks("slow", [[3, 5]])
    assert slow.frame([(0, at(5), 4)], b"kept").answer() == (PLACED, 0, 7)
    runs = [(0, at(3) + start, page) for start in range(0, BLOCK_NBYTES, 2 * page)]
    slow.frame(runs, b"x" * (page // 2), sequence=1)
    block = owner.buffers[0].array[at(3) : at(4)]
    if page == BLOCK_NBYTES:  # short ones are put into their places together
        until(lambda: bool((block[: page // 2] == ord("x")).all()), "the first half")
    owner.transport.close_blocks("slow", [[3]])
    block[:] = 0  # the next request's
    before = owner.snapshot()
    slow.send(b"y" * 2 * BLOCK_NBYTES)
    assert "offered" in owner.wait_failed("slow")
    assert owner.snapshot() == before


def test_a_writer_that_never_pauses_is_out_of_a_block_when_its_close_returns(
    owner: Side, attack: Callable[[bytes], Attacker]
) -> None:
    """Frame after frame into one block, which is closed in the middle of some of them."""
    payload = b"x" * BLOCK_NBYTES * 8
    block = owner.buffers[0].array[at(8) : at(16)]
    for attempt in range(30):
        name = f"busy {attempt}"
        busy = attack(owner.transport.invite(name))
        owner.transport.open_blocks(name, [list(range(8, 16))])
        block[:] = 0
        sending = threading.Thread(target=never_pauses, args=(busy, payload))
        sending.start()
        until(lambda: bool(block[0] == ord("x")), "the first frame")
        owner.transport.close_blocks(name, [list(range(8, 16))])
        block[:] = 0
        owner.wait_failed(name)
        assert not block.any(), f"attempt {attempt}"
        sending.join()


def never_pauses(busy: Attacker, payload: bytes) -> None:
    with contextlib.suppress(OSError):
        for sequence in itertools.count():
            table = RUN.pack(at(8), 0, len(payload))
            header = HEADER.pack(FRAME_MAGIC, 1, busy.there.session, sequence, 7, len(payload))
            busy.socket.sendall(header + table + payload)
            while select.select([busy.socket], [], [], 0)[0] and busy.socket.recv(1 << 16):
                pass


def test_closing_other_blocks_disturbs_no_frame_that_is_being_received(
    owner: Side, attack: Callable[[bytes], Attacker]
) -> None:
    slow = attack(owner.transport.invite("slow"))
    owner.transport.open_blocks("slow", [[3, 5]])
    slow.frame([(0, at(3), BLOCK_NBYTES)], b"x" * 100)
    until(lambda: bool((owner.buffers[0].array[at(3) : at(3) + 100] == ord("x")).all()), "some of it")
    owner.transport.close_blocks("slow", [[5]])
    assert slow.send(b"x" * (BLOCK_NBYTES - 100)).answer() == (PLACED, 0, 7)


def test_blocks_that_do_not_exist_cannot_be_opened(owner: Side) -> None:
    owner.transport.invite("writer")
    for block in (-1, NUM_BLOCKS, 2**40):
        with pytest.raises(ValueError, match=f"no block {block}"):
            owner.transport.open_blocks("writer", [[0, block]])


def test_a_transport_that_is_not_guarded_is_open_as_a_whole(attack: Callable[[bytes], Attacker]) -> None:
    """Benchmarks use it so; an endpoint never does."""
    with contextlib.closing(Side(TcpTransport())) as owner, contextlib.closing(Side(TcpTransport())) as writer:
        for side in (owner, writer):
            side.add_buffer(LAYOUT.extent(0), seed=2)
        join(writer, owner)
        assert writer.wait_batch(writer.submit("owner", run_list([[0, 0, PLANE_NBYTES]]))) == "ok"


# -- through a session -----------------------------------------------------------------------------------------------


class Worker:
    """An endpoint over tcp with a buffer of its own."""

    def __init__(self, name: str, layout: KVLayout, fill: int) -> None:
        self.buffer = Buffer(layout.extent(0))
        self.buffer.array[:] = fill
        config = TransportConfig(batch_timeout_s=5.0)
        self.transport = TcpTransport()
        self.node = pdlink.Node(
            name,
            KVGroups((layout,)),
            [self.buffer],
            transports=[self.transport],
            transport=config,
            deadlines=TIMEOUTS,
        )
        self.endpoint = self.node.endpoint
        self.sender, self.receiver = Sends(self.endpoint.sender), Receives(self.endpoint.receiver)

    def close(self) -> None:
        self.node.close()
        self.buffer.close()

    def transfer_to(
        self, decode: Worker, transfer_id: str, blocks: list[int], before_done: Callable[[], Any]
    ) -> Handler:
        """Move 20 tokens from blocks 0, 1 into these; `before_done` runs when all layers but the last are there."""
        handler = Handler()
        self.sender.announce(transfer_id, lambda _: None, lambda: None)
        decode.receiver.expect(transfer_id, self.endpoint.address, handler)
        decode.receiver.offer(transfer_id, blocks, 0, 20)
        sender = self.sender
        sender.publish(transfer_id, [0, 1], 20, 0)
        sender.layer_ready(transfer_id, 0, 0, 20)
        until(lambda: decode.buffer.array[at(blocks[0])] == 7 or bool(handler.calls), "the first layer is there")
        before_done()
        sender.layer_ready(transfer_id, 1, 0, 20)
        sender.finish(transfer_id, 42)
        handler.wait()
        return handler


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    warm_up()
    with (
        contextlib.closing(Worker("prefill", LAYOUT, 7)) as prefill,
        contextlib.closing(Worker("decode", LAYOUT, 0)) as decode,
    ):
        yield prefill, decode


def written(decode: Worker) -> set[int]:
    planes = decode.buffer.array[: 4 * PLANE_NBYTES].reshape(4, NUM_BLOCKS, BLOCK_NBYTES)
    return set(np.flatnonzero(planes.any(axis=(0, 2))).tolist())


def evil(prefill: Worker, block: int) -> None:
    """The hostile half of the prefill worker: its data connection is good, so it puts what it likes."""
    peer = next(peer.key for peer in prefill.endpoint.peers())
    prefill.transport.submit(peer, [run_list([[0, at(block), 64]])], 5.0)


def test_transfers_write_what_they_offer_and_their_sessions_live_on(workers: tuple[Worker, Worker]) -> None:
    prefill, decode = workers
    for index, blocks in enumerate(([4, 9], [30, 2], [9, 4])):
        assert prefill.transfer_to(decode, f"t{index}", blocks, lambda: None).calls == ["ready 42", "released"]
    assert written(decode) == {2, 4, 9, 30}


def test_an_admitted_prefill_that_writes_to_a_page_not_offered_loses_its_session(
    workers: tuple[Worker, Worker],
) -> None:
    prefill, decode = workers
    calls = prefill.transfer_to(decode, "t", [4, 9], lambda: evil(prefill, 5)).calls
    assert [call.partition(" ")[0] for call in calls] == ["failed", "released"]
    assert written(decode) <= {4, 9}


def test_an_admitted_prefill_cannot_write_to_its_blocks_when_the_transfer_is_over(
    workers: tuple[Worker, Worker],
) -> None:
    """By then they may be another request's."""
    prefill, decode = workers
    assert prefill.transfer_to(decode, "t", [4, 9], lambda: None).calls == ["ready 42", "released"]
    decode.buffer.array[:] = 0
    evil(prefill, 4)
    until(lambda: not decode.endpoint.peers(), "the session is lost")
    assert written(decode) == set()
