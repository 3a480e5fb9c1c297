"""Sockets that are read natively on the thread of the event loop (`csrc/http/poller`). The loop waits natively, too:
Python runs when somebody has to hear of something. asyncio's own way took 5 us from a socket to whoever reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from pdlink._http import SocketPoller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class _Waits:
    """Waits for the sockets of one loop: what its selector does, for asyncio's sockets and for the poller's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # asyncio has no public way to what it waits with.
        self._loop, self._selector = loop, loop._selector  # type: ignore[attr-defined]
        self._select: Any = self._selector.select
        self.poller = SocketPoller(self._selector.fileno())
        self.users = 0
        self._selector.select = self.select

    def select(self, timeout: float | None = None) -> Any:
        """As of `selectors.BaseSelector`."""
        try:
            if not self.poller.turn(timeout):
                return ()
        except Exception as error:  # noqa: BLE001 -- of any connection: the others, and the loop, go on
            told = {"message": "a connection failed unexpectedly", "exception": error}
            self._loop.call_exception_handler(told)
        return self._select(0)

    def end(self) -> None:
        del self._selector.select


_by_loop: dict[asyncio.AbstractEventLoop, _Waits] = {}


@contextlib.asynccontextmanager
async def polling() -> AsyncIterator[SocketPoller]:
    """The poller of the running loop, which has its turns as long as this context lasts."""
    loop = asyncio.get_running_loop()
    waits = _by_loop.get(loop) or _by_loop.setdefault(loop, _Waits(loop))
    waits.users += 1
    try:
        yield waits.poller
    finally:
        waits.users -= 1
        if not waits.users:
            waits.end()
            del _by_loop[loop]
