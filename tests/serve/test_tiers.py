"""A worker finds prompts again that its pool has lost, and answers as if it had computed them."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdlink.config import TiersConfig, UpConfig, WorkerConfig
from pdlink.errors import ConfigError, EngineFailure
from pdlink.kv import hashing
from pdlink.serve.health import health
from pdlink.serve.worker import Worker
from pdlink.store.prompt import Prompt
from tests.waiting import WAIT_S, until

from ..store.tiers.server import valkey_server
from .tiered import (
    CHUNK,
    MODEL,
    Computed,
    answers,
    computed_here,
    damage,
    opened,
    prompt_of,
    pushed,
    settle,
    sourced,
    store_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdlink.store.loading import Load


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7])
def test_an_answer_from_memory_is_the_computed_one(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(length, length)
    with opened() as worker:
        computed = Computed(worker, monkeypatch)
        first, second = (answers(worker, [prompt], at_once=False), answers(worker, [prompt], at_once=False))
        assert first == second == computed_here([prompt])
        assert computed.take() == length + max(1, length % CHUNK)
        assert worker.pool.num_held == 0


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_of_a_prompt_that_is_whole_in_the_store_the_last_token_is_computed(
    share_prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at once: nobody has the block of the last token but the request that computes it."""
    prompt = prompt_of(3 * CHUNK, 5)
    with opened(share_prefixes=share_prefixes) as worker, sourced() as events:
        computed = Computed(worker, monkeypatch)
        (expected,) = answers(worker, [prompt], at_once=False)
        if share_prefixes:
            forget_blocks(worker)
        computed.take()
        events.clear()
        assert answers(worker, [prompt] * 3, at_once=True) == [expected] * 3
        assert computed.take() == 3
        assert [(event.loaded, event.computed) for event in events] == [(3 * CHUNK - 1, 1)] * 3
        events.clear()
        assert answers(worker, [prompt], at_once=False) == [expected]
        (told,) = events
        last_block = 3 * CHUNK - worker.cache.block_tokens
        here = (last_block, 0, 3 * CHUNK - last_block) if share_prefixes else (0, 3 * CHUNK - 1, 1)
        assert (told.cached, told.loaded, told.computed) == here
        assert worker.pool.num_held == 0


def forget_blocks(worker: Worker) -> None:
    """Let no request find blocks of another."""
    for block in range(worker.pool.num_blocks):
        worker.pool.forget(block)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_a_request_is_hashed_once_for_its_blocks_and_its_records(
    share_prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, hashed = prompt_of(5 * CHUNK + 7, 1), list[int]()
    right = hashing._bytes_of

    def counting(tokens: Sequence[int]) -> bytes:
        hashed.append(len(tokens))
        return right(tokens)

    with (
        opened(share_prefixes=share_prefixes, below={"save_decode_cache": True}) as worker,
        monkeypatch.context() as counted,
    ):
        counted.setattr(hashing, "_bytes_of", counting)
        answers(worker, [prompt], at_once=False)
        assert sum(hashed) < len(prompt) + 2 * CHUNK, "each call sees what is new, and less than a block again"
        assert len(store_of(worker)._catalog) == 5


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
        assert computed.take() == sum(max(1, len(prompt) % CHUNK) for prompt in prompts)
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


def test_a_load_that_ends_before_the_engine_has_it_says_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, right, begun_s = prompt_of(5 * CHUNK, 3), Prompt.load, list[float]()

    def load(*args: Any) -> Load:
        begun_s.append(time.monotonic())
        made = right(*args)
        made.done.result(WAIT_S)
        return made

    monkeypatch.setattr(Prompt, "load", load)
    with opened() as worker:
        answers(worker, [prompt], at_once=False)
        with sourced() as events:
            answers(worker, [prompt], at_once=False)
        (told,) = events
        assert told.loaded
        assert told.began_s <= begun_s[-1]


def test_a_record_that_goes_between_look_up_and_load_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 3)
    with opened() as worker:
        expected = answers(worker, [prompt], at_once=False)
        computed, store = Computed(worker, monkeypatch), store_of(worker)
        right = store.fetch

        def fetch(found: Any, *rest: Any, **named: Any) -> Any:
            store.clear(found.keys[2:])
            return right(found, *rest, **named)

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
    expected = [(tokens, "transferred") for tokens in computed_here(prompts)]
    with opened(role="prefill") as prefill, opened(role="decode", records=0) as decode:
        computed = Computed(prefill, monkeypatch)

        async def all_pushed() -> list[tuple[list[int], str]]:
            return list(await asyncio.gather(*(pushed(prefill, decode, prompt) for prompt in prompts)))

        assert asyncio.run(all_pushed()) == expected
        settle(prefill)
        assert computed.take() == 3 * (5 * CHUNK + 3)
        assert asyncio.run(all_pushed()) == expected
        assert computed.take() == 3 * 3


def test_the_answer_of_a_pass_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(below={"save_decode_cache": True}) as worker:
        monkeypatch.setattr(type(worker.model), "logits", lambda *_, **__: torch.full((1, 300), float("nan")))
        with pytest.raises(EngineFailure):
            answers(worker, [prompt_of(3 * CHUNK, 30)], at_once=False)
        assert store_of(worker).gauges()["used"] == 0


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


def test_a_server_that_is_not_there_is_told_before_a_prompt_comes_and_costs_no_answer() -> None:
    prompts = [prompt_of(5 * CHUNK, seed) for seed in range(4)]
    with opened(below={"remote_url": "redis://127.0.0.1:1"}) as worker:
        until(lambda: not store_of(worker).health()["valkey"], "it was asked")
        assert "(valkey 127.0.0.1:1 " in health(worker).problems["valkey"]
        assert answers(worker, prompts, at_once=False) == computed_here(prompts)
        assert not store_of(worker).health()["valkey"]
        assert store_of(worker).gauges()["used"] > 0


def test_chunks_that_do_not_fit_are_refused_with_both_numbers() -> None:
    config = WorkerConfig(model=MODEL, tiers=TiersConfig(chunk_size=1 << 20, max_local_cpu_size=0.001))
    worker = Worker(config, "large")
    with pytest.raises(
        ConfigError, match=r"tiers.chunk_size: got 1048576 tokens, \d+ bytes of this model; expected at most 1073741 "
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


def test_tiers_of_a_gpu_have_the_same_settings() -> None:
    settings = WorkerConfig.model_validate({"engine": {"device": "cuda"}, "tiers": {"chunk_size": 64}})
    assert settings.tiers.chunk_size == 64
