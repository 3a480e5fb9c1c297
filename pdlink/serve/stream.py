"""`Stream`: one request between HTTP and engine."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from pdlink.errors import DeadlineExceeded, PdlinkError
from pdlink.serve.legs import DecodeLeg, PrefillLeg, recomputed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink.engine.request import TokenOutput
    from pdlink.errors import TransferFailed
    from pdlink.serve.legs import Item

log = logging.getLogger(__name__)


class Stream:
    """The tokens of one request, in the asyncio loop that asked for them."""

    def __init__(self, request_id: str, num_prompt_tokens: int, timeout_s: float) -> None:
        self.request_id, self.num_prompt_tokens = request_id, num_prompt_tokens
        self.leg: PrefillLeg | DecodeLeg | None = None
        """Its part in a transfer."""
        self.fallback: TransferFailed | None = None
        """Why a decode leg has no part in its transfer from the start."""
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.num_tokens = 0
        """Of the answer, so far."""
        self.finish_reason = ""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()

    @property
    def kv_path(self) -> str:
        """How the KV of a decode leg's prompt came here, for a header; known with its first token. Else empty."""
        if self.fallback is not None:
            return recomputed(self.fallback)
        return self.leg.kv_path if isinstance(self.leg, DecodeLeg) else ""

    def say(self, item: Item) -> None:
        """A token, or the end, from the engine's thread: to the client when its leg lets it pass."""
        (self.leg if isinstance(self.leg, PrefillLeg) else self).put(item)

    def put(self, item: Item) -> None:
        """To the client, from any thread: a token, or the end (None, or the error that ended the request)."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            log.debug("request %s ended after its reader", self.request_id)

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        """Tokens until the request has ended. Raises the error that ended it, DeadlineExceeded after the deadline."""
        deadline_s = self._loop.time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    item = await self._queue.get()
            except TimeoutError:
                raise DeadlineExceeded(f"the request was not answered within {self._timeout_s} s") from None
            if item is None:
                return
            if isinstance(item, PdlinkError):
                raise item
            yield item
