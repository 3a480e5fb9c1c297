"""A rank's half with a store: steps in, the KV of prompts in other blocks, reports out. Pages are as vLLM's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdlink.api.session import AskedSession
from pdlink.integrations.vllm_parts.adapters import LoadedAdapters
from pdlink.integrations.vllm_parts.layout import COLUMNS, PACKED, ROWS, CacheGroups, GroupKind, LayerView, describe
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.steps import Steps
from pdlink.integrations.vllm_parts.store_book import StoreBook
from pdlink.integrations.vllm_parts.store_half import StoreHalf
from pdlink.integrations.vllm_parts.worker import Results, WorkerHalf
from pdlink.memory.buffers import Buffer
from pdlink.peers.link import PeerLink
from pdlink.peers.routed import RoutedPeers
from pdlink.store.eviction import Lru
from pdlink.store.fetching import Fetch
from pdlink.store.groups import RecordGroup
from pdlink.store.interface import MEMORY, AnyStore
from pdlink.store.prompt import Prompt, PromptFetch
from pdlink.store.slots import Slot
from pdlink.store.source import CallersBlocks, Source
from pdlink.store.store import Store
from pdlink.store.tiers.base import Tier
from pdlink.store.worth import COPY, Speed
from tests.store.process import client, served
from tests.store.stubs import GatedTier, StubTier
from tests.waiting import WAIT_S

CHUNK, TOKENS, LAYERS, HEADS, SIZE, BLOCKS = 16, 44, 3, 2, 8, 64
PROMPT = list(range(500, 500 + TOKENS))
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


class Server:
    """A vLLM server that computes `value` of each token, with one rank and no other server."""

    def __init__(
        self,
        store: AnyStore,
        form: str = COLUMNS,
        block_tokens: int = 8,
        ratio: int = 1,
        revision: str = "r",
        own_places: Sequence[str] = (),
        *,
        recomputes: bool = False,
    ) -> None:
        """recomputes: the prompts of which a part does not come, from that part on."""
        self.shape = (LAYERS, BLOCKS, HEADS, block_tokens, 2 * SIZE)
        nbytes = int(np.prod(self.shape)) * 4
        self.buffer = Buffer(nbytes)
        self.pages = self.buffer.array[:nbytes].view(np.float32).reshape(self.shape)
        self.form, self.block_tokens, self.ratio, self.now_s = form, block_tokens, ratio, 0.0
        strides = tuple(stride // 4 for stride in self.pages.strides[1:])
        each = nbytes // LAYERS
        views = [LayerView(f"l{at}", self.shape[1:], strides, 4, 0, at * each) for at in range(LAYERS)]
        cache = describe(views, GroupKind((), form, head_size=SIZE, dtype="float32"))
        group = RecordGroup(
            cache.layout, model="m", revision=revision, chunk_tokens=CHUNK, orders=cache.record_orders
        )
        source = Source(store, [group], [self.buffer], CallersBlocks(), own_places=own_places)
        self.adapters = LoadedAdapters(str)
        news = threading.Event()
        groups = CacheGroups.of([cache], BLOCKS // ratio)
        self.store = StoreHalf(
            source,
            groups,
            news=news,
            adapters=self.adapters,
            load_if_faster=False,
            recomputes=recomputes,
            by_blocks=recomputes,
            clock=lambda: self.now_s,
        )
        transfers = WorkerHalf([], groups, preemption_s=5.0, news=news, adapters=self.adapters)
        self.steps = Steps(news, transfers, self.store)
        self.book = RequestBook(sends=True, receives=True, shares_prefixes=False, store=StoreBook(CHUNK))
        self.over: set[str] = set()

    # -- its pages ---------------------------------------------------------------------------------------------------

    def place(self, table: list[int], token: int) -> tuple[int, int]:
        """(kernel block, token in it)"""
        per_block = self.block_tokens * self.ratio
        within = token % per_block
        return table[token // per_block] * self.ratio + within // self.block_tokens, within % self.block_tokens

    def vectors(self, layer: int, table: list[int], token: int) -> list[tuple[Vector, Vector]]:
        """(K, V) of each head, as views."""
        block, slot = self.place(table, token)
        found = []
        for head in range(HEADS):
            page = self.pages[layer, block, head]
            if self.form == ROWS:
                found.append((page[slot, :SIZE], page[slot, SIZE:]))
            else:
                halves = page.reshape(2, self.block_tokens * SIZE)
                keys = halves[0].reshape(SIZE, self.block_tokens)[:, slot]
                found.append((keys, halves[1].reshape(self.block_tokens, SIZE)[slot]))
        return found

    def compute(self, layer: int, table: list[int], start: int, end: int) -> None:
        for token in range(start, end):
            for head, vectors in enumerate(self.vectors(layer, table, token)):
                for part, vector in enumerate(vectors):
                    vector[:] = value(layer, token, head, part)

    def holds(self, table: list[int], start: int, end: int) -> bool:
        return all(
            (vector == value(layer, token, head, part)).all()
            for layer in range(LAYERS)
            for token in range(start, end)
            for head, vectors in enumerate(self.vectors(layer, table, token))
            for part, vector in enumerate(vectors)
        )

    # -- its steps ---------------------------------------------------------------------------------------------------

    def step(
        self, parts: Sequence[tuple[Scheduled, list[int]]] = (), preempted: frozenset[str] = frozenset()
    ) -> Results:
        plan = self.book.step([part for part, _ in parts], preempted)
        self.steps.withdraw(plan)
        self.steps.begin(plan)
        for layer in range(LAYERS):
            for part, table in parts:
                self.compute(layer, table, part.start, part.start + part.count)
            self.steps.layer_saved(f"l{layer}")
        self.steps.end()
        over, self.over = self.over, set()
        results = self.steps.results(over)
        if self.book.store is not None:
            self.book.store.looked(results.looked)
        self.book.received(results.received, results.reasons)
        self.book.sent(results.sent)
        return results

    def until(self, done: Callable[[Results], object]) -> Results:
        """Empty steps, as vLLM makes them while something is awaited."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            results = self.step()
            if done(results):
                return results
            self.steps.pause(0.02)
        raise AssertionError("nothing was reported")

    def arrive(self, request_id: str, prompt: list[int] = PROMPT) -> None:
        assert self.book.store is not None
        self.book.store.arrived(request_id, prompt, "", "", ())

    def find(self, request_id: str, computed: int = 0) -> int:
        """What vLLM is told in the end: tokens to load."""
        if self.book.missing(request_id, computed)[0] is None:
            self.until(lambda _: self.book.missing(request_id, computed)[0] is not None)
        answer, _ = self.book.missing(request_id, computed)
        assert answer is not None
        return answer

    def run(self, request_id: str, table: list[int], start: int = 0, cuts: tuple[int, ...] = (TOKENS,)) -> None:
        """Compute the prompt from `start` on."""
        self.book.allocated(request_id, (table,), 0)
        known = 0
        for end in cuts:
            blocks = -(-end // (self.block_tokens * self.ratio))
            part = Scheduled(request_id, (tuple(table[known:blocks]),), not known, start, end - start)
            self.step([(part, table)])
            start, known = end, blocks

    def finish(self, request_id: str) -> None:
        """The request ends, and is reported if vLLM expects it."""
        expected = self.book.ended(request_id)
        self.over.add(request_id)
        if expected:
            assert self.until(lambda results: results.sent).sent == {request_id}
        else:
            assert not self.step().sent

    def load(self, request_id: str, table: list[int]) -> Results:
        count = self.find(request_id)
        self.book.allocated(request_id, (table,), count)
        return self.until(lambda results: results.received)

    def settle(self) -> None:
        done = threading.Event()
        self.store.source.copier.put(done.set)
        assert done.wait(WAIT_S)

    def close(self) -> None:
        self.store._lookers.close(WAIT_S)
        self.store.source.close()
        self.buffer.close()


def value(layer: int, token: int, head: int, part: int) -> Vector:
    return np.random.default_rng([layer, token, head, part]).random(SIZE, np.float32)


@contextmanager
def opened(
    records: int = 16, tiers: list[Tier] | None = None, lease_s: float = 60.0, *, lends: bool = False
) -> Iterator[Store]:
    nbytes = 4096 + LAYERS * 2 * CHUNK * HEADS * SIZE * 4 + 4096
    store = Store(records * nbytes, Lru(), tiers or [], lease_s=lease_s, lends=lends)
    store.open()
    try:
        yield store
        store.check()
        _until(lambda: not store._catalog._leases and not store._catalog._writing)  # a tier may still write
    finally:
        store.close()


@contextmanager
def server(
    store: AnyStore, form: str = COLUMNS, block_tokens: int = 8, ratio: int = 1, **more: Any
) -> Iterator[Server]:
    made = Server(store, form, block_tokens, ratio, **more)
    try:
        yield made
        made.settle()
        half = made.store
        assert not any((half._prompts, half._savings, half._looks, half._loads, half._saved, half.copying))
    finally:
        made.close()


def keep(made: Server, request_id: str, seed: int) -> None:
    """Compute the prompt and keep it."""
    made.arrive(request_id)
    made.find(request_id)
    made.run(request_id, table(seed))
    made.finish(request_id)


def load_fails(made: Server) -> None:
    """vLLM has found the prompt, and computes it in the end."""
    made.book.allocated("r", (table(2),), 32)
    results = made.until(lambda results: results.received)
    assert results.failed == {"r"}
    assert results.failed_blocks == set(table(2))
    assert made.find("r") == 0, "vLLM computes it"
    made.run("r", table(2))
    made.finish("r")


def reset(made: Server) -> None:
    assert made.book.store is not None
    made.book.store.reset(os.urandom(4).hex())


def found(made: Server) -> int:
    """Tokens of the prompt that its store has."""
    made.arrive("f")
    count = made.find("f")
    made.finish("f")
    return count


def table(seed: int) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(BLOCKS // 4)[:12]]


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        (COLUMNS, [(8, 1), (8, 1)]),
        (COLUMNS, [(8, 1), (4, 2)]),
        (COLUMNS, [(4, 4), (16, 1)]),
        (ROWS, [(4, 1), (16, 2)]),
        (PACKED, [(8, 1), (8, 2)]),
    ],
)
@pytest.mark.parametrize("cuts", [(44,), (5, 20, 31, 44), (16, 32, 44)])
def test_what_one_server_computed_is_in_the_blocks_of_another(
    form: str, sizes: list[tuple[int, int]], cuts: tuple[int, ...]
) -> None:
    (first, second), mine, theirs = sizes, table(1), table(2)
    with opened() as store, server(store, form, *first) as writer, server(store, form, *second) as reader:
        writer.arrive("w")
        assert writer.find("w") == 0
        writer.run("w", mine, cuts=cuts)
        writer.finish("w")
        reader.arrive("r")
        results = reader.load("r", theirs)
        assert (results.received, results.failed) == ({"r"}, set())
        assert reader.holds(theirs, 0, 32)
        reader.run("r", theirs, start=32)
        reader.finish("r")
        assert reader.holds(theirs, 0, TOKENS)


