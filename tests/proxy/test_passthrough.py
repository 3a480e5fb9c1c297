"""Routes that one worker serves whole: who gets them, and what passes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pdlink.api.openai import MESSAGES, RESPONSES
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.passthrough import PATHS
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import FAILURES
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping


@dataclass
class Full(FakeVllm):
    """vLLM with more routes; it lists all it has in /openapi.json, as FastAPI does, if `lists`."""

    paths: tuple[str, ...] = PATHS
    lists: bool = True
    asked: int = 0
    """For that list."""
    got: list[tuple[str, bytes, Mapping[str, str]]] = field(default_factory=list)
    status: int = 200
    stream: list[bytes] = field(default_factory=list)
    """Pieces of the answer, instead of one document."""
    then: asyncio.Event | None = None
    """Waited for after the first of them."""
    breaks: bool = False
    """Close the connection after the first of them."""

    async def _nowhere(self, request: web.Request) -> Any:
        if request.path == "/openapi.json":
            self.asked += 1
            if self.lists:
                return web.json_response({"openapi": "3.1.0", "paths": {path: {"post": {}} for path in self.paths}})
        if request.path not in self.paths:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.got.append((request.path, await request.read(), request.headers))
        if not self.stream:
            return web.json_response({"path": request.path, "worker": self.port}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number, piece in enumerate(self.stream):
            await response.write(piece)
            if number == 0 and self.then is not None:
                await self.then.wait()
            if number == 0 and self.breaks and request.transport is not None:
                request.transport.abort()
        return response


@contextlib.asynccontextmanager
async def fleet(*workers: Full) -> AsyncIterator[list[Full]]:
    for worker in workers:
        await worker.start()
    try:
        yield list(workers)
    finally:
        for worker in workers:
            await worker.stop()


@pytest.mark.parametrize("path", [path for path in PATHS if path not in DIALECTS["vllm-nixl"].paths])
async def test_a_route_goes_to_a_worker_that_has_it_as_it_is(path: str) -> None:
    body = b'{"model":"m" , "input" :"x", "odd": 1.50}'
    headers = {
        "Authorization": "Bearer a",
        "X-Request-Id": "one",
        "traceparent": "00-1-2-01",
        "anthropic-version": "v",
    }
    async with (
        fleet(Full(), Full()) as (prefill, decode),
        proxy_of([prefill], [decode], dialect="vllm-nixl") as proxy,
    ):
        async with proxy.client.post(proxy.url + path, data=body, headers=headers) as response:
            assert (response.status, await response.json()) == (200, {"path": path, "worker": decode.port})
            assert response.headers["X-Request-Id"] == "one"
        ((_, sent, got),) = decode.got
        assert sent == body
        assert {name: got[name] for name in headers} == headers
        assert proxy.counted("requests_total", outcome="ok") == 1


async def test_only_workers_that_list_a_route_get_it_and_are_asked_once() -> None:
    without, having = Full(paths=("/tokenize",)), Full(paths=("/v1/embeddings",))
    async with fleet(without, having), proxy_of([], [without, having], dialect="vllm-nixl") as proxy:
        for _ in range(4):
            async with proxy.client.post(proxy.url + "/v1/embeddings", json={"model": "m"}) as response:
                assert response.status == 200
        assert (len(having.got), len(without.got)) == (4, 0)
        assert (having.asked, without.asked) == (1, 1)


async def test_a_worker_is_asked_for_its_routes_when_it_is_chosen() -> None:
    """Not before: the first request of a large fleet would wait for all of them."""
    workers = [Full(paths=("/v1/embeddings",)) for _ in range(3)]
    async with fleet(*workers), proxy_of([], workers, dialect="vllm-nixl") as proxy:
        async with proxy.client.post(proxy.url + "/v1/embeddings", json={"model": "m"}) as response:
            assert response.status == 200
        assert sum(worker.asked for worker in workers) == 1


async def test_a_404_of_a_worker_that_lists_nothing_is_remembered() -> None:
    without, having = Full(paths=(), lists=False), Full(lists=False)
    async with fleet(without, having), proxy_of([], [without, having], dialect="vllm-nixl") as proxy:
        for _ in range(3):
            async with proxy.client.post(proxy.url + "/v1/rerank", json={"model": "m"}) as response:
                assert response.status == 200
        assert len(having.got) == 3
        lacks = {worker.url: worker.lacks for worker in proxy.router.services.pools.all}
        assert lacks[having.url] == set()


async def test_a_prefill_worker_serves_what_no_decode_worker_has() -> None:
    workers = fleet(Full(), Full(paths=()))
    async with (
        workers as (prefill, decode),
        proxy_of([prefill], [decode], dialect="vllm-nixl") as proxy,
        proxy.client.post(proxy.url + "/tokenize", json={"prompt": "x"}) as response,
    ):
        assert (await response.json())["worker"] == prefill.port


async def test_what_nobody_has_is_a_404_and_what_nobody_can_serve_now_a_503(decode: FakeWorker) -> None:
    async with proxy_of([], [decode]) as proxy:
        async with proxy.client.post(proxy.url + "/v1/responses", json={"model": "m"}) as response:
            assert response.status == 404
            assert "no worker here serves POST /v1/responses" in (await response.json())["error"]["message"]
        async with proxy.client.post(proxy.url + "/v1/responses", json={"model": "other"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        decode.status = "failed"
        await until(lambda: proxy.router.services.pools.all[0].state.value != "ok")
        async with proxy.client.post(proxy.url + "/tokenize", json={"model": "m"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_while_all_workers_are_away_a_request_waits_in_the_queue() -> None:
    worker = Full()
    async with (
        fleet(worker),
        proxy_of([], [worker], dialect="vllm-nixl", no_worker_timeout_s=60, queue_size=1) as proxy,
    ):
        worker.dead = True
        await until(lambda: not proxy.router.services.pools.usable(Leg.DECODE))

        async def ask() -> tuple[int, str]:
            async with proxy.client.post(proxy.url + "/v1/embeddings", json={"model": "m"}) as response:
                return response.status, response.headers.get("Retry-After", "")

        waiting = asyncio.create_task(ask())
        await until(lambda: len(proxy.queue) == 1)
        assert await ask() == (503, "1")  # the queue is full
        worker.dead = False
        assert await waiting == (200, "")
        assert len(proxy.queue) == 0
        worker.dead = True
        await until(lambda: not proxy.router.services.pools.usable(Leg.DECODE))
        left = asyncio.create_task(ask())
        await until(lambda: len(proxy.queue) == 1)
        left.cancel()
        await until(lambda: len(proxy.queue) == 0)
    async with (
        fleet(worker),
        proxy_of([], [worker], dialect="vllm-nixl", no_worker_timeout_s=0.01, settled=False) as proxy,
        proxy.client.post(proxy.url + "/v1/embeddings", json={"model": "m"}) as response,
    ):
        assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_a_stream_passes_verbatim_as_it_comes() -> None:
    events = [b"event: message_start\ndata: {}\n\n", b"event: message_stop\ndata: {}\n\n"]
    worker = Full(stream=events, then=asyncio.Event())
    body = {"model": "m", "stream": True}
    async with (
        fleet(worker),
        proxy_of([], [worker], dialect="vllm-nixl") as proxy,
        proxy.client.post(proxy.url + "/pooling", json=body) as response,
    ):
        assert await response.content.readexactly(len(events[0])) == events[0]
        assert worker.then is not None
        worker.then.set()
        assert await response.read() == events[1]
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    worker = Full(stream=[b"data: {}\n\n", b"never"], breaks=True)
    async with fleet(worker), proxy_of([], [worker], dialect="vllm-nixl") as proxy:
        async with proxy.client.post(proxy.url + "/pooling", json={"model": "m"}) as response:
            data = await response.read()
        assert data.startswith(b"data: {}\n\nevent: error\n")
        assert b"the worker was lost (reset)" in data
        assert proxy.counted("requests_total", outcome="broken") == 1


async def test_a_client_that_leaves_ends_the_workers_request() -> None:
    worker = Full(stream=[b"data: {}\n\n", b"never"], then=asyncio.Event())
    async with fleet(worker), proxy_of([], [worker], dialect="vllm-nixl") as proxy:
        async with proxy.client.post(proxy.url + "/pooling", json={"model": "m"}) as response:
            await response.content.readany()
        await until(lambda: proxy.router.services.pools.all[0].in_flight == 0)
        assert proxy.router.services.pools.all[0].work.requests == 0


async def test_a_client_that_reads_nothing_ends_its_request_and_blames_no_worker() -> None:
    worker = Full(stream=[bytes(2**22)] * 8)
    config: dict[str, Any] = {"dialect": "vllm-nixl", "idle_timeout_s": 1.0}
    async with fleet(worker), proxy_of([], [worker], **config) as proxy:
        async with proxy.client.post(proxy.url + "/pooling", json={"model": "m"}):
            await until(lambda: proxy.counted("requests_total", outcome="client_left") == 1)
        assert proxy.counted("leg_failures_total", leg="decode", reason="timeout") == 0
        assert proxy.router.services.pools.all[0].in_flight == 0


async def test_a_worker_that_fails_in_a_row_is_left_alone() -> None:
    bad, good = Full(status=500), Full()
    async with fleet(bad, good), proxy_of([], [bad, good], dialect="vllm-nixl", policy="round_robin") as proxy:
        statuses = []
        for _ in range(20):
            async with proxy.client.post(proxy.url + "/tokenize", json={"model": "m"}) as response:
                statuses.append(response.status)
        assert statuses.count(502) == FAILURES
        assert statuses[-5:] == [200] * 5


async def test_a_lost_worker_is_replaced_and_an_error_of_one_shows_no_words_of_it() -> None:
    lost, other = Full(), Full()
    async with fleet(lost, other), proxy_of([], [lost, other], dialect="vllm-nixl", health_interval_s=30) as proxy:
        await lost.stop()
        for _ in range(2):
            async with proxy.client.post(proxy.url + "/tokenize", json={"model": "m"}) as response:
                assert response.status == 200
        other.status = 500
        async with proxy.client.post(proxy.url + "/tokenize", json={"model": "m"}) as response:
            assert response.status == 502
            assert str(other.port) not in await response.text()


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
async def test_keys_of_clients_count_also_as_x_api_key(path: str) -> None:
    def got(worker: Full) -> Mapping[str, str]:
        return worker.received[-1].headers if path == MESSAGES else worker.got[-1][2]

    body = {"model": "m", "messages": [], "max_tokens": 1}
    async with fleet(Full()) as (worker,), proxy_of([], [worker], dialect="vllm-nixl", api_keys=["k"]) as proxy:
        for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": "k"}, 200)):
            async with proxy.client.post(proxy.url + path, json=body, headers=headers) as response:
                assert response.status == status
        assert "x-api-key" not in got(worker), "it is the proxy's key"
    async with fleet(Full()) as (worker,), proxy_of([], [worker], dialect="vllm-nixl") as proxy:
        sent = {"x-api-key": "theirs", "anthropic-version": "v"}
        await proxy.client.post(proxy.url + path, json=body, headers=sent)
        assert {name: got(worker)[name] for name in sent} == sent


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_plain_server_beside_pairs_that_lack_a_route_gets_it(path: str) -> None:
    """pdlink's own engine has neither of them."""
    async with (
        fleet(Full(has_named=False)) as (plain,),
        proxy_of([], [], both=[plain.url]) as proxy,
        proxy.client.post(proxy.url + path, data=b'{"model": "m"}') as response,
    ):
        assert (response.status, await response.json()) == (200, {"path": path, "worker": plain.port})


async def test_an_id_that_names_servers_is_not_passed_on(prefill: FakeWorker, decode: FakeWorker) -> None:
    """vLLM's P2pNccl and MoRI-IO connectors would talk to them."""
    chosen = "___prefill_addr_host:1.2.3.4,handshake:1,notify:2___decode_addr_x_" + 32 * "0"
    async with proxy_of([prefill], [decode]) as proxy:
        body, headers = {"model": "m", "prompt": "x"}, {"X-Request-Id": chosen}
        async with proxy.client.post(proxy.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"].startswith("req-")
    assert "addr" not in decode.received[0].headers["X-Request-Id"]
