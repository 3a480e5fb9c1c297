"""Real vLLM servers of one host that share a `pdlink store`: one computes on two ranks, the other one loads on one.

Run with `make test-vllm`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.test_vllm_store import CHUNK, loaded  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def store_of(place: Path) -> subprocess.Popen[bytes]:
    pdlink = Path(sys.executable).parent / "pdlink"
    settings = ["--socket", f"ipc://{place}/socket/store", "--memory", "0.5", "--listen", "127.0.0.1:0"]
    with (place / "store.log").open("ab") as log:
        return subprocess.Popen([pdlink, "store", *settings], stdout=log, stderr=log)


@pytest.fixture(scope="module")
def place(vllm_folder: Path) -> Path:
    return place_of(vllm_folder, "store-shared")


@pytest.fixture(scope="module")
def store(place: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The present one is last."""
    lives = [store_of(place)]
    yield lives
    lives[-1].kill()
    lives[-1].wait(30)


@pytest.fixture(scope="module")
def servers(place: Path, store: object, alone: Alone) -> Iterator[tuple[Server, Server]]:
    def server(name: str, *flags: str) -> Server:
        settings = {"tiers": {"store": f"ipc://{place}/socket/store", "chunk_size": CHUNK, "load_if_faster": False}}
        connector = {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
        return Server(name, place / "model", place / f"{name}.log", [*COMPUTES, *flags], connector).start()

    pair = server("two", "--block-size", "128", "--tensor-parallel-size", "2"), server("one", "--block-size", "32")
    try:
        yield pair[0].wait_ready(), pair[1].wait_ready()
    finally:
        for each in pair:
            each.kill()


@pytest.mark.parametrize("length", [513, 2000])
def test_what_two_ranks_computed_is_loaded_by_a_server_of_one(
    servers: tuple[Server, Server], alone: Alone, length: int
) -> None:
    prompt = prompt_of(length, length)
    for server, expected in zip(servers, (0, (length - 1) // CHUNK * CHUNK), strict=True):
        before = loaded(server)
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
        assert loaded(server) == before + expected
        until(server.holds_nothing, "all of it is kept")


def test_what_one_rank_computed_is_loaded_by_two(servers: tuple[Server, Server], alone: Alone) -> None:
    prompt = prompt_of(4096, 4096)
    before = loaded(servers[0])
    for server in reversed(servers):
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
        until(server.holds_nothing, "all of it is kept")
    assert loaded(servers[0]) == before + 4095


def test_a_store_that_was_killed_is_a_miss_and_its_next_life_is_filled_again(
    servers: tuple[Server, Server], alone: Alone, place: Path, store: list[subprocess.Popen[bytes]]
) -> None:
    prompt, (two, one) = prompt_of(1024, 1024), servers
    assert two.complete(prompt).tokens == [alone[tuple(prompt)]]
    store[-1].kill()
    store[-1].wait(30)
    assert one.complete(prompt).tokens == [alone[tuple(prompt)]]
    store.append(store_of(place))

    def found() -> bool:
        before = loaded(one)
        assert one.complete(prompt).tokens == [alone[tuple(prompt)]]
        until(one.holds_nothing, "all of it is kept")
        return loaded(one) > before

    until(found, "the server found the store again")