def test_a_request_is_reported_when_its_copies_have_been_made_and_once() -> None:
    with opened() as store, server(store) as made:
        stop = threading.Event()
        made.arrive("r")
        made.find("r")
        made.store.source.copier.put(partial(_wait, stop))
        made.run("r", table(1))
        assert made.book.ended("r")
        made.over.add("r")
        for _ in range(3):
            assert not made.step().sent, "vLLM would give its blocks to others"
        stop.set()
        assert made.until(lambda results: results.sent).sent == {"r"}
        made.settle()
        assert made.step() == Results()


def test_a_preempted_prompt_keeps_nothing_of_the_blocks_that_others_write_to() -> None:
    with opened() as store, server(store) as made:
        stop, mine = threading.Event(), table(1)
        made.arrive("r")
        made.find("r")
        made.run("r", mine, cuts=(20,))
        made.settle()
        made.store.source.copier.put(partial(_wait, stop))
        made.run("r", mine, start=20)
        made.step(preempted=frozenset({"r"}))
        made.pages[:] = 0
        stop.set()
        made.settle()
        assert made.find("r") == 16, "one chunk was whole before"
        made.book.allocated("r", (mine,), 16)
        assert made.until(lambda results: results.received).failed == set()
        assert made.holds(mine, 0, 16)
        made.run("r", mine, start=16)
        made.finish("r")
        made.arrive("s")
        made.load("s", table(2))
        assert made.holds(table(2), 0, 32)
        made.finish("s")


