"""SGLang's KV pool on a GPU in a store, without SGLang, on the double: order with its passes, numbers, failures.

What SGLang computes is a copy in its stream of forward passes. It plans on another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdlink.cuda import driver
from pdlink.cuda.buffers import DeviceMemory
from pdlink.cuda.driver import CudaStream, Device
from pdlink.errors import TransferFailed
from pdlink.integrations.sglang_parts.device_loads import DeviceLoad
from pdlink.integrations.sglang_parts.device_pages import DevicePages
from pdlink.integrations.sglang_parts.hicache import RankScheme
from pdlink.integrations.sglang_parts.pages import StillCopied
from pdlink.integrations.sglang_parts.settings import read_linker
from tests.cuda.double import DriverEvent, Kv, nothing_can_be_pinned
from tests.cuda.fake import Fake
from tests.cuda.test_sglang_gpu import wait
from tests.events import Reached
from tests.integrations.test_sglang_parts import pages_of, pool
from tests.waiting import WAIT_S

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 64, 3, 2, 8
TOKEN = HEADS * DIM * 2
NBYTES = PAGES * PAGE * TOKEN


class GpuTensor:
    """One layer's K or V in memory that the double takes for a GPU's."""

    device, dtype, ndim = torch.device("cuda", 0), torch.int16, 3

    def __init__(self, kv: Kv, heads: int) -> None:
        self.kv, self.shape = kv, torch.Size((PAGES * PAGE, heads, DIM * HEADS // heads))

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return NBYTES // 2

    def data_ptr(self) -> int:
        return self.kv.ptr


class Rank:
    """Of plain attention, or of a latent. Its scheduler uses one stream, its passes another one."""

    def __init__(self, device: Device, seed: int, *, latent: bool) -> None:
        self.device, self.planning, self.forward = device, CudaStream(device), CudaStream(device)
        self.current = self.planning.handle
        self.parts = 1 if latent else 2
        self.kvs = [Kv(device, NBYTES, seed + number, Reached) for number in range(self.parts * LAYERS)]
        self.drafts = Kv(device, NBYTES, seed + 100, Reached)
        tensors = [GpuTensor(kv, 1 if latent else HEADS) for kv in self.kvs]
        plain = SimpleNamespace(k_buffer=tensors[:LAYERS], v_buffer=tensors[LAYERS:])
        self.pages = DevicePages(
            read_linker({"tiers": {"max_local_cpu_size": 0.01}}),
            RankScheme((0, 1), (0, 1), (0, 1), latent),
            SimpleNamespace(kv_buffer=tensors) if latent else plain,
            PAGE,
            model="m",
            revision="r",
            num_kv_heads=HEADS,
            streams=[self.forward.handle],
        )
        gpu = self.pages.source.gpu
        assert gpu is not None
        self.stores, self.loads = (one.copies._stream.handle for one in (gpu._stores, gpu._loads))

    def compute(self, page: int, layer: int) -> None:
        """Launch a pass that writes a page."""
        for part in range(self.parts):
            at = page * PAGE * TOKEN
            to = self.kvs[part * LAYERS + layer].ptr + at
            self.device.copy(to, self.drafts.ptr + at, PAGE * TOKEN, self.forward.handle)

    def attend(self, page: int, layer: int, to: int) -> None:
        """Launch what reads a page of K, into a page of the drafts."""
        of = self.kvs[layer].ptr + page * PAGE * TOKEN
        self.device.copy(self.drafts.ptr + to * PAGE * TOKEN, of, PAGE * TOKEN, self.forward.handle)

    def page(self, number: int, layer: int) -> bytes:
        at = slice(number * PAGE * TOKEN, (number + 1) * PAGE * TOKEN)
        return b"".join(self.kvs[part * LAYERS + layer].array[at].tobytes() for part in range(self.parts))

    def whole(self, number: int) -> list[bytes]:
        return [self.page(number, layer) for layer in range(LAYERS)]

    def store(self, hashes: list[str], pages: list[int]) -> list[bool]:
        return self.pages.offer(hashes, lambda: pages)()

    def held(self, hashes: list[str], pages: list[int]) -> DeviceLoad:
        load = self.pages.begin(hashes, lambda: pages)
        assert load is not None
        return load

    def close(self) -> None:
        self.forward.synchronize()
        self.pages.close()
        for stream in (self.planning, self.forward):
            stream.close()
        for kv in (*self.kvs, self.drafts):
            kv.close()


Make = Callable[..., Rank]


@pytest.fixture
def rank(double: Fake, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(driver, "LIBRARY", double.path)
    with ExitStack() as made:

        def make(*, seed: int = 1, latent: bool = False) -> Rank:
            one: Rank

            def make_event(_: DeviceMemory) -> DriverEvent:
                event = DriverEvent(device, lambda: one.current)
                made.callback(event.close)
                return event

            monkeypatch.setattr(DeviceMemory, "make_event", make_event)
            monkeypatch.setattr(DeviceMemory, "compute_stream", lambda _: one.current)
            one = made.enter_context(closing(Rank(device, seed, latent=latent)))
            return one

        yield make


class Held:
    """Streams that go on at the end, before ranks are closed."""

    def __init__(self, double: Fake) -> None:
        self._double, self._streams = double, list[int]()

    def __call__(self, stream: int) -> None:
        self._double.hold_stream(stream)
        self._streams.append(stream)

    def go_on(self) -> None:
        while self._streams:
            self._double.go_on_stream(self._streams.pop())


@pytest.fixture
def hold(rank: Make, double: Fake) -> Iterator[Held]:
    held = Held(double)
    yield held
    held.go_on()


class Running(threading.Thread):
    """What SGLang's linker calls in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self.error, self.result = call, None, None
        self.start()

    error: BaseException | None
    result: Any

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def ended(self) -> Running:
        self.join(WAIT_S)
        assert not self.is_alive()
        return self


