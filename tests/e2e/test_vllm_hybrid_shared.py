"""Real vLLM servers of a model with windows that share a `pdlink store`: what two ranks computed is loaded by one,
and the other way round.

Run with `make test-vllm`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_servers import prompt_of, until  # noqa: E402
from tests.e2e.test_vllm_hybrid_store import DEV, FLAGS, KINDS, forget  # noqa: E402
from tests.e2e.test_vllm_store import loaded  # noqa: E402
from tests.e2e.test_vllm_store_shared import store_of  # noqa: E402
from tests.e2e.vllm_servers import Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

KIND = KINDS["windows"]
LENGTHS = (129, 513, 1200)


@dataclass
class Fleet:
    one: Server
    two: Server
    alone: dict[int, list[list[int]]]
    """By length of the prompt, which is its seed: the answer of a server without any connector."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    place = tmp_path_factory.mktemp("hybrid-shared")
    KIND.save(place / "model")
    flags = [*FLAGS, *KIND.flags]
    single = Server("single", place / "model", place / "single.log", flags).start()
    try:
        single.wait_ready()
        alone = {length: single.complete(prompt_of(length, length)).tokens for length in LENGTHS}
    finally:
        single.kill()
    tiers = {"store": f"ipc://{place}/socket/store", "chunk_size": KIND.chunk, "load_if_faster": False}
    started: list[Server] = []
    store: subprocess.Popen[bytes] = store_of(place)
    try:
        for name, more in (("one", []), ("two", ["--tensor-parallel-size", "2"])):
            connector = {
                "kv_role": "kv_both",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"name": name, "tiers": tiers},
            }
            log = place / f"{name}.log"
            started.append(Server(name, place / "model", log, [*flags, *more], connector, environment=DEV).start())
        one, two = (server.wait_ready() for server in started)
        yield Fleet(one, two, alone)
    finally:
        for server in started:
            server.kill()
        store.kill()
        store.wait(30)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_some_ranks_computed_is_loaded_by_others(fleet: Fleet, length: int) -> None:
    """The longest prompt is computed by one rank, the others by two."""
    first, second = (fleet.one, fleet.two) if length == LENGTHS[-1] else (fleet.two, fleet.one)
    for server, expected in ((first, 0), (second, (length - 1) // KIND.chunk * KIND.chunk)):
        forget(server)
        before = loaded(server)
        assert server.complete(prompt_of(length, length)).tokens == fleet.alone[length]
        assert loaded(server) == before + expected
        until(server.holds_nothing, "all of it is kept")
