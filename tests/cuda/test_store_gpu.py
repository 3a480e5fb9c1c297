"""Between an engine's pages on a GPU and the store, on the double: order, what is held, what is refused.

What the engine computes is a copy in its own stream, which a test can hold. Every test ends without accesses in no
order (`double`); the mutants at the end show that the double finds each event that is missing.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink.cuda.buffers import DeviceMemory
from pdlink.cuda.copies import Copies
from pdlink.cuda.driver import CudaStream, Device
from pdlink.cuda.kernels import Kernels
from pdlink.cuda.launches import Launches
from pdlink.cuda.steps import PinnedSteps
from pdlink.cuda.ways import RUN_NBYTES, MeasuredWay, Ways, ways_of
from pdlink.errors import TransferFailed
from pdlink.memory.buffers import Buffer
from pdlink.store import gpu_pages
from pdlink.store.gpu_pages import GpuPages
from pdlink_bench.gpu.tiers import measured
from tests.cuda.double import Kv, nothing_can_be_pinned
from tests.cuda.fake import IMAGE, Fake, fake
from tests.events import Reached
from tests.store.stubs import GatedTier
from tests.store.test_source import (
    CHUNK,
    LAYERS,
    PROMPT,
    TOKENS,
    Engine,
    check,
    holds,
    load,
    only_below,
    opened,
    value,
)
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.store.interface import AnyStore

BY_KERNEL, BY_ENGINE = Ways(1 << 62, 1 << 62), Ways(0, 0)


class Pages(Kv):
    """Device memory of an engine that computes in `stream`."""

    stream: CudaStream

    def compute_stream(self) -> int:
        return self.stream.handle


class GpuEngine(Engine):
    """An engine whose pages are device memory of the double."""

    def __init__(
        self,
        store: AnyStore,
        device: Device,
        order: str = "LPBTH",
        block_tokens: int = 4,
        ways: Ways = BY_KERNEL,
        step_nbytes: int = 4096,
        **more: Any,
    ) -> None:
        self.device, self.ways, self.step_nbytes = device, ways, step_nbytes
        self.stream = CudaStream(device)
        super().__init__(store, order, block_tokens, **more)
        copier = self.source.gpu
        assert copier is not None
        self.stores, self.loads = (one.copies._stream.handle for one in (copier._stores, copier._loads))

    def allocate(self, nbytes: int) -> Any:
        self.drafts = Kv(self.device, nbytes, 1, Reached)
        pages = Pages(self.device, nbytes, 2, Reached)
        pages.stream = self.stream
        return pages

    def gpu(self) -> GpuPages | None:
        return GpuPages([self.buffer], image=IMAGE, ways=self.ways, step_nbytes=self.step_nbytes)

    def compute(self, blocks: Sequence[int], layer: int, begin: int, end: int) -> None:
        """Launch it: the values are in the pages when the stream has come so far."""
        shape, block_tokens = self.layout.layers[layer], self.layout.block_tokens
        rows = []
        for token in range(begin, end):
            for part in range(2):
                at = shape.parts[part].offset + blocks[token // block_tokens] * shape.block_stride
                for index, head in enumerate(self.heads):
                    first = at + token % block_tokens * shape.token_stride + index * shape.head_stride
                    self.drafts.array[first : first + 64] = value(layer, part, token)[head]
                    rows.append((self.drafts.ptr + first, self.buffer.ptr + first, 64))
        self.device.copy_runs(np.array(rows, np.int64), self.stream.handle)

    def read(self, layer: int) -> None:
        """A kernel of the engine reads all pages of a layer."""
        begin = min(part.offset for part in self.layout.layers[layer].parts)
        nbytes = self.layout.extent(0) // LAYERS
        self.device.copy(self.drafts.ptr, self.buffer.ptr + begin, nbytes, self.stream.handle)

    def close(self) -> None:
        super().close()
        self.stream.synchronize()
        self.stream.close()
        self.drafts.close()


@pytest.fixture
def made(device: Device, double: Fake) -> Iterator[Callable[..., Any]]:
    """Makes engines over one store, by default on the GPU; `made.store` is the store."""
    with ExitStack() as stack:
        store = stack.enter_context(opened())

        def make(*args: Any, host: bool = False, **more: Any) -> Any:
            engine = Engine(store, *args, **more) if host else GpuEngine(store, device, *args, **more)
            return stack.enter_context(closing(engine))

        make.store = store  # type: ignore[attr-defined]
        yield make


@pytest.fixture
def held(double: Fake) -> Iterator[Callable[[int], None]]:
    """Holds a stream; all go on at the end, before engines are closed."""
    streams: list[int] = []

    def hold(stream: int) -> None:
        double.hold_stream(stream)
        streams.append(stream)

    hold.streams = streams  # type: ignore[attr-defined]
    yield hold
    for stream in streams:
        double.go_on_stream(stream)


def go_on(held: Any, stream: int) -> None:
    fake().go_on_stream(stream)
    held.streams.remove(stream)


def stored(made: Any, passes: Sequence[int] = (TOKENS,), **more: Any) -> Any:
    """An engine that has stored the prompt, and given its blocks back."""
    engine = made(**more)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, passes)
    prompt.close()
    engine.settle()
    engine.stream.synchronize()
    engine.pool.give_back(blocks)
    assert engine.pool.num_held == 0
    return engine


def found(engine: Engine) -> int:
    return engine.prompt("look").lookup()


@pytest.mark.parametrize("ways", [BY_KERNEL, BY_ENGINE], ids=["kernel", "copy engine"])
def test_kv_of_one_gpu_comes_into_other_pages_of_a_gpu_or_of_the_host(made: Any, ways: Ways) -> None:
    """Axes, block size and pass boundaries differ; one step of the arena's memory is smaller than a record."""
    prefill = stored(made, [3, 17, 40, TOKENS], ways=ways, step_nbytes=4096)
    assert prefill.source.gpu._arena.pinned_nbytes < len(made.store.array), "steps that nobody has used yet"
    others = [made("LPBHT", 16, ways=ways), made("BLPTH", 2, ways=ways, step_nbytes=4096), made(host=True)]
    for engine in others:
        mine = engine.blocks(2)
        end, loading = load(engine, mine)
        assert end == 40
        assert loading.done.result(WAIT_S) == 40
        check(engine, mine, 0, 40)
        engine.pool.give_back(mine)
        assert engine.pool.num_held == 0


