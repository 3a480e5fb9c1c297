"""A worker finds prompts again that its pool has lost, and answers as if it had computed them."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from pdlink.config import CacheConfig, ModelConfig, TiersConfig, TransportConfig, UpConfig, WorkerConfig
from pdlink.engine.request import SamplingParams
from pdlink.errors import ConfigError, EngineFailure, RequestAborted
from pdlink.serve import health
from pdlink.serve.openai import PrefillAddress, TransferParams
from pdlink.serve.worker import Worker

from ..store.tiers.server import valkey_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pdlink.store.store import Store

MODEL = ModelConfig(num_layers=2)
CHUNK = 32
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
WAIT_S = 20.0


@contextmanager
def opened(
    *,
    role: Literal["prefill", "decode", "both"] = "both",
    records: int = 64,
    num_blocks: int = 256,
    share_prefixes: bool = False,
    below: Mapping[str, Any] | None = None,
) -> Iterator[Worker]:
    """records: that the worker's tiers hold; 0 for none."""
    record_nbytes = 4096 + CHUNK * 2 * 2 * 512
    config = WorkerConfig(
        role=role,
        model=MODEL,
        cache=CacheConfig(num_blocks=num_blocks, share_prefixes=share_prefixes),
        transport=TransportConfig(kind="tcp"),
        tiers=TiersConfig(chunk_size=CHUNK, max_local_cpu_size=records * record_nbytes / (1 << 30), **(below or {})),
    )
    worker = Worker(config, role)
    worker.open()
    try:
        assert worker.tiers is None or worker.tiers._source.shape.nbytes == record_nbytes
        yield worker
    finally:
        worker.close()


def damage(folder: Path) -> None:
    """Flip a bit in some files, cut others; of one file, flip a bit in the middle."""
    for number, path in enumerate(path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if number % 3 == 1 else data)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randint(32, 126) for _ in range(length))


def store_of(worker: Worker) -> Store:
    assert worker.tiers is not None
    return worker.tiers._source.store


def settle(worker: Worker) -> None:
    """Until the copies that are in line have been made."""
    assert worker.tiers is not None
    done = threading.Event()
    worker.tiers._source.copier.put(done.set)
    assert done.wait(WAIT_S)


