"""Workers with tiers in this process, and what tests see and hold of them."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pdlink.api.legs import DecodeParams, PrefillAddress, PrefillParams
from pdlink.config import CacheConfig, ModelConfig, TiersConfig, TransportConfig, WorkerConfig
from pdlink.engine.request import SamplingParams
from pdlink.events import PromptSourced, listen
from pdlink.serve.worker import Worker
from pdlink.store.loading import GroupLoad
from pdlink.store.store import Store
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pdlink.serve.stream import Stream

MODEL = ModelConfig(num_layers=2)
CHUNK = 32
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


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
        tiers=TiersConfig(
            chunk_size=CHUNK,
            max_local_cpu_size=records * record_nbytes / (1 << 30),
            **{"load_if_faster": False, **(below or {})},
        ),
    )
    worker = Worker(config, role)
    worker.open()
    try:
        assert worker.source is None or worker.source.groups[0].shape.nbytes == record_nbytes
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
    assert worker.source is not None
    store = worker.source.store
    assert isinstance(store, Store)
    return store


def settle(worker: Worker) -> None:
    """Until the copies that are in line have been made."""
    assert worker.source is not None
    done = threading.Event()
    worker.source.copier.put(done.set)
    assert done.wait(WAIT_S)


class Computed:
    """Counts the prompt tokens that a worker computes."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        assert worker.source is not None
        right = worker.tiers.layer_written

        def layer_written(layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
            if layer == 0:
                self.tokens += sum(end - start for _, start, end in spans)
            right(layer, spans)

        monkeypatch.setattr(worker.tiers, "layer_written", layer_written)

    def take(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens


ids = iter(range(1_000_000))


async def answer(worker: Worker, prompt: tuple[int, ...], source: str = "") -> list[int]:
    name = f"r{next(ids)}"
    stream = worker.start(name, prompt, SAMPLING, None, source=source)
    return [token.token_id async for token in stream]


def answers(
    worker: Worker, prompts: Sequence[tuple[int, ...]], *, at_once: bool, source: str = ""
) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        if at_once:
            return list(await asyncio.gather(*(answer(worker, prompt, source) for prompt in prompts)))
        return [await answer(worker, prompt, source) for prompt in prompts]

    result = asyncio.run(all_of_them())
    if worker.source is not None:
        settle(worker)
    return result


def computed_here(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """What a worker without tiers answers."""
    with opened(records=0) as worker:
        assert worker.source is None
        return answers(worker, prompts, at_once=False)


def between_layers(worker: Worker, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do this in each load when its first layer has landed, before the second one is copied."""
    right = GroupLoad._land

    def land(self: GroupLoad, layer: int, end: int) -> None:
        right(self, layer, end)
        if layer == 0 and self._source is worker.source:
            act()

    patch.setattr(GroupLoad, "_land", land)


def expire(store: Store) -> None:
    with store._lock:
        assert store._catalog.expire(float("1e18")) == 1


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def legs(prefill: Worker, decode: Worker, prompt: tuple[int, ...]) -> tuple[Stream, Stream]:
    """Both of a request."""
    name = f"t{next(ids)}"
    where = PrefillAddress(name="prefill", control=prefill.node.address)
    sends = PrefillParams(transfer_id=name, seed=1, created=1)
    receives = DecodeParams(transfer_id=name, seed=1, created=1, prefill=where)
    sender = prefill.start(f"p{name}", prompt, SAMPLING, sends)
    return sender, decode.start(f"d{name}", prompt, SAMPLING, receives)


async def pushed(prefill: Worker, decode: Worker, prompt: tuple[int, ...]) -> tuple[list[int], str]:
    """The answer of both legs, and how decode came to its KV."""
    _, stream = legs(prefill, decode, prompt)
    return [token.token_id async for token in stream], stream.kv_path


@contextmanager
def sourced() -> Iterator[list[PromptSourced]]:
    """Where the prompts of both workers come from, as they become known."""
    events: list[PromptSourced] = []
    stop = listen(lambda event: events.append(event) if isinstance(event, PromptSourced) else None)
    try:
        yield events
    finally:
        stop()


def until_free(worker: Worker) -> None:
    """Until the endpoint has given its blocks back, too."""
    until(lambda: worker.pool.num_held == 0, "no block is held")