def test_a_record_that_its_tier_has_lost_is_a_shorter_prefix_and_no_failure() -> None:
    """It is fetched before a vLLM is answered that would fail the request."""
    tier = StubTier()
    with opened(tiers=[tier]) as store, server(store) as made:
        keep(made, "w", 1)
        assert all(tier.kept.acquire(timeout=WAIT_S) for _ in range(2))
        store.clear(places=["memory"])
        tier.flip(made.store.source.keys(PROMPT).by_group[0][1])
        made.arrive("r")
        assert made.find("r") == 16
        made.book.allocated("r", (table(2),), 16)
        assert made.until(lambda results: results.received).failed == set()
        assert made.holds(table(2), 0, 16)
        made.finish("r")


@contextmanager
def reading() -> Iterator[tuple[Server, Store, GatedTier, bytes]]:
    """A server that loads a prompt, of which the tier does not give the last chunk yet; that chunk's key."""
    tier = GatedTier()
    with opened(tiers=[tier]) as store, server(store, recomputes=True) as made:
        keep(made, "w", 1)
        assert store.flush(WAIT_S)
        store.clear(places=["memory"])
        tier.late = made.store.source.keys(PROMPT).by_group[0][1]
        made.arrive("r")
        assert made.find("r") == 32, "vLLM is answered before all of it is read"
        yield made, store, tier, tier.late
        tier.gate.set()