@pytest.mark.parametrize("latent", [False, True], ids=["K and V", "a latent"])
def test_pages_of_a_gpu_and_of_hicache_are_the_same_records(rank: Make, latent: bool) -> None:
    one = rank(latent=latent)
    shape = (LAYERS, PAGES * PAGE, 1, HEADS * DIM) if latent else (2, LAYERS, PAGES * PAGE, HEADS, DIM)
    plain = torch.randint(1, 2**15, shape, dtype=torch.int16)
    hicache = pages_of(pool("layer_first", plain), RankScheme((0, 1), (0, 1), (0, 1), latent))
    own = one.pages.source.store
    try:
        assert hicache._source is not None
        one.pages.source.store = one.pages.records._store = hicache._source.store
        assert hicache.kv.records.set(["a", "b"], [3, 9]) == [True, True]
        one.pages.batch([one.held(["a", "b"], [5, 0])]).run(lambda _: None)
        parts = plain.unsqueeze(0) if latent else plain
        for page, source in ((5, 3), (0, 9)):
            wanted = parts[:, :, source * PAGE : (source + 1) * PAGE]
            assert one.whole(page) == [wanted[:, layer].numpy().tobytes() for layer in range(LAYERS)]
        assert one.store(["c"], [7]) == [True]
        assert hicache.kv.records.get(["c"], [20]) == [True]
        got = parts[:, :, 20 * PAGE : 21 * PAGE]
        assert one.whole(7) == [got[:, layer].numpy().tobytes() for layer in range(LAYERS)]
    finally:
        one.pages.source.store = own
        hicache.close()


