"""A rank with a store and a model of full attention, a window and recurrent states, under a scheduler like vLLM's.

Blocks that leave a window, and old states, go to others in the next step, which overwrite them at once; blocks of
preempted requests, too. Whatever a step reads must be what this very prompt has there, in every group.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink.integrations.vllm_parts.layout import CacheGroups
from pdlink.integrations.vllm_parts.params import NO_CAPS, Caps
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.steps import Steps
from pdlink.integrations.vllm_parts.store_book import Looked, StoreBook
from pdlink.integrations.vllm_parts.store_half import StoreHalf
from pdlink.integrations.vllm_parts.worker import Results, WorkerHalf
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part, paged_layout
from pdlink.memory.buffers import Buffer
from pdlink.store.eviction import Lru
from pdlink.store.groups import RecordGroup
from pdlink.store.source import CallersBlocks, Source
from pdlink.store.store import Store
from pdlink.store.tiers.base import Tier
from tests.integrations.vllm_engine import NO_ADAPTERS
from tests.store.stubs import StubTier
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pdlink.store.gpu_pages import GpuPages

CHUNK = BLOCK = 16
WINDOW, LAYERS, NUM_BLOCKS, HEAD = 12, 2, 120, 64
NULL = 0
NAMES = [[f"{kind}{layer}" for layer in range(LAYERS)] for kind in ("full", "window", "state")]


def layouts() -> list[KVLayout]:
    """Each group with a buffer of its own; blocks of 8, 8 and 16 tokens."""
    full = paged_layout(
        dtype="uint8",
        itemsize=1,
        num_layers=LAYERS,
        num_blocks=NUM_BLOCKS,
        block_tokens=8,
        num_heads=1,
        head_dim=HEAD,
        num_parts=1,
        order="LPBTH",
    )
    window = replace(
        full,
        layers=tuple(replace(layer, parts=(replace(layer.parts[0], region=1),)) for layer in full.layers),
        window=WINDOW,
        window_step=8,
    )
    states = tuple(LayerLayout((Part(2, at * NUM_BLOCKS * HEAD),), HEAD, 0, HEAD) for at in range(LAYERS))
    state = KVLayout("state", BLOCK, NUM_BLOCKS, 1, HEAD, states, state=True)
    return [full, window, state]


def in_whole_blocks(layout: KVLayout) -> KVLayout:
    """The same memory, as blocks that only a kernel can read."""
    nbytes, tokens = layout.block_tokens * HEAD, layout.block_tokens
    layers = tuple(replace(layer, token_stride=nbytes, head_stride=nbytes) for layer in layout.layers)
    return replace(layout, block_tokens=1, head_nbytes=nbytes, position_tokens=tokens, layers=layers)


@dataclass
class Request:
    """As vLLM's scheduler knows it."""

    name: str
    prompt: list[int]
    prefixes: list[int]
    """A hash of the prompt up to each token."""
    tables: list[list[int]] = field(default_factory=lambda: [[], [], []])
    known: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Blocks of each group that the workers were told."""
    computed: int = 0
    fresh: bool = True
    """Its next step names all of its blocks."""


def new_request(name: str, prompt: list[int]) -> Request:
    prefixes, last = [], 0
    for token in prompt:
        last = zlib.crc32(token.to_bytes(4, "little"), last)
        prefixes.append(last)
    return Request(name, prompt, prefixes)


class Server:
    """One rank without a link, and a scheduler that gives blocks away as early as vLLM's does."""

    def __init__(self, store: Store, choose: random.Random, copies_s: float, packed: Sequence[int] = ()) -> None:
        """packed: groups whose blocks only a kernel can read."""
        self.choose = choose
        self.layouts = layouts()
        self.buffers = [self.allocate(layout.extent(region)) for region, layout in enumerate(self.layouts)]
        gpu = self.gpu()
        described = [in_whole_blocks(one) if group in packed else one for group, one in enumerate(self.layouts)]
        groups = [
            RecordGroup(layout, model="m", revision=f"group {group}", chunk_tokens=CHUNK)
            for group, layout in enumerate(described)
        ]
        self.source = Source(store, groups, self.buffers, CallersBlocks(), gpu=gpu)
        planes: dict[str, tuple[int, ...]] = {name: (at,) for at, name in enumerate(sum(NAMES, []))}
        cache = CacheGroups(KVGroups(tuple(described)), planes, (1, 1, 1))
        news = threading.Event()
        self.half = StoreHalf(
            self.source, cache, news=news, adapters=NO_ADAPTERS, load_if_faster=False, copies_s=copies_s
        )
        self.steps = Steps(news, WorkerHalf([], cache, preemption_s=5.0, news=news, adapters=NO_ADAPTERS), self.half)
        self.store_book = StoreBook(CHUNK, keeps_all=False)
        self.book = RequestBook(
            sends=True, receives=True, shares_prefixes=False, keeps_all=False, store=self.store_book
        )
        self.free = [list(range(1, NUM_BLOCKS)) for _ in self.layouts]
        self.waiting: list[Request] = []
        self.parked: dict[str, Request] = {}
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}
        """Ended, and reported when their copies have been made."""
        self.over: set[str] = set()
        self.num_loaded = self.num_failed = self.num_preempted = 0
        for group in range(3):
            for layer in range(LAYERS):
                self.page(group, layer, NULL)[:] = 0x77

    def allocate(self, nbytes: int) -> Any:
        """The buffer of a group's pages, with its bytes as `array`."""
        return Buffer(nbytes)

    def gpu(self) -> GpuPages | None:
        """What copies for these buffers."""
        return None

    def write(self, place: np.ndarray[Any, Any], what: Any) -> None:
        """In the order of what the engine computes."""
        place[:] = what

    # -- pages -------------------------------------------------------------------------------------------------------

    def page(self, group: int, layer: int, block: int) -> np.ndarray[Any, Any]:
        shape = self.layouts[group].layers[layer]
        begin = shape.parts[0].offset + block * shape.block_stride
        memory: np.ndarray[Any, Any] = self.buffers[group].array
        return memory[begin : begin + shape.block_stride]

    def vector(self, group: int, layer: int, table: list[int], token: int) -> np.ndarray[Any, Any]:
        """What is after `token`, or of it."""
        layout = self.layouts[group]
        page = self.page(group, layer, table[token // layout.block_tokens])
        begin = token % layout.block_tokens * layout.layers[layer].token_stride
        return page[begin : begin + HEAD]

    def check(self, request: Request) -> None:
        """All that the next step reads of what was computed or loaded before."""
        for group, layout in enumerate(self.layouts):
            if not request.computed:
                continue
            first, last = layout.needed(0, request.computed)
            for token in range(first, last):
                for layer in range(LAYERS):
                    found = self.vector(group, layer, request.tables[group], token)
                    right = value(group, layer, request.prefixes[token])
                    assert (found == right).all(), (request.name, group, layer, token, request.computed)
            assert all((self.page(group, layer, NULL) == 0x77).all() for layer in range(LAYERS)), (
                "block 0 is nobody's"
            )

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def arrive(self, request: Request, caps: Caps = NO_CAPS) -> None:
        self.store_book.arrived(request.name, request.prompt, "", "", (), caps=caps)
        self.waiting.append(request)

    def admit(self) -> None:
        for request in list(self.waiting):
            count, parks = self.book.missing(request.name, 0)
            if count is None or not self._reserve(request, count):
                continue
            self.waiting.remove(request)
            self.book.allocated(request.name, tuple(map(tuple, request.tables)), count)
            if parks:
                self.parked[request.name] = request
                request.computed = count
                self.num_loaded += count
            else:
                self.running.append(request)

    def _reserve(self, request: Request, end: int) -> bool:
        """Blocks for what a group needs of tokens up to `end`, where they are not there yet."""
        wanted = []
        for group, layout in enumerate(self.layouts):
            table = request.tables[group]
            first = layout.needed(0, end)[0] if end else 0
            fresh = range(len(table), layout.blocks_of(0, end).stop)
            wanted.append([block >= layout.blocks_of(first, end).start for block in fresh])
        if any(sum(new) > len(free) for new, free in zip(wanted, self.free, strict=True)):
            return False
        for new, free, table in zip(wanted, self.free, request.tables, strict=True):
            table += [free.pop(self.choose.randrange(len(free))) if real else NULL for real in new]
        return True

    def _extend(self, request: Request, end: int) -> bool:
        """Give up what is not needed after `computed` tokens, and take blocks for those up to `end`."""
        for group, layout in enumerate(self.layouts):
            first = layout.blocks_of(*layout.needed(0, request.computed)).start if request.computed else 0
            table = request.tables[group]
            for at in range(min(first, len(table))):
                if table[at] != NULL:
                    self.free[group].append(table[at])
                    table[at] = NULL
        taken = []
        for group, layout in enumerate(self.layouts):
            count = layout.blocks_of(0, end).stop - len(request.tables[group])
            taken.append([not layout.state or at == count - 1 for at in range(count)])
        if any(sum(new) > len(free) for new, free in zip(taken, self.free, strict=True)):
            return False
        for new, free, table in zip(taken, self.free, request.tables, strict=True):
            table += [free.pop(self.choose.randrange(len(free))) if real else NULL for real in new]
        return True

    def _free(self, request: Request) -> None:
        for free, table in zip(self.free, request.tables, strict=True):
            free += [block for block in table if block != NULL]
        request.tables, request.known, request.computed, request.fresh = [[], [], []], [0, 0, 0], 0, True

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self.waiting.insert(0, request)
        self.num_preempted += 1

    def finish(self, request: Request) -> None:
        """However it ends."""
        self.over.add(request.name)
        loading = request.name in self.parked
        kept = self.book.ended(request.name)
        for where in (self.waiting, self.running):
            if request in where:
                where.remove(request)
        if loading or kept:
            self.held[request.name] = self.parked.pop(request.name, request)
        else:
            self._free(request)

    def step(self, preempted: tuple[Request, ...] = (), budget: int = 40) -> Results:
        """As vLLM's: schedule, compute, report. Ends of steps are multiples of a block but for the last one."""
        for request in preempted:
            self.preempt(request)
        self.admit()
        parts = []
        for request in list(self.running):
            end = min(len(request.prompt), request.computed + budget)
            if end < len(request.prompt):
                end = end // BLOCK * BLOCK
            if end > request.computed and self._extend(request, end):
                tables = tuple(
                    tuple(table[known:]) for table, known in zip(request.tables, request.known, strict=True)
                )
                parts.append(Scheduled(request.name, tables, request.fresh, request.computed, end - request.computed))
                request.fresh, request.known = False, [len(table) for table in request.tables]
        plan = self.book.step(parts, frozenset(request.name for request in preempted))
        self.steps.withdraw(plan)
        self.steps.begin(plan)
        for group, free in enumerate(self.free):
            for block in free:  # whose blocks they are now writes into them
                for layer in range(LAYERS):
                    self.write(self.page(group, layer, block), self.choose.randrange(256))
        mine = {request.name: request for request in self.running}
        for part in parts:
            self.check(mine[part.request_id])
        for layer in range(LAYERS):
            for group in (0, 1):
                for part in parts:
                    request = mine[part.request_id]
                    for token in range(part.start, part.start + part.count):
                        right = value(group, layer, request.prefixes[token])
                        self.write(self.vector(group, layer, request.tables[group], token), right)
                self.steps.layer_saved(NAMES[group][layer])
        for name in NAMES[2]:  # as if a hook of vLLM's came before the state is there
            self.steps.layer_saved(name)
        for part in parts:
            request = mine[part.request_id]
            request.computed = part.start + part.count
            for layer in range(LAYERS):
                last = request.computed - 1
                self.write(self.vector(2, layer, request.tables[2], last), value(2, layer, request.prefixes[last]))
        self.steps.end()
        over, self.over = self.over, set()
        results = self.steps.results(over)
        self.store_book.looked(results.looked)
        self.book.received(results.received, results.reasons)
        self.book.sent(results.sent)
        for name in results.sent | results.received:
            if name in self.held:
                self._free(self.held.pop(name))
        for name in results.received & self.parked.keys():
            request = self.parked.pop(name)
            if name in results.failed:
                self.num_failed += 1
                self._free(request)
                self.waiting.append(request)
            else:
                self.running.append(request)
        return results

    def until_over(self, request: Request) -> None:
        """Compute it to its end."""
        deadline_s = time.monotonic() + WAIT_S
        while request.computed < len(request.prompt) or request.name in self.parked:
            assert time.monotonic() < deadline_s
            self.step()
            self.steps.pause(0.02)
        self.check(request)
        self.finish(request)
        while self.held:
            assert time.monotonic() < deadline_s
            self.step()
            self.steps.pause(0.02)
        self.settle()

    def run(self, name: str, prompt: list[int], caps: Caps = NO_CAPS) -> int:
        """One request by itself; tokens that were loaded."""
        before = self.num_loaded
        request = new_request(name, prompt)
        self.arrive(request, caps)
        self.until_over(request)
        return self.num_loaded - before

    def settle(self) -> None:
        done = threading.Event()
        self.source.when_settled(done.set)
        assert done.wait(WAIT_S)

    def close(self) -> None:
        self.half._lookers.close(WAIT_S)
        self.source.close()
        for buffer in self.buffers:
            buffer.close()


def value(group: int, layer: int, prefix: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([prefix, group, layer]).integers(0, 256, HEAD, dtype=np.uint8)


@contextmanager
def serving(
    choose: random.Random,
    nbytes: int = 1 << 20,
    tiers: list[Tier] | None = None,
    copies_s: float = WAIT_S,
    packed: Sequence[int] = (),
) -> Iterator[tuple[Server, Store]]:
    store = Store(nbytes, Lru(), tiers or [])
    store.open()
    server = Server(store, choose, copies_s, packed)
    try:
        yield server, store
        server.step()  # which reports what has ended
        server.settle()
        half = server.half
        deadline_s = time.monotonic() + WAIT_S
        while store._catalog._leases and time.monotonic() < deadline_s:
            threading.Event().wait(0.01)  # what is not needed is given back by other threads
        assert not any((half._prompts, half._savings, half._looks, half._loads, half._saved, half.copying))
        store.check()
        assert not store._catalog._leases
        assert not store._catalog._writing
    finally:
        server.close()
        store.close()


PROMPT = list(range(300, 412))
"""Seven chunks."""


def keys_of(server: Server, group: int, prompt: list[int] = PROMPT) -> list[bytes]:
    return list(server.source.keys(prompt).by_group[group])


@pytest.mark.parametrize("packed", [(), (1,), (0, 1)], ids=str)
def test_what_was_computed_once_is_loaded_into_every_group(packed: tuple[int, ...]) -> None:
    with serving(random.Random(0), packed=packed) as (server, _):
        assert server.run("first", PROMPT) == 0
        assert server.run("again", PROMPT) == 96, "a step ended there, and left a state"
        assert server.run("longer", [*PROMPT, 1, 2, 3]) == 112
        assert server.run("branch", [*PROMPT[:70], *range(60)]) == 64
        assert server.run("other", [*PROMPT[:40], *range(60)]) == 32


@pytest.mark.parametrize("packed", [(), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    ("group", "chunk", "reaches"),
    [(0, 0, 0), (0, 5, 64), (1, 5, 64), (1, 4, 96), (1, 0, 96), (2, 5, 64), (2, 3, 96), (2, 1, 96)],
)
def test_a_hit_is_complete_in_every_group(group: int, chunk: int, reaches: int, packed: tuple[int, ...]) -> None:
    """Steps of 32 leave states at 32, 64 and 96; before 96 the window has tokens of chunk 5 only."""
    with serving(random.Random(0), packed=packed) as (server, store):
        server.run("first", PROMPT)
        store.clear([keys_of(server, group)[chunk]])
        assert server.run("again", PROMPT) == reaches


def test_a_wrong_record_in_any_group_is_no_hit_and_no_failure() -> None:
    """Its sums are compared before vLLM is answered, although this layout lets copies compare them."""
    tier = StubTier()
    with serving(random.Random(0), tiers=[tier]) as (server, store):
        assert all(map(server.source.fuses, server.source.groups))
        server.run("first", PROMPT)
        for group, chunk in ((0, 2), (1, 5), (2, 5)):
            assert store.flush(WAIT_S)
            store.clear(places=["memory"])
            tier.flip(keys_of(server, group)[chunk])
            assert server.run(f"again {group}", PROMPT) == 0
        assert store.flush(WAIT_S)
        assert server.run("last", PROMPT) == 96
        assert server.num_failed == 0


def test_windows_are_not_kept_of_blocks_that_others_have_written_to() -> None:
    """The copier stands still for longer than a step waits."""
    with serving(random.Random(0), copies_s=0.2) as (server, _):
        stop = threading.Event()
        request = new_request("slow", PROMPT)
        server.arrive(request)
        deadline_s = time.monotonic() + WAIT_S
        while request not in server.running:
            assert time.monotonic() < deadline_s
            server.step(budget=0)
        server.source.copier.put(partial(_wait, stop))
        while request.computed < len(PROMPT):
            server.step()
        stop.set()
        server.half._copies_s = WAIT_S
        server.until_over(request)
        assert server.run("again", PROMPT) == 0, "full attention alone is no prefix"
        assert server.run("third", PROMPT) == 96


@pytest.mark.parametrize("packed", [(), (1,), (0, 1)], ids=str)
def test_a_cap_takes_what_was_found_as_a_whole_or_not(packed: tuple[int, ...]) -> None:
    """A shorter prefix needs an earlier state, and earlier tokens of the window."""
    with serving(random.Random(0), packed=packed) as (server, _):
        server.run("first", PROMPT)
        for cap, loaded in ((0, 0), (40, 0), (95, 0), (96, 96)):
            assert server.run(f"again {cap}", PROMPT, Caps(load=cap)) == loaded


def test_ranks_that_have_found_different_prefixes_load_none() -> None:
    """A shorter one of the same prompt may lack a state on the rank that has found more."""
    book = StoreBook(CHUNK, 2, keeps_all=False)
    book.arrived("r", PROMPT, "", "", ())
    for ends, found in (((96, 64), 0), ((64, 96), 0), ((64, 64), 64)):
        book.arrived("r", PROMPT, "", "", ())
        assert book.missing("r", 0) is None
        book.looked(Looked("r", 1, end) for end in ends)
        assert book.missing("r", 0) == found


def test_whatever_happens_no_step_reads_what_is_not_its_own() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    choose = random.Random(seed)
    roots = [[choose.randrange(1000) for _ in range(130)] for _ in range(4)]
    packed = choose.choice([(), (1,), (0, 1)])
    with serving(choose, nbytes=1 << 19, packed=packed) as (server, store):
        alive: list[Request] = []
        for turn in range(250):
            if len(alive) < 4:
                root = choose.choice(roots)[: choose.randint(1, 130)]
                request = new_request(
                    f"r{turn}", [*root, *(choose.randrange(9) for _ in range(choose.randint(0, 20)))]
                )
                if request.prompt:
                    alive.append(request)
                    server.arrive(request)
            preempted: list[Request] = []
            if server.running and choose.random() < 0.15:
                preempted = [choose.choice(server.running)]
            if choose.random() < 0.2:
                root, group = choose.choice(roots), choose.randrange(3)
                store.clear([choose.choice(keys_of(server, group, root))])
            server.step(tuple(preempted), budget=choose.choice([16, 33, 70]))
            for request in list(alive):
                ended = request.computed >= len(request.prompt) and request in server.running
                if ended or choose.random() < 0.03:
                    server.finish(request)
                    alive.remove(request)
            server.steps.pause(0.01)
        for request in alive:
            server.finish(request)
        deadline_s = time.monotonic() + WAIT_S
        while server.held or server.parked:
            assert time.monotonic() < deadline_s
            server.step()
            server.steps.pause(0.01)
        assert server.num_loaded > 0
        assert server.num_preempted > 0
        assert all(len(free) == NUM_BLOCKS - 1 for free in server.free), "blocks were lost"


def _wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