def test_kv_of_the_host_comes_into_pages_of_a_gpu(made: Any) -> None:
    host = made(host=True)
    prompt, blocks = host.prompt("p"), host.blocks(1)
    host.prefill(prompt, blocks, [TOKENS])
    host.settle()
    gpu = made()
    mine = gpu.blocks(2)
    assert load(gpu, mine, 12)[1].done.result(WAIT_S) == 40
    check(gpu, mine, 12, 40)


def test_a_layer_is_stored_when_the_kernels_that_write_it_have_run_and_the_engine_does_not_wait(
    made: Any, held: Any
) -> None:
    """A store that read them sooner kept garbage (vllm#45704)."""
    engine = made()
    held(engine.stream.handle)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [20, TOKENS])  # returns although nothing of it has run
    prompt.close()
    done = threading.Event()
    engine.source.when_settled(done.set)
    engine.pool.give_back(blocks)
    assert not done.wait(0.1)
    assert engine.pool.num_held == 10, "the copies will read them"
    assert found(engine) == 0
    go_on(held, engine.stream.handle)
    assert done.wait(WAIT_S)
    assert engine.pool.num_held == 0
    assert found(engine) == 40
    mine = engine.blocks(2)
    assert load(engine, mine)[1].done.result(WAIT_S) == 40
    check(engine, mine, 0, 40)


def test_slots_and_blocks_of_an_aborted_request_are_kept_until_its_copies_are_over(made: Any, held: Any) -> None:
    engine = made()
    held(engine.stores)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    _begun(engine)
    prompt.withdraw()
    engine.pool.give_back(blocks)
    done = threading.Event()
    engine.source.when_settled(done.set)
    assert not done.wait(0.1)
    assert made.store.held()["reservations"] == 5
    assert engine.pool.num_held == 10
    go_on(held, engine.stores)
    assert done.wait(WAIT_S)
    assert made.store.held()["reservations"] == 0
    assert engine.pool.num_held == 0
    assert found(engine) == 0, "others may have written into its blocks"


