"""What the tiers hold, in the KV events of vLLM's own scheduler, and what a router knows by them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn about each other while they are imported
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)

from vllm.distributed.kv_events import BlockStored  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402

from pdlink.integrations.vllm_parts import tier_events  # noqa: E402
from pdlink.integrations.vllm_parts.tier_events import ServerTiers  # noqa: E402
from pdlink.kv.hashing import Origin, Preimage  # noqa: E402
from pdlink.observe.kv_ledger import BlockPlace  # noqa: E402
from pdlink_proxy.kv_index import DISK, HOST, LOADING, KVIndex  # noqa: E402
from tests.integrations.contract import vllm_server  # noqa: E402
from tests.integrations.contract.vllm_server import HAS_V2, Server, servers  # noqa: E402
from tests.proxy.test_kv_index import apply  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

CHUNK = 32
"""Two blocks of vLLM's."""
PROMPT = list(range(1, 101))
HELD = 96
MEMORY_GIB = 0.00005
"""13 chunks."""
SAYS_EXTRA = "extra_keys" in BlockStored.__struct_fields__
TELLS_AGAIN = hasattr(KVConnectorBase_V1, "bind_gpu_block_pool")  # since 0.22


class Router:
    """Reads the KV events of one server."""

    def __init__(self, server: Server | None = None) -> None:
        self.index = KVIndex()
        self.index.assign(1, [1], shared=False)
        self.most = 0
        """Chunks of the tiers in one batch."""
        if server is not None:
            server.scheduler.kv_event_publisher = MagicMock(publish=lambda batch: self.hear(batch.events))

    def hear(self, events: list[Any]) -> None:
        self.most = max(
            self.most, sum(len(one.block_hashes) for one in events if getattr(one, "medium", "GPU") != "GPU")
        )
        apply(self.index, 1, "m", msgspec.msgpack.encode([0.0, events]))

    def knows(self, prompt: list[int], *names: str) -> tuple[int, float]:
        """How many tokens the worker has, and what loading one costs. names: of LoRA and salt."""
        shares = self.index.held("m", names, np.array(prompt, np.uint32)).shares
        return next(((tokens, round(loading / tokens, 3)) for _, tokens, loading in shares), (0, 0.0))


def tiers(**more: Any) -> dict[str, Any]:
    return {"name": "s", "tiers": {"chunk_size": CHUNK, "max_local_cpu_size": 0.01, "load_if_faster": False, **more}}


def prompts(count: int) -> list[list[int]]:
    return [[1000 * number + token for token in range(100)] for number in range(1, count + 1)]


def serve(server: Server, wanted: list[list[int]]) -> None:
    for number, prompt in enumerate(wanted):
        server.request(f"{number} of {id(wanted)}", prompt, max_tokens=1)
        server.until_idle()


def kept(server: Server, wanted: list[list[int]]) -> list[int]:
    """How many tokens of each prompt the store has."""
    source = server.connector._rank._store.source
    return [source.prompt("", source.keys(prompt)).lookup() for prompt in wanted]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("runner", ["v1", "v2"] if HAS_V2 else ["v1"])
def test_a_router_knows_what_is_in_memory_when_vllm_has_forgotten_it(
    tmp_path: Path, runner: str, *, asynchronous: bool
) -> None:
    with servers(tmp_path, {"extra": tiers(), "runner": runner, "asynchronous": asynchronous}) as (server,):
        router = Router(server)
        serve(server, [PROMPT])
        assert router.knows(PROMPT) == (HELD, 0.0), "in vLLM's blocks, which are quicker"
        serve(server, prompts(12))
        host = LOADING[HOST]
        assert router.knows(PROMPT) == (HELD, host), "others have its blocks"
        if not TELLS_AGAIN:
            return
        assert server.scheduler.reset_prefix_cache()
        server.until(lambda: router.knows(PROMPT) == (HELD, host))
        assert server.scheduler.reset_prefix_cache(reset_connector=True)
        server.until(lambda: not len(router.index))


def test_a_router_knows_what_is_on_the_disk_alone_and_what_has_gone(tmp_path: Path) -> None:
    extra = tiers(local_disk=str(tmp_path / "{name}"), max_local_disk_size=0.1)
    wanted, disk = prompts(8), LOADING[DISK]
    with servers(tmp_path, {"extra": extra}) as (server,):
        router = Router(server)
        serve(server, wanted)
        server.until(lambda: all(router.knows(prompt)[0] == HELD for prompt in wanted))
        store = server.connector._rank._store.source.store
        assert store.flush(30)
        store.clear(places=["memory"])
        server.until(lambda: router.knows(wanted[0]) == (HELD, disk))
    with servers(tmp_path, {"extra": extra}) as (server,):  # the next life
        router = Router(server)
        server.until(lambda: [router.knows(prompt) for prompt in wanted] == [(HELD, disk)] * 8)
        server.connector._rank._store.source.store.clear()
        server.until(lambda: not len(router.index))


