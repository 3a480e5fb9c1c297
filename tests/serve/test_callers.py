"""Whom the HTTP of workers and stores answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdlink.api.keys import KEY_HEADER
from pdlink.few_lines import LINES
from pdlink.serve import app, store_app
from pdlink.serve.process import bind, serve
from tests.store.process import served
from tests.waiting import WAIT_S

from .tiered import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from aiohttp import web

OPEN = {"/health", "/livez", "/readyz", "/metrics"}
PAGES = [
    {"origin": "http://evil.example"},
    {"sec-fetch-site": "same-origin", "host": "evil.example:8100"},
]
FORMS = [{"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}]


@pytest.fixture(scope="module", params=["worker", "store"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes the app of a server with or without a key."""
    if request.param == "worker":
        with opened() as worker:
            yield lambda key=None: app.build_app(worker, key)
    else:
        folder: Path = tmp_path_factory.mktemp("store")
        with served(folder) as (store, listener):
            yield lambda key=None: store_app.build_app("store", store, listener, key)


def routes(of: web.Application) -> set[tuple[str, str]]:
    found = {(each.method, each.resource.canonical) for each in of.router.routes() if each.resource}
    return {(method, path.replace("{", "").replace("}", "")) for method, path in found if method != "HEAD"}


async def test_every_route_but_health_and_metrics_asks_for_the_key(build: Callable[..., web.Application]) -> None:
    made = build("key")
    async with TestClient(TestServer(made)) as http:
        assert {path for _, path in routes(made)} > OPEN
        for method, path in routes(made):
            for sent, least in (({}, 401), ({KEY_HEADER: "other"}, 401), ({KEY_HEADER: "key"}, 0)):
                async with http.request(method, path, json={}, headers=sent) as answer:
                    assert (answer.status == 401) == (least == 401 and path not in OPEN), (method, path, sent)


async def test_a_foreign_page_is_refused_where_no_key_is_set(build: Callable[..., web.Application]) -> None:
    """A page of somebody else in the operator's browser would clear what is kept."""
    made = build()
    async with TestClient(TestServer(made)) as http:
        for method, path in routes(made):
            for headers in [*PAGES, *(FORMS if method == "POST" else [])]:
                async with http.request(method, path, data=b"{}", headers=headers) as answer:
                    assert answer.status == 403, (method, path, headers)
                    assert "http_key_file" in (await answer.json())["error"]["message"]
            async with http.request(method, path, json={}) as answer:
                assert answer.status != 403, (method, path)


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[tuple[str, int]]:
    """Host and port of the app as processes serve it."""
    bound, started = bind("127.0.0.1", 0), asyncio.Event()

    def ready(_: str) -> dict[str, Any]:
        started.set()
        return {"line": ""}

    async def drain() -> None:
        pass

    task = asyncio.create_task(serve(app, bound, None, ready=ready, drain=drain, say=lambda _: None))
    async with asyncio.timeout(WAIT_S):
        await started.wait()
        yield bound.getsockname()
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def test_what_is_no_http_costs_a_few_short_lines_of_the_log(
    build: Callable[..., web.Application], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.few_lines.WINDOW_S", 10 * WAIT_S)
    logging.getLogger("pdlink.http").filters.clear()
    async with serving(build("key")) as place:
        for _ in range(3 * LINES):
            reader, writer = await asyncio.open_connection(*place)
            with contextlib.closing(writer):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"\x01" * 8000 + b"\r\n\r\n")
                assert b" 400 " in (await reader.readline())
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 0 < len(lines) <= LINES
    assert all(record.exc_info is None and len(record.getMessage()) < 300 for record in lines)


@pytest.mark.parametrize("path", ["health", "nothing"])
async def test_answers_do_not_name_the_software_and_its_versions(
    build: Callable[..., web.Application], path: str
) -> None:
    async with serving(build("key")) as place:
        reader, writer = await asyncio.open_connection(*place)
        with contextlib.closing(writer):
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            head, _, _ = (await reader.read()).partition(b"\r\n\r\n")
    assert b"Content-Type" in head
    assert b"Server:" not in head
