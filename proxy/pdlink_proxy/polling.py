"""Sockets that are read natively on the thread of the event loop (`csrc/http/poller`). The loop waits natively, too:
Python runs when somebody has to hear of something. A turn takes 1.5 us with the read and the write that it is for; as
a reader of asyncio's it took 3.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import sys
from typing import TYPE_CHECKING, Any, cast

from pdlink._http import SocketPoller
from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class _Waits:
    """Waits for the sockets of one loop: what its selector does, for asyncio's sockets and for the poller's.

    asyncio has no public way to what it waits with. A loop could be made with another selector, but a proxy also runs
    on loops that others have made.
    """

    def __init__(self, loop: Any) -> None:
        """Raises LocalError for a loop that does not wait with epoll."""
        selector = getattr(loop, "_selector", None)
        if not isinstance(selector, selectors.EpollSelector):
            got = type(loop).__name__ + (f" with {type(selector).__name__}" if selector is not None else "")
            text = f"event loop: got {got}; expected asyncio's own with epoll; run the proxy without another one"
            raise LocalError(text)
        self._loop, self._selector = loop, cast("Any", selector)
        self._select = selector.select
        self.poller = SocketPoller(self._selector.fileno())
        self.users = 0
        self._selector.select = self.select

    def select(self, timeout: float | None = None) -> Any:
        """As of `selectors.BaseSelector`. Returns when asyncio has something to do."""
        loop, turn = self._loop, self.poller.turn
        num_timers, until_s = len(loop._scheduled), 0.0 if timeout is None else loop.time() + timeout
        try:
            while not turn(timeout):
                if loop._ready or len(loop._scheduled) != num_timers:
                    return ()
                if timeout is not None and (timeout := until_s - loop.time()) <= 0:
                    return ()
        except Exception as error:  # noqa: BLE001 -- of any connection: the others, and the loop, go on
            loop.call_exception_handler({"message": "a connection failed unexpectedly", "exception": error})
        return self._select(0)

    def end(self) -> None:
        del self._selector.select


_by_loop: dict[asyncio.AbstractEventLoop, _Waits] = {}

_READS_ALL_THE_SAME = sys.version_info < (3, 11, 4)
"""asyncio begins to read after `connection_made`, whatever that said (CPython's issue 103607)."""


def keep_from_reading(transport: asyncio.Transport) -> None:
    """For `connection_made`, of a socket that a poller reads: asyncio reads it from `resume_reading` on."""
    transport.pause_reading()
    if _READS_ALL_THE_SAME:
        asyncio.get_running_loop().call_soon(_pause_again, transport)


def _pause_again(transport: asyncio.Transport) -> None:
    if not transport.is_reading():  # else somebody else has it by now
        transport.resume_reading()
        transport.pause_reading()


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