def test_a_pass_reads_a_loaded_layer_behind_its_copy_and_waits_for_the_last_one_alone(made: Any, held: Any) -> None:
    engine = stored(made)
    held(engine.loads)
    mine = engine.blocks(2)
    landed: list[int] = []
    prompt = engine.prompt("load")
    loading = prompt.load(0, prompt.lookup(), [mine], lambda layer, end: landed.append(layer))
    for layer in range(LAYERS - 1):
        loading.wait_layer(layer, WAIT_S)  # nothing of it has run
        engine.read(layer)
    assert landed == []
    with pytest.raises(TimeoutError):
        loading.done.result(0.05)
    go_on(held, engine.loads)
    loading.wait_layer(LAYERS - 1, WAIT_S)
    engine.read(LAYERS - 1)
    assert loading.done.result(WAIT_S) == 40
    assert landed == [0, 1, 2]
    check(engine, mine, 0, 40)
    engine.stream.synchronize()


@pytest.mark.parametrize("late", [2, 4])
def test_chunks_are_copied_by_the_gpu_while_the_last_one_is_read(device: Device, double: Fake, late: int) -> None:
    """Behind the kernels that still use the blocks; also where the last one does not come."""
    tier = GatedTier()
    with opened(tiers=[tier]) as store, closing(GpuEngine(store, device)) as engine:
        keys = only_below(engine, store, tier, late)
        mine = engine.blocks(2)
        double.hold_stream(engine.stream.handle)
        for layer in range(LAYERS):
            engine.read(layer)  # of another request, which had the blocks before
        _, loading = load(engine, mine)
        double.go_on_stream(engine.stream.handle)
        until(lambda: holds(engine, mine, 0, late * CHUNK), "what came is in the blocks")
        if late == 2:
            del tier.records[keys[late]]
        tier.gate.set()
        end = 40 if late == 4 else late * CHUNK
        assert loading.done.result(WAIT_S) == end
        check(engine, mine, 0, end)


def test_blocks_are_loaded_into_when_the_kernels_that_used_them_have_run(made: Any, held: Any) -> None:
    engine = stored(made)
    mine = engine.blocks(2)
    held(engine.stream.handle)
    for layer in range(LAYERS):
        engine.read(layer)  # of another request, which had the blocks before
    _, loading = load(engine, mine)
    with pytest.raises(TimeoutError):
        loading.done.result(0.05)
    go_on(held, engine.stream.handle)
    assert loading.done.result(WAIT_S) == 40
    check(engine, mine, 0, 40)


def test_blocks_and_leases_of_a_cancelled_load_are_kept_until_its_copies_are_over(made: Any, held: Any) -> None:
    engine = stored(made)
    held(engine.loads)
    mine = engine.blocks(2)
    _, loading = load(engine, mine)
    loading.wait_layer(0, WAIT_S)
    loading.cancel()
    engine.pool.give_back(mine)
    with pytest.raises(TimeoutError):
        loading.done.result(0.05)
    assert engine.pool.num_held == 10
    assert made.store.held()["leases"] == 1
    go_on(held, engine.loads)
    loading.done.result(WAIT_S)
    assert engine.pool.num_held == 0
    assert made.store.held()["leases"] == 0