@pytest.mark.skipif(not TELLS_AGAIN, reason="after vLLM has emptied its cache, tiers are not told of")
def test_what_memory_has_lost_is_not_known(tmp_path: Path) -> None:
    with servers(tmp_path, {"extra": tiers(max_local_cpu_size=MEMORY_GIB)}) as (server,):
        router = Router(server)
        serve(server, wanted := prompts(30))
        assert server.scheduler.reset_prefix_cache()
        serve(server, wanted[-1:])
        found = kept(server, wanted)
        assert found == [router.knows(prompt)[0] for prompt in wanted]
        assert 0 < sum(found) < len(wanted) * HELD


def test_a_store_that_fills_quickly_is_told_a_part_with_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_events, "_MAX_CHUNKS", 2)
    with servers(tmp_path, {"extra": tiers()}) as (server,):
        router = Router(server)
        serve(server, wanted := prompts(8))
        server.until(lambda: all(router.knows(prompt)[0] == HELD for prompt in wanted))
        assert router.most == 2


@pytest.mark.parametrize("why", ["no events", "a store process"])
def test_nothing_is_noted_where_nobody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    config = vllm_server._config

    def without(*given: Any, **more: Any) -> Any:
        found = config(*given, **more)
        found.kv_events_config.enable_kv_cache_events = why != "no events"
        return found

    monkeypatch.setattr(vllm_server, "_config", without)
    extra = tiers()
    if why == "a store process":
        extra["tiers"] = {"chunk_size": CHUNK, "store": str(tmp_path / "none.sock")}
    with servers(tmp_path, {"extra": extra}) as (server,):
        serve(server, [PROMPT])
        assert server.connector._rank._store.tiers is None
        assert list(server.scheduler.connector.take_events()) == []


@pytest.mark.skipif(not SAYS_EXTRA, reason="events name neither")
def test_a_chunk_is_told_under_the_name_that_clients_say_of_its_lora(tmp_path: Path) -> None:
    with servers(tmp_path, {"extra": tiers()}) as (server,):
        router, origin = Router(server), Origin("m", "", "", lora="tuned 0123abcd", salt="salt")
        chunk = Preimage(None, PROMPT[:CHUNK], ("tuned 0123abcd", "salt"), origin)
        server.connector._rank._store.tiers.stored(BlockPlace(CHUNK, "CPU"), b"a" * 32, chunk)
        server.until(lambda: len(router.index))
        assert router.knows(PROMPT, "tuned", "salt") == (CHUNK, LOADING[HOST])


@pytest.mark.skipif(not SAYS_EXTRA, reason="events name neither LoRA nor salt")
def test_a_chunk_is_told_while_all_ranks_have_it() -> None:
    asked: list[str] = []
    server, router = ServerTiers(2, lambda: asked.append("again")), Router()
    memory = BlockPlace(CHUNK, "CPU")
    first = Preimage(None, PROMPT[:CHUNK], ("tuned", "salt"), Origin("m", "", "", lora="tuned", salt="salt"))
    second = Preimage(b"a" * 32, PROMPT[CHUNK : 2 * CHUNK])
    both = [(memory, b"a" * 32, first), (memory, b"b" * 32, second)]
    server.heard({0: both})
    assert server.take() == []
    server.heard({1: both})
    (event,) = server.take()
    assert (event.lora_name, event.medium, len(event.block_hashes)) == ("tuned", "CPU", 2)
    router.hear([event])
    assert router.knows(PROMPT, "tuned", "salt") == (2 * CHUNK, LOADING[HOST])
    assert router.knows(PROMPT) == (0, 0.0)
    server.heard({0: [(memory, b"b" * 32, None)], 1: both})
    router.hear(server.take())
    assert router.knows(PROMPT, "tuned", "salt")[0] == CHUNK
    server.heard({1: [(memory, b"b" * 32, None)], 0: both})
    assert server.take() == []
    pool = MagicMock(reset_prefix_cache=lambda: True)
    server.watch(pool)
    assert pool.reset_prefix_cache()
    assert asked == ["again"]
    server.heard({0: both, 1: both})
    assert len(server.take()) == 1
