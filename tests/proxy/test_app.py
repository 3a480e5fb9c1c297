"""The proxy's own answers: refusals, health, metrics, and going out of service."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import time

import pytest

from pdlink import __version__
from pdlink.cli import main
from pdlink_proxy.admission import Admission
from pdlink_proxy.attempt import Attempt
from pdlink_proxy.flow import Flow
from pdlink_proxy.leg import WorkerLeg
from pdlink_proxy.request import Request
from pdlink_proxy.worker import State
from tests.proxy.fakes import DEADLINE_S, DONE, END, FakeWorker, event, proxy_of, tokens_of, until


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt":"x"}', b'{"model":"m"}', b'{"model":"m","prompt":"x","stream":"x"}', b"\xff\xfe"],
)
async def test_what_no_worker_could_serve_is_a_400_here(prefill: FakeWorker, decode: FakeWorker, body: bytes) -> None:
    async with (
        proxy_of([prefill], [decode]) as proxy,
        proxy.client.post(f"{proxy.url}/v1/completions", data=body, headers={"X-Request-Id": "r"}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert response.headers["X-Request-Id"] == "r"
        assert proxy.counted("requests_total", outcome="rejected") == 1
    assert prefill.received == decode.received == []


async def test_a_body_over_the_limit_is_a_413_with_the_limit(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with (
        proxy_of([prefill], [decode], max_body_nbytes=1000) as proxy,
        proxy.client.post(f"{proxy.url}/v1/completions", data=io.BytesIO(b"x" * 2000)) as response,
    ):
        assert response.status == 413
        assert "1000" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/"), ("GET", "/v1/completions"), ("POST", "/v1/nothing")])
async def test_other_routes_are_a_404_that_clients_can_read(method: str, path: str) -> None:
    async with proxy_of([], []) as proxy, proxy.client.request(method, proxy.url + path) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_cache_commands_that_are_given_a_proxy_name_its_workers(
    prefill: FakeWorker, decode: FakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        assert await asyncio.to_thread(main, ["cache", "stats", proxy.url]) == 1
    assert "is a proxy, which keeps no KV; give one of its workers: " in (said := capsys.readouterr().err)
    assert prefill.url in said
    assert decode.url in said


async def test_the_proxy_says_what_it_is_and_whose(prefill: FakeWorker, decode: FakeWorker) -> None:
    """A load test of somebody else's proxy on the same port looks just like one of one's own."""
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.client.get(f"{proxy.url}/") as response:
            assert response.status == 200
            assert "pdlink" in await response.text()
        async with proxy.client.get(f"{proxy.url}/version") as response:
            assert await response.json() == {"version": __version__}
        async with proxy.client.get(f"{proxy.url}/health") as response:
            said = (await response.json())["proxy"]
        assert said["pid"] == os.getpid()
        assert 0 <= time.time() - said["started"] < 60


async def test_a_proxy_without_workers_is_alive_and_not_ready(decode: FakeWorker) -> None:
    """A liveness probe on /health would restart the proxy because its workers restart."""
    async with proxy_of([], [decode], api_keys=["secret"]) as proxy:
        for status in (200, 503):
            async with proxy.client.get(f"{proxy.url}/livez") as response:
                assert response.status == 200
            async with proxy.client.get(f"{proxy.url}/readyz") as response:
                assert response.status == status
                assert list(await response.json()) == ["status"]
            await decode.stop()
            await until(lambda: proxy.router.services.pools.all[0].state is State.UNREACHABLE)
        async with proxy.client.get(f"{proxy.url}/version") as response:
            assert response.status == 401


@pytest.mark.parametrize("value", ["n\u00f6", "x" * 5000, "a\tb"])
async def test_headers_that_cannot_be_sent_on_are_replaced(
    prefill: FakeWorker, decode: FakeWorker, value: str
) -> None:
    body = {"model": "m", "prompt": "p"}
    async with (
        proxy_of([prefill], [decode]) as proxy,
        proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers={"X-Request-Id": value}) as response,
    ):
        assert response.status == 200
        assert response.headers["X-Request-Id"].startswith("req-")


async def test_health_lists_every_worker_and_asks_none(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 200
            body = await response.json()
        assert body["status"] == "ok"
        assert [worker["url"] for worker in body["prefill"] + body["decode"]] == [prefill.url, decode.url]
        assert body["decode"][0]["state"] == "ok"
        assert body["decode"][0]["health"]["name"] == decode.name
        await decode.stop()
        await until(lambda: proxy.router.services.pools.all[1].state.value == "unreachable")
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 503
            body = await response.json()
        assert (body["status"], body["reason"]) == ("unavailable", "no healthy decode worker")
        assert "GET /health" in body["decode"][0]["reason"]


async def test_a_proxy_is_not_ready_before_it_has_asked_its_prefill_workers(decode: FakeWorker) -> None:
    """Else its first requests would be computed by decode, although prefill is there."""
    asked = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()  # and says nothing
        await reader.read()
        writer.close()

    slow = await asyncio.start_server(hear, "127.0.0.1", 0)
    prefill = FakeWorker("prefill", port=slow.sockets[0].getsockname()[1])
    async with slow, proxy_of([prefill], [decode], settled=False, connect_timeout_s=30) as proxy:
        await asked.wait()
        await until(lambda: proxy.router.services.pools.all[1].state.value == "ok")
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert (response.status, (await response.json())["reason"]) == (503, "no healthy prefill worker")
        proxy.router.services.pools.all[0].unreachable("said the test")
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 200


async def test_health_answers_while_every_worker_connection_is_taken(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Health has connections of its own, so a bounded pool of busy ones makes nobody look dead."""
    decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], max_connections=2) as proxy:
        answers = [asyncio.create_task(proxy.stream()) for _ in range(4)]
        await until(lambda: len(decode.received) >= 1)
        heard = {worker: worker.heard_s or 0.0 for worker in proxy.router.services.pools.all}
        await until(lambda: all((worker.heard_s or 0.0) > before for worker, before in heard.items()), "next answers")
        decode.gate.set()
        assert len(await asyncio.gather(*answers)) == 4


