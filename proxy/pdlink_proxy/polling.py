"""Sockets that are read natively on the thread of the event loop (`csrc/http/poller`): the loop is woken once for all
that have something, and Python is called when somebody has to hear of it. asyncio calls Python for every read."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pdlink._http import SocketPoller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def polling() -> AsyncIterator[SocketPoller]:
    """A poller that has its turns on the running loop, as long as this context lasts."""
    poller, loop = SocketPoller(), asyncio.get_running_loop()
    loop.add_reader(poller.fd, poller.turn)
    try:
        yield poller
    finally:
        loop.remove_reader(poller.fd)