def test_chunks_are_copied_while_others_are_read() -> None:
    with reading() as (made, _, tier, _):
        made.book.allocated("r", (table(2),), 32)
        made.until(lambda _: made.holds(table(2), 0, 16))
        assert made.step().received == set()
        tier.gate.set()
        results = made.until(lambda results: results.received)
        assert (results.received, results.failed, results.lost_blocks) == ({"r"}, set(), set())
        assert made.holds(table(2), 0, 32)
        made.finish("r")


def test_of_a_prompt_whose_last_chunk_does_not_come_the_first_ones_count() -> None:
    with reading() as (made, _, tier, key):
        made.book.allocated("r", (table(2),), 32)
        made.until(lambda _: made.holds(table(2), 0, 16))
        del tier.records[key]
        tier.gate.set()
        results = made.until(lambda results: results.received)
        assert (results.received, results.failed, results.lost_blocks) == ({"r"}, set(), set(table(2)[2:]))
        assert results.short == {"r": 16}
        made.run("r", table(2), start=16)
        made.finish("r")


@pytest.mark.parametrize("when", ["found", "loading"])
def test_an_abort_while_chunks_are_read_lets_go_of_everything(when: str) -> None:
    with reading() as (made, store, tier, _):
        if when == "loading":
            made.book.allocated("r", (table(2),), 32)
            made.until(lambda _: made.holds(table(2), 0, 16))
        assert not made.book.ended("r")
        made.over.add("r")
        if when == "loading":
            assert made.until(lambda results: results.received).received == {"r"}, "before the tier has answered"
        else:
            made.step()
        tier.gate.set()
        _until(lambda: not store._catalog._leases and not store._catalog._writing)


def test_a_load_whose_lease_has_ended_fails_and_names_its_blocks() -> None:
    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        made.arrive("r")
        assert made.find("r") == 32
        with store._lock:
            assert store._catalog.expire(float("1e18"))
        load_fails(made)


def test_a_load_for_an_adapter_that_was_replaced_fails_though_its_bytes_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        made.arrive("r")
        assert made.find("r") == 32

        def other(_: object) -> bool:
            made.settle()  # all copies have been made
            return False

        monkeypatch.setattr(made.adapters, "has", other)
        load_fails(made)


