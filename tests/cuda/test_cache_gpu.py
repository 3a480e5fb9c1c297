"""`pdlink.Cache` over pages on a GPU, on the double: order with what the engine computes, and what is held."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pdlink
from pdlink.cuda.driver import CudaStream, Device
from pdlink.errors import InvalidRequest, TransferFailed
from pdlink.memory.buffers import Buffer
from tests.cuda.double import Kv, nothing_can_be_pinned
from tests.events import Reached
from tests.store.stubs import StubTier
from tests.store.test_cache import CHUNK, LAYERS, PROMPT, Pages, forget_memory
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.cuda.fake import Fake


class _Memory(Kv):
    stream: CudaStream

    def compute_stream(self) -> int:
        return self.stream.handle


class GpuPages(Pages):
    """The pages of test_cache.py in device memory. What the engine computes comes there by a copy in its stream."""

    def __init__(self, device: Device, order: str = "LPBTH", block_tokens: int = 16, **settings: Any) -> None:
        self.device, self.stream = device, CudaStream(device)
        super().__init__(order, block_tokens)
        self.cache.close()
        drafts = self.memory
        self.drafts = Kv(device, len(drafts), 1, Reached)
        self.drafts.array[:] = 0
        self.pages = _Memory(device, len(drafts), 2, Reached)
        self.pages.stream = self.stream
        more = {"nbytes": 1 << 20, "model": "m", "chunk_tokens": CHUNK, **settings}
        self.cache = pdlink.Cache(self.layout, [self.pages], **more)
        self.memory = self.pages.array[: len(drafts)]

    def compute(self, prompt: Sequence[int], blocks: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> None:
        """Launch it."""
        real, self.memory = self.memory, self.drafts.array[: len(self.memory)]
        super().compute(prompt, blocks, layers)
        self.memory = real
        rows = []
        for layer in layers:
            place = self.layout.layers[layer]
            for part in place.parts:
                for block in blocks:
                    for token in range(self.block_tokens):
                        for head in range(self.layout.num_heads):
                            steps = block * place.block_stride, token * place.token_stride, head * place.head_stride
                            at = part.offset + sum(steps)
                            rows.append((self.drafts.ptr + at, self.pages.ptr + at, self.layout.head_nbytes))
        self.device.copy_runs(np.array(rows, np.int64), self.stream.handle)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.stream.synchronize()
        self.stream.close()
        self.pages.close()
        self.drafts.close()


@pytest.fixture
def made(double: Fake, device: Device) -> Iterator[Callable[..., GpuPages]]:
    with ExitStack() as stack:

        def make(*args: Any, **more: Any) -> GpuPages:
            pages = GpuPages(device, *args, **more)
            stack.enter_context(pages)
            return pages

        yield make


@pytest.mark.parametrize("block_tokens", [16, 128])
@pytest.mark.parametrize("order", ["LPBTH", "LPBHT", "BLPTH"])
def test_what_is_stored_comes_back_into_other_blocks_and_into_pages_of_the_host(
    made: Callable[..., GpuPages], order: str, block_tokens: int
) -> None:
    tier = StubTier()
    pages = made(order, block_tokens, tiers=[tier])
    mine = pages.table(2)
    assert pages.stored() == 96
    assert pages.cache.retrieve(PROMPT, mine) == 96
    pages.check(PROMPT, mine, 0, 96)
    forget_memory(pages, tier)
    with Pages("LPBHT", 2, tiers=[tier]) as host:
        blocks = host.table(3)
        assert host.cache.retrieve(PROMPT, blocks) == 96
        host.check(PROMPT, blocks, 0, 96)
    pages.memory[:] = 0
    assert pages.cache.retrieve(PROMPT, mine) == 96, "from the tier"
    pages.check(PROMPT, mine, 0, 96)


def test_tokens_before_the_begin_are_left_alone(made: Callable[..., GpuPages]) -> None:
    pages = made("LPBHT")
    blocks, mine = pages.table(1), pages.table(2)
    pages.compute(PROMPT, blocks)
    assert pages.cache.store(PROMPT, blocks[2:], begin=32) == 64
    assert pages.cache.store(PROMPT, blocks) == 32
    pages.memory[:] = 7
    assert pages.cache.retrieve(PROMPT, mine[3:], begin=48) == 48
    pages.check(PROMPT, mine, 48, 96)
    for layer in range(LAYERS):
        assert (pages.tokens(mine[:3], layer, 0) == 7).all()


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_a_call_follows_the_kernels_of_its_thread_and_returns_when_it_is_over(
    made: Callable[..., GpuPages], double: Fake, verb: str
) -> None:
    """A store reads what they write, and a load writes to blocks that they may still use."""
    pages = made()
    blocks = pages.table(1)
    if verb == "retrieve":
        pages.stored(seed=3)
    double.hold_stream(pages.stream.handle)
    pages.compute(PROMPT, blocks)
    over = threading.Event()

    def call() -> None:
        getattr(pages.cache, verb)(PROMPT, blocks)
        over.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert not over.wait(0.1)
    double.go_on_stream(pages.stream.handle)
    assert over.wait(WAIT_S)
    thread.join()
    mine = pages.table(2)
    assert pages.cache.retrieve(PROMPT, mine) == 96
    pages.check(PROMPT, mine, 0, 96)


def test_memory_that_cannot_be_pinned_keeps_nothing_and_finds_nothing(made: Callable[..., GpuPages]) -> None:
    pages = made()
    with nothing_can_be_pinned():
        assert pages.stored() == 0
    assert pages.cache._store.gauges()["used"] == 0
    assert pages.stored() == 96, "memory may be there later"


def test_a_call_under_way_when_the_gpu_fails_is_told_and_its_slots_are_given_to_nobody(
    device: Device, double: Fake
) -> None:
    pages = GpuPages(device)
    blocks = pages.table(1)
    gpu = pages.cache._source.gpu
    assert gpu is not None
    stores = gpu._stores.copies._stream.handle
    double.hold_stream(stores)
    told: list[Exception] = []

    def store() -> None:
        try:
            pages.cache.store(PROMPT, blocks)
        except TransferFailed as error:
            told.append(error)

    thread = threading.Thread(target=store)
    thread.start()
    _wait_until(lambda: len(gpu._stores.copies.in_flight) == LAYERS)
    double.break_context(700)
    with gpu._lock:
        gpu._kick()
    thread.join(WAIT_S)
    assert "the GPU has failed" in str(told[0])
    assert pages.cache._store.held()["reservations"] == 6
    with pytest.raises(TransferFailed, match="the GPU has failed"):
        pages.cache.store(PROMPT[::-1], blocks)
    double.break_context(0)
    double.go_on_stream(stores)
    pages.cache.close()
    device.synchronize()
    # What the process would take with it:
    gpu._stores.copies.in_flight.clear()
    gpu._opened.close()
    assert gpu._arena is not None
    gpu._arena.close()
    for event in gpu._events:
        event.close()
    pages.stream.close()
    pages.drafts.close()
    pages.pages.close()


def _wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_memory_of_the_host_and_of_a_gpu_is_not_one_cache(double: Fake, device: Device) -> None:
    layout = pdlink.paged_layout(
        dtype="uint8", itemsize=1, num_layers=1, num_blocks=4, block_tokens=16, num_heads=1, head_dim=16
    )
    pages, host = Kv(device, layout.extent(0), 1, Reached), Buffer(4096)
    with pytest.raises(InvalidRequest, match="expected one kind"):
        pdlink.Cache(layout, [pages, host], nbytes=1 << 20, chunk_tokens=CHUNK)
    pages.close()
    host.close()
