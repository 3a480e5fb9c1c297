"""The line that sums up a few seconds: silent without load, and what it says under load."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdlink.events import FallbackUsed, LayerLanded, TransferEnded
from pdlink.observe.summary import WorkerSummary, tell
from tests.waiting import WAIT_S


def landed(submitted_s: float, at_s: float) -> LayerLanded:
    what = {"transfer_id": "t", "layer": 0, "start": 0, "end": 8, "nbytes": 10**9, "transport": "mapped"}
    return LayerLanded(**what, submitted_s=submitted_s, asked_s=submitted_s, at_s=at_s)  # type: ignore[arg-type]


def ended(side: str, reason: str = "", exposed_s: float | None = None) -> TransferEnded:
    what = {"transfer_id": "t", "side": side, "peer": "p", "state": "DONE", "transport": "mapped"}
    more = {"nbytes": 2 * 10**9, "started_s": 0.0, "exposed_s": exposed_s}
    return TransferEnded(**what, **more, reason=reason)  # type: ignore[arg-type]


def test_a_worker_says_what_it_sent_how_fast_and_what_was_not_hidden() -> None:
    summary = WorkerSummary()
    assert summary.take(1.0) == ""
    for event in (landed(1.0, 1.5), landed(1.25, 2.0), ended("sender", exposed_s=0.002)):
        summary(event)
    assert summary.take(1.0) == (
        "sent 2000.0 MB of KV over mapped at 2 GB/s while it moved, 1 transfer done, 2.0 ms not hidden by prefill "
        "(median); failed 0, recomputed 0"
    )
    assert summary.take(1.0) == "", "said once"


def test_a_worker_says_what_it_received_and_what_failed() -> None:
    summary = WorkerSummary()
    for event in (ended("receiver"), ended("receiver"), ended("receiver", "peer_lost")):
        summary(event)
    summary(FallbackUsed(kind="recompute", reason="peer_lost"))
    assert summary.take(1.0) == "received 4000.0 MB of KV in 2 transfers; failed 1, recomputed 1"


async def test_it_is_silent_without_load_and_told_again_and_again_under_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    said = ["", "", "first", "second", "", "third"]
    over = asyncio.Event()

    def take(span_s: float) -> str:
        assert span_s > 0
        if not said:
            over.set()
            return ""
        return said.pop(0)

    task = asyncio.create_task(tell(take, 0.01))
    async with asyncio.timeout(WAIT_S):
        await over.wait()
    task.cancel()
    assert [record.getMessage() for record in caplog.records] == ["first", "second", "third"]
    assert {(record.name, record.levelname) for record in caplog.records} == {("pdlink.summary", "INFO")}
