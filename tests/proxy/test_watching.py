"""What a server is asked for its health for: the look is told whether its legs were answered since the last one."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from pdlink.api.health import Health
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.steps import Leg
from pdlink_proxy.upstream import Asking
from pdlink_proxy.watching import watch
from pdlink_proxy.worker import State, Worker
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink_proxy.dialects import KnownHealth

URL = "http://w"


@contextlib.asynccontextmanager
async def looks_at(
    worker: Worker, interval_s: float, pools: Mock | None = None
) -> AsyncIterator[asyncio.Queue[bool]]:
    """Whether it spoke, of each look at it."""
    told: asyncio.Queue[bool] = asyncio.Queue()

    async def look(_asking: Asking, known: KnownHealth) -> Health:
        told.put_nowait(known.spoke)
        return Health("ok", name="w", epoch="1", role=None, model="m", control=None)

    dialect = replace(DIALECTS["vllm"], look=look)
    asking = Asking(None, URL, 1.0)  # type: ignore[arg-type]
    task = asyncio.create_task(watch(pools or Mock(), [worker], asking, dialect, interval_s, lambda: None))
    try:
        async with asyncio.timeout(WAIT_S):
            assert not await told.get()
            yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_look_hears_whether_legs_were_answered_since_the_one_before() -> None:
    worker = Worker(URL, Leg.DECODE)
    async with looks_at(worker, 0.001) as told:
        assert not await told.get()
        worker.spoke_s = math.inf
        while not await told.get():
            pass
        worker.spoke_s = 0.0
        while await told.get():
            pass
        worker.legs |= {Mock(passed_s=0.0), Mock(passed_s=math.inf)}  # events of a stream pass, which no leg hears
        while not await told.get():
            pass


async def test_a_look_that_fails_unexpectedly_is_logged_and_the_server_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, pools = Worker(URL, Leg.DECODE), Mock()
    pools.heard.side_effect = [TypeError("a fault of ours"), None, None]
    async with looks_at(worker, 0.001, pools) as told:
        await told.get()
        await told.get()
        assert worker.state is State.OK
    assert "unreachable (GET /health: TypeError)" in caplog.text
    (logged,) = (each for each in caplog.records if "not understood" in each.message)
    assert logged.exc_info


async def test_a_leg_that_pokes_has_its_server_asked_whatever_others_were_answered() -> None:
    worker = Worker(URL, Leg.DECODE)
    async with looks_at(worker, 3600.0) as told:
        worker.spoke_s = math.inf
        worker.poke.set()
        assert not await told.get()
