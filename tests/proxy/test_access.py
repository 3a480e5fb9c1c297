"""Who may use the proxy, how it shows itself to workers, and that a client's word about transfers is dropped."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdlink.config import ProxyConfig
from pdlink.errors import ConfigError
from pdlink_proxy.access import api_keys, may_enter, worker_headers, worker_tls
from pdlink_proxy.app import build_app
from pdlink_proxy.worker import State
from tests.certificates import make_certificate
from tests.private import write_private
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

KEY = "sk-open-sesame"


@pytest.fixture
async def proxy(prefill: FakeWorker, decode: FakeWorker, tmp_path: Path) -> AsyncIterator[Proxy]:
    """With one API key in its settings, another in a file, and a secret for its workers."""
    write_private(tmp_path / "api", "# keys\n\nsk-second\n")
    write_private(tmp_path / "http", "only-between-us\n")
    more: dict[str, Any] = {
        "api_keys": [KEY],
        "api_key_file": str(tmp_path / "api"),
        "worker_key_file": str(tmp_path / "http"),
    }
    async with proxy_of([prefill], [decode], **more) as proxy:
        yield proxy


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer n\u00f6"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/m"),
        ("GET", "/metrics"),
        ("GET", "/decisions"),
    ],
)
async def test_no_worker_hears_of_a_client_without_a_key(
    proxy: Proxy, prefill: FakeWorker, decode: FakeWorker, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    json = {"model": "m", "prompt": "p", "messages": []} if method == "POST" else None
    async with proxy.client.request(method, proxy.url + path, json=json, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        body = await response.text()
        assert '"code":"invalid_api_key"' in body
        assert KEY not in body
    assert prefill.received == decode.received == []


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", "Bearer sk-second"])
async def test_each_key_lets_its_client_in_and_goes_on_to_the_workers(
    proxy: Proxy, prefill: FakeWorker, decode: FakeWorker, header: str
) -> None:
    json = {"model": "m", "prompt": "p"}
    url = proxy.url + "/v1/completions"
    async with proxy.client.post(url, json=json, headers={"Authorization": header}) as response:
        assert response.status == 200
    for worker in (prefill, decode):
        assert worker.received[0].headers["Authorization"] == header


@pytest.mark.parametrize(("key", "goes_on"), [("plain", True), ("cl\u00e9", False), ("k" * 4096, False)])
async def test_a_key_that_no_header_should_carry_lets_in_and_is_not_sent_on(
    prefill: FakeWorker, decode: FakeWorker, key: str, *, goes_on: bool
) -> None:
    async with proxy_of([prefill], [decode], api_keys=[key]) as proxy:
        headers = {"Authorization": f"Bearer {key}"}
        asked = {"model": "m", "prompt": "p"}
        async with proxy.client.post(proxy.url + "/v1/completions", json=asked, headers=headers) as response:
            assert response.status == 200
    for worker in (prefill, decode):
        assert ("Authorization" in worker.received[0].headers) is goes_on


async def test_workers_get_their_secret_from_the_proxy_and_never_from_a_client(
    proxy: Proxy, prefill: FakeWorker, decode: FakeWorker
) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Pdlink-Key": "guessed"}
    url = proxy.url + "/v1/completions"
    async with proxy.client.post(url, json={"model": "m", "prompt": "p"}, headers=headers) as response:
        assert response.status == 200
        assert "X-Pdlink-Key" not in response.headers
    for worker in (prefill, decode):
        assert worker.received[0].headers.getall("X-Pdlink-Key") == ["only-between-us"]  # type: ignore[attr-defined]


async def test_health_without_a_key_is_the_status_alone(proxy: Proxy, prefill: FakeWorker) -> None:
    async with proxy.client.get(f"{proxy.url}/health") as response:
        assert response.status == 200
        assert await response.json() == {"status": "ok"}
    async with proxy.client.get(f"{proxy.url}/health", headers={"Authorization": f"Bearer {KEY}"}) as response:
        assert (await response.json())["prefill"][0]["url"] == prefill.url


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"p","kv_transfer_params":{"transfer_id":"mine","leg":"decode",'
        b'"prefill":{"name":"x","control":"tcp://169.254.169.254:80"}}}',
        b'{"kv_transfer_params":1,"model":"m","prompt":"p","kv_transfer_params":{"transfer_id":"mine"}}',
        b'{"model":"m","prompt":"p","\\u006bv_transfer_params":{"transfer_id":"mine"}}',
        b'{"model":"m","prompt":"p","kv_transfer_params":null}',
    ],
    ids=["whole", "twice", "escaped", "null"],
)
async def test_transfer_parameters_of_a_client_reach_no_worker(
    prefill: FakeWorker, decode: FakeWorker, body: bytes
) -> None:
    """vllm#45230: a client that could name the address would have the worker dial it."""
    async with (
        proxy_of([prefill], [decode]) as proxy,
        proxy.client.post(f"{proxy.url}/v1/completions", data=body) as response,
    ):
        assert response.status == 200
    for worker, leg in ((prefill, "prefill"), (decode, "decode")):
        raw = worker.received[0].raw
        assert raw.count(b"kv_transfer_params") == 1
        assert b"mine" not in raw
        assert b"169.254" not in raw
        assert worker.received[0].body["kv_transfer_params"]["leg"] == leg
    params = decode.received[0].body["kv_transfer_params"]
    assert params["prefill"] == {"name": prefill.name, "control": f"tcp://127.0.0.1:{prefill.port + 1}"}


def test_without_keys_everybody_may_enter() -> None:
    assert may_enter(api_keys(ProxyConfig()), {})
    assert worker_headers(ProxyConfig()) == {}


@pytest.mark.parametrize("setting", ["api_key_file", "worker_key_file", "worker_ca"])
def test_files_that_cannot_be_used_are_named(setting: str, tmp_path: Path) -> None:
    write_private(tmp_path / "empty", "# nothing\n")
    readers: dict[str, Callable[[ProxyConfig], object]]
    readers = {"api_key_file": api_keys, "worker_key_file": worker_headers, "worker_ca": worker_tls}
    for path in ("no", "empty"):
        with pytest.raises(ConfigError, match=f"^{setting}: "):
            readers[setting](ProxyConfig.model_validate({setting: str(tmp_path / path)}))


def test_empty_api_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        ProxyConfig(api_keys=("",))


class HttpsWorker(FakeWorker):
    """Reached over HTTPS with a certificate of its own."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def start_with(self, cert: str, key: str) -> HttpsWorker:
        await self.start()
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context).start()
        return self


async def test_https_workers_are_verified_against_the_configured_authority(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "good")
    other, _ = make_certificate(tmp_path, "other")
    workers = [await HttpsWorker(role).start_with(cert, key) for role in ("prefill", "decode")]
    prefill, decode = workers
    async with proxy_of([prefill], [decode], worker_ca=cert) as proxy:
        assert b"two" in await proxy.stream()
    async with proxy_of([prefill], [decode], settled=False, worker_ca=other) as proxy:
        pool = proxy.router.services.pools
        await until(lambda: all(worker.state is State.UNREACHABLE for worker in pool.all), "both are turned down")
        assert "CERTIFICATE_VERIFY_FAILED" in pool.all[0].reason
        async with proxy.post() as response:
            assert response.status == 503
    assert [len(worker.received) for worker in workers] == [1, 1]
    for worker in workers:
        await worker.stop()


async def test_a_secret_that_cannot_be_read_stops_the_proxy_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_file: cannot read"):
        build_app(ProxyConfig(api_key_file=str(tmp_path / "no")))