def test_pages_are_stored_when_the_pass_that_writes_them_has_run_and_nobody_waits(rank: Make, hold: Held) -> None:
    """SGLang's stream of passes is not the one that it offers on."""
    one = rank()
    hold(one.forward.handle)
    before = one.whole(3)
    for layer in range(LAYERS):
        one.compute(3, layer)
    storing = Running(one.pages.offer(["a"], lambda: [3]))  # the scheduler's part of it has returned
    storing.join(0.2)
    assert storing.is_alive()
    assert one.pages.records.num_known(["a"]) == 0
    hold.go_on()
    assert storing.ended().result == [True]
    assert one.whole(3) != before
    one.pages.batch([one.held(["a"], [8])]).run(lambda _: None)
    assert one.whole(8) == one.whole(3)


def test_a_pass_is_launched_before_its_layers_are_loaded_and_reads_each_behind_its_copy(
    rank: Make, hold: Held
) -> None:
    """The double notes a read that nothing puts behind the copy."""
    one = rank()
    assert one.store(["a", "b"], [3, 4]) == [True, True]
    hold(one.loads)
    batch = one.pages.batch([one.held(["a"], [10]), one.held(["a", "b"], [11, 12])])
    ready = [threading.Event() for _ in range(LAYERS)]
    loading = Running(lambda: batch.run(lambda layer: ready[layer].set()))
    one.current = one.forward.handle
    for layer in range(LAYERS):
        assert ready[layer].wait(WAIT_S), "its copy has been launched"
        batch.follow(layer)
        one.attend(12, layer, layer)
    assert loading.is_alive()
    hold.go_on()
    assert loading.ended().error is None
    one.forward.synchronize()
    read = [one.drafts.array[layer * PAGE * TOKEN :][: PAGE * TOKEN].tobytes() for layer in range(LAYERS)]
    assert read == [one.page(4, layer)[: PAGE * TOKEN] for layer in range(LAYERS)]
    assert (one.whole(10), one.whole(11), one.whole(12)) == (one.whole(3), one.whole(3), one.whole(4))


def test_a_graph_of_a_whole_pass_follows_the_last_layer_alone(rank: Make, hold: Held) -> None:
    one = rank()
    assert one.store(["a"], [3]) == [True]
    hold(one.loads)
    batch = one.pages.batch([one.held(["a"], [10])])
    last = threading.Event()
    loading = Running(lambda: batch.run(lambda layer: last.set() if layer == LAYERS - 1 else None))
    assert last.wait(WAIT_S)
    one.current = one.forward.handle
    batch.follow(LAYERS - 1)
    for layer in range(LAYERS):
        one.attend(10, layer, layer)
    hold.go_on()
    assert loading.ended().error is None


def test_a_load_follows_the_pass_before_which_may_still_use_its_pages(rank: Make, hold: Held) -> None:
    """A request that has ended is in the step that runs, too."""
    one = rank()
    assert one.store(["a"], [3]) == [True]
    hold(one.forward.handle)
    for layer in range(LAYERS):
        one.compute(10, layer)
    loading = Running(lambda: one.pages.batch([one.held(["a"], [10])]).run(lambda _: None))
    loading.join(0.2)
    assert loading.is_alive()
    hold.go_on()
    assert loading.ended().error is None
    assert one.whole(10) == one.whole(3)


def test_numbers_of_pages_are_read_when_they_have_come_from_the_gpu(rank: Make, hold: Held) -> None:
    one = rank()
    hold(one.planning.handle)
    numbers = [60]
    storing = Running(one.pages.offer(["a"], lambda: list(numbers)))
    storing.join(0.1)
    numbers[0] = 3
    hold.go_on()
    assert storing.ended().result == [True]
    hold(one.planning.handle)
    numbers[0] = 61
    load = one.pages.begin(["a"], lambda: list(numbers))
    assert load is not None
    batch = one.pages.batch([load])
    loading = Running(lambda: batch.run(lambda _: None))
    loading.join(0.1)
    numbers[0] = 10
    hold.go_on()
    assert loading.ended().error is None
    assert one.whole(10) == one.whole(3)


