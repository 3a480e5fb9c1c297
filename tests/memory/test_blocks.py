"""`BlockPool` against a plain model of it, and the promises the model does not show."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdlink.errors import PoolExhausted
from pdlink.memory.blocks import BlockChange, BlockPool
from tests.waiting import WAIT_S

NUM_BLOCKS = 6
KEYS = [bytes([letter]) for letter in b"abcdefgh"]


class Mirror:
    """What a listener can know of the pool from its changes alone."""

    def __init__(self, pool: BlockPool) -> None:
        self.changes: list[BlockChange] = []
        pool.listen(self.changes.append)

    @property
    def names(self) -> dict[bytes, int]:
        names: dict[bytes, int] = {}
        for change in self.changes:
            if change.kind == "stored":
                assert change.key not in names
                assert change.block not in names.values()
                names[change.key] = change.block
            else:
                assert names.pop(change.key) == change.block
        return names


class PoolMachine(RuleBasedStateMachine):
    """References as a list with one entry each, names as a dict, use as a list: slow and plain."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []
        self.names: dict[bytes, int] = {}
        self.unused: list[int] = []
        """Named blocks nobody holds, least recently used first."""
        self.mirrors = [Mirror(self.pool)]

    @precondition(lambda self: len(self.mirrors) < 3)
    @rule()
    def listen(self) -> None:
        self.mirrors.append(Mirror(self.pool))

    def _returned(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held.remove(block)
            if block not in self.held and block in self.names.values() and block not in self.unused:
                self.unused.append(block)

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def take(self, n: int) -> None:
        nameless = [b for b in range(NUM_BLOCKS) if b not in self.held and b not in self.unused]
        num_free = len(nameless) + len(self.unused)
        if n > num_free:
            with pytest.raises(PoolExhausted, match=f"{n} blocks .* {num_free} of {NUM_BLOCKS}"):
                self.pool.take(n)
            return
        evicted, self.unused = self.unused[: max(0, n - len(nameless))], self.unused[max(0, n - len(nameless)) :]
        self.names = {key: block for key, block in self.names.items() if block not in evicted}
        expected = sorted(nameless[:n] + evicted)
        assert self.pool.take(n) == expected
        self.held += expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), max_size=4))
        self.pool.share(blocks)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        entries = data.draw(st.lists(st.sampled_from(range(len(self.held))), max_size=5, unique=True))
        blocks = [self.held[entry] for entry in entries]
        self.pool.give_back(blocks)
        self._returned(blocks)

    @rule(blocks=st.lists(st.integers(-1, NUM_BLOCKS), min_size=1, max_size=4))
    def give_back_too_much(self, blocks: list[int]) -> None:
        if all(blocks.count(block) <= self.held.count(block) for block in blocks):
            return
        with pytest.raises(ValueError, match="block"):
            self.pool.give_back(blocks)

    @rule(block=st.integers(0, NUM_BLOCKS - 1), key=st.sampled_from(KEYS))
    def name(self, block: int, key: bytes) -> None:
        if block not in self.held:
            with pytest.raises(ValueError, match=f"block {block} is held 0 times"):
                self.pool.name(block, key)
            return
        self.pool.name(block, key)
        if block not in self.names.values():
            self.names.setdefault(key, block)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def find(self, keys: list[bytes]) -> None:
        expected = []
        for key in keys:
            if key not in self.names:
                break
            expected.append(self.names[key])
        assert self.pool.find(keys) == expected
        self.held += expected
        self.unused = [block for block in self.unused if block not in expected]

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.names = {key: named for key, named in self.names.items() if named != block}
        self.unused = [unused for unused in self.unused if unused != block]

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_held == len(set(self.held))
        assert self.pool.num_free == NUM_BLOCKS - len(set(self.held))
        assert self.pool.num_cached == len(self.unused)
        for mirror in self.mirrors:
            assert mirror.names == self.names


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    """Without its beginning the rest of a prefix is of no use."""
    pool = BlockPool(4)
    blocks = pool.take(4)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.name(block, key)
    pool.give_back(blocks)
    pool.take(2)
    assert pool.find(KEYS[:4]) == blocks[:2]