def test_what_was_found_is_held_for_a_while_and_looked_up_again_after_it() -> None:
    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        made.arrive("r")
        assert made.find("r") == 32
        made.now_s = 31.0
        assert [answer.end for answer in made.step().looked] == [None]
        assert not made.step().looked, "it is told once"
        assert made.find("r") == 32
        assert len(store._catalog._leases) == 1
        made.finish("r")


@pytest.mark.parametrize("when", ["asked", "found", "loading"])
def test_an_abort_lets_go_of_everything(when: str) -> None:
    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        made.arrive("r")
        stop = threading.Event()
        if when == "asked":
            made.store._lookers.put(partial(_wait, stop))
            made.store._lookers.put(partial(_wait, stop))
            assert made.book.missing("r", 0) == (None, False)
            made.step()
        else:
            assert made.find("r") == 32
        if when == "loading":
            made.store.source.copier.put(partial(_wait, stop))
            made.book.allocated("r", (table(2),), 32)
            made.step()
        assert not made.book.ended("r")
        made.over.add("r")
        assert not made.step().sent
        stop.set()
        if when == "loading":
            assert made.until(lambda results: results.received).received == {"r"}
        _until(lambda: not store._catalog._leases)


def test_an_abort_while_its_prompt_comes_keeps_the_connection_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection's own thread hears that the prompt has come, and must not wait for an answer then."""
    fetched, aborted, tier = threading.Event(), threading.Event(), StubTier()
    begun: list[PromptFetch] = []
    right = Prompt.fetch

    def fetch(prompt: Prompt, begin: int, end: int) -> PromptFetch:
        begun.append(right(prompt, begin, end))
        fetched.set()
        _wait(aborted)
        return begun[0]

    with (
        served(tmp_path, 16, [tier]) as (store, listener),
        client(listener.path, timeout_s=3.0) as mine,
        server(mine) as made,
    ):
        keep(made, "w", 1)
        assert mine.flush(WAIT_S)
        mine.clear(places=[MEMORY])
        monkeypatch.setattr(Prompt, "fetch", fetch)
        tier.going.clear()
        link = mine._link
        made.arrive("r")
        assert made.book.missing("r", 0) == (None, False)
        made.step()
        _wait(fetched)
        made.book.ended("r")
        made.over.add("r")
        made.step()
        aborted.set()
        _wait(tier.stalled)
        made.store._lookers.submit(lambda: None).result(WAIT_S)
        tier.going.set()
        assert begun[0].done.result(WAIT_S)
        assert begun[0].fetches[0].fetch.close(), "the store has answered"
        assert mine._link is link
        assert mine.connected
        _until(lambda: not store._catalog._leases)


def test_what_takes_longer_to_load_than_to_compute_is_computed_until_loading_is_fast_again() -> None:
    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        speeds, made.store._load_if_faster = made.store.source.speeds, True
        for slow_s, expected, reason in ((10.0, 0, "slower"), (1e-9, 32, "faster")):
            for place in (0, COPY):
                speeds[place] = Speed()
                speeds[place].measured(1e6, slow_s, time.monotonic())
            made.store.pace.computing.measured(TOKENS, 1e-3, time.monotonic())
            made.arrive("r")
            assert made.find("r") == expected
            assert made.book.store is not None
            chosen = made.book.store.chosen("r")
            assert (chosen.reason, chosen.found) == (reason, 32)
            assert (chosen.load_s > chosen.other_s) == (reason == "slower")
            assert chosen.places == ((("memory", 32),) if expected else ())
            made.finish("r")
        made.store._load_if_faster = False
        speeds[COPY].measured(1e6, 10.0, time.monotonic())
        made.arrive("r")
        assert made.find("r") == 32
        made.finish("r")