def test_slots_of_a_tensor_on_a_gpu_are_copied_without_a_wait(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, made = rank(), list["Pinned"]()

    class Pinned:
        """Memory that is filled later."""

        def __init__(self, shape: tuple[int, ...], *, dtype: Any, pin_memory: bool) -> None:
            assert pin_memory
            self.numbers = np.zeros(shape, np.int64)

        def copy_(self, slots: Any, *, non_blocking: bool) -> Pinned:
            assert non_blocking
            made.append(self)
            return self

        def __array__(self, *_: object, **__: object) -> Any:
            return self.numbers

    monkeypatch.setattr(torch, "empty", Pinned)
    slots = SimpleNamespace(device=torch.device("cuda", 0), shape=(2 * PAGE,), dtype=torch.int64)
    pages = one.pages.pages(slots)
    made[0].numbers[:] = [*range(20, 24), *range(8, 12)]
    assert pages() == [5, 2]


def test_what_the_store_has_already_is_not_copied_again_and_no_mark_is_lost(rank: Make, double: Fake) -> None:
    one = rank()
    assert one.store(["a"], [3]) == [True]
    gpu = one.pages.source.gpu
    assert gpu is not None
    for _ in range(3):
        assert one.store(["a"], [4]) == [True]
        one.pages.batch([one.held(["a"], [8])]).run(lambda _: None)
    assert len(gpu._spare) == len(gpu._events) == 1
    assert one.whole(8) == one.whole(3)


def test_a_load_whose_records_do_not_come_is_said_and_touches_no_page_of_others(rank: Make) -> None:
    one = rank()
    assert one.store(["a"], [3]) == [True]
    before, load = one.whole(11), one.held(["a"], [10, 12])
    load._fetch.done.result()
    load._num_pages = 2  # as if the store had promised one more
    with pytest.raises(LookupError, match="did not come"):
        one.pages.batch([load]).run(lambda _: None)
    assert one.whole(11) == before
    one.pages.batch([one.held(["a"], [10])]).run(lambda _: None)
    assert one.whole(10) == one.whole(3)


def test_memory_that_cannot_be_pinned_is_said_and_nothing_is_lost(rank: Make) -> None:
    one = rank()
    with nothing_can_be_pinned(), pytest.raises(TransferFailed, match="has not copied"):
        one.store(["a"], [3])
    assert not one.pages.lost
    assert one.pages.records.num_known(["a"]) == 0
    assert one.pages.source.store.held()["reservations"] == 0  # type: ignore[attr-defined]
    assert one.store(["a"], [3]) == [True]


def test_of_a_gpu_that_fails_with_copies_under_way_records_stay_reserved(
    rank: Make, hold: Held, double: Fake
) -> None:
    """Nobody knows what it still writes. A load says so, and a store gives its records to nobody."""
    one = rank()
    assert one.store(["a"], [3]) == [True]
    hold(one.stores)
    hold(one.loads)
    storing = Running(one.pages.offer(["b"], lambda: [4]))
    ready = threading.Event()
    batch = one.pages.batch([one.held(["a"], [10])])
    loading = Running(lambda: batch.run(lambda layer: ready.set() if layer == LAYERS - 1 else None))
    assert ready.wait(WAIT_S)
    store: Any = one.pages.source.store
    assert wait(lambda: store.held()["reservations"] == 1)
    gpu = one.pages.source.gpu
    assert gpu is not None
    assert wait(lambda: len(gpu._stores.copies.in_flight) >= LAYERS), "and what the load puts behind them"
    double.break_context(700)
    try:
        assert isinstance(loading.ended().error, TransferFailed)
        assert isinstance(storing.ended().error, StillCopied)
        assert one.pages.lost
        assert store.held()["reservations"] == 1
    finally:
        double.break_context(0)
        hold.go_on()
        one.device.synchronize()
        gpu.lost = False  # the process would take with it what that keeps
