"""A tool must be called: prefill's one token is no call, and its server answers an error that is about that token."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import proxy_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.proxy.fakes import Proxy

NAMED = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@asynccontextmanager
async def pair(dialect: str, **more: Any) -> AsyncIterator[tuple[Proxy, FakeVllm, FakeVllm]]:
    connector = "nixl" if dialect == "vllm-nixl" else "pdlink"
    prefill, decode = await FakeVllm(connector).start(), await FakeVllm(connector).start()
    control: dict[str, Any] = {"control": {prefill.url: ["tcp://127.0.0.1:1"]}} if dialect == "vllm" else {}
    async with proxy_of([prefill], [decode], dialect=dialect, **control, **more) as proxy:
        yield proxy, prefill, decode
    await prefill.stop()
    await decode.stop()


async def ask(proxy: Proxy, **more: Any) -> tuple[int, bytes]:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **more}
    async with proxy.post("/v1/chat/completions", **body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl"])
@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_decodes_answer_is_the_clients_and_the_prompt_is_computed_by_prefill_once(
    dialect: str, status: int, stream: bool, choice: object
) -> None:
    async with pair(dialect) as (proxy, prefill, decode):
        prefill.misreads = status
        for number in range(1, 7):
            got, data = await ask(proxy, tool_choice=choice, stream=stream)
            assert got == 200, data
            assert b"0.0" in data
            assert (len(prefill.received), len(decode.received)) == (number, number)
        assert prefill.received[0].body["tool_choice"] == choice, "or the servers would make other prompts"
        assert all(
            worker.state.value == "ok" and not worker.breaker.failures for worker in proxy.router.services.pools.all
        )
        assert proxy.counted("requests_total", outcome="ok") == 6


@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl"])
async def test_what_decode_rejects_as_well_is_rejected(dialect: str) -> None:
    async with pair(dialect) as (proxy, prefill, decode):
        prefill.fail_with = decode.fail_with = 400
        got, data = await ask(proxy, tool_choice="required")
        assert got == 400
        assert json.loads(data)["error"]["message"]
        assert proxy.counted("requests_total", outcome="rejected") == 1


@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl"])
async def test_what_prefill_rejects_of_other_requests_is_rejected(dialect: str) -> None:
    async with pair(dialect) as (proxy, prefill, _):
        prefill.fail_with = 400
        assert (await ask(proxy, tool_choice="auto"))[0] == 400


async def test_a_prefill_that_is_not_there_is_tried_elsewhere_all_the_same() -> None:
    async with pair("vllm") as (proxy, prefill, _):
        prefill.fail_with = 503
        assert (await ask(proxy, tool_choice="required"))[0] == 200
        assert proxy.counted("fallbacks_total", kind="retry") >= 1
