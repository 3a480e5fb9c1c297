"""KV events as the engines' own code writes them (`events/record_*.py`), read by the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.kv_events import KVEvents
from pdlink_proxy.kv_index import KVIndex
from pdlink_proxy.table import WorkerState
from tests.proxy.events.frames import OTHER, PROMPT
from tests.proxy.fakes import until
from tests.proxy.test_kv_events import shares
from tests.proxy.test_kv_index import apply, tokens_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORKER = 1
RECORDED: dict[str, dict[str, list[list[str]]]] = {
    engine: json.loads((Path(__file__).parent / "events" / f"{engine}.json").read_text())["frames"]
    for engine in ("vllm", "sglang")
}


def frames(engine: str, what: str) -> list[list[bytes]]:
    return [[bytes.fromhex(frame) for frame in each] for each in RECORDED[engine][what]]


def index_of(engine: str, what: str) -> KVIndex:
    """What is known after all these batches."""
    index = KVIndex()
    for *_, batch in frames(engine, what)[:-1]:
        apply(index, WORKER, "m", batch)
    return index


def held(index: KVIndex, tokens: list[int], *extra: str, model: str = "m") -> int:
    return tokens_in(index, model, extra, np.array(tokens, np.uint32)).get(WORKER, 0)


@pytest.mark.parametrize(
    ("engine", "what", "of_prompt", "of_other"),
    [
        ("vllm", "a chain of parents", 64, 0),
        ("vllm", "blocks pushed out", 16, 112),
        ("vllm", "all cleared", 0, 0),
        ("vllm", "filled again", 32, 0),
        ("vllm", "blocks of 32", 64, 0),
        ("vllm", "names of 32 bytes", 32, 0),
        ("vllm", "a sliding window beside", 64, 0),
        ("sglang", "a chain of parents", 64, 0),
        ("sglang", "moved to the host's memory", 48, 32),
        ("sglang", "blocks pushed out", 0, 32),
        ("sglang", "all cleared", 0, 0),
        ("sglang", "pairs of tokens", 32, 0),
    ],
)
def test_the_router_knows_what_the_engine_has(engine: str, what: str, of_prompt: int, of_other: int) -> None:
    index = index_of(engine, what)
    assert (held(index, PROMPT), held(index, OTHER)) == (of_prompt, of_other)


@pytest.mark.parametrize(("engine", "what"), [("vllm", "a salt and a LoRA"), ("sglang", "a salt")])
def test_salted_and_adapted_blocks_are_of_use_to_their_own_requests(engine: str, what: str) -> None:
    index = index_of(engine, what)
    assert held(index, PROMPT, "tenant") == 32
    assert held(index, PROMPT, "adapter") == (32 if engine == "vllm" else 0)
    assert held(index, PROMPT) == held(index, PROMPT, "other") == 0


def test_workers_with_blocks_of_other_sizes_are_compared_by_one_prompt() -> None:
    index, other = KVIndex(), 2
    for publisher, what in ((WORKER, "names of 32 bytes"), (other, "blocks of 32")):
        apply(index, publisher, "m", frames("vllm", what)[0][-1])
    assert tokens_in(index, "m", (), np.array(PROMPT[:50], np.uint32)) == {1: 32, 2: 32}
    assert tokens_in(index, "m", (), np.array(PROMPT, np.uint32)) == {1: 32, 2: 64}


def test_a_chain_whose_parent_was_missed_is_not_believed() -> None:
    index = KVIndex()
    apply(index, WORKER, "m", frames("vllm", "a chain of parents")[1][-1])
    assert held(index, PROMPT) == 0


class Engine:
    """Sends an engine's frames: batches when it is told to, and what it keeps to those who ask again."""

    def __init__(self, engine: str, what: str) -> None:
        self._context = zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._pub, self._router)]
        self.said = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
        *self.batches, self.end = frames(engine, what)
        self.lost: set[int] = set()
        """Batches that it does not keep any more."""
        self.asked = 0

    async def subscribed(self) -> None:
        assert (await self._pub.recv())[:1] == b"\x01"

    async def publish(self, number: int) -> None:
        await self._pub.send_multipart(self.batches[number][1:])  # a reply without its empty first frame

    async def answer(self) -> None:
        while True:
            name, _, first = await self._router.recv_multipart()
            self.asked += 1
            for number, reply in enumerate(self.batches):
                if number >= int.from_bytes(first, "big") and number not in self.lost:
                    await self._router.send_multipart([name, *reply])
            await self._router.send_multipart([name, *self.end])

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def engine_of(engine: str, what: str) -> AsyncIterator[Engine]:
    made = Engine(engine, what)
    answering = asyncio.create_task(made.answer())
    try:
        yield made
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        made.close()


async def knows(events: KVEvents, tokens: int) -> None:
    request = PlacementRequest("m", len(PROMPT), prompt=json.dumps(PROMPT).encode())
    await until(lambda: sum(held for _, held, _ in shares(events, request)) == tokens, f"{tokens} tokens")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_its_batches_are_asked_for_again_in_its_own_words(engine: str) -> None:
    async with engine_of(engine, "a chain of parents") as worker:
        events, batches = KVEvents(), worker.batches
        worker.batches = []
        events.heard("http://w", WorkerState("http://w#1"), "m", [worker.said])
        await worker.subscribed()
        await until(lambda: worker.asked == 1, "the first question")
        worker.batches = batches
        await worker.publish(1)  # the first one is lost on the way
        await knows(events, 64)
        assert worker.asked == 2
        events.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_after_a_gap_nothing_is_believed_until_it_is_told_anew(engine: str) -> None:
    async with engine_of(engine, "a chain of parents") as worker:
        events, batches = KVEvents(), worker.batches
        worker.batches, worker.lost = batches[:1], set()
        events.heard("http://w", WorkerState("http://w#1"), "m", [worker.said])
        await knows(events, 48)
        await worker.subscribed()
        worker.batches = [*batches, [*batches[1][:2], (2).to_bytes(8, "big"), batches[1][3]]]
        worker.lost = {1}
        await worker.publish(2)  # behind a block that it has, but who knows what happened between
        await knows(events, 0)
        worker.batches.append([*batches[0][:2], (3).to_bytes(8, "big"), batches[0][3]])
        await worker.publish(3)
        await knows(events, 48)
        events.close()


@pytest.mark.vllm
@pytest.mark.slow
def test_this_vllm_still_writes_what_was_recorded() -> None:
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)
    from tests.proxy.events import record_vllm

    assert record_vllm.recorded() == json.loads((Path(__file__).parent / "events" / "vllm.json").read_text())


@pytest.mark.sglang
@pytest.mark.slow
def test_this_sglang_still_writes_what_was_recorded() -> None:
    pytest.importorskip("sglang.srt.mem_cache.events", exc_type=ImportError)
    from tests.proxy.events import record_sglang

    found: Any = record_sglang.recorded()
    assert found == json.loads((Path(__file__).parent / "events" / "sglang.json").read_text())