def test_a_load_measures_the_tier_that_it_came_from_and_the_copy() -> None:
    tier = StubTier()
    with opened(tiers=[tier]) as store, server(store) as made:
        keep(made, "w", 1)
        assert store.flush(WAIT_S)
        store.clear(places=[MEMORY])
        made.arrive("r")
        made.load("r", table(2))
        made.settle()
        assert {place for place, speed in made.store.source.speeds.items() if speed.known} == {1, COPY}
        made.run("r", table(2), start=32)
        assert made.store.pace.computing.known
        made.finish("r")


def test_an_answer_is_kept_with_its_prompt_and_found_by_the_next_turn() -> None:
    with opened() as store, server(store) as made:
        assert made.book.store is not None
        made.book.store._keeps_answers = True
        made.arrive("w")
        made.find("w")
        made.run("w", table(1))
        for layer in range(LAYERS):
            made.compute(layer, table(1), TOKENS, 70)
        whole = [*PROMPT, *range(700, 726)]
        assert made.book.ended("w", whole, (table(1),))
        made.over.add("w")
        assert made.until(lambda results: results.sent).sent == {"w"}
        made.arrive("r", [*whole, 1, 2, 3])
        assert made.load("r", table(2)).failed == set()
        assert made.holds(table(2), 0, 64)
        made.finish("r")


def test_after_a_reset_only_what_was_computed_since_is_found() -> None:
    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        reset(made)
        made.arrive("r")
        assert made.find("r") == 0
        made.run("r", table(2))
        made.finish("r")
        made.arrive("s")
        assert made.find("s") == 32
        made.finish("s")


def test_a_reset_of_one_server_takes_nothing_from_others_that_share_its_store(tmp_path: Path) -> None:
    """Neither from another model nor from a server that has the weights of the files still, or loads them again."""
    with served(tmp_path, 64) as (_, listener):
        stores = [client(listener.path, name) for name in ("mine", "twin", "other")]
        with stores[0] as one, stores[1] as two, stores[2] as three:
            mine, twin, other = Server(one), Server(two), Server(three, revision="other")
            try:
                keep(mine, "w", 1)
                keep(other, "w", 2)
                reset(mine)
                assert [found(each) for each in (mine, twin, other)] == [0, 32, 32]
                keep(mine, "x", 3)
                reset(twin)
                assert [found(each) for each in (mine, twin, other)] == [32, 0, 32], "each change is its own"
            finally:
                for each in (mine, twin, other):
                    each.close()


def test_a_reset_frees_what_only_this_server_keeps(tmp_path: Path) -> None:
    """Its memory and its disk; tiers below them are others', too."""
    disk, shared = StubTier(), StubTier()
    disk.name, shared.name = "disk", "valkey"
    with opened(tiers=[disk, shared]) as store, server(store, own_places=(MEMORY, "disk")) as made:
        keep(made, "w", 1)
        assert store.flush(WAIT_S)
        assert (len(disk.records), len(shared.records)) == (2, 2)
        reset(made)
        made.step()
        _until(lambda: (len(store._catalog), len(disk.records)) == (0, 0))
        assert len(shared.records) == 2


def test_what_is_not_needed_is_let_go_of_while_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by vLLM's thread: the answer to a release may take as long as `store_timeout_s`."""
    answers, right = threading.Event(), Fetch.close

    def close(fetch: Fetch, wrong: Sequence[Slot] = ()) -> bool:
        _wait(answers)
        return right(fetch, wrong)

    with opened() as store, server(store) as made:
        keep(made, "w", 1)
        made.arrive("r")
        assert made.find("r") == 32
        monkeypatch.setattr(Fetch, "close", close)
        made.book.allocated("r", (table(2),), 0)
        made.step()
        assert store._catalog._leases, "it waits in another thread"
        answers.set()
        _until(lambda: not store._catalog._leases)
        made.finish("r")


def test_what_is_loaded_while_the_store_is_reset_does_not_come_back_to_it() -> None:
    with opened() as store, server(store) as made:
        assert made.book.store is not None
        keep(made, "w", 1)
        made.arrive("r", [*PROMPT, *range(900, 910)])
        made.book.allocated("r", (table(2),), made.find("r"))
        made.book.store.reset("era")
        made.until(lambda results: results.received)
        made.run("r", table(2), 2 * CHUNK, (TOKENS + 10,))
        made.finish("r")
        made.arrive("s")
        assert made.find("s") == 0
        made.finish("s")


