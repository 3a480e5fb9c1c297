"""What decides in the staging lane: credit, whose blocks are open. No GPU."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink.errors import ProtocolError
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import paged_layout
from pdlink.transport.staging.credit import Credit
from pdlink.transport.staging.open_blocks import OpenBlocks
from pdlink.transport.staging.peers import StagingPeer, WritingTo
from pdlink.transport.staging.wire import Grant, Invitation, SlotPlaced
from pdlink.transport.staging.writer import Writer


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


def test_blocks_are_open_to_one_peer_by_group() -> None:
    layouts = [
        paged_layout(
            dtype="float16",
            itemsize=2,
            num_layers=2,
            num_blocks=5,
            block_tokens=3,
            num_heads=2,
            head_dim=4,
            region=region,
        )
        for region in range(2)
    ]
    guard = OpenBlocks(KVGroups(tuple(layouts)))
    guard.open(7, [[1, 2, 4], []])
    guard.open(8, [[2], [1]])
    assert guard.require(7, 0, np.array([4, 1])).tolist() == [4, 1]
    assert guard.require(8, 1, np.array([1])).tolist() == [6]
    for group, block in ((0, 2), (0, 3), (1, 1)):
        with pytest.raises(ProtocolError, match=f"block {block} of group {group} is not offered"):
            guard.require(7, group, np.array([4 if not group else 1, block]) if block != 1 else np.array([1]))
    assert guard.close(7, [[1, 2], []]).tolist() == [1, 2]
    assert guard.require(8, 0, np.array([2])).tolist() == [2], "that of another peer stays open"


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
