"""Pairs beside plain servers, and pairs within cells: which requests go where, and why."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdlink_proxy.fleet import Fleet, PlacementRequest
from pdlink_proxy.placement import Pair, Placer, Queued
from pdlink_proxy.table import WorkerState
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.proxy.fakes import Proxy


@pytest.fixture
async def plain() -> AsyncIterator[FakeVllm]:
    server = await FakeVllm("none").start()
    yield server
    await server.stop()


async def kv_of(proxy: Proxy, **body: Any) -> tuple[int, str, str]:
    """Status, X-Pdlink-KV and the worker that answered."""
    async with proxy.post(**body) as response:
        await response.read()
        return response.status, response.headers.get("X-Pdlink-KV", ""), response.headers.get("X-Pdlink-Decode", "")


async def test_requests_that_no_pair_can_serve_go_to_a_plain_server(plain: FakeVllm) -> None:
    prefill, decode = await FakeVllm("nixl").start(), await FakeVllm("nixl").start()
    try:
        async with proxy_of([prefill], [decode], dialect="vllm-nixl", both=[plain.url]) as proxy:
            assert (await kv_of(proxy))[2] == "decode-0"
            for body in ({"n": 2}, {"prompt": ["a", "b"]}, {"use_beam_search": True}, {"prompt_logprobs": 1}):
                assert await kv_of(proxy, **body) == (200, "recomputed;reason=prompt_only_decode", "both-0")
            assert len(plain.received) == 4
            assert len(decode.received) == 1
            assert "kv_transfer_params" not in plain.received[0].body
    finally:
        await prefill.stop()
        await decode.stop()


async def test_sglang_requests_of_several_answers_have_a_plain_server_to_go_to() -> None:
    servers = [FakeSglang("prefill"), FakeSglang("decode"), FakeSglang()]
    prefill, decode, plain = [await server.start() for server in servers]
    try:
        async with proxy_of([prefill], [decode], dialect="sglang", both=[plain.url]) as proxy:
            assert (await kv_of(proxy, n=2))[::2] == (200, "both-0")
            await prefill.stop()
            await until(
                lambda: (
                    proxy.router.services.pools.workers[next(iter(proxy.router.services.pools.workers))][
                        0
                    ].state.value
                    != "ok"
                )
            )
            assert await kv_of(proxy) == (200, "recomputed;reason=no_pair", "both-0")
            async with proxy.client.get(f"{proxy.url}/readyz") as response:
                assert response.status == 200
    finally:
        for server in servers:
            await server.stop()


async def test_a_busy_pair_leaves_requests_to_an_idle_plain_server(
    plain: FakeVllm, prefill: FakeWorker, decode: FakeWorker
) -> None:
    prefill.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], both=[plain.url]) as proxy:
        first = asyncio.create_task(kv_of(proxy))
        await until(lambda: len(prefill.received) == 1)
        assert await kv_of(proxy) == (200, "recomputed;reason=plain_sooner", "both-0")
        prefill.gate.set()
        assert (await first)[2] == "decode-0"


async def test_a_plain_server_alone_serves_a_proxy(plain: FakeVllm) -> None:
    async with proxy_of([], [], both=[plain.url]) as proxy:
        assert (await kv_of(proxy, stream=True))[0] == 200
        plain.fail_with = 500
        assert (await kv_of(proxy))[0] == 500


def states(*groups: tuple[str, str]) -> list[WorkerState]:
    return [WorkerState(f"w{number}", group=group) for number, group in enumerate(groups)]


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "round_robin", "consistent_hash"])
def test_pairs_are_within_a_cell_and_of_equal_fingerprints(policy: str) -> None:
    prefills, decodes = (states(("a", "1"), ("b", "1"), ("b", "2"), ("", "2")) for _ in range(2))
    placer = Placer(policy, policy)
    for number in range(200):
        request = PlacementRequest("m", 100 + number, prompt=str(number).encode() * 100)
        placed = placer.place(request, Fleet(prefills, decodes, grouped=True))
        assert isinstance(placed, Pair)
        assert placed.prefill is not None
        for one, other in zip(placed.prefill.group, placed.decode.group, strict=True):
            assert one == other or "" in (one, other)


def test_a_full_pair_leaves_requests_to_a_plain_server_with_room() -> None:
    fleet = Fleet(states(("", "")), states(("", "")), plain=[WorkerState("plain")])
    fleet.decode[0].heard(1, 0)
    fleet.plain[0].sent(10_000, 0.0)
    placed = Placer("cost", "cost").place(PlacementRequest("m", 10, 10, prompt=b"x"), fleet)
    assert placed == Pair(None, fleet.plain[0], alone="plain_sooner")


def test_what_only_a_plain_server_can_serve_waits_for_one() -> None:
    full = WorkerState("plain")
    full.heard(1, 0)
    request = PlacementRequest("m", 10, 10, prompt=b"x", whole=True, plain=True)
    for plain in ([full], []):
        fleet = Fleet(states(("", "")), states(("", "")), plain=plain)
        found = Placer("cost", "cost").place(request, fleet)
        assert isinstance(found, Queued)
        assert found.empty == (not plain)


async def test_workers_of_one_group_cost_no_comparison(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    async with proxy_of(prefills, decodes) as proxy:
        assert len(proxy.router.services.pools._groups) == 1
    async with proxy_of(prefills, decodes, cells={decodes[0].url: "a"}) as proxy:
        assert len(proxy.router.services.pools._groups) == 2


def test_a_decode_worker_without_a_prefill_worker_of_its_cell_computes_or_waits() -> None:
    fleet = Fleet(states(("a", "")), states(("b", "")), grouped=True)
    request = PlacementRequest("m", 10, prompt=b"x")
    placed = Placer("cost", "cost").place(request, fleet)
    assert placed == Pair(None, fleet.decode[0], misfit=True)
    needy = Fleet(fleet.prefill, fleet.decode, grouped=True, needs_prefill=True)
    assert isinstance(Placer("cost", "cost").place(request, needy), Queued)


async def test_cells_of_settings_reach_placement(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    cells = {each.url: cell for pool in (prefills, decodes) for each, cell in zip(pool, ("a", "b"), strict=True)}
    async with proxy_of(prefills, decodes, cells=cells) as proxy:
        for _ in range(8):
            async with proxy.post() as response:
                assert response.headers["X-Pdlink-Prefill"][-1] == response.headers["X-Pdlink-Decode"][-1]
