"""What a worker with tiers tells subscribers of the KV it keeps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdlink.config import CacheConfig, KVEventsConfig, ModelConfig, TiersConfig, TransportConfig, WorkerConfig
from pdlink.engine.request import SamplingParams
from pdlink.kv.hashing import Chain, namespace
from pdlink.serve.health import health
from pdlink.serve.worker import Worker

from ..observe.subscriber import BlockStored, Subscriber

if TYPE_CHECKING:
    from pathlib import Path

BLOCK, CHUNK = 16, 32
PROMPT = tuple(range(40, 40 + 3 * CHUNK))


async def answer(worker: Worker) -> None:
    stream = worker.start("a", PROMPT, SamplingParams(max_tokens=1), None)
    async for _ in stream:
        pass


def test_a_router_learns_what_lies_in_the_pool_in_memory_and_on_disk(tmp_path: Path) -> None:
    """With tokens and parents, so that one of another project can follow. The end of the worker clears it all."""
    config = WorkerConfig(
        model=ModelConfig(num_layers=1),
        cache=CacheConfig(num_blocks=64, block_tokens=BLOCK),
        transport=TransportConfig(kind="tcp"),
        tiers=TiersConfig(
            chunk_size=CHUNK, max_local_cpu_size=0.01, local_disk=str(tmp_path / "kv"), max_local_disk_size=0.01
        ),
        kv_events=KVEventsConfig(
            endpoint=f"ipc://{tmp_path}/events", replay_endpoint="tcp://127.0.0.1:*", topic="kv@{name}@m"
        ),
    )
    worker = Worker(config, "w")
    worker.open()
    try:
        said = health(worker).kv_events
        subscriber = Subscriber(said[0], "kv@w@m")
        assert worker.source is not None
        chain = Chain(namespace(worker.source.groups[0].origin), BLOCK, CHUNK)
        chain.extend(PROMPT)
        blocks = chain.blocks
        asyncio.run(answer(worker))
        store = worker.source.store
        chunks = worker.source.keys(PROMPT).by_group[0]
        expected: set[tuple[str | None, bytes | int]] = {("CPU", key) for key in [*blocks, *chunks]}
        expected |= {("STORAGE", key) for key in chunks}
        assert subscriber.hears(expected)
        stored: dict[tuple[str | None, bytes | int], tuple[bytes | int | None, list[int], str | None]] = {}
        for event in subscriber.told:
            assert isinstance(event, BlockStored)
            parent, size = event.parent_block_hash, event.block_size
            for index, key in enumerate(event.block_hashes):
                tokens = event.token_ids[index * size : (index + 1) * size]
                stored[event.medium, key] = parent, tokens, event.ownership
                parent = key
        for medium, keys, size, owner in (
            ("CPU", blocks, BLOCK, None),
            ("CPU", chunks, CHUNK, None),
            ("STORAGE", chunks, CHUNK, "disk"),
        ):
            for index, key in enumerate(keys):
                tokens = list(PROMPT[index * size : (index + 1) * size])
                assert stored[medium, key] == (keys[index - 1] if index else None, tokens, owner)
        store.clear(chunks[1:])
        assert subscriber.hears(expected - {(medium, key) for medium in ("CPU", "STORAGE") for key in chunks[1:]})
    finally:
        worker.close()
    assert subscriber.hears(set())
    subscriber.close()
