"""Workers that come and go while the proxy runs."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.config import ProxyConfig
from pdlink.errors import ConfigError
from pdlink_proxy.app import build_app
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.members import ListedWorker, Members
from pdlink_proxy.membership import parse
from pdlink_proxy.steps import Leg
from tests.proxy.fakes import FakeWorker, Proxy, event, proxy_of, until

if TYPE_CHECKING:
    from pathlib import Path


async def asked(proxy: Proxy, method: str, body: Any = None, *, key: str = "admin", **query: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.client.request(
        method, f"{proxy.url}/workers", json=body, headers=headers, params=query
    ) as response:
        return response.status, await response.json()


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "admin"
    path.write_text("admin\n")
    path.chmod(0o600)
    return {"admin_key_file": str(path)}


def urls(workers: list[FakeWorker]) -> list[str]:
    return [worker.url for worker in workers]


async def test_an_operator_adds_drains_and_removes_workers(
    prefills: list[FakeWorker], decodes: list[FakeWorker], admin: dict[str, Any]
) -> None:
    async with proxy_of(prefills[:1], decodes[:1], **admin) as proxy:
        status, shown = await asked(proxy, "POST", {"role": "decode", "url": decodes[1].url})
        assert (status, [worker["label"] for worker in shown["decode"]]) == (200, ["decode-0", "decode-1"])
        await until(
            lambda: all(worker.heard_s for worker in proxy.router.services.pools.all), "the new worker's health"
        )
        for _ in range(4):
            await proxy.stream()
        assert [len(worker.received) for worker in decodes] == [2, 2]
        await asked(proxy, "POST", {"role": "decode", "url": decodes[0].url, "drain": True})
        for _ in range(2):
            await proxy.stream()
        assert [len(worker.received) for worker in decodes] == [2, 4]
        status, shown = await asked(proxy, "DELETE", url=decodes[0].url)
        assert (status, [worker["label"] for worker in shown["decode"]]) == (200, ["decode-1"])
        status, shown = await asked(proxy, "PUT", {"prefill": urls(prefills), "decode": urls(decodes)})
        assert [worker["label"] for worker in shown["decode"]] == ["decode-2", "decode-1"]
        assert (await asked(proxy, "GET"))[1].keys() == {"prefill", "decode"}


async def test_a_removed_worker_finishes_its_requests(
    prefill: FakeWorker, decodes: list[FakeWorker], admin: dict[str, Any]
) -> None:
    decodes[0].gates[1] = goes_on = asyncio.Event()
    async with proxy_of([prefill], decodes[:1], **admin) as proxy:
        running = asyncio.create_task(proxy.stream())
        await until(lambda: bool(decodes[0].received), "the request to begin")
        await asked(proxy, "PUT", {"prefill": [prefill.url], "decode": [decodes[1].url]})
        await until(
            lambda: all(worker.heard_s for worker in proxy.router.services.pools.all), "the new worker's health"
        )
        await proxy.stream()
        assert len(decodes[1].received) == 1
        goes_on.set()
        assert event("two") in await running


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"decode": ["10.0.0.1:80"]}, "decode"),
        ({"decode": ["http://a", "http://a/"]}, "twice"),
        ({"neither": ["http://a"]}, "neither"),
        ({"decode": [{"url": "http://a", "weight": 1}]}, "weight"),
        ({"decode": "http://a"}, "array"),
        ({"decode": [{"url": "http://a", "kv_events": ["a:5557"]}]}, "tcp://HOST:PORT"),
        ([], "mapping"),
    ],
)
async def test_a_list_that_cannot_be_meant_changes_nothing(
    prefill: FakeWorker, decode: FakeWorker, admin: dict[str, Any], body: Any, named: str
) -> None:
    async with proxy_of([prefill], [decode], **admin) as proxy:
        before = proxy.router.services.pools.all
        status, answer = await asked(proxy, "PUT", body)
        assert (status, named in answer["error"]["message"]) == (400, True), answer
        assert proxy.router.services.pools.all == before
        status, _ = await asked(proxy, "DELETE", url="http://nobody")
        assert status == 400


async def test_only_operators_change_workers(prefill: FakeWorker, decode: FakeWorker, admin: dict[str, Any]) -> None:
    async with proxy_of([prefill], [decode], api_keys=["client"], **admin) as proxy:
        for method in ("GET", "PUT", "POST", "DELETE"):
            assert (await asked(proxy, method, {}, key="client"))[0] == 401
    async with proxy_of([prefill], [decode]) as proxy:
        assert (await asked(proxy, "PUT", {}))[0] == 403
        assert len(proxy.router.services.pools.all) == 2


async def test_a_listed_file_replaces_the_workers_and_a_broken_one_does_not(
    prefill: FakeWorker,
    decodes: list[FakeWorker],
    admin: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "workers.yaml"

    def write(text: str) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, path)

    write(json.dumps({"prefill": [prefill.url], "decode": [decodes[0].url]}))
    async with proxy_of([], [], settled=False, discover=[f"file:{path}"], **admin) as proxy:
        pools = proxy.router.services.pools

        async def decode_is(worker: FakeWorker) -> None:
            await until(
                lambda: (
                    [each.url for each in pools.usable(Leg.DECODE)] == [worker.url]
                    and bool(pools.usable(Leg.PREFILL))
                ),
                "the file's workers",
            )

        await decode_is(decodes[0])
        await proxy.stream()
        for broken in ("prefill: [", "prefill: [2001-99-99]"):
            caplog.clear()
            write(broken)
            await until(lambda: "is down, and the workers stay" in caplog.text, "a line about the broken file")
        await proxy.stream()
        write(
            f"prefill: [{prefill.url}]\ndecode:\n- url: {decodes[1].url}\n- {{url: {decodes[0].url}, drain: true}}\n"
        )
        await decode_is(decodes[1])
        (told,) = [each for each in caplog.records if "answers again" in each.getMessage()]
        assert told.levelname == "ERROR", "a recovery is as loud as its failure"
        await proxy.stream()
        assert [len(worker.received) for worker in decodes] == [2, 1]
        assert (await asked(proxy, "PUT", {}))[0] == 409


async def test_keys_are_read_again_without_dropping_a_stream(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("old\n")
    path.chmod(0o600)
    decode.gates[1] = goes_on = asyncio.Event()
    async with proxy_of([prefill], [decode], api_key_file=str(path)) as proxy:

        def post(key: str) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": "m", "prompt": "hello", "stream": True}
            return proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers=headers)

        async with post("old") as running:
            path.write_text("new\n")
            proxy.router.reload()
            async with post("old") as response:
                assert response.status == 401
            goes_on.set()
            assert event("two") in await running.read()
        async with post("new") as response:
            assert response.status == 200
            await response.read()
        path.write_text("")
        proxy.router.reload()
        async with post("new") as response:
            assert response.status == 200, "an empty file changes nothing"
            await response.read()


def test_a_vllm_prefill_needs_its_control_address() -> None:
    with pytest.raises(ConfigError, match="control"):
        parse({"prefill": ["http://a"]}, "workers", dialect=DIALECTS["vllm"])
    found = parse({"prefill": [{"url": "http://a", "control": ["tcp://a:1"]}]}, "workers", dialect=DIALECTS["vllm"])
    assert found == Members((ListedWorker("http://a", control=("tcp://a:1",)),))


def test_settings_that_name_other_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_events: got http://b"):
        build_app(ProxyConfig(decode=("http://a",), kv_events={"http://b": ("tcp://b:1",)}))


@pytest.mark.parametrize("address", ["8110", "10.0.0.1:8110", "tcp://10.0.0.1", "http://10.0.0.1:8110"])
def test_a_store_that_nobody_can_ask_is_refused(address: str) -> None:
    words = rf"stores: got '{address}' for http://a; expected tcp://HOST:PORT"
    with pytest.raises(ConfigError, match=words):
        build_app(ProxyConfig(dialect="vllm", both=("http://a",), stores={"http://a": address}))
    with pytest.raises(ConfigError, match=words):
        parse({"both": [{"url": "http://a", "store": address}]}, "workers", dialect=DIALECTS["vllm"])


async def test_nothing_is_said_of_a_worker_that_was_removed(
    prefill: FakeWorker, decodes: list[FakeWorker], admin: dict[str, Any]
) -> None:
    decodes[0].refused.append({"peer": prefill.name, "factor": "content"})
    async with proxy_of([prefill], decodes, **admin) as proxy:

        async def healthy() -> list[str]:
            async with proxy.client.get(f"{proxy.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            return [
                line for line in lines if line.startswith("pdlink_proxy_worker_healthy{") and decodes[0].url in line
            ]

        await until(lambda: len(proxy.router.services.pools.refusals) == 1, "the refused pair")
        assert len(await healthy()) == 1
        prefiller, gone, _ = proxy.router.services.pools.all
        await asked(proxy, "DELETE", url=decodes[0].url)
        assert await healthy() == []
        assert proxy.router.services.standing() == ("ok", "")
        proxy.router.services.pools.mispaired(prefiller, gone)  # by a request that it still has
        assert proxy.router.services.standing() == ("ok", "")


@pytest.mark.parametrize(
    "url", ["http://a:99999", "http://a:b", "http://", "http://:80", "http://a b", "http://a/?x=1"]
)
def test_a_url_that_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="decode: got"):
        build_app(ProxyConfig(decode=(url,)))