def test_a_store_that_cannot_be_asked_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as store, server(store) as made:

        def broken(*_: object) -> None:
            raise OSError("gone")

        monkeypatch.setattr(store, "lookup", broken)
        made.arrive("r")
        assert made.find("r") == 0
        made.finish("r")


def _wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


def others(made: Server, count: int) -> None:
    """Prompts of others are kept, too."""
    for number in range(count):
        name = f"other-{number}"
        made.arrive(name, [1000 * number + 7000 + token for token in range(TOKENS)])
        made.find(name)
        made.run(name, table(number))
        made.finish(name)


def test_a_session_keeps_its_prompt_for_its_next_turn() -> None:
    with opened(records=16) as store, server(store) as made:
        assert made.book.store is not None
        for turn in ("first", "second"):
            made.book.store.arrived(turn, PROMPT, "", "", (), session=AskedSession("agent", 60.0))
            if turn == "first":
                made.find(turn)
                made.run(turn, table(1))
            else:
                assert made.load(turn, table(2)).received == {turn}
                assert made.holds(table(2), 0, 32)
            made.finish(turn)
            made.settle()
            (session,) = store.state().sessions
            assert (session.name, session.records, session.waits) == ("agent", 2, True)
            others(made, 12)


def test_a_turn_whose_prompt_is_all_in_vllms_blocks_keeps_what_the_store_has() -> None:
    with opened(records=16) as store, server(store) as made:
        assert made.book.store is not None
        keep(made, "before", 1)
        made.book.store.arrived("r", PROMPT, "", "", (), session=AskedSession("agent", 60.0))
        assert made.find("r", computed=TOKENS - 1) == 0
        made.run("r", table(2), start=TOKENS - 1)
        made.finish("r")
        made.settle()
        assert [(each.records, each.waits) for each in store.state().sessions] == [(2, True)]


def test_a_session_waits_though_its_turn_ends_before_the_store_hears_that_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, may_hear = threading.Event(), threading.Event()
    with opened() as store, server(store) as made:
        hold = store.hold

        def late(*held: Any, waits: bool) -> int:
            if not waits:
                told.set()
                _wait(may_hear)
            return hold(*held, waits=waits)

        monkeypatch.setattr(store, "hold", late)
        assert made.book.store is not None
        made.book.store.arrived("r", PROMPT, "", "", (), session=AskedSession("agent", 60.0))
        assert made.book.missing("r", 0)[0] is None
        made.step()
        _wait(told)
        made.finish("r")
        made.settle()
        assert [each.waits for each in store.state().sessions] == [True]
        may_hear.set()
        made.store._lookers.submit(lambda: None, alone=True).result(WAIT_S)
        assert [each.waits for each in store.state().sessions] == [True]


def test_a_session_keeps_nothing_where_nothing_is_stored() -> None:
    with opened() as store, server(store) as made:
        assert made.book.store is not None
        session = AskedSession("agent", 60.0)
        for name, receives in (("r", True), ("s", False)):
            made.book.store.arrived(name, PROMPT, "", "", (), session=session, receives=receives, keeps=receives)
            assert made.book.store._requests[name].prompt.session is None
            made.finish(name)
        assert store.state().sessions == []


@contextmanager
def lending(name: str) -> Iterator[Store]:
    link = PeerLink(name, timeout_s=WAIT_S)
    with opened(tiers=[RoutedPeers(link)], lends=True) as store:
        link.open(store)
        try:
            yield store
        finally:
            link.close()


def test_a_prompt_is_pulled_from_the_store_that_its_request_names() -> None:
    with lending("left") as left, lending("right") as right, server(left) as one, server(right) as two:
        keep(one, "r", 1)
        assert two.book.store is not None
        two.book.store.arrived("r", PROMPT, "", "", (), source=left.lends_at)
        assert two.load("r", table(2)).received == {"r"}
        assert two.holds(table(2), 0, 32)
        two.finish("r")