def test_what_does_not_fit_into_the_launches_in_flight_waits_in_line(
    made: Any, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of many runs is several launches, and over when the last of them is."""
    monkeypatch.setattr(gpu_pages, "MOST_PAIRS", 7)
    monkeypatch.setattr(gpu_pages, "_NUM_SLOTS", 2)
    engine = made()
    held(engine.stores)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    prompt.close()
    done = threading.Event()
    engine.source.when_settled(done.set)
    assert not done.wait(0.05)
    go_on(held, engine.stores)
    assert done.wait(WAIT_S)
    assert found(engine) == 40
    mine = engine.blocks(2)
    assert load(engine, mine)[1].done.result(WAIT_S) == 40
    check(engine, mine, 0, 40)


def test_memory_that_cannot_be_pinned_is_a_miss(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine, other, third = stored(made), made(), made()
    mine = other.blocks(2)
    with nothing_can_be_pinned():
        end, loading = load(other, mine)
        assert end == 40
        assert loading.done.result(WAIT_S) == 0
    with pytest.raises(TransferFailed):
        loading.has_layer(0)
    assert "cannot be pinned: cuMemHostRegister_v2 failed with CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert load(other, mine)[1].done.result(WAIT_S) == 40, "memory may be there later"
    check(other, mine, 0, 40)
    with nothing_can_be_pinned():
        prompt, blocks = third.prompt("x", PROMPT[::-1]), third.blocks(1)
        third.prefill(prompt, blocks, [TOKENS])
        prompt.close()
        third.settle()
    assert made.store.held()["reservations"] == 0
    assert not third.prompt("y", PROMPT[::-1]).lookup()
    assert found(engine) == 40


def test_copies_fail_when_the_thread_that_ends_them_has_died(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies that wait, and copies that come later."""
    engine = stored(made)
    copier = engine.source.gpu
    said: list[str] = []

    def bug() -> Any:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "_look", bug)
        with copier._lock:
            copier._kick()
        assert _until(lambda: not copier._thread.is_alive())
    copier.copy([], made.store.array, loading=False, after=None, then=said.append)
    assert said == ["thread pdlink-store-gpu has died: ZeroDivisionError: a bug"]
    assert "KV of this GPU is not stored or loaded any more: thread pdlink-store-gpu has died" in caplog.text


def test_what_a_failed_gpu_may_still_touch_is_given_to_nobody(device: Device, double: Fake) -> None:
    """The device is dead until the process ends; so are the slots and blocks that its copies had."""
    allocated = fake().counts()
    with opened() as store:
        engine = GpuEngine(store, device)
        prompt, blocks = engine.prompt("p"), engine.blocks(1)
        double.hold_stream(engine.stores)
        engine.prefill(prompt, blocks, [TOKENS])
        prompt.close()
        begun = threading.Event()
        engine.source.copier.put(begun.set)
        assert begun.wait(WAIT_S)
        engine.stream.synchronize()
        double.break_context(700)
        copier = engine.source.gpu
        assert copier is not None
        copier._thread.join(0)
        with copier._lock:
            copier._kick()
        assert _until(lambda: copier.lost)
        double.break_context(0)
        engine.pool.give_back(blocks)
        assert engine.pool.num_held == 10
        assert store.held()["reservations"] == 5
        mine = engine.blocks(2)
        assert not engine.prompt("q").lookup()
        engine.pool.give_back(mine)
        double.go_on_stream(engine.stores)
        engine.source.close()
        assert engine.pool.num_held == 10
        Device.synchronize(device)
        # What the process would take with it:
        copier.lost = False
        copier._stores.copies.in_flight.clear()
        copier._opened.close()
        assert copier._arena is not None
        copier._arena.close()
        for event in copier._events:
            event.close()
        engine.stream.close()
        engine.drafts.close()
        engine.buffer.close()
    assert fake().counts() == allocated


def _until(true: Callable[[], bool]) -> bool:
    waited = threading.Event()
    return any(true() or waited.wait(0.01) for _ in range(int(WAIT_S * 100)))


def test_a_step_that_has_memory_is_pinned_before_a_copy_needs_it(made: Any, double: Fake) -> None:
    engine, store = made(), made.store
    gpu, step_nbytes = engine.source.gpu, 4096
    store.memory_settled(3 * step_nbytes - 1)
    assert gpu._arena.pinned_nbytes == 2 * step_nbytes, "the third has not all of its memory"
    with nothing_can_be_pinned():
        store.memory_settled(3 * step_nbytes)
    assert gpu._arena.pinned_nbytes == 2 * step_nbytes
    store.memory_settled(len(store.array))
    double.take_log()
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    prompt.close()
    engine.settle()
    assert found(engine) == 40
    assert "cuMemHostRegister_v2" not in [call for call, _ in double.take_log()]
    engine.pool.give_back(blocks)


