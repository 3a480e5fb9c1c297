"""A proxy's line of the last seconds, and what it has of a request in JSON."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdlink_proxy.records import MAX_RECORDS, Records
from pdlink_proxy.summary import ProxySummary
from tests.proxy.fakes import FakeWorker, proxy_of, until
from tests.proxy.test_records import kept


def test_it_counts_what_has_ended_since_the_last_one() -> None:
    records = Records()
    records.keep(kept())
    summary = ProxySummary(records, lambda: (3, 1))
    assert summary.take(10.0) == "", "it was there before"
    for number in range(18):
        records.keep(kept(number, first_s=100.1 + number / 100))
    records.keep(kept(kv="recomputed;reason=peer_lost"))
    records.keep(kept(outcome="failed", first_s=None))
    assert summary.take(10.0) == (
        "2.0 requests/s; TTFT p50 190 ms, p95 600 ms; KV transferred 18, recomputed 1; errors 1 (failed 1); "
        "running 3, queued 1"
    )
    assert summary.take(10.0) == ""


def test_more_requests_than_are_kept_are_all_counted() -> None:
    records = Records()
    summary = ProxySummary(records, lambda: (0, 0))
    for number in range(MAX_RECORDS + 500):
        records.keep(kept(number))
    assert summary.take(10.0).startswith("150.0 requests/s; ")


async def test_a_proxy_under_load_logs_it(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with proxy_of([prefill], [decode], summary_s=0.02) as proxy:
        await proxy.stream()
        lines = [each.getMessage() for each in caplog.records if each.name == "pdlink.summary"]
        await until(lambda: any(each.name == "pdlink.summary" for each in caplog.records), "the line")
        assert all("errors 0; running 0, queued 0" in line for line in lines)


async def test_lines_about_a_request_have_its_id_and_its_transfers(
    prefill: FakeWorker, decodes: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    prefill.gate = asyncio.Event()
    decodes[0].resets = 1
    async with proxy_of([prefill], decodes) as proxy, proxy.post(stream=True) as answer:
        await answer.read()
        request_id = answer.headers["X-Request-Id"]
    (line,) = [each for each in caplog.records if each.getMessage().startswith("request ")]
    assert vars(line)["request_id"] == request_id
    assert vars(line)["transfer_id"] == decodes[0].received[0].transfer_id
