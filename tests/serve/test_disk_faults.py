"""A disk that is full or fails costs a worker what is on it, and no answer."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdlink.api.health import UNTOLD
from pdlink.api.keys import KEY_HEADER
from pdlink.serve.app import build_app
from pdlink.serve.health import health, metrics_of
from tests.waiting import WAIT_S

from .tiered import CHUNK, Computed, answers, computed_here, opened, prompt_of, store_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdlink.serve.worker import Worker

PROMPTS = [prompt_of(4 * CHUNK + 5 + seed, seed) for seed in range(6)]
TAILS = sum(len(prompt) - 4 * CHUNK for prompt in PROMPTS)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return computed_here(PROMPTS)


def on_disk(folder: Path) -> dict[str, Any]:
    return {"local_disk": str(folder / "kv"), "max_local_disk_size": 0.01}


def answering(worker: Worker) -> bool:
    return store_of(worker).health()["disk"]


class Broken:
    """Calls of the kernel that fail while a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> None:
        self.number, self.hits = number, 0
        self.on = True
        for name in names:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, right: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if not self.on:
                return right(*args)
            self.hits += 1
            raise OSError(self.number, os.strerror(self.number))

        return call


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, UNTOLD), (errno.EIO, "it does not answer")])
async def test_why_a_disk_fails_is_told_to_holders_of_the_key_alone(
    number: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(below=on_disk(tmp_path)) as worker:
        Broken(monkeypatch, number, "pwrite", "posix_fallocate")
        await asyncio.to_thread(answers, worker, PROMPTS, at_once=True)
        assert not await asyncio.to_thread(store_of(worker).flush, WAIT_S)
        why = store_of(worker).problems()["disk"]
        for http_key, sent, told in (
            ("secret", {}, kind),
            ("secret", {KEY_HEADER: "wrong"}, kind),
            ("secret", {KEY_HEADER: "secret"}, why),
            (None, {}, why),
        ):
            async with (
                TestClient(TestServer(build_app(worker, http_key))) as client,
                client.get("/health", headers=sent) as response,
            ):
                assert (await response.json())["problems"] == {"disk": told}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["ENOSPC", "EROFS", "EIO"])
def test_a_disk_that_takes_nothing_costs_no_answer(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    with opened(below=on_disk(tmp_path)) as worker:
        store = store_of(worker)
        disk = Broken(monkeypatch, number, "pwrite", "posix_fallocate")
        assert answers(worker, PROMPTS, at_once=True) == expected
        assert not store.flush(WAIT_S), "nothing of it is down"
        assert disk.hits
        assert answering(worker) == (number != errno.EIO), "one that takes no more can be read"
        assert health(worker).problems == {"disk": store.problems()["disk"]}
        assert ("left alone" if number == errno.EIO else os.strerror(number)) in store.problems()["disk"]
        body, _ = metrics_of(worker).exposition("")
        assert b'pdlink_tier_problem{tier="disk"} 1' in body
        store.clear(places=["memory"])
        assert answers(worker, PROMPTS, at_once=True) == expected
        assert worker.pool.num_held == 0
        disk.on = False
        store.clear(places=["memory"])
        comes_back(worker, expected)
    with opened(below=on_disk(tmp_path)) as worker:
        computed = Computed(worker, monkeypatch)
        assert answers(worker, PROMPTS, at_once=True) == expected
        assert computed.take() == TAILS, "what it took since is there after a restart"


def test_a_disk_that_cannot_be_read_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    with opened(below=on_disk(tmp_path)) as worker:
        store = store_of(worker)
        assert answers(worker, PROMPTS, at_once=True) == expected
        assert store.flush(WAIT_S)
        store.clear(places=["memory"])
        disk = Broken(monkeypatch, errno.EIO, "preadv")
        assert answers(worker, PROMPTS, at_once=True) == expected
        assert disk.hits
        assert answering(worker) == 0
        assert worker.pool.num_held == 0
        disk.on = False
        store.clear(places=["memory"])
        comes_back(worker, expected)


def comes_back(worker: Worker, expected: list[list[int]]) -> None:
    """Until the disk has all of it, after the pause of its breaker."""
    store, deadline_s = store_of(worker), time.monotonic() + WAIT_S
    assert worker.source is not None
    keys = [worker.source.keys(prompt).by_group[0][:4] for prompt in PROMPTS]
    while True:
        assert answers(worker, PROMPTS, at_once=True) == expected
        store.flush(WAIT_S)  # False while the disk is left alone
        store.clear(places=["memory"])
        if all(store.lookup(these, WAIT_S).places == (1,) * 4 for these in keys):
            break
        assert time.monotonic() < deadline_s, "the disk has not come back"
        time.sleep(0.1)
    assert answering(worker) == 1