def test_finding_a_block_makes_it_the_last_to_go() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.name(block, key)
    pool.give_back(blocks)
    pool.give_back(pool.find([KEYS[2]]))
    pool.take(2)
    assert pool.find([KEYS[2]]) == [blocks[2]]


def test_broken_invariant_is_named() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool._refs[block] = 0
    with pytest.raises(AssertionError, match="in no state"):
        pool.check()


def test_many_threads_never_hold_the_same_block() -> None:
    pool = BlockPool(16)
    owners = [0] * 16
    clashes: list[int] = []

    def worker(seed: int) -> None:
        for turn in range(300):
            try:
                blocks = pool.take(1 + (turn + seed) % 4)
            except PoolExhausted:
                continue
            for block in blocks:
                owners[block] += 1
                if owners[block] != 1:
                    clashes.append(block)
            pool.name(blocks[0], bytes([turn % 200, seed]))
            for block in blocks:
                owners[block] -= 1
            pool.give_back(blocks)

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not clashes
    assert pool.num_held == 0
    pool.check()


def test_listeners_hear_changes_of_many_threads_in_their_order() -> None:
    """What they know in the end is what the pool holds, and no change comes before one it depends on."""
    pool = BlockPool(8)
    heard = Mirror(pool)

    def worker(seed: int) -> None:
        for turn in range(300):
            try:
                (block,) = pool.take(1)
            except PoolExhausted:
                continue
            pool.name(block, bytes([(turn * 7 + seed) % 20]))
            if turn % 5 == 0:
                pool.forget(block)
            pool.give_back([block])

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(heard.changes) > 300
    assert heard.names == pool._block_of


def test_listener_may_use_the_pool_and_hears_what_it_causes_afterwards() -> None:
    pool = BlockPool(3)
    heard: list[tuple[str, bytes, int]] = []

    def changed(change: BlockChange) -> None:
        if change.key == b"a" and change.kind == "stored":
            assert pool.find([b"a"]) == [change.block]
            pool.give_back([change.block])
            pool.forget(change.block)
            assert len(heard) == 0, "the change it causes waits until this one is told"
        heard.append((change.kind, change.key, change.block))

    pool.listen(changed)
    blocks = pool.take(2)
    for block, key in zip(blocks, (b"a", b"b"), strict=True):
        pool.name(block, key)
    assert heard == [("stored", b"a", 0), ("evicted", b"a", 0), ("stored", b"b", 1)]


def test_a_change_during_a_report_is_told_by_the_thread_that_reports() -> None:
    """A slow listener delays nobody but that thread."""
    pool = BlockPool(2)
    inside, go_on = threading.Event(), threading.Event()
    heard: list[tuple[str, bytes, str]] = []

    def changed(change: BlockChange) -> None:
        heard.append((change.kind, change.key, threading.current_thread().name))
        if change.key == b"a":
            inside.set()
            assert go_on.wait(WAIT_S)

    pool.listen(changed)
    first, second = pool.take(2)
    thread = threading.Thread(target=pool.name, args=(first, b"a"), name="slow")
    thread.start()
    assert inside.wait(WAIT_S)
    pool.name(second, b"b")
    assert pool.find([b"b"]) == [second], "the pool works while the listener is busy"
    pool.forget(second)
    go_on.set()
    thread.join(WAIT_S)
    assert heard == [("stored", b"a", "slow"), ("stored", b"b", "slow"), ("evicted", b"b", "slow")]


def test_a_listener_that_raises_takes_nothing_from_the_others_and_from_the_pool() -> None:
    pool = BlockPool(1)

    def broken(_: BlockChange) -> None:
        raise KeyError("a mistake of the listener")

    pool.listen(broken)
    heard = Mirror(pool)
    (block,) = pool.take(1)
    pool.name(block, b"a")
    assert heard.names == {b"a": block} == pool._block_of
