"""Whatever ends while KV is stored or loaded gives everything back, and answers stay right."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.engine.request import SamplingParams
from pdlink.errors import RequestAborted
from pdlink.serve.worker import Worker
from tests.waiting import WAIT_S

from .tiered import (
    CHUNK,
    MODEL,
    SAMPLING,
    answer,
    answers,
    between_layers,
    computed_here,
    ids,
    legs,
    opened,
    prompt_of,
    settle,
    sourced,
    store_of,
    until_free,
    wait_for,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pdlink.store.interface import Found


def test_a_request_that_ends_while_it_is_looked_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 24)
    with opened() as worker:
        expected = answers(worker, [prompt], at_once=False)
        right, looking, goes_on = store_of(worker).lookup, threading.Event(), threading.Event()

        def lookup(*args: Any) -> Found:
            looking.set()
            wait_for(goes_on)
            return right(*args)

        async def aborted() -> None:
            stream = worker.start("same", prompt, SAMPLING, None)
            assert await asyncio.to_thread(looking.wait, WAIT_S)
            worker.abort(stream)
            with pytest.raises(RequestAborted):
                assert not [token async for token in stream]

        async def again() -> list[int]:
            stream = worker.start("same", prompt, SAMPLING, None)
            goes_on.set()
            return [token.token_id async for token in stream]

        monkeypatch.setattr(store_of(worker), "lookup", lookup)
        asyncio.run(aborted())
        assert (worker.pool.num_held, worker.engine.num_waiting) == (0, 0)
        assert [asyncio.run(again())] == expected
        settle(worker)
        assert (worker.pool.num_held, store_of(worker)._catalog.num_leases) == (0, 0)


def test_an_aborted_request_gives_everything_back_while_its_kv_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 5)
    with opened() as worker:
        (expected,) = answers(worker, [prompt], at_once=False)
        stop = threading.Event()
        assert worker.source is not None
        worker.source.copier.put(lambda: None if stop.wait(WAIT_S) else None)

        loading = asyncio.Event()

        async def aborted(patch: pytest.MonkeyPatch) -> None:
            assert worker.source is not None
            loop, right = asyncio.get_running_loop(), worker.tiers.admitted

            def admitted(*args: Any) -> None:
                right(*args)
                loop.call_soon_threadsafe(loading.set)

            patch.setattr(worker.tiers, "admitted", admitted)
            stream = worker.start("aborted", prompt, SAMPLING, None)
            await loading.wait()
            worker.abort(stream)
            with pytest.raises(RequestAborted):
                assert not [token async for token in stream]

        with monkeypatch.context() as patch:
            asyncio.run(aborted(patch))
        assert worker.pool.num_held > 0, "the copier may still write to the blocks"
        stop.set()
        settle(worker)
        assert worker.pool.num_held == 0
        assert answers(worker, [prompt], at_once=False) == [expected]
        store_of(worker).check()


def test_an_aborted_request_gives_everything_back_while_its_kv_is_stored() -> None:
    """vllm#46014, PR 29870: blocks of a request that had ended were read, or never freed."""
    prompt = prompt_of(5 * CHUNK, 31)
    with opened() as worker:
        assert worker.source is not None
        stop, begun = threading.Event(), threading.Event()
        copier = worker.source.copier
        copier.put(begun.set)
        copier.put(lambda: wait_for(stop))
        wait_for(begun)

        async def ends(max_tokens: int) -> None:
            stream = worker.start(f"ends{max_tokens}", prompt, SamplingParams(max_tokens=max_tokens), None)
            async for _ in stream:
                worker.abort(stream)

        for max_tokens in (1, 200):  # one is complete, and one is aborted
            with suppress(RequestAborted):
                asyncio.run(ends(max_tokens))
        assert worker.engine.num_running == 0
        # The copier asks the store what it lacks when it gets to them: of both requests.
        assert worker.pool.num_held == 2 * 5 * CHUNK // 16, "the copier may read them, and no others"
        stop.set()
        settle(worker)
        assert worker.pool.num_held == 0
        assert store_of(worker)._catalog.num_reservations == 0
        store_of(worker).check()
        assert answers(worker, [prompt], at_once=False) == computed_here([prompt])