class Computed:
    """Counts the prompt tokens that a worker computes."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        assert worker.tiers is not None
        right = worker.tiers.layer_written

        def layer_written(layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
            if layer == 0:
                self.tokens += sum(end - start for _, start, end in spans)
            right(layer, spans)

        monkeypatch.setattr(worker.tiers, "layer_written", layer_written)

    def take(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens


_ids = iter(range(1_000_000))


async def answer(worker: Worker, prompt: tuple[int, ...]) -> list[int]:
    name = f"r{next(_ids)}"
    stream = worker.start(name, prompt, SAMPLING, None, stored=await worker.look(name, prompt, None))
    return [token.token_id async for token in stream]


def answers(worker: Worker, prompts: Sequence[tuple[int, ...]], *, at_once: bool) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        if at_once:
            return list(await asyncio.gather(*(answer(worker, prompt) for prompt in prompts)))
        return [await answer(worker, prompt) for prompt in prompts]

    result = asyncio.run(all_of_them())
    if worker.tiers is not None:
        settle(worker)
    return result


def computed_here(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """What a worker without tiers answers."""
    with opened(records=0) as worker:
        assert worker.tiers is None
        return answers(worker, prompts, at_once=False)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7])
def test_an_answer_from_memory_is_the_computed_one(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(length, length)
    with opened() as worker:
        computed = Computed(worker, monkeypatch)
        first, second = (answers(worker, [prompt], at_once=False), answers(worker, [prompt], at_once=False))
        assert first == second == computed_here([prompt])
        assert computed.take() == length + length - (length - 1) // CHUNK * CHUNK
        assert worker.pool.num_held == 0


def test_an_answer_depends_on_what_was_loaded() -> None:
    """Otherwise the tests here could not fail."""
    prompt = prompt_of(5 * CHUNK, 1)
    with opened() as worker:
        (right,) = answers(worker, [prompt], at_once=False)
        store_of(worker).array[:] = 0
        assert answers(worker, [prompt], at_once=False) != [right]


def test_sixteen_at_once_get_what_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    head = prompt_of(3 * CHUNK, 2)
    prompts = [head + prompt_of(10 + 9 * index, index) for index in range(16)]
    expected = computed_here(prompts)
    with opened(records=128, num_blocks=512) as worker:
        computed = Computed(worker, monkeypatch)
        assert answers(worker, prompts, at_once=True) == expected
        computed.take()
        assert answers(worker, prompts, at_once=True) == expected
        assert computed.take() == sum((len(prompt) - 1) % CHUNK + 1 for prompt in prompts)
        assert worker.pool.num_held == 0


@pytest.mark.parametrize("records", [1, 5, 11])
def test_answers_are_right_while_records_are_evicted(records: int) -> None:
    heads = [prompt_of(2 * CHUNK, seed) for seed in range(3)]
    rng = random.Random(records)
    prompts = [rng.choice(heads) + prompt_of(rng.randint(1, 60), rng.randint(0, 4)) for _ in range(40)]
    expected = computed_here(prompts)
    with opened(records=records, num_blocks=64, share_prefixes=True) as worker:
        assert answers(worker, prompts[:20], at_once=False) == expected[:20]
        assert answers(worker, prompts[20:], at_once=True) == expected[20:]
        store_of(worker).check()
        assert worker.pool.num_held == 0


def test_a_record_that_goes_between_look_up_and_load_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 3)
    with opened() as worker:
        expected = answers(worker, [prompt], at_once=False)
        computed, store = Computed(worker, monkeypatch), store_of(worker)
        right = store.fetch

        def fetch(found: Any, *rest: Any) -> Any:
            store.clear(found.keys[2:])
            return right(found, *rest)

        monkeypatch.setattr(store, "fetch", fetch)
        assert answers(worker, [prompt], at_once=False) == expected
        assert computed.take() == 3 * CHUNK
        assert worker.pool.num_held == 0


def test_kv_of_a_pass_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(3 * CHUNK, 4)
    with opened() as worker:
        right = worker.model.logits

        def logits(*args: Any, **named: Any) -> torch.Tensor:
            return right(*args, **named) * float("nan")

        with monkeypatch.context() as broken:
            broken.setattr(type(worker.model), "logits", lambda _, *args, **named: logits(*args, **named))
            with pytest.raises(EngineFailure):
                answers(worker, [prompt], at_once=False)
        settle(worker)
        assert store_of(worker).gauges()["used"] == 0
        assert answers(worker, [prompt], at_once=False) == computed_here([prompt])


def test_prefill_pushes_what_it_loaded_like_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(5 * CHUNK + 3, seed) for seed in range(3)]
    expected = computed_here(prompts)
    with opened(role="prefill") as prefill, opened(role="decode", records=0) as decode:
        computed = Computed(prefill, monkeypatch)
        where = PrefillAddress(name="prefill", control=prefill.node.address)

        async def pushed(prompt: tuple[int, ...]) -> list[int]:
            name = f"t{next(_ids)}"
            sends = TransferParams(transfer_id=name, leg="prefill", seed=1, created=1)
            receives = TransferParams(transfer_id=name, leg="decode", seed=1, created=1, prefill=where)
            stored = await prefill.look(f"p{name}", prompt, sends)
            prefill.start(f"p{name}", prompt, SAMPLING, sends, stored=stored)
            stream = decode.start(f"d{name}", prompt, SAMPLING, receives)
            tokens = [token.token_id async for token in stream]
            assert stream.kv_path == "transferred"
            return tokens

        async def all_pushed() -> list[list[int]]:
            return list(await asyncio.gather(*map(pushed, prompts)))

        assert asyncio.run(all_pushed()) == expected
        settle(prefill)
        assert computed.take() == 3 * (5 * CHUNK + 3)
        assert asyncio.run(all_pushed()) == expected
        assert computed.take() == 3 * 3


def test_an_aborted_request_gives_everything_back_while_its_kv_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 5)
    with opened() as worker:
        (expected,) = answers(worker, [prompt], at_once=False)
        stop = threading.Event()
        assert worker.tiers is not None
        worker.tiers._source.copier.put(lambda: None if stop.wait(WAIT_S) else None)

        loading = asyncio.Event()

        async def aborted(patch: pytest.MonkeyPatch) -> None:
            assert worker.tiers is not None
            loop, right = asyncio.get_running_loop(), worker.tiers.admitted

            def admitted(*args: Any) -> None:
                right(*args)
                loop.call_soon_threadsafe(loading.set)

            patch.setattr(worker.tiers, "admitted", admitted)
            stored = await worker.look("aborted", prompt, None)
            stream = worker.start("aborted", prompt, SAMPLING, None, stored=stored)
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


def test_kv_that_comes_too_late_is_not_taken_for_that_of_the_next_request_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt_of(5 * CHUNK, seed) for seed in (6, 7)]
    with opened() as worker:
        expected = answers(worker, prompts, at_once=False)
        tiers, right = worker.tiers, worker.port.layer_written
        assert tiers is not None
        goes_on, next_one, copier = threading.Event(), threading.Event(), tiers._source.copier._threads[0]

        async def again(patch: pytest.MonkeyPatch) -> list[int]:
            loop, loaded, admitted = asyncio.get_running_loop(), asyncio.Event(), asyncio.Queue[None]()

            def layer_written(*args: Any) -> None:
                if threading.current_thread() is copier:
                    loop.call_soon_threadsafe(loaded.set)
                    assert goes_on.wait(WAIT_S)
                right(*args)

            tell = tiers.admitted

            def told(*args: Any) -> None:
                tell(*args)
                loop.call_soon_threadsafe(admitted.put_nowait, None)

            patch.setattr(worker.port, "layer_written", layer_written)
            patch.setattr(tiers, "admitted", told)
            for prompt in prompts:
                stored = await worker.look("same", prompt, None)
                stream = worker.start("same", prompt, SAMPLING, None, stored=stored)
                await admitted.get()
                if prompt is prompts[0]:
                    await loaded.wait()
                    tiers._source.copier.put(lambda: None if next_one.wait(WAIT_S) else None)
                    worker.abort(stream)
                    with pytest.raises(RequestAborted):
                        assert not [token async for token in stream]
            goes_on.set()
            await answer(worker, prompt_of(CHUNK // 2, 8))  # the engine has heard what it hears of the first one
            next_one.set()
            return [token.token_id async for token in stream]

        with monkeypatch.context() as patch:
            assert asyncio.run(again(patch)) == expected[1]


@pytest.mark.parametrize("tier", ["local_disk", "remote_url"])
def test_a_worker_that_starts_again_finds_its_prompts(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's disk tier begins empty after each restart, with its old files still there."""
    prompts = [prompt_of(3 * CHUNK + 5, seed) for seed in range(4)]
    expected = computed_here(prompts)
    below: dict[str, Any] = {"remote_url": f"file://{tmp_path}"}
    if tier == "local_disk":
        below = {"local_disk": str(tmp_path / "{name}"), "max_local_disk_size": 0.01}
    with opened(below=below) as worker:
        assert answers(worker, prompts, at_once=True) == expected
    with opened(below=below) as worker:
        computed = Computed(worker, monkeypatch)
        assert answers(worker, prompts, at_once=True) == expected
        assert computed.take() == 4 * 5
    damage(tmp_path)
    with opened(below=below) as worker:
        assert answers(worker, prompts, at_once=True) == expected


