"""What decides in the staging lane: cutting, credit, whose blocks a run is in. No GPU."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink.errors import ProtocolError
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, RunList, paged_layout
from pdlink.transport.staging.credit import Credit
from pdlink.transport.staging.open_blocks import OpenBlocks
from pdlink.transport.staging.peers import StagingPeer, WritingTo
from pdlink.transport.staging.rest import RestOfBatch
from pdlink.transport.staging.wire import Grant, Invitation, SlotPlaced
from pdlink.transport.staging.writer import Writer


@pytest.mark.parametrize("seed", range(20))
def test_the_slots_of_a_batch_are_its_bytes_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [
        RunList(region, 7, 2 - region, 11, rng.integers(0, 300, (int(rng.integers(0, 40)), 3), dtype=np.int64))
        for region in range(3)
    ]
    expected = [
        (one.src_region, src + 7 + i, one.dst_region, dst + 11 + i)
        for one in lists
        for src, dst, nbytes in one.runs.tolist()
        for i in range(nbytes)
    ]
    rest, found = RestOfBatch(lists), []
    most_nbytes, most_runs = int(rng.integers(1, 2000)), int(rng.integers(1, 12))
    assert rest.nbytes == len(expected)
    while rest.nbytes:
        one = rest.take(most_nbytes, most_runs)
        assert 0 < one.nbytes <= most_nbytes
        assert sum(len(runs) for _, _, runs in one.lists) <= most_runs
        for src_region, dst_region, runs in one.lists:
            for src, dst, nbytes in runs.tolist():
                found += [(src_region, src + i, dst_region, dst + i) for i in range(nbytes)]
    assert found == expected, f"seed {seed}"


def test_writers_take_turns_and_nobody_has_more_than_half() -> None:
    credit = Credit(8)
    credit.ask("greedy", 100)
    credit.ask("small", 2)
    given = credit.grants()
    assert [writer for writer, _ in given] == ["greedy", "small", "greedy", "small", "greedy", "greedy"]
    assert len({slot for _, slot in given}) == 6
    assert credit.grants() == []
    credit.give_back("greedy", given[0][1])
    assert [writer for writer, _ in credit.grants()] == ["greedy"]
    credit.forget("greedy")
    credit.ask("third", 8)
    assert len(credit.grants()) == 4
    assert not credit.holds("greedy", given[2][1])


LAYOUTS = {
    order: paged_layout(
        dtype="float16",
        itemsize=2,
        num_layers=2,
        num_blocks=5,
        block_tokens=3,
        num_heads=2,
        head_dim=4,
        order=order,
    )
    for order in ("LPBTH", "BLPTH", "LPHBT", "LBPTH")
}


def bytes_of(layout: KVLayout) -> dict[int, int]:
    """Block of each byte of region 0."""
    found = {}
    for layer in layout.layers:
        for part in layer.parts:
            for block in range(layout.num_blocks):
                for token in range(layout.block_tokens):
                    for head in range(layout.num_heads):
                        at = part.offset + block * layer.block_stride + token * layer.token_stride
                        at += head * layer.head_stride
                        found.update(dict.fromkeys(range(at, at + layout.head_nbytes), block))
    return found


@pytest.mark.parametrize("order", LAYOUTS)
def test_a_run_is_let_through_exactly_if_all_its_bytes_are_in_open_blocks(order: str) -> None:
    layout, rng = LAYOUTS[order], np.random.default_rng(3)
    owner, size = bytes_of(layout), layout.extent(0)
    guard = OpenBlocks(KVGroups((layout,)))
    guard.open(7, [[1, 2, 4]])
    guard.open(8, [[2]])
    open_to = {1: 7, 2: 8, 4: 7}
    allowed = 0
    for _ in range(400):
        offset = int(rng.integers(0, size))
        nbytes = int(rng.integers(1, min(64, size - offset) + 1))
        blocks = {owner.get(at) for at in range(offset, offset + nbytes)}
        fine = all(block is not None and open_to.get(block) == 7 for block in blocks)
        allowed += fine
        run = np.array([offset]), np.array([nbytes])
        if fine:
            assert {*guard.require(7, 0, *run).tolist()} == blocks, (offset, nbytes)
        else:
            with pytest.raises(ProtocolError, match="not in blocks that are offered"):
                guard.require(7, 0, *run)
    assert 20 < allowed < 380, "both happen"
    assert guard.close(7, [[1, 2]]).tolist() == [1, 2]
    first = next(at for at, block in owner.items() if block == 2)
    assert guard.require(8, 0, np.array([first]), np.array([1])).tolist() == [2], "that of another peer stays open"


def test_an_owner_cannot_make_a_writer_keep_more_grants_than_it_has_slots() -> None:
    there = Invitation((64,), 0, 4096, 4, b"")
    peer, writing = StagingPeer("owner", 1), WritingTo(there)
    writer = Writer.__new__(Writer)
    writer.on_note(peer, writing, Grant((0, 1, 2)))
    with pytest.raises(ProtocolError, match=r"got slots \(3, 0\) beside 3; expected 4 at most"):
        writer.on_note(peer, writing, Grant((3, 0)))
    with pytest.raises(ProtocolError, match=r"got slots \(4,\)"):
        writer.on_note(peer, writing, Grant((4,)))
    with pytest.raises(ProtocolError, match="slot 9 is placed, and was not sent"):
        writer.on_note(peer, writing, SlotPlaced(9))
