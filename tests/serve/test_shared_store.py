"""Workers whose store is another process: what one computed the other loads, and a store that goes costs nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.config import CacheConfig, StoreConfig, TiersConfig, TransportConfig, WorkerConfig
from pdlink.serve.worker import Worker
from pdlink.store.eviction import Lru
from pdlink.store.server.listener import Listener
from pdlink.store.store import Store
from pdlink.store.tiers.opening import open_tier

from .tiered import CHUNK, MODEL, Computed, answers, computed_here, opened, prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdlink.store.tiers.base import Tier


@contextmanager
def listening(tmp_path: Path, nbytes: int = 8 << 20, tiers: Sequence[Tier] = ()) -> Iterator[Listener]:
    store = Store(nbytes, Lru(), tiers)
    store.open()
    listener = Listener(store, tmp_path / "socket" / "store")
    listener.open()
    try:
        yield listener
        store.check()
    finally:
        listener.close()
        store.close()


@contextmanager
def worker(tmp_path: Path, name: str) -> Iterator[Worker]:
    config = WorkerConfig(
        role="both",
        model=MODEL,
        cache=CacheConfig(num_blocks=256, share_prefixes=False),
        transport=TransportConfig(kind="tcp"),
        tiers=TiersConfig(
            chunk_size=CHUNK, store=str(tmp_path / "socket" / "store"), store_timeout_s=5.0, load_if_faster=False
        ),
    )
    found = Worker(config, name)
    found.open()
    try:
        yield found
    finally:
        found.close()


def test_what_one_worker_computed_another_one_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK + 3, 1)
    with listening(tmp_path) as listener, worker(tmp_path, "a") as first, worker(tmp_path, "b") as second:
        expected = answers(first, [prompt], at_once=False)
        computed = Computed(second, monkeypatch)
        assert answers(second, [prompt], at_once=False) == expected == computed_here([prompt])
        assert computed.take() == 3
        assert {client["name"] for client in listener.clients()} == {"a", "b"}


def test_a_worker_with_a_store_in_itself_and_a_store_process_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(5 * CHUNK + 3, seed) for seed in range(2)]
    url = f"file://{tmp_path}"
    with opened(below={"remote_url": url}) as alone:
        expected = answers(alone, prompts[:1], at_once=False)
    with listening(tmp_path, tiers=[open_tier(url)]), worker(tmp_path, "a") as shared:
        computed = Computed(shared, monkeypatch)
        expected += answers(shared, prompts[1:], at_once=False)
        computed.take()
        assert answers(shared, prompts[:1], at_once=False) == expected[:1]
        assert computed.take() == 3
    with opened(below={"remote_url": url}) as alone:
        computed = Computed(alone, monkeypatch)
        assert answers(alone, prompts, at_once=False) == expected == computed_here(prompts)
        assert computed.take() == 2 * 3


def test_sixteen_requests_at_once_in_two_workers_answer_as_one(tmp_path: Path) -> None:
    heads = [prompt_of(2 * CHUNK, seed) for seed in range(3)]
    prompts = [heads[number % 3] + prompt_of(10 + number, number) for number in range(16)]
    expected = computed_here(prompts)
    with listening(tmp_path, 200_000), worker(tmp_path, "a") as first, worker(tmp_path, "b") as second:
        for _ in range(2):
            assert answers(first, prompts, at_once=True) == expected
            assert answers(second, prompts, at_once=True) == expected
        assert first.pool.num_held == second.pool.num_held == 0


@pytest.mark.parametrize("loading", [True, False])
def test_a_store_that_goes_during_a_copy_costs_nothing_but_the_copy(
    loading: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(5 * CHUNK, 2)
    expected = computed_here([prompt])
    with listening(tmp_path) as listener, worker(tmp_path, "a") as found:
        if loading:
            assert answers(found, [prompt], at_once=False) == expected
        computed = Computed(found, monkeypatch)
        assert found.source is not None
        source = found.source
        right = source.copy

        def copy(*args: Any, **kwargs: Any) -> None:
            right(*args, **kwargs)
            if kwargs["loading"] == loading:
                listener.close()

        monkeypatch.setattr(source, "copy", copy)
        assert answers(found, [prompt], at_once=False) == expected
        assert computed.take() == 5 * CHUNK
        assert answers(found, [prompt], at_once=False) == expected
        assert found.pool.num_held == 0
        assert source.store.health() == {"store": False}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TiersConfig, {"store": "/s", "local_disk": "/d", "max_local_disk_size": 1}, "tiers.local_disk: .*the store"),
        (TiersConfig, {"store": "/s", "max_local_cpu_size": 0}, "tiers.max_local_cpu_size: .*the store"),
        (TiersConfig, {"store_timeout_s": 2}, "tiers.store_timeout_s: .*names none"),
        (StoreConfig, {"tiers": {"chunk_size": 16}}, "tiers.chunk_size: .*of workers"),
        (StoreConfig, {"transport": {"kind": "tcp"}}, "transport: .*of other nodes"),
        (StoreConfig, {"key_file": "k", "allow_file": "a"}, "key_file: .*of other nodes"),
    ],
)
def test_a_setting_belongs_to_the_worker_or_to_the_store(kind: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.model_validate(settings)