def test_a_worker_finds_what_another_one_left_on_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, url = prompt_of(5 * CHUNK + 3, 6), valkey_server().url
    with opened(below={"remote_url": url}) as first:
        expected = answers(first, [prompt], at_once=False)
    with opened(below={"remote_url": url}) as second:
        computed = Computed(second, monkeypatch)
        assert answers(second, [prompt], at_once=False) == expected == computed_here([prompt])
        assert computed.take() == 3


def test_a_server_that_is_not_there_costs_no_answer() -> None:
    prompts = [prompt_of(5 * CHUNK, seed) for seed in range(4)]
    with opened(below={"remote_url": "redis://127.0.0.1:1"}) as worker:
        assert health.gauges(worker)["tiers_answering"][1] == {"valkey": 1}
        assert answers(worker, prompts, at_once=False) == computed_here(prompts)
        assert health.gauges(worker)["tiers_answering"][1] == {"valkey": 0}
        assert health.gauges(worker)["store_nbytes"][1]["used"] > 0


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
        prompt, name = rng.choice(prompts), f"r{next(_ids)}"
        stored = await worker.look(name, prompt, None)
        stream = worker.start(name, prompt, SAMPLING, None, stored=stored)
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


def test_chunks_that_do_not_fit_are_refused_with_both_numbers() -> None:
    config = WorkerConfig(model=MODEL, tiers=TiersConfig(chunk_size=1 << 20, max_local_cpu_size=0.001))
    worker = Worker(config, "large")
    with pytest.raises(
        ConfigError, match=r"tiers.chunk_size: got 1048576 tokens, \d+ bytes of this model; limit 1073741 "
    ):
        worker.open()


def test_tiers_below_need_memory_and_a_size_and_one_worker_each() -> None:
    for tiers, complaint in (
        ({"local_disk": "/x"}, "tiers.max_local_disk_size: missing"),
        ({"remote_url": "file:///x", "max_local_cpu_size": 0}, "tiers.max_local_cpu_size: got 0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            WorkerConfig.model_validate({"tiers": tiers})
    two: dict[str, Any] = {"num_prefill": 2, "prefill": {"tiers": {"local_disk": "/x", "max_local_disk_size": 1}}}
    with pytest.raises(ValueError, match="prefill.tiers.local_disk: is of one worker"):
        UpConfig.model_validate(two)
    two["prefill"]["tiers"]["local_disk"] = "/x/{name}"
    UpConfig.model_validate(two)


def test_tiers_of_a_gpu_are_refused_while_they_read_host_memory_only() -> None:
    with pytest.raises(ValueError, match="tiers.chunk_size: reads host memory"):
        WorkerConfig.model_validate({"engine": {"device": "cuda"}, "tiers": {"chunk_size": 64}})
