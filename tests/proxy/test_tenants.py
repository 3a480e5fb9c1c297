"""What one of several API keys sees and steers: its own requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.health import UNTOLD
from pdlink.api.pages import refused_page
from pdlink_proxy.app import build_app
from pdlink_proxy.siblings import SiblingPlace, Siblings
from tests.private import write_private
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, settings

if TYPE_CHECKING:
    from pathlib import Path

PAIR = {"prefill": "prefill-0", "decode": "decode-0"}


async def asked(proxy: Proxy, method: str, path: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    said = {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with proxy.client.request(method, proxy.url + path, json=body, headers=said) as response:
        return response.status, await response.json(content_type=None) if response.status != 200 or "json" in (
            response.content_type
        ) else await response.read()


async def test_a_key_sees_its_own_requests_and_an_operator_all(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"api_keys": ["a", "b"], "admin_key_file": str(write_private(tmp_path / "admin", "boss"))}
    async with proxy_of([prefill], [decode], **more) as proxy:
        for key in ("a", "b"):
            body = {"model": "m", "prompt": "hello"}
            status, _ = await asked(proxy, "POST", "/v1/completions", key, body, X_Request_Id=f"id-of-{key}")
            assert status == 200

        async def ids(path: str, key: str) -> set[str]:
            status, found = await asked(proxy, "GET", path, key)
            assert status == 200
            return {each["request_id"] for each in found["decisions"]}

        assert await ids("/decisions", "a") == await ids("/decisions?request=id-of-a", "a") == {"id-of-a"}
        assert await ids("/decisions?request=id-of-b", "a") == set()
        assert await ids("/decisions", "boss") == {"id-of-a", "id-of-b"}
        for path in ("/pdlink/state", "/pdlink/timeline", "/pdlink/timeline?request=id-of-b"):
            assert (await asked(proxy, "GET", path, "a"))[0] == 403, path
        assert (await asked(proxy, "GET", "/pdlink/timeline?request=id-of-a", "a"))[0] == 200
        assert (await asked(proxy, "GET", "/pdlink/state", "boss"))[0] == 200
        assert (await asked(proxy, "POST", "/pdlink/probe", "a", PAIR))[0] == 403
        assert (await asked(proxy, "POST", "/pdlink/probe", "boss", PAIR))[0] == 200
        assert (await asked(proxy, "GET", "/health", "boss"))[1]["prefill"], "what doctor and top begin with"
        for path in ("/metrics", "/version"):
            assert (await asked(proxy, "GET", path, "boss"))[0] == 200, path
        body = {"model": "m", "prompt": "hello"}
        assert (await asked(proxy, "POST", "/v1/completions", "boss", body))[0] == 401, "no key of a client"
        for path in ("/pdlink/state", "/pdlink/timeline", "/decisions"):
            assert (await asked(proxy, "GET", path, "nobody"))[0] == 401, path


async def test_health_names_no_request_of_others(prefill: FakeWorker, decode: FakeWorker, tmp_path: Path) -> None:
    more: dict[str, Any] = {"api_keys": ["a", "b"], "admin_key_file": str(write_private(tmp_path / "admin", "boss"))}
    async with proxy_of([prefill], [decode], retries=0, **more) as proxy:
        decode.fail_with = 500
        body = {"model": "m", "prompt": "hello"}
        assert (await asked(proxy, "POST", "/v1/completions", "b", body, X_Request_Id="id-of-b"))[0] >= 500
        of_a, of_boss = [(await asked(proxy, "GET", "/health", key))[1] for key in ("a", "boss")]
        assert "id-of-b" not in str(of_a)
        assert of_a["prefill"]
        assert "id-of-b" in str(of_boss["findings"])


async def test_why_a_tier_of_a_worker_fails_is_told_to_operators_alone(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    decode.problems = {"disk": "cannot write /mnt/kv: No space left on device"}
    more: dict[str, Any] = {"api_keys": ["a", "b"], "admin_key_file": str(write_private(tmp_path / "admin", "boss"))}
    async with proxy_of([prefill], [decode], **more) as proxy:
        for key, why in (("a", UNTOLD), ("boss", decode.problems["disk"])):
            _, said = await asked(proxy, "GET", "/health", key)
            assert said["decode"][0]["health"]["problems"] == {"disk": why}
            assert [each["text"] for each in said["findings"] if each["kind"] == "place"] == [
                f"its disk keeps less KV than the settings say: {why}"
            ]


async def test_processes_together_tell_of_as_many_requests_as_one_alone(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink_proxy.services.MAX_RECORDS", 6)
    places = [Siblings(SiblingPlace(str(tmp_path), number, 2)) for number in range(2)]
    async with (
        proxy_of([prefill], [decode], siblings=places[0]) as first,
        proxy_of([prefill], [decode], siblings=places[1]) as second,
    ):
        body = {"model": "m", "prompt": "x"}
        for number in range(5):
            await asked(second, "POST", "/v1/completions", "", body, X_Request_Id=f"id-{number}")
        _, said = await asked(first, "GET", "/pdlink/state", "")
        assert [each["request_id"] for each in said["requests"]] == ["id-4", "id-3", "id-2"]
        assert said["summary"]["requests"] == 3
        oldest = (await asked(first, "GET", "/decisions?request=id-0", ""))[1]["record"]
        assert oldest["request_id"] == "id-0", "one that is asked for is looked for among all"


async def test_who_names_his_request_as_another_ones_does_not_see_it(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], api_keys=["a", "b"]) as proxy:
        for key in ("a", "b"):
            await asked(proxy, "POST", "/v1/completions", key, {"model": "m", "prompt": "x"}, X_Request_Id="same")
        for key in ("a", "b"):
            assert (await asked(proxy, "GET", "/decisions?request=same", key))[1] == {"decisions": []}


async def test_who_names_his_request_so_in_another_process_does_not_see_it_either(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    places = [Siblings(SiblingPlace(str(tmp_path), number, 2)) for number in range(2)]
    async with (
        proxy_of([prefill], [decode], api_keys=["a", "b"], siblings=places[0]) as first,
        proxy_of([prefill], [decode], api_keys=["a", "b"], siblings=places[1]) as second,
    ):
        body = {"model": "m", "prompt": "x"}
        await asked(first, "POST", "/v1/completions", "a", body, X_Request_Id="same")
        await asked(first, "POST", "/v1/completions", "a", body, X_Request_Id="own")
        await asked(second, "POST", "/v1/completions", "b", body, X_Request_Id="same")
        for proxy in (first, second):
            status, found = await asked(proxy, "GET", "/decisions?request=own", "a")
            assert status == 200
            assert found["record"]["request_id"] == "own"
            for key in ("a", "b"):
                assert (await asked(proxy, "GET", "/decisions?request=same", key))[1] == {"decisions": []}
                assert (await asked(proxy, "GET", "/pdlink/timeline?request=same", key))[0] == 403


async def test_an_id_that_comes_again_stays_with_its_key(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request is old, and its last one is shown."""
    monkeypatch.setattr("pdlink_proxy.entry.MAX_OWNERS", 2)
    async with proxy_of([prefill], [decode], api_keys=["a", "b"]) as proxy:
        for key, name in (("a", "again"), ("a", "1"), ("a", "again"), ("a", "2"), ("b", "again")):
            body = {"model": "m", "prompt": "x"}
            assert (await asked(proxy, "POST", "/v1/completions", key, body, X_Request_Id=name))[0] == 200
        assert (await asked(proxy, "GET", "/decisions?request=again", "b"))[1] == {"decisions": []}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_who_has_no_key_hides_no_request_from_its_owner(
    prefill: FakeWorker, decode: FakeWorker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by naming his own as another one's, nor by naming many."""
    monkeypatch.setattr("pdlink_proxy.entry.MAX_OWNERS", 2)
    async with proxy_of([prefill], [decode], api_keys=["a", "b"]) as proxy:
        body = {"model": "m", "prompt": "x"}
        assert (await asked(proxy, "POST", "/v1/completions", "a", body, X_Request_Id="id-of-a"))[0] == 200
        for name in ("id-of-a", "1", "2", "3"):
            assert (await asked(proxy, "POST", path, "stranger", body, X_Request_Id=name))[0] == 401
        assert (await asked(proxy, "GET", "/decisions?request=id-of-a", "a"))[1]["decisions"]


FOR_ALL = {"/", "/health", "/readyz", "/livez", "/pdlink"}
"""Text, a status, and files of the page, which hold no data."""
OF_A_KEY = {"/decisions", "/v1/models", "/v1/models/{id}", "/version", "/metrics", "/pdlink/sessions/{id}"}
"""Beside what generates: a key's own requests and sessions, and sums over all."""
OF_OPERATORS = {"/pdlink/state", "/pdlink/timeline", "/pdlink/probe", "/workers"}


async def test_every_route_is_open_or_asks_for_a_key_or_for_an_operators(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    admin = str(write_private(tmp_path / "admin", "boss"))
    more: dict[str, Any] = {"api_keys": ["a", "b"], "admin_key_file": admin}
    app = build_app(settings([prefill], [decode], **more))
    routes = {(each.method, each.resource.canonical) for each in app.router.routes() if each.resource}
    assert len(routes) > 40
    async with proxy_of([prefill], [decode], **more) as proxy:
        for method, path in sorted(routes):
            if method in ("HEAD", "*") or path in FOR_ALL:
                continue
            if method == "GET" and path.startswith("/pdlink/") and path not in OF_OPERATORS:
                continue
            url = path.replace("{id}", "1")
            assert (await asked(proxy, method, url, "nobody", {}))[0] == 401, (method, path)
            generates = method == "POST" and path not in OF_OPERATORS | OF_A_KEY
            if path in OF_OPERATORS:
                assert (await asked(proxy, method, url, "a", {}))[0] in (401, 403), (method, path)
                assert (await asked(proxy, method, url, "boss", {}))[0] not in (401, 403), (method, path)
            else:
                assert generates or path in OF_A_KEY or path.removesuffix("/{id}") in OF_A_KEY, (
                    f"say whose {method} {path} is"
                )
                assert (await asked(proxy, method, url, "a", {}))[0] not in (401, 403), (method, path)
        assert set((await asked(proxy, "GET", "/health", "nobody"))[1]) == {"status"}


async def test_no_request_to_a_proxy_reaches_what_workers_show_operators(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    paths = ["/pdlink/cache", "/pdlink/cache/clear", "/pdlink/events", "/pdlink/sources", "/flush_cache"]
    async with proxy_of([prefill], [decode], api_keys=["a"]) as proxy:
        for path in [*paths, "/reset_prefix_cache", "/update_weights_from_disk", "/pdlink/transfers/1/stop"]:
            for method in ("GET", "POST"):
                assert (await asked(proxy, method, path, "a", {}))[0] == 404, path
        assert prefill.received == decode.received == []


async def test_the_only_key_sees_all_and_probes(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], api_keys=["a"]) as proxy:
        assert (await asked(proxy, "GET", "/pdlink/state", "a"))[0] == 200
        assert (await asked(proxy, "POST", "/pdlink/probe", "a", PAIR))[0] == 200


PAGES = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://evil.example", "host": "evil.example"},
    {"sec-fetch-site": "same-origin", "host": "evil.example:8000"},
    {"content-type": "text/plain;charset=UTF-8"},
    {"content-type": "application/x-www-form-urlencoded"},
]


@pytest.mark.parametrize("headers", PAGES)
async def test_a_foreign_page_is_refused_where_no_keys_are_set(
    prefill: FakeWorker, decode: FakeWorker, headers: dict[str, str]
) -> None:
    """A page of somebody else in the operator's browser, also one whose name was pointed at this host."""
    body = b'{"model": "m", "prompt": "hello"}'
    async with proxy_of([prefill], [decode]) as proxy:
        for path in ("/v1/completions", "/v1/embeddings", "/pdlink/probe"):
            sent = {"content-type": "application/json", **headers}
            async with proxy.client.post(proxy.url + path, data=body, headers=sent) as response:
                assert response.status == 403, path
                assert "api_keys" in (await response.json())["error"]["message"]
        if "content-type" not in headers:
            for path in ("/pdlink/state", "/decisions", "/metrics"):
                async with proxy.client.get(proxy.url + path, headers=headers) as response:
                    assert response.status == 403, path
        assert prefill.received == decode.received == []
        own = {"origin": proxy.url, "sec-fetch-site": "same-origin", "content-type": "application/json"}
        async with proxy.client.post(proxy.url + "/v1/completions", data=body, headers=own) as response:
            assert response.status == 200, "its own page"


def test_programs_and_other_hosts_pages_are_judged_by_their_headers() -> None:
    assert not refused_page({"host": "x"}, loopback=True, setting="api_keys"), "no browser"
    assert not refused_page({"host": "[::1]:80", "sec-fetch-site": "none"}, loopback=True, setting="api_keys")
    assert not refused_page(
        {"host": "proxy.example", "origin": "https://proxy.example"}, loopback=False, setting="api_keys"
    )
    assert refused_page({"host": "[", "sec-fetch-site": "none"}, loopback=True, setting="api_keys")
