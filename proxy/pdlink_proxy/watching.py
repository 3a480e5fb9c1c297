"""Asks a worker for its health, again and again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pdlink.errors import WorkerKeyRefused

from .dialects import Known, look_at_plain
from .http_connection import HttpError
from .steps import Leg
from .upstream import describe
from .worker import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from .dialects import Dialect
    from .pools import Pools
    from .upstream import Asking
    from .worker import Worker


async def watch(
    pools: Pools, worker: Worker, asking: Asking, dialect: Dialect, interval_s: float, heard: Callable[[], None]
) -> None:
    """Poll a worker's health, every interval and when poked, until cancelled; call `heard` after each look.

    A worker whose beats come, and that is well, is asked when poked only.
    """
    while True:
        worker.poke.clear()
        faults, asked_s = worker.faults, time.monotonic()
        try:
            known = Known(worker.health, worker.state is State.OK, worker.control, worker.side is Leg.PREFILL)
            health = await (look_at_plain if worker.plain else dialect.look)(asking, known)
            worker.heard(health, faults_when_asked=faults)
            pools.heard(worker)
        except WorkerKeyRefused as error:
            worker.barred(str(error))
        except TimeoutError:
            worker.silent(asked_s)
        except (HttpError, OSError, ValueError) as error:
            worker.unreachable(f"GET /health: {describe(error)}")
        heard()
        try:
            told = worker.beats and worker.state in (State.OK, State.DRAINING, State.OTHER_ROLE)
            async with asyncio.timeout(None if told else interval_s):
                await worker.poke.wait()
        except TimeoutError:
            continue
