"""The two legs of a healthy request: who is asked what, who delivers which byte."""

from __future__ import annotations

import asyncio
import io

import msgspec
import pytest

from tests.proxy.fakes import END, FakeWorker, event, proxy_of, tokens_of, until

WHOLE = event("zero") + event("one") + event("two") + END


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_legs_get_the_clients_body_and_one_transfer(
    prefill: FakeWorker, decode: FakeWorker, path: str
) -> None:
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(path, top_k=3, nested={"a": [1, None]}) as response:
        assert response.status == 200
        assert (await response.json())["worker"] == decode.name
    await until(lambda: len(prefill.received) == len(decode.received) == 1)
    bodies = [worker.received[0].body for worker in (prefill, decode)]
    params = [body.pop("kv_transfer_params") for body in bodies]
    assert bodies[0] == bodies[1]
    assert bodies[0]["top_k"] == 3
    assert bodies[0]["nested"] == {"a": [1, None]}
    assert [params[0].pop("leg"), params[1].pop("leg")] == ["prefill", "decode"]
    assert params[1].pop("prefill") == {"name": prefill.name, "control": f"tcp://127.0.0.1:{prefill.port + 1}"}
    assert params[0] == params[1]
    assert params[0]["transfer_id"].startswith("xfer-")
    assert len(params[0]["transfer_id"]) == len("xfer-") + 32
    assert isinstance(params[0]["seed"], int)
    assert [worker.received[0].path for worker in (prefill, decode)] == [path, path]


async def test_legs_start_at_once(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Each leg is held until the other one has arrived: a proxy that waits for one to send the other hangs."""
    prefill.gate, decode.gate = asyncio.Event(), asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy:
        answer = asyncio.create_task(proxy.stream())
        await until(lambda: len(prefill.received) == len(decode.received) == 1, "both legs")
        prefill.gate.set()
        decode.gate.set()
        assert await answer == WHOLE


async def test_first_token_is_sent_while_decode_has_nothing_yet(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(stream=True) as response:
        assert await response.content.readexactly(len(event("zero"))) == event("zero")
        assert not decode.received[0].answered
        decode.gate.set()
        assert tokens_of(await response.read()) == WHOLE.removeprefix(event("zero"))
        assert proxy.counted("time_to_first_token_seconds_count", first_leg="prefill") == 1


async def test_first_token_of_a_decode_that_is_first_is_not_repeated(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Decode recomputes and overtakes prefill, whose token then is the copy."""
    prefill.gate = asyncio.Event()
    decode.gates = {1: asyncio.Event()}
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(stream=True) as response:
        assert await response.content.readexactly(len(event("zero"))) == event("zero")
        prefill.gate.set()
        await until(lambda: prefill.received[0].answered, "prefill's copy")
        decode.gates[1].set()
        assert tokens_of(await response.read()) == WHOLE.removeprefix(event("zero"))
        assert proxy.counted("time_to_first_token_seconds_count", first_leg="decode") == 1


@pytest.mark.parametrize("split", [1, 2, 3, 7, 31, 64])
async def test_bytes_arrive_verbatim_wherever_they_are_cut(
    prefill: FakeWorker, decode: FakeWorker, split: int
) -> None:
    odd = (
        b': a comment\n\nevent: x\ndata: {"a":\r\ndata: 1}\r\n\r\n' + event("\u20ac \n\n [DONE]") + b"id: 7\n\n" + END
    )
    decode.stream_override = event("zero") + odd
    decode.split = prefill.split = split
    async with proxy_of([prefill], [decode]) as proxy:
        assert await proxy.stream() == event("zero") + odd


async def test_two_megabytes_of_prompt_pass(prefill: FakeWorker, decode: FakeWorker) -> None:
    """aiohttp's own limit is 1 MiB."""
    prompt = "x" * (2 * 2**20)
    body = io.BytesIO(msgspec.json.encode({"model": "m", "prompt": prompt}))
    async with (
        proxy_of([prefill], [decode]) as proxy,
        proxy.client.post(f"{proxy.url}/v1/completions", data=body) as response,
    ):
        assert response.status == 200
    assert decode.received[0].body["prompt"] == prompt


async def test_a_hundred_and_fifty_streams_run_side_by_side(prefill: FakeWorker, decode: FakeWorker) -> None:
    """aiohttp's client lets the 101st wait for another one to end; here none ends before all have begun.

    vllm#26122: a session per request and pools with limits lost requests under load.
    """
    decode.gates = {1: asyncio.Event()}
    async with proxy_of([prefill], [decode]) as proxy:
        streams = [asyncio.create_task(proxy.stream()) for _ in range(150)]
        await until(lambda: proxy.counted("active_streams") == len(decode.received) == 150, "150 open streams")
        decode.gates[1].set()
        assert set(await asyncio.gather(*streams)) == {WHOLE}


async def test_a_bound_on_connections_delays_but_never_deadlocks(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Decode legs that hold every connection while they wait for prefill legs that cannot get one (I-15)."""
    decode.needs = prefill
    async with proxy_of([prefill], [decode], max_connections=2) as proxy:
        assert set(await asyncio.gather(*(proxy.stream() for _ in range(20)))) == {WHOLE}


async def test_round_robin_spreads_over_every_worker(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    async with proxy_of(prefills, decodes) as proxy:
        for _ in range(8):
            await proxy.stream()
    assert [len(worker.received) for worker in prefills + decodes] == [4, 4, 4, 4]
    pairs = {
        (worker.name, got.body["kv_transfer_params"]["prefill"]["name"])
        for worker in decodes
        for got in worker.received
    }
    assert len(pairs) == 4, "every prefill worker is paired with every decode worker"


async def test_least_loaded_prefers_the_idle_worker(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    decodes[0].running = 5
    async with proxy_of([prefill], decodes, policy="least_loaded") as proxy:
        for _ in range(3):
            await proxy.stream()
    assert [len(worker.received) for worker in decodes] == [0, 3]


async def test_headers_of_the_client_pass_and_the_request_id_comes_back(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "Cookie": "secret=1", "Connection": "close"}
        body = {"model": "m", "prompt": "p", "stream": True}
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            assert response.headers["X-Request-Id"] == "mine"
            assert response.headers["X-Pdlink-Transfer"] == decode.received[0].transfer_id
            assert response.headers["X-Pdlink-Prefill"] == "prefill-0"
            assert response.headers["X-Pdlink-Decode"] == "decode-0"
        async with proxy.post() as response:
            made = response.headers["X-Request-Id"]
    for worker in (prefill, decode):
        first, second = (got.headers for got in worker.received)
        assert (first["Authorization"], first["X-Request-Id"]) == ("Bearer k", "mine")
        assert "Cookie" not in first
        assert first.get("Connection") != "close"
        assert "Authorization" not in second
        assert second["X-Request-Id"] == made


async def test_a_clients_own_transfer_parameters_are_dropped(prefill: FakeWorker, decode: FakeWorker) -> None:
    """They could name any address to fetch KV from (vllm#45230)."""
    forged = {"transfer_id": "xfer-forged", "prefill": {"name": "x", "control": "tcp://10.0.0.1:1"}}
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(kv_transfer_params=forged) as response:
        assert response.status == 200
    for worker in (prefill, decode):
        assert b"forged" not in worker.received[0].raw
        assert b"10.0.0.1" not in worker.received[0].raw


async def test_both_legs_sample_with_the_clients_seed(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(seed=42) as response:
        assert response.status == 200
    assert [worker.received[0].body["kv_transfer_params"]["seed"] for worker in (prefill, decode)] == [42, 42]