async def test_metrics_name_workers_and_outcomes(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        await proxy.stream()
        await until(lambda: proxy.counted("requests_total", outcome="ok") == 1)
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
        assert f'pdlink_proxy_worker_healthy{{leg="decode",worker="{decode.url}"}} 1.0' in text
        assert proxy.counted("time_to_first_token_seconds_count", first_leg="prefill") == 1
        assert proxy.counted("active_streams") == 0
        for worker, leg in ((prefill, "prefill"), (decode, "decode")):
            await until(lambda w=worker, g=leg: proxy.counted("in_flight_legs", worker=w.url, leg=g) == 0)  # type: ignore[misc]


async def test_draining_ends_running_streams_whole_and_refuses_new_requests(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    decode.gates = {1: asyncio.Event()}
    async with proxy_of([prefill], [decode], drain_s=DEADLINE_S) as proxy, proxy.post(stream=True) as running:
        assert await running.content.readexactly(len(event("zero"))) == event("zero")
        drain = asyncio.create_task(proxy.router.drain())
        await asyncio.sleep(0)  # it begins
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 503
            assert (await response.json())["status"] == "draining"
        async with proxy.post() as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"] == "1"
            assert "shutting down" in (await refused.json())["error"]["message"]
        assert not drain.done()
        decode.gates[1].set()
        assert tokens_of(await running.read()) == event("one") + event("two") + END
        async with asyncio.timeout(DEADLINE_S):
            await drain


async def test_a_stream_that_outlasts_the_drain_is_told_so(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.gates = {1: asyncio.Event()}
    async with proxy_of([prefill], [decode], drain_s=0.05) as proxy:
        async with proxy.post(stream=True) as running:
            await running.content.readexactly(len(event("zero")))
            await proxy.router.drain()
            data = await running.read()
        assert b"stream_error" in data
        assert b"shutting down" in data
        assert data.endswith(DONE)
        await until(lambda: decode.received[0].aborted, "decode's leg being closed")


async def test_an_ended_request_leaves_nothing_to_the_garbage_collector(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    kinds = (Request, Attempt, WorkerLeg, Admission, Flow)
    async with proxy_of([prefill], [decode]) as proxy:
        gc.collect()
        gc.disable()
        try:
            for stream in (True, False):
                async with proxy.post(stream=stream) as answer:
                    await answer.read()
            await until(lambda: proxy.router.services.num_running == 0, "the end")
            await until(lambda: not any(type(each) in kinds for each in gc.get_objects()), "nothing left")
        finally:
            gc.enable()