def test_an_abort_in_a_pass_that_waits_for_layers_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK + 7, 32)
    with opened() as worker:
        expected, tiers = answers(worker, [prompt], at_once=False), worker.tiers
        assert tiers is not None
        right, waits, stop = tiers.layer_needed, threading.Event(), threading.Event()

        def layer_needed(request_id: str, layer: int, timeout_s: float) -> bool:
            if layer == 1:
                waits.set()
            return right(request_id, layer, timeout_s)

        async def aborted() -> None:
            stream = worker.start("aborted", prompt, SAMPLING, None)
            assert await asyncio.to_thread(waits.wait, WAIT_S)
            worker.abort(stream)
            with pytest.raises(RequestAborted):
                assert not [token async for token in stream]
            assert worker.pool.num_held > 0, "the copier may still write to the blocks"
            stop.set()

        with monkeypatch.context() as patch:
            patch.setattr(tiers, "layer_needed", layer_needed)
            between_layers(worker, patch, lambda: wait_for(stop))
            asyncio.run(aborted())
            settle(worker)
        assert worker.pool.num_held == 0
        assert answers(worker, [prompt], at_once=False) == expected
        store_of(worker).check()


def test_loads_that_fill_the_memory_together_are_shorter_and_wait_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lmcache#3855, vllm#45388: each held some memory and waited for more. Six loads, room for one of them."""
    prompts = [prompt_of(5 * CHUNK + 3, seed) for seed in range(6)]
    expected = computed_here(prompts)
    below = {"local_disk": str(tmp_path), "max_local_disk_size": 0.05}
    with opened(records=64, below=below) as worker:
        assert answers(worker, prompts, at_once=False) == expected
        assert store_of(worker).flush(WAIT_S)
    with opened(records=5, below=below) as worker, sourced() as events:
        assert worker.source is not None
        right, goes_on, loads = worker.tiers._load, threading.Event(), itertools.count(1)
        worker.source.copier.put(lambda: wait_for(goes_on))

        def load(*args: Any, receives: bool) -> None:
            right(*args, receives=receives)
            if next(loads) == len(prompts):
                goes_on.set()

        monkeypatch.setattr(worker.tiers, "_load", load)
        assert answers(worker, prompts, at_once=True) == expected
        settle(worker)
        assert sum(event.loaded for event in events) >= 5 * CHUNK
        assert min(event.loaded for event in events) < 5 * CHUNK
        assert worker.pool.num_held == 0
        store_of(worker).check()


