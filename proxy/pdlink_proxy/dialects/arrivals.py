"""News that the KV of a transfer has left its prefill worker, where an engine tells its proxy so (LMCache)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from pdlink.errors import ConfigError
from pdlink.logs import about

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("pdlink.proxy")

PATIENCE_S = 5.0
"""Longest wait after prefill's answer. Then decode starts all the same, and computes what has not come."""
MAX_NEWS_NBYTES = 4096


class _News(msgspec.Struct, tag="ProxyNotif"):
    """LMCache 0.5.6, v1/storage_backend/pd_backend.py."""

    req_id: str


class Arrivals:
    """Counts the news about the transfers that somebody waits for; others are dropped. A context manager."""

    def __init__(self, address: str) -> None:
        """address: to listen on, as tcp://HOST:PORT. Raises ConfigError."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_NEWS_NBYTES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"notify: cannot listen on {address}: {error}; choose a free address") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._left: dict[str, int] = {}
        """By transfer, news still to come."""
        self._arrived: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Arrivals:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def expect(self, transfer_id: str, num: int) -> None:
        """So many news of this transfer will come, one from each rank. Before its prefill leg starts."""
        self._left[transfer_id], self._arrived[transfer_id] = num, asyncio.Event()

    async def wait(self, transfer_id: str) -> bool:
        """Whether all has arrived, at most `PATIENCE_S` from now."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._arrived[transfer_id].wait()
        except TimeoutError:
            words = "transfer %s: no news within %g s that its KV has arrived"
            log.warning(words, transfer_id, PATIENCE_S, extra=about(transfer_id=transfer_id))
            return False
        return True

    def forget(self, transfer_id: str) -> None:
        """Nobody waits for it any more."""
        self._left.pop(transfer_id, None)
        self._arrived.pop(transfer_id, None)

    async def _listen(self) -> None:
        while True:
            data = await self._socket.recv()
            with contextlib.suppress(ValueError, RecursionError):
                self._heard(msgspec.msgpack.decode(data, type=_News).req_id)

    def _heard(self, transfer_id: str) -> None:
        left = self._left.get(transfer_id)
        if left is not None:
            self._left[transfer_id] = left - 1
            if left <= 1:
                self._arrived[transfer_id].set()
