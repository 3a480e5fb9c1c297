"""`Stream`: one request between HTTP and engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING

from pdlink.errors import DeadlineExceeded, PdlinkError
from pdlink.logs import about

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink.engine.request import TokenOutput
    from pdlink.errors import TransferFailed
    from pdlink.serve.legs import PrefillLeg

    Item = TokenOutput | PdlinkError | None
    """What a client gets: a token, or the end (None, or the error that ended the request)."""

log = logging.getLogger(__name__)


class Stream:
    """The tokens of one request, in the asyncio loop that asked for them."""

    kv_path = ""
    """How the KV of a decode leg's prompt came here, for a header; known with its first token. Else empty."""
    failure: TransferFailed | None = None
    """Why the transfer of a prefill leg failed, which aborts its request."""
    leg: PrefillLeg | None = None
    """Of a prefill leg, which waits for its receiver longer than the engine computes."""
    first_token_s: float | None = None
    num_tokens = 0
    """Of the answer, so far."""
    finish_reason = ""

    def __init__(self, request_id: str, num_prompt_tokens: int, timeout_s: float) -> None:
        self.request_id, self.num_prompt_tokens = request_id, num_prompt_tokens
        self.started_s = time.monotonic()
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._lock = threading.Lock()
        self._held: list[Item] | None = None
        """What waits for `let_pass`; None if nothing has to."""

    @property
    def holds(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """Keep what is put from the client until `let_pass`."""
        self._held = []

    def let_pass(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
            for item in held:
                self._put(item)

    def put(self, item: Item) -> None:
        """From any thread: a token, or the end. An error is not held, and drops what is."""
        with self._lock:
            if self._held is not None and not isinstance(item, PdlinkError):
                self._held.append(item)
            else:
                self._held = None
                self._put(item)

    def _put(self, item: Item) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            log.debug("request %s ended after its reader", self.request_id, extra=about(request_id=self.request_id))

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
