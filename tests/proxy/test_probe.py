"""A probe of a pair, by workers that are not real: who may ask, and what fakes answer."""

from __future__ import annotations

from typing import Any

from tests.proxy.fakes import FakeWorker, proxy_of

PAIR = {"prefill": "prefill-0", "decode": "decode-0"}


async def test_a_probe_needs_a_key_and_counts_in_its_limit(prefill: FakeWorker, decode: FakeWorker) -> None:
    limit: dict[str, Any] = {"rate_limit": {"tokens": 300}, "api_keys": ["k"]}
    async with proxy_of([prefill], [decode], **limit) as proxy:
        url, key = f"{proxy.url}/pdlink/probe", {"Authorization": "Bearer k"}
        statuses = []
        for headers in ({}, key, key):
            async with proxy.client.post(url, json={**PAIR, "num_tokens": 256}, headers=headers) as response:
                statuses.append(response.status)
                body = await response.json()
        assert statuses == [401, 200, 429]
        assert body["error"]["code"] == "rate_limited"


async def test_a_probe_is_no_request_of_a_client(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.client.post(f"{proxy.url}/pdlink/probe", json=PAIR) as response:
            found = await response.json()
        assert (found["prefill"], found["decode"], found["kv"]) == ("prefill-0", "decode-0", "transferred")
        assert (found["lane"], found["nbytes"]) == ("", 0), "these workers measure nothing"
        assert len(proxy.router.services.records) == 0