@pytest.mark.parametrize("seed", range(3))
def test_random_turns_over_two_workers_give_right_answers_and_leave_nothing_held(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    heads = [prompt_of(rng.randint(1, 4) * CHUNK, number) for number in range(3)]
    prompts = [rng.choice(heads) + prompt_of(rng.randint(1, 70), number) for number in range(8)]
    expected = dict(zip(prompts, computed_here(prompts), strict=True))
    records, keeps = rng.choice([3, 8, 40]), {"save_decode_cache": True, "load_if_faster": rng.random() < 0.5}
    disk = {"local_disk": str(tmp_path / "{name}"), "max_local_disk_size": 0.005}
    paths: list[str] = []

    async def one(prefill: Worker, decode: Worker) -> None:
        prompt, loop = rng.choice(prompts), asyncio.get_running_loop()
        sender, receiver = legs(prefill, decode, prompt)
        for leg, worker in ((sender, prefill), (receiver, decode)):
            if rng.random() < 0.15:
                loop.call_later(rng.random() * 0.05, worker.abort, leg)
        with suppress(RequestAborted):
            assert [token.token_id async for token in receiver] == expected[prompt]
            paths.append(receiver.kv_path)

    async def some(prefill: Worker, decode: Worker) -> None:
        await asyncio.gather(*(one(prefill, decode) for _ in range(10)))

    shared = rng.random() < 0.5
    with (
        opened(role="prefill", records=records, share_prefixes=shared, below=disk) as prefill,
        opened(role="decode", records=records, share_prefixes=shared, below={**disk, **keeps}) as decode,
    ):
        for _ in range(4):
            asyncio.run(some(prefill, decode))
        workers = (prefill, decode)
        for worker in workers:
            settle(worker)
            until_free(worker)
            store_of(worker).check()
    assert "transferred" in paths
    for worker in workers:
        catalog = store_of(worker)._catalog
        assert (catalog.num_leases, catalog.num_reservations) == (0, 0)


def test_kv_that_comes_too_late_is_not_taken_for_that_of_the_next_request_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt_of(5 * CHUNK, seed) for seed in (6, 7)]
    with opened() as worker:
        expected = answers(worker, prompts, at_once=False)
        tiers, source, right = worker.tiers, worker.source, worker.port.layer_written
        assert source is not None
        goes_on, next_one, copier = threading.Event(), threading.Event(), source.copier._threads[0]

        async def again(patch: pytest.MonkeyPatch) -> list[int]:
            loop, loaded, admitted = asyncio.get_running_loop(), asyncio.Event(), asyncio.Queue[None]()

            def layer_written(layer: int, *spans: Any) -> None:
                if threading.current_thread() is copier and layer == MODEL.num_layers - 1:
                    loop.call_soon_threadsafe(loaded.set)
                    assert goes_on.wait(WAIT_S)
                right(layer, *spans)

            tell = tiers.admitted

            def told(*args: Any) -> None:
                tell(*args)
                loop.call_soon_threadsafe(admitted.put_nowait, None)

            patch.setattr(worker.port, "layer_written", layer_written)
            patch.setattr(tiers, "admitted", told)
            for prompt in prompts:
                stream = worker.start("same", prompt, SAMPLING, None)
                await admitted.get()
                if prompt is prompts[0]:
                    await loaded.wait()
                    source.copier.put(lambda: None if next_one.wait(WAIT_S) else None)
                    worker.abort(stream)
                    with pytest.raises(RequestAborted):
                        assert not [token async for token in stream]
            goes_on.set()
            await answer(worker, prompt_of(CHUNK // 2, 8))  # the engine has heard what it hears of the first one
            next_one.set()
            return [token.token_id async for token in stream]

        with monkeypatch.context() as patch:
            assert asyncio.run(again(patch)) == expected[1]


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_aborts_and_clearings_give_right_answers_and_leave_nothing_held(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    heads = [prompt_of(3 * CHUNK, number) for number in range(4)]
    prompts = [
        rng.choice(heads)[: rng.randint(1, 3) * CHUNK] + prompt_of(rng.randint(1, 70), number % 6)
        for number in range(12)
    ]
    expected = dict(zip(prompts, computed_here(prompts), strict=True))
    below = {"local_disk": str(tmp_path), "max_local_disk_size": 0.005}
    records, num_blocks = rng.choice([2, 6, 15]), rng.choice([40, 64])

    async def one(worker: Worker) -> int:
        prompt, name = rng.choice(prompts), f"r{next(ids)}"
        stream = worker.start(name, prompt, SAMPLING, None)
        if rng.random() < 0.3:
            asyncio.get_running_loop().call_later(rng.random() * 0.05, worker.abort, stream)
        try:
            assert [token.token_id async for token in stream] == expected[prompt]
        except RequestAborted:
            return 0
        return 1

    async def some(worker: Worker) -> int:
        return sum(await asyncio.gather(*(one(worker) for _ in range(12))))

    with opened(records=records, num_blocks=num_blocks, share_prefixes=seed % 2 == 0, below=below) as worker:
        for _ in range(5):
            assert asyncio.run(some(worker)) > 0
            if rng.random() < 0.3:
                store_of(worker).clear()
        settle(worker)
        assert worker.pool.num_held == 0
        catalog = store_of(worker)._catalog
        store_of(worker).check()
    assert (catalog.num_leases, catalog.num_reservations) == (0, 0)
