"""Asks a server for its health, again and again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from pdlink.errors import WorkerKeyRefused
from pdlink.few_lines import FewLines

from .dialects import KnownHealth, look_at_plain
from .http_connection import HttpError
from .upstream import describe
from .worker import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .dialects import Dialect
    from .pools import Pools
    from .upstream import Asking
    from .worker import Worker

log = logging.getLogger("pdlink.proxy")

LEAST_S = 0.1
"""Between two looks at one server that no leg has found gone."""


async def watch(
    pools: Pools,
    workers: Sequence[Worker],
    asking: Asking,
    dialect: Dialect,
    interval_s: float,
    heard: Callable[[], None],
) -> None:
    """Poll a server's health, every interval and when poked, until cancelled; call `heard` after each look. workers:
    the server, or the engines behind its URL.

    One that a leg has found gone is asked at once, others once in `LEAST_S` at most, however many legs poke.
    """
    loop, first, least_s = asyncio.get_running_loop(), workers[0], min(LEAST_S, interval_s)
    asked_s, few = -math.inf, FewLines()
    for each in workers:
        each.poke = first.poke
    while True:
        first.poke.clear()
        faults, before_s, asked_s = [each.faults for each in workers], asked_s, time.monotonic()
        poked = asked_s - before_s < interval_s
        try:
            well = all(each.state is State.OK for each in workers)
            spoke = not poked and all(each.spoke_since(before_s) for each in workers)
            known = KnownHealth(first.health, well, spoke)
            health = await (look_at_plain if first.plain else dialect.look)(asking, known)
            for each, count in zip(workers, faults, strict=True):
                each.heard(health, faults_when_asked=count)
                pools.heard(each)
        except WorkerKeyRefused as error:
            for each in workers:
                each.barred(str(error))
        except TimeoutError:
            for each in workers:
                each.silent(asked_s)
        except (HttpError, OSError, ValueError) as error:
            for each in workers:
                each.unreachable(f"GET /health: {describe(error)}")
        except Exception as error:  # noqa: BLE001 -- of any dialect or answer: it is asked again
            for each in workers:
                each.unreachable(f"GET /health: {type(error).__name__}")
            if (more := few.admits(asked_s)) is not None:
                log.error("the health of %s was not understood%s", first.id, more, exc_info=error)
        heard()
        due = loop.call_later(interval_s, first.poke.set)
        await first.poke.wait()
        due.cancel()
        early_s = least_s - (time.monotonic() - asked_s)
        if early_s > 0 and faults == [each.faults for each in workers]:
            await asyncio.sleep(early_s)
