"""What workers say of themselves at GET /pdlink/state, asked while somebody looks, and for the memory of the page."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from pdlink.observe.timeline import EndedTransfer  # noqa: TC001  msgspec reads the annotation

from ..http_connection import HttpError
from ..upstream import Asking, ask
from ..worker import State

if TYPE_CHECKING:
    from ..shared import Shared
    from ..worker import Worker

_FRESH_S = 0.8
"""A report is not asked for again before."""
_TIMEOUT_S = 1.0
_ALL_S = 2.0
"""For the reports of all together."""
_MAX_AT_ONCE = 32
_ANSWERING = (State.OK, State.DRAINING, State.FAILED, State.WRONG_ROLE)


class Live(msgspec.Struct, frozen=True):
    """A transfer that goes on; see `pdlink.endpoint.live`."""

    transfer_id: str
    side: str
    state: str
    peer: str
    lane: str
    num_tokens: int
    nbytes: int
    age_s: float
    layers: str


class PeerSession(msgspec.Struct, frozen=True):
    peer: str
    state: str
    transport: str
    lane: str


class Report(msgspec.Struct, frozen=True):
    """A worker's answer. A worker that answers with something else has none."""

    name: str
    requests: dict[str, int] = {}
    blocks: dict[str, int] = {}
    peers: list[PeerSession] = []
    live: list[Live] = []
    ended: list[EndedTransfer] = []
    totals: dict[str, dict[str, float]] = {}


class WorkerReports:
    """The newest report of each worker."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._asked_s = 0.0
        self.at_s = 0.0
        """Unix time of the newest reports: rates are differences between two of them."""
        self._lock = asyncio.Lock()
        self.newest: dict[str, Report] = {}
        """By URL, those that somebody asked for last; late ones are left out."""

    async def now(self) -> dict[str, Report]:
        """Reports by URL, at most `_FRESH_S` old; late ones are left out."""
        async with self._lock:  # two people who look cost the workers as much as one
            if time.monotonic() - self._asked_s >= _FRESH_S:
                slots = asyncio.Semaphore(_MAX_AT_ONCE)
                # Others would only be waited for.
                workers = {worker.url: worker for worker in self._shared.pools.all if worker.state in _ANSWERING}
                asked = {url: asyncio.create_task(self._ask(worker, slots)) for url, worker in workers.items()}
                if asked:
                    await asyncio.wait(asked.values(), timeout=_ALL_S)
                answers = {url: task.result() if task.done() else None for url, task in asked.items()}
                for task in asked.values():
                    task.cancel()
                self.newest = {url: answer for url, answer in answers.items() if answer is not None}
                self._asked_s, self.at_s = time.monotonic(), time.time()
            return self.newest

    async def _ask(self, worker: Worker, slots: asyncio.Semaphore) -> Report | None:
        try:
            async with slots:
                reply = await ask(Asking(self._shared.control, worker.url, _TIMEOUT_S), "/pdlink/state")
            return msgspec.json.decode(reply.body, type=Report) if reply.status == 200 else None
        except (HttpError, OSError, ValueError, RecursionError):
            return None
