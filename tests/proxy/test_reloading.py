"""New settings of a running proxy: what it takes at once, what needs a restart, and that nothing is dropped."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdlink.config import ProxyConfig
from pdlink_proxy.reloading import LIVE, WORKERS, taken
from tests.proxy.fakes import END, FakeWorker, event, proxy_of, settings, tokens_of, until


def test_live_settings_are_settings() -> None:
    assert WORKERS < LIVE < ProxyConfig.model_fields.keys()


def test_a_running_proxy_takes_only_what_it_can() -> None:
    old = ProxyConfig(listen="127.0.0.1:0", retries=1, queue_size=5)
    new = ProxyConfig(listen="127.0.0.1:8000", retries=2, queue_size=5, policy="prefix")
    found = taken(old, new)
    assert (found.changed, found.ignored) == (frozenset({"retries"}), frozenset({"policy"}))
    assert (found.config.retries, found.config.policy) == (2, old.policy)
    assert taken(old, old) == (old, frozenset(), frozenset())


async def test_a_stream_goes_on_while_limits_queue_and_workers_change(
    prefill: FakeWorker, decodes: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdlink.proxy")
    first, second = decodes
    first.gates[1] = asyncio.Event()
    async with proxy_of([prefill], [first]) as proxy, proxy.post(stream=True) as running:
        router = proxy.router
        new = {
            "rate_limit": {"requests": 1},
            "queue_size": 7,
            "shares": {"k": 2.0},
            "policy": "cost",
            "listen": "127.0.0.1:1",
        }
        router.adopt(settings([prefill], [second], **new))
        assert (router.services.shared.queue.size, router.services.shared.queue.weights) == (7, {"k": 2.0})
        assert [worker.url for worker in router.services.pools.all] == [prefill.url, second.url]
        await until(lambda: all(worker.heard_s for worker in router.services.pools.all), "the new worker")
        async with proxy.post() as answer:
            assert (answer.status, answer.headers["X-Pdlink-Decode"]) == (200, "decode-1")
        async with proxy.post() as answer:
            assert answer.status == 429
        first.gates[1].set()
        assert tokens_of(await running.read()) == event("zero") + event("one") + event("two") + END
        router.adopt(settings([prefill], [second, second]))
        assert [worker.url for worker in router.services.pools.all] == [prefill.url, second.url]
    said = [record.getMessage() for record in caplog.records]
    assert "settings that need a restart are as they were: policy" in said
    assert any("the workers are unchanged: decode" in each for each in said)
