"""POST /route: the decision alone, and an edge that does the rest."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.legs import PrefillAddress
from pdlink.api.route_token import HEADER, RouteToken, peer_of, read_token
from pdlink.cli import main
from tests.private import write_private
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

if TYPE_CHECKING:
    from pathlib import Path


async def decided(proxy: Proxy, **body: Any) -> tuple[int, dict[str, Any]]:
    async with proxy.client.post(f"{proxy.url}/route", json={"model": "m", **body}) as response:
        return response.status, await response.json()


def loads(proxy: Proxy) -> list[int]:
    return [worker.work.requests for worker in proxy.router.services.pools.all]


async def test_an_edge_streams_from_decode_by_a_decision(prefill: FakeWorker, decode: FakeWorker) -> None:
    """It sends both legs, each with its changes, and the workers see what a proxy would have sent."""
    body = {"model": "m", "prompt": "hello", "stream": True, "top_k": 3}
    async with proxy_of([prefill], [decode], route_s=60) as proxy:
        status, found = await decided(proxy, **body)
        assert status == 200
        assert loads(proxy) == [1, 1]

        async def leg(name: str) -> bytes:
            told = found[name]
            sent = {field: value for field, value in body.items() if field not in told["remove"]} | told["set"]
            async with proxy.client.post(
                told["url"] + "/v1/completions", json=sent, headers=told["headers"]
            ) as response:
                data: bytes = await response.read()
                return data

        _, streamed = await asyncio.gather(leg("prefill"), leg("decode"))
        assert streamed.endswith(b"data: [DONE]\n\n")
        for worker in (prefill, decode):
            assert worker.received[0].transfer_id == found["transfer_id"]
            assert worker.received[0].body["top_k"] == 3
        async with proxy.client.delete(f"{proxy.url}/route/{found['transfer_id']}") as response:
            assert response.status == 204
        assert loads(proxy) == [0, 0]
        async with proxy.client.delete(f"{proxy.url}/route/{found['transfer_id']}") as response:
            assert response.status == 404


async def test_a_decision_counts_in_the_load_and_nothing_more_once_it_expires(
    prefills: list[FakeWorker], decode: FakeWorker
) -> None:
    async with proxy_of(prefills, [decode], route_s=60, policy="cost") as proxy:
        first, second = [(await decided(proxy, num_tokens=5000))[1]["prefill"]["url"] for _ in range(2)]
        assert first != second
    async with proxy_of(prefills, [decode], route_s=0.01) as proxy:
        assert (await decided(proxy, num_tokens=5000))[0] == 200
        await until(lambda: loads(proxy) == [0, 0, 0], "its end")


async def test_equal_digests_go_to_the_same_worker(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    async with proxy_of(prefills, [decode], route_s=60, policy="prefix") as proxy:
        for name in ("a", "b", "c"):
            asked = {"num_tokens": 2048, "prefix": [f"{name}{number}" for number in range(4)]}
            urls = set()
            for _ in range(3):
                _, found = await decided(proxy, **asked)
                urls.add(found["prefill"]["url"])
                async with proxy.client.delete(f"{proxy.url}/route/{found['transfer_id']}"):
                    pass
            assert len(urls) == 1


async def test_a_decision_is_signed(prefill: FakeWorker, decode: FakeWorker, tmp_path: Path) -> None:
    key = str(write_private(tmp_path / "key", "secret\n"))
    async with proxy_of([prefill], [decode], route_s=60, route_key_file=key) as proxy:
        _, found = await decided(proxy, num_tokens=10)
    source = found["decode"]["set"]["kv_transfer_params"]["prefill"]
    peers = {"prefill": "", "decode": peer_of(PrefillAddress(source["control"], source["name"]))}
    for leg, peer in peers.items():
        allowed = read_token(b"secret", found[leg]["headers"][HEADER], found["expires"] - 1)
        assert allowed == RouteToken(leg, found["transfer_id"], peer, found["expires"])
    async with proxy_of([], [decode], route_s=60, route_key_file=key) as proxy:
        _, found = await decided(proxy, num_tokens=10)
    allowed = read_token(b"secret", found["decode"]["headers"][HEADER], 0)
    assert allowed == RouteToken("decode", found["transfer_id"], "", found["expires"])


@pytest.mark.parametrize(
    "body", [{}, {"num_tokens": 0}, {"num_tokens": "x"}, {"prompt": 3}, {"num_tokens": 1, "prefix": 3}]
)
async def test_what_is_no_request_is_refused(decode: FakeWorker, body: dict[str, Any]) -> None:
    async with proxy_of([], [decode], route_s=60) as proxy:
        status, answer = await decided(proxy, **body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")


async def test_no_worker_is_said_and_nothing_is_reserved(prefill: FakeWorker) -> None:
    async with proxy_of([prefill], [], route_s=60) as proxy:
        assert (await decided(proxy, num_tokens=1))[0] == 503
        assert loads(proxy) == [0]
    async with proxy_of([prefill], []) as proxy:
        assert (await decided(proxy, num_tokens=1))[0] == 404


async def test_the_command_prints_the_decision(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with proxy_of([prefill], [decode], route_s=60) as proxy:
        assert await asyncio.to_thread(main, ["route", "m", "--tokens", "5", "--proxy", proxy.url]) == 0
        assert json.loads(capsys.readouterr().out)["decode"]["url"] == decode.url
        file = tmp_path / "request"
        file.write_text('{"prompt": [1, 2]}')
        assert await asyncio.to_thread(main, ["route", "m", "--request", str(file), "--proxy", proxy.url]) == 0
        assert json.loads(capsys.readouterr().out)["prefill"]["url"] == prefill.url
        assert await asyncio.to_thread(main, ["route", "m", "--tokens", "0", "--proxy", proxy.url]) == 1
        assert "num_tokens" in capsys.readouterr().err
    async with proxy_of([prefill], [decode]) as proxy:
        assert await asyncio.to_thread(main, ["route", "m", "--proxy", proxy.url]) == 1
        assert "set route_s" in capsys.readouterr().err