def test_nothing_is_pinned_for_a_gpu_whose_engine_has_ended(made: Any, double: Fake) -> None:
    engine, store = made(), made.store
    store.memory_settled(8192)
    steps = engine.source.gpu._arena
    engine.source.close()
    before = double.counts().registrations
    store.memory_settled(len(store.array))
    steps.pin(len(store.array))
    assert double.counts().registrations == before
    assert steps.pinned_nbytes == 0


def test_runs_are_cut_where_steps_meet_and_a_step_is_pinned_when_it_is_used(device: Device, double: Fake) -> None:
    rng, before = np.random.default_rng(7), double.counts().registrations
    with closing(Buffer(1 << 16)) as memory:
        steps = PinnedSteps(device, memory.array, 4096)
        for _ in range(10):
            begins, lengths = rng.integers(0, 40_000, 9), rng.integers(1, 20_000, 9)
            runs = np.stack([begins, 7 * begins, lengths], axis=1).astype(np.int64)
            placed = steps.placed(runs, 0)
            offsets = placed[:, 0] - memory.ptr  # the double's addresses are the host's
            assert (offsets // 4096 == (offsets + placed[:, 2] - 1) // 4096).all()
            expected = [
                (at, 7 * begin + at - begin) for begin, _, n in runs.tolist() for at in range(begin, begin + n)
            ]
            rows = zip(offsets.tolist(), placed[:, 1].tolist(), placed[:, 2].tolist(), strict=True)
            assert [(a + i, b + i) for a, b, n in rows for i in range(n)] == expected
        assert double.counts().registrations - before == steps.pinned_nbytes // 4096 <= 15
        with pytest.raises(ValueError, match="outside the 65536 bytes"):
            steps.placed(np.array([[65_000, 0, 4096]]), 0)
        steps.close()
        steps.close()


def test_the_copy_engine_takes_the_lengths_at_which_it_was_not_slower(
    device: Device, double: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [MeasuredWay(n, way, *((1.0, 2.0) if n >= first else (2.0, 1.0))) for n in RUN_NBYTES
            for way, first in ((False, 64 << 10), (True, 1 << 30))]  # fmt: skip
    chosen = Ways.chosen(tuple(rows))
    assert (chosen.to_host_nbytes, chosen.to_device_nbytes) == (64 << 10, 2 << 20)
    assert ways_of(device, None) == (0, 0, ()), "without kernels the engine takes all"
    monkeypatch.setattr("pdlink.cuda.ways._MEASURED", {})
    with closing(Kernels(device, IMAGE)) as kernels:
        double.fail("cuMemAlloc_v2", 2)  # vLLM has taken the GPU's memory
        assert ways_of(device, kernels) == Ways()
        table = ways_of(device, kernels).table
        assert ways_of(device, kernels).table is table, "once for a process"
    assert sorted((row.run_nbytes, row.to_device) for row in table) == [
        (n, w) for n in RUN_NBYTES for w in (False, True)
    ]
    assert all(row.engine_s > 0 and row.kernel_s > 0 for row in table)


def test_the_benchmark_of_tiers_compares_what_came_back(
    device: Device, double: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make gpu` runs it; times on the double say nothing."""
    monkeypatch.setattr(DeviceMemory, "compute_stream", lambda _: 0)
    small: dict[str, Any] = {"layers": 2, "tokens": 512, "heads": 1, "repeats": 1, "image": IMAGE}
    figures = measured(device, **small)
    assert [one.name.split(",")[0] for one in figures[:2]] == ["GPU pages to arena", "arena to GPU pages"]
    assert all(one.ratio for one in figures[:2])
    assert len(figures) == 3 + 2 * len(RUN_NBYTES)
    hnd = measured(device, order="LPBHT", **{**small, "heads": 2})
    assert [one.name.split(",")[0] for one in hnd[:2]] == ["HND pages to arena", "arena to HND pages"]
    monkeypatch.setattr(Copies, "begin", lambda self, work, rows: self.note(work))  # copies nothing
    with pytest.raises(RuntimeError, match="with other bytes"):
        measured(device, ways=BY_KERNEL, **small)


# --- Mutants: the double finds each


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _tells_at_once(self: GpuPages, make: Any, loading: bool, **more: Any) -> Any:
    then = more.pop("then")
    job = COPY(self, make, loading, then=_nothing, **more)
    then("")
    return job


def _settles_at_once(self: GpuPages, then: Callable[[], None]) -> None:
    then()


COPY = GpuPages._copy


def _store_while_computing(made: Any, held: Any) -> None:
    engine = made()
    held(engine.stream.handle)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    _begun(engine)
    go_on(held, engine.stream.handle)
    engine.settle()


def _load_into_blocks_in_use(made: Any, held: Any) -> None:
    engine = stored(made)
    held(engine.stream.handle)
    for layer in range(LAYERS):
        engine.read(layer)
    _, loading = load(engine, engine.blocks(2))
    _begun(engine)
    go_on(held, engine.stream.handle)
    loading.done.result(WAIT_S)


def _read_layers_on_their_way(made: Any, held: Any) -> None:
    engine = stored(made)
    held(engine.loads)
    _, loading = load(engine, engine.blocks(2))
    for layer in range(LAYERS - 1):
        loading.wait_layer(layer, WAIT_S)
        engine.read(layer)
    go_on(held, engine.loads)
    loading.done.result(WAIT_S)


def _load_what_is_being_stored(made: Any, held: Any) -> None:
    engine = made()
    held(engine.stores)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    _begun(engine)
    if found(engine):
        _, loading = load(engine, engine.blocks(2))
        _begun(engine)
    go_on(held, engine.stores)
    engine.settle()


def _reuse_blocks(made: Any, held: Any) -> None:
    engine = made()
    held(engine.stores)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    _begun(engine)
    prompt.withdraw()
    _begun(engine)
    engine.pool.give_back(blocks)
    if engine.pool.num_held == 0:
        engine.compute(blocks, 0, 0, TOKENS)  # of another request
    go_on(held, engine.stores)
    engine.settle()


def _unpin(made: Any, held: Any) -> None:
    engine = made()
    held(engine.stores)
    prompt, blocks = engine.prompt("p"), engine.blocks(1)
    engine.prefill(prompt, blocks, [TOKENS])
    _begun(engine)
    done = threading.Event()
    engine.source.gpu.settled(done.set)
    if done.is_set():
        engine.source.gpu._arena.close()
    go_on(held, engine.stores)
    engine.settle()


def _begun(engine: GpuEngine) -> None:
    """What is in the copier's line has been begun."""
    for _ in range(3):  # a load is put there by the end of its fetch
        engine.source.copier.wait()


MUTANTS: dict[str, tuple[object, str, object, Callable[[Any, Any], None]]] = {
    "a store does not wait for the kernels": (Launches, "follow", _nothing, _store_while_computing),
    "a load does not wait for the kernels": (Launches, "follow", _nothing, _load_into_blocks_in_use),
    "a pass does not wait for a layer": (GpuPages, "precede", _nothing, _read_layers_on_their_way),
    "slots are committed before the event": (GpuPages, "_copy", _tells_at_once, _load_what_is_being_stored),
    "blocks are given back before the event": (GpuPages, "settled", _settles_at_once, _reuse_blocks),
    "memory is unpinned before the event": (GpuPages, "settled", _settles_at_once, _unpin),
}  # fmt: skip


@pytest.mark.parametrize("mutated", [False, True], ids=["as it is", "mutant"])
@pytest.mark.parametrize("order", ["LPBTH", "LPBHT"], ids=["by runs", "by slots of tokens"])
@pytest.mark.parametrize("name", MUTANTS)
def test_the_double_finds_every_event_that_is_missing(
    made: Any, held: Any, double: Fake, monkeypatch: pytest.MonkeyPatch, name: str, order: str, mutated: bool
) -> None:
    of_order: Any = partial(made, order=order)
    of_order.store = made.store
    where, what, instead, act = MUTANTS[name]
    if mutated:
        monkeypatch.setattr(where, what, instead)
    act(of_order, held)
    faults = double.take_faults()
    assert bool(faults) is mutated, faults
